"""The rows of a comparison: each method once, with the settings that were given for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..parts.presets import PRESETS
from ..parts.registry import find_part
from ..parts.stack import forwarded, parse_stack, read_token, split_tokens
from .config import RunConfig


@dataclass(frozen=True)
class Entry:
    """A row. `settings` are all that were given, by part.option; `values` other settings of the run for this row alone."""

    name: str                                                   # as it was first typed
    method: str                                                 # the same for every order of typing
    settings: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def config(self, base: RunConfig, seed: int) -> RunConfig:
        return base.replace(**{**self.values, "method": self.method, "settings": dict(self.settings), "seed": seed})


def targets_of(path: str, parts: Sequence[str]) -> tuple[str, ...]:
    """The parts' options that a path like lfd.tau or prox.mu sets."""
    owner, _, option = path.partition(".")
    return (path,) if owner in parts or owner not in PRESETS else forwarded(PRESETS[owner], option)


def given_settings(text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What brackets and settings say together, by part.option. Settings have the last word."""
    parts = [p.name for p in parse_stack(text, settings).parts]
    out: dict[str, Any] = {}
    for token in split_tokens(text):
        name, inline = read_token(token)
        for option, value in inline.items():
            owner = find_part(name).name if ":" in name else name
            out |= dict.fromkeys(forwarded(PRESETS[name], option) if name in PRESETS else (f"{owner}.{option}",), value)
    for path, value in settings.items():
        out |= dict.fromkeys(targets_of(path, parts), value)
    return dict(sorted(out.items()))


def make_entries(methods: Sequence[str], base: RunConfig, with_local: bool = True,
                 overrides: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[list[Entry], list[str]]:
    """The rows, and notes about names that mean the same: those share one row."""
    if not methods and not with_local:
        raise ConfigError("A comparison needs at least one method.")
    entries: list[Entry] = []
    stacks: list[tuple[Any, ...]] = []
    notes: list[str] = []
    names = (["local"] if with_local else []) + [m.strip() for m in methods]
    for name in names:
        own = dict((overrides or {}).get(name, {}))
        applying = {k: v for k, v in base.settings.items() if applies(k, name)} | dict(own.pop("settings", {}))
        base.replace(**{**own, "method": name, "settings": applying})           # says what is wrong in the user's own words
        entry = Entry(name, parse_stack(name).canonical, given_settings(name, applying), own)
        identity = (parse_stack(entry.method, entry.settings).parts, sorted(own.items()))
        if identity not in stacks:
            stacks.append(identity)
            entries.append(entry)
        elif (first := entries[stacks.index(identity)].name) != name:
            notes.append(f"{name} is the same as {first}: one row.")
    for path in base.settings:
        if not any(applies(path, name) for name in names):
            raise ConfigError(f"The setting {path!r} belongs to none of the methods compared: {', '.join(names)}.")
    return entries, notes


def applies(path: str, method: str) -> bool:
    """Whether a setting like dbe.kappa concerns a method: its owner is one of the method's names or parts."""
    tokens = [read_token(t)[0] for t in split_tokens(method)]
    return path.partition(".")[0] in {*tokens, *(p.name for p in parse_stack(method).parts)}
