"""Flower's SuperNode, asking for messages as often as told: its own loop sleeps three seconds whenever there was none.

On three machines that is nothing beside a round of training; in a demo or a test it is most of the time. `main` takes the pause
in seconds, then the arguments of `flower-supernode`.

It also says every few seconds that it is there, not twice a minute. The SuperLink lets a node in only when it believes it gone, which is
two silent intervals after it was killed: 20 seconds in place of a minute.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection
from flwr.supernode import start_client_internal as loop
from flwr.supernode.cli.flower_supernode import flower_supernode

HEARTBEAT = 10                # seconds; the least that a SuperLink takes


def main() -> None:
    pause = float(sys.argv.pop(1))
    loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, pause)))  # type: ignore[assignment]
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    flower_supernode()
