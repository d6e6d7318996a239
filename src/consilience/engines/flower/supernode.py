"""Flower's SuperNode, asking for messages as often as told: its own loop sleeps three seconds whenever there was none.

On three machines that is nothing beside a round of training; in a demo or a test it is most of the time. `main` takes the pause
in seconds, then the arguments of `flower-supernode`.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

from flwr.supernode import start_client_internal as loop
from flwr.supernode.cli.flower_supernode import flower_supernode


def main() -> None:
    pause = float(sys.argv.pop(1))
    loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, pause)))  # type: ignore[assignment]
    flower_supernode()
