"""Flower's ServerApp and ClientApp, made from what run and node configuration say."""

from __future__ import annotations

import json
import logging
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ...errors import ConsilienceError
from ...federation.site import load_site
from .grid import FlowerLink, pack, unpack
from .parcel import Parcel, Refused
from .server import Server
from .settings import FederationSettings, SiteSettings
from .site import Site

log = logging.getLogger("consilience.federation")
_sites: dict[str, Site] = {}             # built once per process: a site answers many messages


def _speak() -> None:
    """Our messages go where Flower's go, so that `flwr log` shows them."""
    flower = logging.getLogger("flwr")
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in flower.handlers:
        if handler not in log.handlers:
            log.addHandler(handler)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Flower prints the traceback of whatever ends an app. An error of ours has said in its message what to do."""
    if record.exc_info and isinstance(record.exc_info[1], ConsilienceError):
        record.exc_info = None
    return True


def make_server_app() -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _speak()
        logging.getLogger("flwr").addFilter(_without_traceback)
        try:
            Server(FederationSettings.make(context.run_config), FlowerLink(grid)).run()
        except ConsilienceError as error:
            log.error("The federation stops: %s", error)
            raise

    return app


def make_client_app() -> ClientApp:
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        _speak()
        try:
            request = unpack(message.content)
            reply = site_of(context.run_config, context.node_config).answer(request)
        except ConsilienceError as error:       # the site cannot even be built: wrong settings, data that do not fit
            log.error("This site cannot take part: %s", error.__cause__ or error)
            known = unpack(message.content).about
            reply = Parcel.of({"error": str(error), **{k: known.get(k) for k in ("federation", "task", "round", "site")}})
        return Message(pack(reply), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    app.query()(answer)
    return app


def site_of(run_config: Any, node_config: Any) -> Site:
    """The site that a node is, for a run's settings."""
    key = json.dumps([dict(run_config), dict(node_config)], sort_keys=True)
    if key not in _sites:
        settings, own = FederationSettings.make(run_config), SiteSettings.make(node_config)
        _sites.clear()                          # one at a time: its data are in memory
        try:
            a = settings.agreed
            data = load_site(own.data, number=own.site, classes=a.classes, class_names=a.class_names, feature_names=a.feature_names)
        except ConsilienceError as error:       # its text names files and quotes what stands in them: for the site's own log alone
            raise Refused("its data cannot be read, or are not what was agreed on; the site's log says why") from error
        _sites[key] = Site(settings, own, data)
    return _sites[key]
