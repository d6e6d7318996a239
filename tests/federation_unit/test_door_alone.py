"""From other machines only the sites' interface of a SuperLink can be reached."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from consilience.engines.flower.superlink import Door, allowed

HERE, THERE = ("127.0.0.1", 5000), ("10.0.0.7", 5000)
PATHS = {"/health": True, "/v1/fleet/pull-messages": True, "/v1/control/start-run": False, "/v1/control/register-node": False,
         "/v1/runtime/acquire-task": False, "/docs": False, "/openapi.json": False, "/": False, "/v1/fleetx/y": False,
         "/v1/fleet/../control/start-run": False, "/healthy": False}


@pytest.mark.parametrize("path", PATHS)
def test_who_may_ask_what(path):
    assert allowed(path, THERE) == PATHS[path]
    assert allowed(path, HERE)
    assert allowed(path, ("::1", 1))
    assert not allowed("/v1/control/start-run", None)
    assert not allowed("/v1/control/start-run", ("testclient", 1))


def ask(app, client) -> httpx.Response:
    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app, client=client), base_url="http://hub") as web:
            return await web.post("/v1/control/start-run")
    return asyncio.run(post())


def test_the_answer_is_403_before_anything_else_runs():
    served = []

    def start(request):
        served.append(request.client)
        return PlainTextResponse("started")
    app = Starlette(routes=[Route("/v1/control/start-run", start, methods=["POST"])], middleware=[Middleware(Door)])
    assert ask(app, THERE).status_code == 403
    assert served == []
    assert ask(app, HERE).text == "started"


def test_flower_still_offers_the_place_where_the_door_hangs():
    """The SuperLink takes its outermost middleware from this function, looked up when the app is made."""
    import inspect

    from flwr.superlink import extensions, main
    assert main.extensions is extensions
    assert "extensions.get_middleware()" in inspect.getsource(main)


def test_flower_still_sleeps_where_a_site_shortens_its_pause():
    import inspect

    from flwr.supernode import fleet_http_connection, start_client_internal
    assert "time.sleep(" in inspect.getsource(start_client_internal.start_client_internal)
    assert start_client_internal.time.__name__ == "time"
    assert fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL > 0


def test_flower_still_has_the_calls_by_which_a_starter_takes_tasks():
    from consilience.engines.flower import starter
    assert callable(starter.RuntimeHttpClient.AcquireTask)
    assert {"CLIENT_APP", "AGENT_APP"} <= set(starter.TaskType.__members__)
