"""The architectures of this package by name: every file of it may hold one, and is found without a list to edit."""

from __future__ import annotations

import importlib
import pkgutil

import torch
from torch import Tensor

from .. import options, rng
from ..errors import unknown
from .architecture import Architecture, Built, Need
from .user import from_user, parse_taps


def _discover() -> dict[str, type[Architecture]]:
    package = __name__.rpartition(".")[0]
    found: dict[str, type[Architecture]] = {}
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if info.name == __name__.rpartition(".")[2]:
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Architecture) and value.name \
                    and value.__module__ == module.__name__:
                found[value.name] = value
    return dict(sorted(found.items()))


MODELS: dict[str, type[Architecture]] = _discover()


def settings_of(text: str) -> Architecture:
    """"resnet18(stem='3x3')" → the checked settings of that architecture."""
    name, values = options.parse_call(text, "A model")
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    settings = options.build(MODELS[name], values, f"model {name!r}")
    options.check(settings, f"model {name!r}")
    return settings


def make(text: str, *, sample: tuple[int, ...], classes: int, key: Tensor, vocabulary: int | None = None,
         taps: str | None = None) -> Built:
    """A model for samples of this shape, with initial values drawn from `key` and no other draw moved.

    `text` is a name of MODELS with its settings, or `package.module:factory` for a model of the user's own, whose
    points `taps` names.
    """
    need = Need(tuple(sample), classes, vocabulary)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator: torch.manual_seed would seed those of the GPUs as well, and nothing puts them back.
        torch.default_generator.manual_seed(rng.seed_torch(key))
        if ":" in text.partition("(")[0]:
            return from_user(text, parse_taps(taps), need)
        return settings_of(text).build(need)
