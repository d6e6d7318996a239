"""A real SuperLink on all addresses: what another machine can ask, and what it cannot."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request

import pytest

from consilience.federation.certificates import make_certificates
from consilience.federation.launch import Launcher

pytestmark = pytest.mark.federation


def own_address() -> str | None:
    """An address of this machine that is not loopback. Nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            found = str(probe.getsockname()[0])
        except OSError:
            return None
    return None if found.startswith("127.") else found


def status(url: str, context: ssl.SSLContext) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=b"", method="POST"), timeout=30, context=context) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_runs_can_be_controlled_from_the_servers_own_machine_alone(tmp_path):
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    files = make_certificates(tmp_path / "c", [address])
    context = ssl.create_default_context(cafile=str(files.authority))
    with Launcher(tmp_path / "server", certificates=files) as launcher:
        port = launcher.superlink("0.0.0.0").address.rpartition(":")[2]
        for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task"):
            assert status(f"https://{address}:{port}{path}", context) == 403
            assert status(f"https://127.0.0.1:{port}{path}", context) != 403
        assert status(f"https://{address}:{port}/v1/fleet/pull-messages", context) in (401, 415)    # Flower's answer, not the door's
