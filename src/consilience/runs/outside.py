"""Code of the user's own in a run: parts and models from files that are not ours. Another version of such a file is another run."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..blame import shown
from ..errors import ConfigError
from ..models.user import find_callable
from ..options import parse_call

if TYPE_CHECKING:
    from .config import RunConfig

COPIES = "code"                                           # the folder of a run that keeps the files it was made with
_INSTALLED = ("site-packages", "dist-packages")           # released packages have a version


def outside_files(config: RunConfig) -> dict[str, Path]:
    """The files of parts and of the model, where they are the user's: {'mine': Path('mine.py'), 'model': Path('mynet.py')}."""
    sources: dict[str, Any] = {part.name: type(part) for part in config.stack().parts}
    where, colon, call = (config.run.model or "").partition(":")
    if colon and "(" not in where:
        sources["model"] = find_callable(where, parse_call(call, f"The factory in {config.run.model!r}")[0])
    if typed := [name for name, thing in sources.items() if _typed(thing)]:
        raise ConfigError(f"{typed[0]!r} was typed in a session, so a run that is kept could not tell its versions apart. Write it to a "
                          "file (in a notebook: %%writefile mine.py) and name it as './mine.py:Name', or keep no folder.")
    files = {name: _file_of(thing) for name, thing in sources.items()}
    return {name: file for name, file in sorted(files.items()) if file is not None}


def _typed(thing: Any) -> bool:
    """Defined at a prompt, in a notebook or on standard input, where no file holds it."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return getattr(thing, "__module__", None) == "__main__" and (file is None or not Path(file).is_file())


def _file_of(thing: Any) -> Path | None:
    module = getattr(thing, "__module__", None) or ""
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None or set(_INSTALLED) & set(Path(file).parts) else Path(file)


def code_of(config: RunConfig) -> dict[str, str]:
    """Short hashes of these files. Comments count: what a change means is not guessed."""
    return {name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for name, file in outside_files(config).items() if file.is_file()}


def refuse_other_code(folder: Path, stored: dict[str, str], config: RunConfig, mend: str) -> None:
    """A run must not be read or continued as if code that was changed since had made it."""
    now = code_of(config)
    for name in sorted(stored.keys() | now.keys()):
        if stored.get(name) != now.get(name):
            file = outside_files(config).get(name)
            kept = folder / COPIES / f"{name}.py"
            raise ConfigError(f"The run in {str(folder)!r} was made with another version of {shown(str(file)) if file else name!r}, "
                              f"changed since{f' (a copy of the old one is {str(kept)!r})' if kept.is_file() else ''}. {mend}")
