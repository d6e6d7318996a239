"""Flower's SuperLink, with a door: from other machines only the sites' interface can be reached.

Since Flower 1.41 one port serves three interfaces: Fleet (sites fetch and answer messages; nodes are authenticated by their keys),
Control (start runs, register nodes) and Runtime (the ServerApp's process). Without an account service, which the open edition lacks, the
last two ask for no password: whoever reaches the port could register a key of their own or take over a run. So they are
answered to this machine alone. `main` takes the arguments of `flower-superlink`.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/v1/fleet/", "/health")


class Door:
    """Middleware that answers 403 to other machines, except on the sites' interface."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not allowed(scope["path"], scope.get("client")):
            refusal = PlainTextResponse("Only this machine may use this interface of the SuperLink.\n", 403)
            await refusal(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def allowed(path: str, client: Any) -> bool:
    """Whether a request for a path may pass, given the (address, port) it comes from."""
    if any(path == door.rstrip("/") or path.startswith(door.rstrip("/") + "/") for door in OPEN) and ".." not in path:
        return True
    try:
        return bool(client) and ipaddress.ip_address(str(client[0]).partition("%")[0]).is_loopback
    except ValueError:
        return False


def main() -> None:
    before = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Door), *before())
    flower_superlink()
