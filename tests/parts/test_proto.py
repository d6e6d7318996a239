"""FedProto: the pull, whose features make prototypes, what the server makes of them; alone and beside averaged models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consilience.core.population import Population
from consilience.data.federated import as_float
from consilience.errors import RefusedCombination
from consilience.parts import parse_stack
from consilience.parts.ditto import Ditto
from consilience.parts.local import Local
from consilience.parts.mixup import Mixup
from consilience.parts.proto import Proto
from consilience.parts.rep import Rep
from consilience.testing import differences, in_model, run_tiny, tiny_federation, tiny_net, tiny_population

VARIANTS: list[dict[str, Any]] = [{}, {"collect": "round"}, {"collect": "trained"}, {"aggregation": "weighted"}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains_and_can_be_captured(trains_and_replays: Any, settings: dict[str, Any]) -> None:
    trains_and_replays(Proto(**settings))


# ---- the pull ------------------------------------------------------------------------------------------------------

def loss(target: Any, seen: Any = (1.0, 1.0), features: Any = ((3.0, 4.0), (1.0, 1.0)), weight: float = 2.0) -> float:
    v = SimpleNamespace(features=torch.tensor(features), batch=SimpleNamespace(target=torch.tensor(target)),
                        shared={"proto": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "seen": torch.tensor(seen)})
    return Proto(weight=weight).loss(v).item()                                  # type: ignore[arg-type]


def test_the_pull_by_hand() -> None:
    """(3, 4) − (1, 0) = (2, 4): squares 4 and 16, mean 10. (1, 1) − (0, 2) = (1, −1): mean 1. Mean over both 5.5, λ = 2: 11.

    Without a prototype of class 1 the second sample adds 0 and the mean stays over two: 2·10/2 = 10.
    """
    assert loss([0, 1]) == pytest.approx(11.0)
    assert loss([0, 1], seen=(1.0, 0.0)) == pytest.approx(10.0)
    assert loss([0, 1], seen=(0.0, 0.0)) == 0.0
    assert loss([0], features=((3.0, 4.0),)) == pytest.approx(20.0)             # a batch of one


def test_soft_labels_weigh_the_pull() -> None:
    """(3, 4) is 10 away from class 0 and ((3)² + (2)²)/2 = 6.5 from class 1; (1, 1) is 0.5 and 1 away. λ = 2, over two samples:
    0.75·10 + 0.25·6.5 + 0.4·0.5 + 0.6·1 = 9.925, and without class 1's prototype 0.75·10 + 0.4·0.5 = 7.7.
    """
    mixed = [[0.75, 0.25], [0.4, 0.6]]
    assert loss(mixed) == pytest.approx(9.925)
    assert loss(mixed, seen=(1.0, 0.0)) == pytest.approx(7.7)
    assert loss([[1.0, 0.0], [0.0, 1.0]]) == pytest.approx(loss([0, 1]))


def test_the_pull_moves_the_features_and_not_the_head(open_round: Any) -> None:
    taken, plain = open_round(Proto(), rounds_before=1).step(), open_round(rounds_before=1).step()
    h, y = taken.trace.before["head:input"].detach(), taken.batch.y
    proto = taken.step.slot.shared["proto"]["proto"]
    assert float(taken.terms["proto"]) == pytest.approx(float((h - proto[y]).square().mean()), rel=1e-5)
    torch.testing.assert_close(taken.grads["head.weight"], plain.grads["head.weight"])      # round 1 had no prototypes: the same model
    assert not torch.allclose(taken.grads["header.weight"], plain.grads["header.weight"])


def test_the_first_round_is_plain() -> None:
    assert not differences(run_tiny(rounds=1), run_tiny([Proto()], rounds=1), only=in_model)
    assert differences(run_tiny(rounds=2), run_tiny([Proto()], rounds=2), only=in_model)


# ---- a client's prototypes -----------------------------------------------------------------------------------------

def seen_in(opened: Any) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Features, labels and batch size of all steps of the model that travels."""
    return [(t.trace.before["head:input"].detach(), t.batch.y, len(t.batch.y)) for t in opened.rest() if t.phase.model == "model"]


def by_class(steps: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    h, y = torch.cat([s[0] for s in steps]), torch.cat([s[1] for s in steps])
    return torch.stack([h[y == c].sum(0) for c in range(3)]), torch.tensor([float((y == c).sum()) for c in range(3)])


@pytest.mark.parametrize(("how", "number", "steps", "last"), [
    ({"epochs": 3}, 0, 9, 3),                                                   # 24 samples in batches of 8
    ({"epochs": 2}, 1, 4, 2),                                                   # 17: the seventeenth is dropped
    ({"epochs": 2, "last_batch": "keep", "sizes": (24, 19)}, 1, 6, 3),          # 8 8 3 | 8 8 3
    ({"steps": 5}, 0, 5, 3),                                                    # the last ones that show each sample once at most
    ({"steps": 2}, 0, 2, 2),                                                    # less than an epoch: all of them
    ({"epochs": 2, "sampling": "replacement", "sizes": (24, 5)}, 1, 2, 1),      # a batch is more than the client has
])
def test_features_of_the_last_epoch(open_round: Any, how: dict[str, Any], number: int, steps: int, last: int) -> None:
    opened = open_round(Proto(aggregation="weighted"), number=number, **how)
    seen = seen_in(opened)
    assert len(seen) == steps
    total, count = by_class(seen[-last:])
    up = opened.finish().uploads["proto"]
    torch.testing.assert_close(up["proto"], total)
    assert torch.equal(up["weight"], count)


def test_features_of_the_whole_round_and_of_the_trained_model(open_round: Any) -> None:
    opened = open_round(Proto(aggregation="weighted", collect="round"))
    total, count = by_class(seen_in(opened))
    up = opened.finish().uploads["proto"]
    torch.testing.assert_close(up["proto"], total)
    assert count.sum() == 48                                                    # two epochs of 24
    opened = open_round(Proto(aggregation="weighted", collect="trained"))
    opened.rest()
    outcome = opened.finish()
    net = tiny_net().eval()
    net.load_state_dict({**outcome.model["params"], **outcome.model["buffers"]})
    x, y = opened.fed.samples.inputs(opened.fed.samples.rows[0].train)
    with torch.no_grad():
        h = net.header(net.neck(net.stage1(x)))                                 # type: ignore[operator, union-attr]
    total, count = by_class([(h, y)])
    torch.testing.assert_close(outcome.uploads["proto"]["proto"], total, rtol=1e-4, atol=1e-4)
    assert torch.equal(outcome.uploads["proto"]["weight"], count)


def test_owners_weigh_the_same_and_a_missing_class_not_at_all(open_round: Any) -> None:
    """Uniform: a client's means, and 1 for each class it has shown. Class 2 is relabelled away."""
    p = tiny_population()
    merged = Population(p.x, p.y.clamp(max=1), p.rows, 3, as_float, p.names)
    opened = open_round(Proto(), population=merged)
    total, count = by_class(seen_in(opened)[-3:])
    up = opened.finish().uploads["proto"]
    torch.testing.assert_close(up["proto"][:2], total[:2] / count[:2, None])
    assert torch.equal(up["proto"][2], torch.zeros(12))
    assert up["weight"].tolist() == [1.0, 1.0, 0.0]


def test_the_last_epoch_is_that_of_the_phase_that_uploads(open_round: Any) -> None:
    """FedRep's head phase shows nothing that travels; Ditto's phase comes after, on another model. Alone, both phases count."""
    for parts, steps, last in (((Rep(head_epochs=2),), 12, 3), ((Ditto(),), 6, 3), ((Rep(head_epochs=2), Local()), 12, 3)):
        opened = open_round(Proto(aggregation="weighted"), *parts)
        seen = seen_in(opened)
        assert len(seen) == steps
        total, count = by_class(seen[-last:])
        up = opened.finish().uploads["proto"]
        torch.testing.assert_close(up["proto"], total)
        assert torch.equal(up["weight"], count)


def test_mixed_samples_count_by_their_labels_parts(open_round: Any) -> None:
    opened = open_round(Proto(aggregation="weighted", collect="round"), Mixup(alpha=0.5))
    total, count, hard = torch.zeros(3, 12), torch.zeros(3), []
    for taken in opened.rest():
        hard.append((taken.trace.before["head:input"].detach(), taken.batch.y))
        total += taken.batch.target.T @ taken.trace.before["head:input"].detach()
        count += taken.batch.target.sum(0)
    up = opened.finish().uploads["proto"]
    torch.testing.assert_close(up["proto"], total)
    torch.testing.assert_close(up["weight"], count)
    assert not torch.allclose(by_class(hard)[0], total, atol=1e-2)


# ---- the server ----------------------------------------------------------------------------------------------------

def test_the_mean_over_owners_by_hand() -> None:
    """Class 0: A has one sample of mean 2, B three of mean 6. Uniform (2 + 6)/2 = 4, weighted (1·2 + 3·6)/4 = 5.
    Class 1: B alone, mean 8, in both. Class 2: nobody; 7 stays, and it stays known. Class 3: nobody ever.
    """
    shared = {"proto": torch.tensor([[1.0], [0.0], [7.0], [0.0]]), "seen": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    uniform = {"proto": torch.tensor([[8.0], [8.0], [0.0], [0.0]]), "weight": torch.tensor([2.0, 1.0, 0.0, 0.0])}
    weighted = {"proto": torch.tensor([[20.0], [16.0], [0.0], [0.0]]), "weight": torch.tensor([4.0, 2.0, 0.0, 0.0])}
    for reduced, first in ((uniform, 4.0), (weighted, 5.0)):
        new, _ = Proto().server(SimpleNamespace(shared=shared, reduced=reduced, server={}))       # type: ignore[arg-type]
        assert new["proto"].flatten().tolist() == [first, 8.0, 7.0, 0.0]
        assert new["seen"].tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_weight_that_is_noise_alone_makes_no_prototype() -> None:
    """Differential privacy adds noise to sums and weights: 0.02 owners of class 1 would make (0.3, −0.4) a prototype of (15, −20).
    2.1 owners of class 0 are owners: (4.2, 0) / 2.1 = (2, 0).
    """
    shared = {"proto": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "seen": torch.tensor([1.0, 0.0])}
    reduced = {"proto": torch.tensor([[4.2, 0.0], [0.3, -0.4]]), "weight": torch.tensor([2.1, 0.02])}
    new, _ = Proto().server(SimpleNamespace(shared=shared, reduced=reduced, server={}))       # type: ignore[arg-type]
    torch.testing.assert_close(new["proto"], torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    assert new["seen"].tolist() == [1.0, 0.0]


def test_a_class_that_leaves_keeps_its_prototype_and_a_late_client_finds_it(open_round: Any) -> None:
    p = tiny_population()
    y = p.y.clone()
    y[p.rows[0][:8]] = 2
    for rows in p.rows[1:]:
        y[rows] = y[rows].clamp(max=1)
    fed = tiny_federation([Local(), Proto()], population=Population(p.x, y, p.rows, 3, as_float, p.names))
    fed.round([0, 1])
    first = fed.shared["proto"]["proto"].clone()
    fed.round([1, 3])                                                           # client 3 comes late; class 2 is not shown
    second = fed.shared["proto"]["proto"]
    assert torch.equal(first[2], second[2])
    assert not torch.equal(first[0], second[0])
    opened = open_round(fed=fed, number=3)
    assert torch.equal(opened.slot.shared["proto"]["proto"], second)
    assert float(opened.step().terms["proto"]) > 0


# ---- both methods --------------------------------------------------------------------------------------------------

def test_the_preset_averages_no_model_and_the_part_alone_does() -> None:
    """fedproto: prototypes up and down and no model. fedavg+proto: FedFM's generalised form."""
    assert [p.name for p in parse_stack("fedproto(weight=3, collect=trained, aggregation=weighted)").parts] == ["local", "proto"]
    assert parse_stack("fedproto(weight=3)").parts[1] == Proto(weight=3.0)
    original, general = (tiny_federation(parse_stack(text).parts) for text in ("fedproto", "fedavg+proto"))
    start = {k: v.clone() for k, v in original.model["params"].items()}
    report = original.round()
    prototypes = (3 * 12 + 3) * 4
    assert report.bytes_up == 3 * prototypes
    assert all(torch.equal(start[k], v) for k, v in original.model["params"].items())
    assert original.no_global_model
    general.round()
    assert general.no_global_model is None
    assert not torch.equal(start["head.weight"], general.model["params"]["head.weight"])
    original.round()
    own = [original.client(i).tensors["local"]["head.weight"] for i in (0, 1)]
    assert not torch.equal(*own)


def test_fedproto_has_no_average_to_act_on() -> None:
    with pytest.raises(RefusedCombination, match=r"avgm and local cannot be combined: local has no global model"):
        parse_stack("fedproto+fedavgm").method()
    parse_stack("fedavgm+proto").method()
