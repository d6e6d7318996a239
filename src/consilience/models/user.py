"""A model of the user's own: any `nn.Module`, by the path of what makes it, with its points named from outside."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from .. import options
from ..blame import place_in_users_code
from ..core.layout import Layout
from ..errors import ConfigError, unknown
from ..loading import hint_of_script, load_file
from .architecture import Built, Need, probe_batch
from .probe import check_layout, describe_points, table_of

_ROLES = ("head", "stages", "extractor", "header")


def parse_taps(text: str | None) -> Layout | None:
    """'head=classifier,stages=layer1+layer2' → a Layout. Modules of one role are joined by '+'."""
    if text is None:
        return None
    roles: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        role, equals, names = (piece.strip() for piece in item.partition("="))
        if not equals or not names:
            raise ConfigError(f"Taps must be written role=module or role=module+module, separated by commas. "
                              f"Got {item!r} instead.")
        if role not in _ROLES:
            raise unknown("role in the taps", role, _ROLES)
        if role in roles:
            raise ConfigError(f"The taps name {role!r} twice; join its modules by '+'.")
        modules = tuple(name.strip() for name in names.split("+"))
        if role == "head" and len(modules) != 1:
            raise ConfigError(f"The head is one module. Got {names!r} instead.")
        roles[role] = modules[0] if role == "head" else modules
    if "head" not in roles:
        raise ConfigError(f"The taps must name the head, as in head=classifier. Got {text!r} instead.")
    return Layout(**roles)


def from_user(path: str, layout: Layout | None, need: Need) -> Built:
    """The module that `package.module:factory` (or `…:factory(key=value)`) makes, checked against the layout.

    The factory is a class or a function. Of `sample`, `classes` and `vocabulary` it is given those it names.
    """
    where, _, call = path.partition(":")
    name, values = options.parse_call(call, f"The factory in {path!r}")
    factory = find_callable(where, name)
    offered = {"sample": need.sample, "classes": need.classes, "vocabulary": need.vocabulary}
    try:
        module = factory(**{**{k: v for k, v in offered.items() if k in _parameters(factory)}, **values})
    except TypeError as error:
        raise ConfigError(f"{path!r} could not be called: {error}. Offered by name: {', '.join(offered)}; "
                          f"the rest needs a default or a value, as in {where}:{name}(width=64).") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{path!r} must give a torch.nn.Module. Got {type(module).__name__} instead.")
    if layout is None:
        raise ConfigError(f"Name the points of {path!r} with taps, as in head=classifier,stages=layer1+layer2. "
                          f"Its modules:\n{table_of(describe_points(module))}")
    x = probe_batch(need)
    shapes = check_layout(module, layout, x)
    if shapes[layout.head][:1] != (need.classes,):
        raise ConfigError(f"The head {layout.head!r} of {path!r} gives {shapes[layout.head]} per sample; the data have "
                          f"{need.classes} classes. A factory with an argument named 'classes' is told their number.")
    return Built(module, layout)


def find_callable(where: str, name: str, kind: str = "factory") -> Callable[..., Any]:
    """The named object of a module, which may lie in the working directory."""
    if where.endswith(".py"):
        return _callable_in(load_file(where, f"the {kind} {name!r}"), where, name, kind)
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
            raise ConfigError(f"Importing {where!r} failed: {error}.") from error
        raise ConfigError(f"There is no Python module {error.name!r}. Looked in the installed packages, on PYTHONPATH "
                          "and in the working directory.") from error
    except Exception as error:
        place = place_in_users_code(error)
        raise ConfigError(f"Importing {where!r} failed: {type(error).__name__}: {error}{f' ({place})' if place else ''}") from error
    finally:
        if added:
            sys.path.remove(here)
    return _callable_in(module, where, name, kind)


def _callable_in(module: ModuleType, where: str, name: str, kind: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found) and (hint := hint_of_script(where)):
        raise ConfigError(f"There is no {kind} {name!r} in {where!r}.{hint}")
    if not callable(found):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise unknown(f"{kind} in {where!r}", name, public)
    return found


def _parameters(factory: Callable[..., Any]) -> set[str]:
    """Names the factory takes; those of a class are its constructor's. `**kwargs` takes none by itself."""
    try:
        return set(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return set()
