"""From 'scaffold+dbe' and its settings to the parts of a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..core.method import Method
from ..core.part import Part
from ..errors import ConfigError, did_you_mean, unknown
from ..options import build, parse_call
from .presets import PRESETS, Preset
from .registry import find_part, installed_parts


@dataclass(frozen=True)
class Stack:
    """A method as it was typed, resolved."""

    text: str
    names: tuple[str, ...]              # tokens as typed, sorted
    parts: tuple[Part, ...]

    def method(self) -> Method:
        return Method(self.parts)

    @property
    def canonical(self) -> str:
        """The same for every order of typing."""
        return "+".join(self.names) or "fedavg"


def split_tokens(text: str) -> list[str]:
    """Split at '+' outside brackets."""
    tokens, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch in "([") - (ch in ")]")
        if ch == "+" and depth == 0:
            tokens.append(text[start:i].strip())
            start = i + 1
    tokens.append(text[start:].strip())
    if not all(tokens):
        raise ConfigError(f"A method is names joined by '+', as in scaffold+dbe. Got {text!r} instead.")
    return tokens


def read_token(token: str) -> tuple[str, dict[str, Any]]:
    """'prox(mu=1)' → 'prox' and {'mu': 1}; './mine.py:Mine(mu=1)' and 'package.module:Mine(mu=1)' likewise."""
    place, colon, call = token.partition(".py:")
    if colon:
        place, colon = place + ".py", ":"
    elif ":" in token.partition("(")[0]:
        place, colon, call = token.partition(":")
    else:
        if token.endswith(".py"):
            raise ConfigError(f"A part from a file is written with its class, as in {token}:Mine. Got {token!r} instead.")
        if "," in token.partition("(")[0]:
            raise ConfigError("Parts of a method are joined by '+', as in scaffold+dbe, and the methods of a comparison stand apart, as in "
                              f"fedavg dbe. Got {token!r} instead.")
        place, call = "", token
    name, inline = parse_call(call, "A method")
    return place + colon + name, inline


def forwarded(preset: Preset, option: str) -> tuple[str, ...]:
    """The parts' options that one option of a preset sets."""
    if option in preset.options:
        return preset.options[option]
    known = [*preset.options]
    if len(preset.parts) == 1:
        known += [f.name for f in fields(find_part(preset.parts[0]))]  # type: ignore[arg-type]
        if option in known:
            return (f"{preset.parts[0]}.{option}",)
    if not known:
        raise ConfigError(f"{preset.name} has no options, so {option!r} cannot be set.")
    raise ConfigError(f"{preset.name} has no option {option!r}.{did_you_mean(option, known)}")


def parse_stack(text: str, settings: Mapping[str, Any] | None = None) -> Stack:
    """Names joined by '+', and settings like {'dbe.kappa': 5}. Options may also stand in brackets: 'fedprox(mu=0.1)'."""
    classes: dict[str, type[Part]] = {}
    values: dict[str, dict[str, Any]] = {}
    set_by: dict[tuple[str, str], str] = {}
    presets: dict[str, Preset] = {}
    names: list[str] = []

    def assign(part: str, option: str, value: Any, source: str) -> None:
        old = values.setdefault(part, {})
        if option in old and old[option] != value:
            raise ConfigError(f"{part}.{option} is set twice: {old[option]!r} by {set_by[part, option]} and {value!r} by {source}.")
        old[option], set_by[part, option] = value, source

    for token in split_tokens(text):
        name, inline = read_token(token)
        if name in names:
            raise ConfigError(f"{name!r} stands twice in {text!r}.")
        names.append(name)
        if name in PRESETS:
            presets[name] = PRESETS[name]
            chosen = {target for option in inline for target in forwarded(PRESETS[name], option)}
            for part in PRESETS[name].parts:
                classes[part] = find_part(part)
                for option, value in PRESETS[name].settings.get(part, {}).items():
                    if f"{part}.{option}" not in chosen:                # brackets have the last word over the name before them
                        assign(part, option, value, f"the preset {name}")
        elif ":" not in name and name not in installed_parts():
            raise unknown("method", name, [*PRESETS, *installed_parts()])
        else:
            cls = find_part(name)
            if cls.name in classes and classes[cls.name] is not cls:
                raise ConfigError(f"{name!r} and another part of the stack are both named {cls.name!r}.")
            classes[cls.name] = cls
            names[-1] = name if ":" in name else cls.name
        for option, value in inline.items():
            own_name = find_part(name).name if ":" in name else name
            for target in forwarded(presets[name], option) if name in presets else (f"{own_name}.{option}",):
                part, key = target.split(".")
                assign(part, key, value, token)
    for path, value in (settings or {}).items():
        owner, dot, option = path.partition(".")
        if not dot or not option or "." in option:
            raise ConfigError(f"A method's setting is written part.option=value, as in prox.mu=0.1. Got {path!r} instead.")
        if owner not in presets and owner not in classes:
            raise ConfigError(f"{owner!r} in {path!r} is not in the method {text!r}.{did_you_mean(owner, [*presets, *classes])}")
        targets = (path,) if owner in classes else forwarded(presets[owner], option)
        for target in targets:
            part, key = target.split(".")
            if set_by.get((part, key)) not in (settings or {}):
                values.setdefault(part, {}).pop(key, None)      # a setting has the last word over what was typed in the method
            assign(part, key, value, path)
    parts = tuple(build(cls, values.get(name, {}), name) for name, cls in sorted(classes.items()))
    return Stack(text, tuple(sorted(n for n in names if n != "fedavg")), parts)
