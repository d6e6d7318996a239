"""docs/parts.md lists the options of FedBR and of baselines as the code has them; docs/comparisons.md which methods weigh clients alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.options import describe
from consilience.parts import PARTS, parse_stack
from consilience.parts.presets import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "parts.md"


def documented(part: str) -> dict[str, tuple[str, str]]:
    """option -> its default and its source, as written."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n### {part}\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+? \| (.+?) \|$", section, re.MULTILINE)
    return {name: (default, source) for name, default, source in rows}


@pytest.mark.parametrize("part", ["debias", "moon", "cosine", "dann", "rod", "proto", "affine", "mixstyle", "moex", "manifold_mixup",
                                  "apfl", "moreau", "amplitude", "maml", "apple", "mix", "vhl"])
def test_every_option_with_its_default_and_a_source(part: str) -> None:
    rows = documented(part)
    said = lambda value: str(value).lower() if isinstance(value, bool) else str(value)
    assert {name: default for name, (default, _) in rows.items()} == {r["name"]: said(r["default"]) for r in describe(PARTS[part])}
    assert all(source.strip() for _, source in rows.values())


def test_methods_in_which_clients_weigh_the_same() -> None:
    text = (PAGE.parent / "comparisons.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`", re.search(r"clients weigh the same in (.*?), by their samples", text)[1])       # type: ignore[index]
    alike = {name for name in PRESETS if Method(parse_stack(name).parts).resolve(Policy()).weights == "uniform"}
    assert sorted(named) == sorted([*alike, "dp"])
