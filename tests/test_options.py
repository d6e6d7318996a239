"""Declared settings: strict, and never another exception than ConfigError."""

from __future__ import annotations

import keyword
import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from consilience.errors import ConfigError, did_you_mean
from consilience.options import _quote_keywords, build, check, coerce, describe, format_call, option, parse_call
from consilience.parts import PARTS


@dataclass(frozen=True)
class Settings:
    rate: float = option(0.5, "a rate", low=0.0, below=1.0)
    many: int = option(3, "a number", low=1, high=10)
    flag: bool = option(False)
    name: str = option("a", choices=("a", "b", "long-name"))
    limit: int | None = option(None, low=1)
    places: tuple[int, ...] = option((1, 2), low=1)
    words: tuple[str, ...] = option(())

    def __post_init__(self) -> None:
        check(self, "settings")


HINTS = (float, int, bool, str, int | None, float | None, tuple[int, ...], tuple[str, ...], Any)
junk = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4)),
                    lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner),
                                            st.dictionaries(st.text(max_size=3), inner, max_size=2)), max_leaves=5)


@given(junk, st.sampled_from(HINTS))
@settings(max_examples=150)
def test_coerce_gives_the_type_or_a_config_error(value, hint):
    try:
        out = coerce(value, hint, "The option")
    except ConfigError:
        return
    plain = {float: float, int: int, bool: bool, str: str}
    if hint in plain:
        assert type(out) is plain[hint]
    elif hint == int | None or hint == float | None:
        assert out is None or isinstance(out, (int, float))
    elif hint in (tuple[int, ...], tuple[str, ...]):
        assert isinstance(out, tuple)


@given(st.dictionaries(st.text(max_size=8), junk, max_size=4))
@settings(max_examples=80)
def test_build_refuses_with_a_config_error_only(values):
    try:
        made = build(Settings, values, "settings")
    except ConfigError:
        return
    assert isinstance(made, Settings)


@given(st.sampled_from(sorted(PARTS)), st.data())
@settings(max_examples=80)
def test_parts_refuse_with_a_config_error_only(name, data):
    cls = PARTS[name]
    options = [f.name for f in fields(cls)]
    values = {k: data.draw(junk) for k in options[:2]}
    try:
        part = build(cls, values, name)
    except ConfigError:
        return
    assert part.name == name


@given(st.integers(-(10**30), 10**30))
@example(2**53 + 1)
def test_whole_numbers_round_trip(n):
    assert coerce(n, int, "x") == n
    assert coerce(str(n), int, "x") == n


@given(st.floats(allow_nan=False))
def test_numbers_round_trip(x):
    assert coerce(x, float, "x") == x
    assert coerce(repr(x), float, "x") == x


@given(st.lists(st.integers(-100, 100), max_size=4))
def test_lists_round_trip_as_text(values):
    assert coerce(",".join(map(str, values)), tuple[int, ...], "x") == tuple(values)
    assert coerce(values, tuple[int, ...], "x") == tuple(values)
    assert coerce(str(values), tuple[int, ...], "x") == tuple(values)


@pytest.mark.parametrize(("value", "hint", "out"), [
    ("3", int, 3), (3.0, int, 3), ("3.0", int, 3), ("1e2", int, 100), (3, float, 3.0), ("yes", bool, True), ("Off", bool, False),
    ("none", int | None, None), ("", int | None, None), ("4", int | None, 4), (5, tuple[int, ...], (5,)),
    ("(1, 2)", tuple[int, ...], (1, 2)),
    ("a,b", tuple[str, ...], ("a", "b")), ("", tuple[int, ...], ()),
])
def test_text_becomes_what_the_type_asks(value, hint, out):
    assert coerce(value, hint, "x") == out


@pytest.mark.parametrize(("value", "hint"), [
    (3.5, int), ("3.5", int), (True, int), (True, float), (1, bool), ("1", bool), (3, str), (None, int), ("x", float), (math.inf, int),
    (math.nan, int), ([1, "x"], tuple[int, ...]), ({"a": 1}, tuple[int, ...]), (True, tuple[int, ...]), ([[1]], tuple[int, ...]),
])
def test_nothing_is_guessed(value, hint):
    with pytest.raises(ConfigError, match="must be a"):
        coerce(value, hint, "The option")


@pytest.mark.parametrize(("values", "message"), [
    ({"rate": 1.0}, r"'rate' option of settings must be at least 0.0 and below 1.0. Got 1.0"),
    ({"rate": math.nan}, "'rate'"),
    ({"rate": "nan"}, "'rate'"),
    ({"many": 11}, "at least 1 and at most 10"),
    ({"limit": 0}, "'limit' option of settings must be at least 1"),
    ({"places": [3, 0]}, "Every item of the 'places' option of settings must be at least 1. Got 0 instead"),
    ({"name": "lng-name"}, "Did you mean 'long-name'"),
    ({"name": "zzzz"}, "one of a, b, long-name"),
    ({"rat": 1}, "settings has no option 'rat'. Did you mean 'rate'"),
    ({"qqqqqq": 1}, "Known: flag, limit, many, name, places, rate, words"),
])
def test_refusals(values, message):
    with pytest.raises(ConfigError, match=message):
        build(Settings, values, "settings")


def test_none_true_and_false_are_words_where_a_word_is_asked_for():
    @dataclass(frozen=True)
    class Wordy:
        kind: str = option("some", choices=("some", "none", "true"))
        text: str = option("")
        limit: int | None = option(3)
        flag: bool = option(False)

        def __post_init__(self) -> None:
            check(self, "wordy")
    made = lambda text: build(Wordy, parse_call(text, "It")[1], "wordy")
    assert made("wordy(kind=none)") == made("wordy(kind='none')") == Wordy(kind="none")
    assert made("wordy(kind=true, flag=true, limit=none)") == Wordy("true", "", None, True)
    with pytest.raises(ConfigError, match=r"'kind' option of wordy must be one of some, none, true. Got 'false' instead"):
        made("wordy(kind=false)")
    with pytest.raises(ConfigError, match=r"'text' option of wordy must be a text. Got None instead. If .* write it in quotes: 'none'"):
        made("wordy(text=none)")
    assert made("wordy(text='none')").text == "none"


def test_a_class_without_options_says_so():
    @dataclass(frozen=True)
    class Nothing:
        pass
    with pytest.raises(ConfigError, match="nothing has no options, so 'x' cannot be set"):
        build(Nothing, {"x": 1}, "nothing")


def test_limits_hold_for_direct_construction_too():
    with pytest.raises(ConfigError, match="'many'"):
        Settings(many=0)
    assert Settings(many="7").many == 7


def test_describe_lists_everything():
    rows = {r["name"]: r for r in describe(Settings)}
    assert list(rows) == ["rate", "many", "flag", "name", "limit", "places", "words"]
    assert rows["rate"]["range"] == "at least 0.0 and below 1.0"
    assert rows["limit"]["type"] == "whole number or none"
    assert rows["places"]["type"] == "list of whole number"
    assert rows["name"]["choices"] == ["a", "b", "long-name"]


# ---- name(key=value) -------------------------------------------------------------------------------------------------

identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda s: not keyword.iskeyword(s))
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=6))
literals = st.recursive(plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner),
                                                       st.dictionaries(plain, inner, max_size=2)), max_leaves=4)


@given(identifiers, st.dictionaries(identifiers, literals, max_size=4))
@settings(max_examples=80)
def test_format_and_parse_are_inverse(name, values):
    text = format_call(name, values)
    parsed = parse_call(text, "A split")
    assert parsed == (name, values)
    assert [type(v) for v in parsed[1].values()] == [type(v) for v in values.values()]


@pytest.mark.parametrize(("text", "result"), [
    ("iid", ("iid", {})), (" iid ", ("iid", {})), ("dirichlet(alpha=0.1)", ("dirichlet", {"alpha": 0.1})),
    ("dbe(init_mean=pass)", ("dbe", {"init_mean": "pass"})),
    ("f(a=pass   # why\n)", ("f", {"a": "pass"})), ("f(\n  a=in\n  , b=is\n)", ("f", {"a": "in", "b": "is"})),
    ("f(a='x=pass)', b=not)", ("f", {"a": "x=pass)", "b": "not"})),
    ("f(a = in,\n  b='is', c=None, d=lambda )", ("f", {"a": "in", "b": "is", "c": None, "d": "lambda"})),
    ("f(a=-1, b=true, c=none, d=word, e='a b', g=[1, 2])", ("f", {"a": -1, "b": True, "c": None, "d": "word", "e": "a b", "g": [1, 2]})),
    ("f(a='true')", ("f", {"a": "true"})), ("f()", ("f", {})),
])
def test_calls_by_hand(text, result):
    assert parse_call(text, "A split") == result


gaps = st.sampled_from(["", " ", "\n", "  # pass, in\n", "\t"])
values_as_typed = st.one_of(st.sampled_from([w for w in keyword.kwlist if w not in ("True", "False", "None")]).map(lambda w: (w, repr(w))),
                            st.sampled_from(["None", "word", "'x=pass,'", "1", "(1, 2)", '"é"']).map(lambda w: (w, w)))


@given(st.lists(st.tuples(identifiers, gaps, values_as_typed, gaps), max_size=8))
@settings(max_examples=100)
@example([("key", " ", ("pass", "'pass'"), "\n")] * 10_000)
def test_keywords_are_quoted_where_a_value_stands_and_nothing_else_changes(entries):
    """What was typed is put together beside what it must become, piece by piece."""
    bare, quoted = ("f(" + ",".join(f"{key}={before}{value[i]}{after}" for key, before, value, after in entries) + ")" for i in (0, 1))
    assert _quote_keywords(bare) == quoted


@pytest.mark.parametrize(("text", "message"), [
    ("", "must be written name"), ("1", "must be written name"), ("f(", "must be written name"), ("f(1)", "need names, as in f"),
    ("f(**x)", "need names"), ("a.b(c=1)", "must be written name"), ("f(a=g(1))", "not a plain value"), ("f(a=b.c)", "not a plain value"),
    ("f(a={[]: 1})", "not a plain value"), ("f(a=" + "-" * 20000 + "1)", "must be written name|not a plain value"),
    ("f(a=3x3)", "stands in quotes: key='3x3'"), ("f(a=b-c)", "'a' in .* is not a plain value. Text .* in quotes: a='a-b'"),
    ("f(a=1, a=2)", "twice"), ("f(a=__import__('os'))", "not a plain value"),
])
def test_calls_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_call(text, "A split")


@given(st.one_of(st.text(max_size=20), st.text(alphabet="abf(){}[]=,:'\"*+-.12 ", max_size=25)))
@settings(max_examples=200)
def test_any_text_is_parsed_or_refused(text):
    try:
        name, values = parse_call(text, "A split")
    except ConfigError:
        return
    assert name.isidentifier()
    assert all(k.isidentifier() for k in values)


# ---- nearest names ---------------------------------------------------------------------------------------------------

@given(st.text(max_size=10), st.lists(st.text(max_size=8), max_size=4))
def test_hints_never_fail(wrong, known):
    assert isinstance(did_you_mean(wrong, known), str)


def test_hints():
    assert did_you_mean("FedProxx", ["fedprox", "scaffold"]) == " Did you mean 'fedprox'?"
    assert did_you_mean("zzz", ["b", "a"]) == " Known: a, b."
    assert did_you_mean("zzz", []) == ""


def test_a_list_whose_items_hold_commas_is_json():
    assert coerce('["dose, mg", "age"]', tuple[str, ...], "x") == ("dose, mg", "age")
    assert coerce("[dose, age]", tuple[str, ...], "x") == ("dose", "age")
    with pytest.raises(ConfigError, match="begins like a list in JSON and is none"):
        coerce('["dose, mg", age]', tuple[str, ...], "x")


@pytest.mark.parametrize(("text", "items"), [
    ("auroc,mdl(steps=500, seeds=2)", ("auroc", "mdl(steps=500, seeds=2)")),
    ("calibration(bins=5)", ("calibration(bins=5)",)),
    ("mdl(point='a,b)'), cka", ("mdl(point='a,b)')", "cka")),
    ("(a, b)", ("a", "b")),
    ("age (years),patient's dose,sex", ("age (years)", "patient's dose", "sex")),
    ("low (,high", ("low (", "high")),
])
def test_a_comma_in_brackets_belongs_to_its_item(text, items):
    assert coerce(text, tuple[str, ...], "x") == items
