"""Load a Python file of the user's own, wherever it lies."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from .blame import place_in_users_code
from .errors import ConfigError

LOADED: dict[str, str] = {}          # name of the module → the file it was made from


def load_file(place: str, wanted: str) -> ModuleType:
    """The module of './mine.py'. A file that has not changed is run once, so that its classes stay the same; `wanted` is for messages."""
    path = Path(place).expanduser()
    if not path.is_file():
        raise ConfigError(f"There is no file {place!r} to take {wanted} from.")
    version = hashlib.sha256(str(path.resolve()).encode() + b"\0" + path.read_bytes()).hexdigest()[:16]
    alias = f"consilience_outside_{path.stem}_{version}"
    return load_as(alias, str(path.resolve()), place)


def load_as(alias: str, path: str, place: str = "") -> ModuleType:
    """Run a file as a module of this name, unless it was; also in the processes that share a run's work."""
    if alias in sys.modules:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(alias, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module                       # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[alias]
        where = f" ({found})" if (found := place_in_users_code(error)) else ""
        raise ConfigError(f"The file {place or path!r} cannot be loaded: {type(error).__name__}: {error}{where}") from error
    LOADED[alias] = path
    return module


def hint_of_script(place: str) -> str:
    """What to do where a script's own class is not there: the processes of a comparison do not run the script."""
    return " Other processes do not see what a script or notebook defines: put it in a file and write './mine.py:Name'." \
        if place == "__main__" else ""
