"""The parts that docs/parts.md writes as examples keep the contract and do what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from consilience import rng
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


@pytest.fixture(scope="module")
def choice() -> type[Part]:
    return example("An example that chooses clients", "choice").Choice


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


def test_the_choice_keeps_the_contract(choice: type[Part]) -> None:
    check_part(choice)


def test_those_with_the_highest_loss_are_chosen(choice: type[Part]) -> None:
    """All of five clients are candidates: 4 never took part, and of the others 1 and 2 had the highest losses."""
    loss = torch.tensor([0.5, 2.0, 3.0, 1.0, torch.finfo(torch.float32).max])
    s = SimpleNamespace(ids=[0, 1, 2, 3, 4], p=torch.full((5,), 0.2), server={"loss": loss}, key=rng.key(0, "x"))
    assert choice(candidates=9).choose(s, [0, 3, 1]) == [4, 2, 1]
    assert choice(candidates=3).choose(s, [0, 3, 1]) == [0, 3, 1]                      # nobody to choose among


def test_candidates_are_drawn_by_their_weights(choice: type[Part]) -> None:
    """Two of three candidates with weights 0.6, 0.3 and 0.1. The first has the highest loss, so it is chosen wherever it is one of them:
    drawn first, or after the second or the third, 0.6 + 0.3 · 0.6/0.7 + 0.1 · 0.6/0.9 ≈ 0.9238. Of 2000 rounds 1847.6 are expected, with a
    standard deviation of √(2000 · 0.9238 · 0.0762) ≈ 11.9.
    """
    at = lambda r: SimpleNamespace(ids=[3, 5, 7], p=torch.tensor([0.6, 0.3, 0.1]), key=rng.key(r, "draw"),
                                   server={"loss": torch.tensor([0, 0, 0, 3.0, 0, 2.0, 0, 1.0])})
    chosen = [choice(candidates=2).choose(at(r), [5]) for r in range(2000)]
    assert {len(c) for c in chosen} == {1}
    assert abs(chosen.count([3]) - 1847.6) < 4 * 11.9
