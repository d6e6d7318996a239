"""The part that docs/parts.md writes as an example keeps the contract and does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from consilience.core.part import Part
from consilience.parts.local import Local
from consilience.parts.scaffold import Scaffold
from consilience.testing import check_part, run_tiny

PAGE = Path(__file__).parents[2] / "docs" / "parts.md"


@pytest.fixture(scope="module")
def protos() -> type[Part]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## An example with state\n")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    module = sys.modules["protos"] = ModuleType("protos")              # dataclasses look their module up
    exec(code[1], vars(module))
    return module.Protos


def test_it_keeps_the_contract(protos: type[Part]) -> None:
    check_part(protos)


def test_prototypes_are_the_means_of_the_trained_models_features(protos: type[Part]) -> None:
    """Alone, a client's model after the round is the one that made its features; two of them, so the sums are easily taken again."""
    fed = run_tiny([Local(), protos()], rounds=1, sizes=(24, 17))
    total, count = torch.zeros(3, 12), torch.zeros(3)
    for i in (0, 1):
        own = fed.client(i).tensors["local"]
        model = {home: {k: own[k] for k in fed.model[home]} for home in ("params", "buffers")}
        for x, y in fed.samples.batches(fed.samples.rows[i].train):
            for h, label in zip(fed.look(i, fed.client(i), model, x, False, False).before["head:input"], y):
                total[label] += h
                count[label] += 1
    torch.testing.assert_close(fed.shared["protos"]["proto"], total / count[:, None])
    assert fed.shared["protos"]["seen"].tolist() == [1.0, 1.0, 1.0]


def test_it_stacks_as_the_page_says(protos: type[Part]) -> None:
    fed = run_tiny([Scaffold(), protos()], rounds=2)
    assert set(fed.shared) == {"scaffold", "protos"}
