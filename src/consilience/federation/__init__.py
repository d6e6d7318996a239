"""What people touch of a federation: certificates, keys, apps, sites, approvals, and the processes that carry it. Flower does the rest."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ..errors import ConfigError

TESTED = ("1.41",)            # versions of Flower the tests ran with; the extra 'flower' pins the same


def require_flower() -> str:
    """Flower's version, or an error that says how to install it."""
    try:
        return version("flwr")
    except PackageNotFoundError:
        raise ConfigError("A federation needs the extra 'flower'. Install it with: pip install 'consilience[flower]'") from None
