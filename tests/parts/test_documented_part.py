"""The parts that docs/parts.md writes as examples keep the contract and do what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from consilience.core.method import Method
from consilience.core.part import Part
from consilience.parts.avgm import Avgm
from consilience.parts.local import Local
from consilience.parts.scaffold import Scaffold
from consilience.testing import check_part, run_tiny

PAGE = Path(__file__).parents[2] / "docs" / "parts.md"


def example(heading: str, name: str) -> ModuleType:
    """The code of a section, as the module of that name."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2], re.DOTALL)
    assert code is not None
    module = sys.modules[name] = ModuleType(name)              # dataclasses look their module up
    exec(code[1], vars(module))
    return module


@pytest.fixture(scope="module")
def protos() -> type[Part]:
    return example("An example with state", "protos").Protos


@pytest.fixture(scope="module")
def trimmed() -> type[Part]:
    return example("An example on the server", "trimmed").Trimmed


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


def test_the_trimmed_mean_keeps_the_contract(trimmed: type[Part]) -> None:
    check_part(trimmed)


def test_of_three_clients_it_leaves_the_one_between(trimmed: type[Part]) -> None:
    """⌊0.4 · 3⌋ = 1 at either end. Changes of −1, 2 and 30 leave 2, whatever the average was, and FedAvgM comes after it."""
    model = {"params": {"w": torch.tensor([5.0])}}
    s = SimpleNamespace(models=[{"w": torch.tensor([x])} for x in (7.0, 4.0, 35.0)], model=model, server={})
    change, _ = trimmed(cut=0.4).aggregate(s, {"w": torch.tensor([10.0])})
    assert change["w"].tolist() == [2.0]
    assert [p.name for p in Method([Avgm(), trimmed()]).using("aggregate")] == ["trimmed", "avgm"]
