"""docs/methods.md lists the options of all parts as the code has them; docs/comparisons.md which methods weigh clients alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.options import describe
from consilience.parts import PARTS, parse_stack
from consilience.parts.presets import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


SAID = lambda value: str(value).lower() if isinstance(value, bool) else str(value)


def section(part: str) -> str:
    text = PAGE.read_text(encoding="utf-8").partition(f"\n### {part}\n")[2]
    return re.split(r"^##", text, maxsplit=1, flags=re.MULTILINE)[0]


def documented(part: str) -> dict[str, tuple[str, str]]:
    """option -> its default and its source, as written."""
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+? \| (.+?) \|$", section(part), re.MULTILINE)
    return {name: (default, source) for name, default, source in rows}


@pytest.mark.parametrize("part", ["debias", "moon", "cosine", "dann", "rod", "proto", "affine", "mixstyle", "moex", "manifold_mixup",
                                  "apfl", "moreau", "amplitude", "maml", "apple", "mix", "vhl", "mr", "drift", "anchors", "ffa"])
def test_every_option_with_its_default_and_a_source(part: str) -> None:
    rows = documented(part)
    assert {name: default for name, (default, _) in rows.items()} == {r["name"]: SAID(r["default"]) for r in describe(PARTS[part])}
    assert all(source.strip() for _, source in rows.values())


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_has_a_section_with_its_options_and_their_defaults(part: str) -> None:
    assert section(part).strip()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", section(part), re.MULTILINE)
    assert rows == [(r["name"], SAID(r["default"])) for r in describe(PARTS[part])]


def test_methods_in_which_clients_weigh_the_same() -> None:
    text = (PAGE.parent / "comparisons.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`", re.search(r"clients weigh the same in (.*?), by their samples", text)[1])       # type: ignore[index]
    alike = {name for name in PRESETS if Method(parse_stack(name).parts).resolve(Policy()).weights == "uniform"}
    assert sorted(named) == sorted([*alike, "dp"])
