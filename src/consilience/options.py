"""Declared settings: one mechanism for the options of parts, splits, models and of a run.

A setting is a dataclass field made with `option`, which carries its range, its meaning and the range worth searching.
`build` turns loose values (from a file or the command line) into such a dataclass, strictly. Values written as
`name(key=value, …)` are read by `parse_call`.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import keyword
import math
import tokenize
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from .errors import ConfigError, did_you_mean

T = TypeVar("T")
_HINTS: WeakKeyDictionary[type, Mapping[str, Any]] = WeakKeyDictionary()


def option(default: Any, doc: str = "", *, low: float | None = None, high: float | None = None,
           above: float | None = None, below: float | None = None, choices: tuple | None = None,
           tune: tuple | None = None) -> Any:
    """A dataclass field with limits. `low`, `high` are inclusive, `above`, `below` exclusive.

    `tune` lists values worth searching, for comparisons that give every method the same budget.
    """
    limits = {"low": low, "high": high, "above": above, "below": below, "choices": choices}
    metadata = {"doc": doc, "tune": tune, **{k: v for k, v in limits.items() if v is not None}}
    return dataclasses.field(default=default, metadata=metadata)


def hints_of(cls: type) -> Mapping[str, Any]:
    """The types of a class's fields, kept: Python evaluates the annotations whenever it is asked, and every part that is made asks."""
    if cls not in _HINTS:
        _HINTS[cls] = types.MappingProxyType(typing.get_type_hints(cls))
    return _HINTS[cls]


def describe(cls: type) -> list[dict[str, Any]]:
    """The declared settings of a dataclass, ready for a table or JSON."""
    hints = hints_of(cls)
    rows = []
    for f in dataclasses.fields(cls):
        limits = {k: f.metadata[k] for k in ("low", "high", "above", "below") if k in f.metadata}
        rows.append({"name": f.name, "type": _type_name(hints[f.name]), "default": f.default,
                     "doc": f.metadata.get("doc", ""), "range": _range_text(f.metadata), "limits": limits,
                     "choices": list(f.metadata["choices"]) if f.metadata.get("choices") else None,
                     "tune": list(f.metadata["tune"]) if f.metadata.get("tune") else None})
    return rows


def build(cls: type[T], values: Mapping[str, Any], owner: str) -> T:
    """An instance of `cls` from loose values; unknown keys and wrong values are refused with the nearest names."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{owner} has no option {key!r}.{did_you_mean(key, known)}" if known else
                              f"{owner} has no options, so {key!r} cannot be set.")
    hints, meant = hints_of(cls), {f.name: f.metadata for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{k: coerce(_as_word(v, hints[k], meant[k]), hints[k], f"The {k!r} option of {owner}") for k, v in values.items()})


_WORDS = {"true": True, "false": False, "none": None}        # bare words that calls and files give as values of their own
_PYTHONS = ("True", "False", "None")                         # the same as Python spells them, which are keywords of it


def _as_word(value: Any, hint: Any, meta: Mapping[str, Any]) -> Any:
    """Where an option is one of several words, none, true and false are words too: projection=none is the projection named none."""
    words = [word for word, meaning in _WORDS.items() if value is meaning]
    return words[0] if words and hint is str and meta.get("choices") else value


def check(instance: Any, owner: str) -> None:
    """Refuse values of the wrong type or outside their declared limits. Called when a part is made, from anywhere."""
    hints = hints_of(type(instance))
    for f in dataclasses.fields(instance):
        what = f"The {f.name!r} option of {owner}"
        value = coerce(getattr(instance, f.name), hints[f.name], what)
        object.__setattr__(instance, f.name, value)
        if value is not None:
            _check_limits(value, f.metadata, what)


def _check_limits(value: Any, meta: Mapping[str, Any], what: str) -> None:
    if isinstance(value, tuple):
        for item in value:                               # limits are those of every item
            _check_limits(item, meta, f"Every item of {what[0].lower()}{what[1:]}")
        return
    if meta.get("choices") and value not in meta["choices"]:
        hint = did_you_mean(value, meta["choices"]) if isinstance(value, str) else ""
        raise ConfigError(f"{what} must be one of {', '.join(map(str, meta['choices']))}. Got {value!r} instead.{hint}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{what} must be finite. Got {value!r} instead.")
        wrong = (("low" in meta and value < meta["low"]) or ("high" in meta and value > meta["high"])
                 or ("above" in meta and value <= meta["above"]) or ("below" in meta and value >= meta["below"]))
        if wrong:
            raise ConfigError(f"{what} must be {_range_text(meta)}. Got {value!r} instead.")


def _range_text(meta: Mapping[str, Any]) -> str:
    words = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
    return " and ".join(f"{word} {meta[k]}" for k, word in words.items() if k in meta)


def _type_name(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_type_name(a) for a in typing.get_args(hint))
    if hint is type(None):
        return "none"
    origin = typing.get_origin(hint)
    if origin is tuple:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    plain = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return plain.get(hint, getattr(hint, "__name__", str(hint)))


def _split(text: str) -> list[str]:
    """At the commas that stand in no brackets; at every comma where brackets do not close, as in a name that holds one."""
    out, depth, quote = [""], 0, ""
    for ch in text:
        if depth and quote:
            quote = "" if ch == quote else quote
        elif depth and ch in "'\"":                      # outside of brackets it is an apostrophe
            quote = ch
        else:
            depth += (ch in "([{") - (ch in ")]}")
        if ch == "," and not depth:
            out.append("")
        else:
            out[-1] += ch
    return text.split(",") if depth else out


def _items(text: str, what: str) -> list[Any]:
    """The items of a list as users write it, with commas, or as JSON where items hold commas themselves. A comma in brackets belongs to its
    item, as in auroc,mdl(steps=500, seeds=2)."""
    if not text.lstrip().startswith('["'):
        text = text.strip()
        if text[:1] + text[-1:] in ("()", "[]") and len(_split(text)) == 1:         # brackets around the whole of it
            text = text[1:-1]
        return [v for v in map(str.strip, _split(text)) if v]
    try:
        items: list[Any] = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what} begins like a list in JSON and is none: {error}. Got {text!r}.") from None
    return items


def coerce(value: Any, hint: Any, what: str) -> Any:
    """`value` as the declared type, or a ConfigError. Text is read as the type asks; nothing is guessed beyond that."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        for option_type in typing.get_args(hint):
            try:
                return coerce(value, option_type, what)
            except ConfigError:
                continue
        raise _wrong_type(value, hint, what)
    if hint is type(None):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            return None
        raise _wrong_type(value, hint, what)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if isinstance(value, str):
            value = _items(value, what)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            value = [value]
        if not isinstance(value, (list, tuple)):
            raise _wrong_type(value, hint, what)
        return tuple(coerce(v, item, what) for v in value)
    if hint is bool:
        if isinstance(value, str) and value.lower() in ("true", "yes", "on", "false", "no", "off"):
            return value.lower() in ("true", "yes", "on")
        if isinstance(value, bool):
            return value
    elif hint is int and isinstance(value, int) and not isinstance(value, bool):
        return int(value)                                # not by way of float, which rounds from 2^53 up
    elif hint in (int, float) and not isinstance(value, bool):
        try:
            if hint is int and isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
                return int(value)
            number = float(value)
            if hint is float:
                return number
            if number.is_integer():
                return int(number)
        except (TypeError, ValueError, OverflowError):
            pass
    elif hint is Any or (isinstance(hint, type) and hint not in (int, float) and isinstance(value, hint)):
        return value
    raise _wrong_type(value, hint, what)


def _wrong_type(value: Any, hint: Any, what: str) -> ConfigError:
    read_as_value = hint is str and (value is None or isinstance(value, bool))
    quotes = f" If the word is meant, write it in quotes: '{str(value).lower()}'." if read_as_value else ""
    return ConfigError(f"{what} must be a {_type_name(hint)}. Got {value!r} instead.{quotes}")


class _LowerCaseWords(ast.NodeTransformer):
    """true, false and none as Python spells them, other bare words (in a list, as in drop=(sex, ward)) as text."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS.get(node.id, node.id))


def _quote_keywords(text: str) -> str:
    """init_mean=pass is the word, though Python keeps it for itself: such words are put in quotes where a value stands."""
    try:
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in (tokenize.NL, tokenize.COMMENT)]
    except (tokenize.TokenError, SyntaxError):                          # not Python at all: what reads it says so
        return text
    begins = [0, *(i + 1 for i, ch in enumerate(text) if ch == "\n")]     # where each row begins
    pieces, done = [], 0
    for before, word, after in zip(tokens, tokens[1:], tokens[2:]):
        if before.string == "=" and after.string in (",", ")") and keyword.iskeyword(word.string) and word.string not in _PYTHONS:
            start, end = (begins[row - 1] + column for row, column in (word.start, word.end))
            pieces += [text[done:start], repr(word.string)]
            done = end
    return "".join([*pieces, text[done:]])


def parse_call(text: str, what: str) -> tuple[str, dict[str, Any]]:
    """'dirichlet(alpha=0.1)' → ('dirichlet', {'alpha': 0.1}). Values are literals; a bare word is text."""
    try:
        node = ast.parse(_quote_keywords(text.strip()), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):      # the last two from nesting beyond reason
        node = None
    if isinstance(node, ast.Name):
        return node.id, {}
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        quotes = " Text other than a plain word stands in quotes: key='3x3'." if node is None and "=" in text else ""
        raise ConfigError(f"{what} must be written name or name(key=value, …). Got {text!r} instead.{quotes}")
    if node.args or any(k.arg is None for k in node.keywords):
        raise ConfigError(f"{what}: settings of {node.func.id!r} need names, as in {node.func.id}(key=value). "
                          f"Got {text!r} instead.")
    values: dict[str, Any] = {}
    for pair in node.keywords:
        assert pair.arg is not None
        if pair.arg in values:
            raise ConfigError(f"{what}: {pair.arg!r} stands twice in {text!r}.")
        if isinstance(pair.value, ast.Name) and pair.value.id not in _WORDS:
            values[pair.arg] = pair.value.id
            continue
        try:
            values[pair.arg] = ast.literal_eval(_LowerCaseWords().visit(pair.value))
        except (ValueError, TypeError, MemoryError, RecursionError):
            raise ConfigError(f"{what}: {pair.arg!r} in {text!r} is not a plain value. Text other than a plain word stands in quotes: "
                              f"{pair.arg}='a-b'.") from None
    return node.func.id, values


def format_call(name: str, values: Mapping[str, Any], *, bare: bool = False) -> str:
    """The inverse of `parse_call`; `bare`: words without quotes where they are read the same without."""
    def written(value: Any) -> str:
        plain = bare and isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value) and value not in _WORDS
        return str(value) if plain else repr(value)
    return f"{name}({', '.join(f'{k}={written(v)}' for k, v in values.items())})" if values else name


def one_spelling(text: str) -> str:
    """One way of writing a call, for settings that are compared: Net(a=.1,b="c") is Net(a=0.1, b='c'), after module: too. What cannot
    be read stays as it is. The order stays, too: runs that are kept have names made of it."""
    where, colon, _ = text.partition("(")[0].rpartition(":")
    try:
        name, values = parse_call(text[len(where + colon):], "It")
    except ConfigError:
        return text
    return where + colon + format_call(name, values)
