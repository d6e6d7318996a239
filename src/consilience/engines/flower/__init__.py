"""A real federation on Flower: the method of a simulation, on data that stay with their owners."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from .settings import FederationSettings, SiteSettings

__all__ = ["FederationSettings", "SiteSettings", "client_app", "server_app"]


def server_app() -> Any:
    """A Flower ServerApp that runs what the run configuration says."""
    _need_flower()
    from .apps import make_server_app
    return make_server_app()


def client_app() -> Any:
    """A Flower ClientApp for one site, which the node configuration describes."""
    _need_flower()
    from .apps import make_client_app
    return make_client_app()


def _need_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("A federation needs Flower. Install it with: pip install 'consilience[flower]'") from None
