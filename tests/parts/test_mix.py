"""FedMix and NaiveMix: the loss by hand, its distance from true mixing, the pool that clients make, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_step import ONE, check_step
from torch import Tensor

from consilience import rng
from consilience.core.method import Method
from consilience.core.part import Batch
from consilience.core.population import Population
from consilience.data.federated import as_float
from consilience.errors import ConfigError, RefusedCombination
from consilience.parts.mix import Mix
from consilience.parts.ntd import Ntd
from consilience.parts.sam import Sam
from consilience.parts.stack import parse_stack
from consilience.testing import run_tiny, tiny_federation

SIZES = (24, 17, 5, 40)


def view_of(w: Tensor, lam: float, x: Tensor, y: Tensor, mean: Tensor, shares: Tensor, rows: Tensor, **settings: Any) -> tuple[Mix, Any]:
    """A step of the model whose two logits are 0 and w·x."""
    part = Mix(lam=lam, **settings)
    v = SimpleNamespace(batch=Batch(x, y, y), plan={"row": rows}, shared={"x": mean, "y": shares}, spec=SimpleNamespace(classes=2),
                        task_loss=F.cross_entropy)
    v.batch = part.batch(v)                                                       # type: ignore[arg-type]
    v.trace = SimpleNamespace(logits=torch.cat([torch.zeros(len(x), 1), w * v.batch.x], 1))
    return part, v


@pytest.mark.parametrize(("taylor", "slope"), [("per_sample", 1.0), ("released", 0.5)])
def test_loss_and_gradient_by_hand(taylor: str, slope: float) -> None:
    """At x' = 0 both classes have ½, so each cross-entropy is ln 2, and a sample's slope is (½ − y)w: −½ and ½ for labels 1 and 0 with
    w = 1. Along averages 2 and 6 that is −1 and 3, mean 1; the release divides by the batch's size again. λ = 0.1:
    0.9(ln 2 + 0.1·1) + 0.1 ln 2. Of w the slope at x' = 0 is that of the third term alone: 0.9·0.1·mean of (½ − y)x̄ = 0.09.
    """
    w = torch.ones((), requires_grad=True)
    part, v = view_of(w, 0.1, torch.zeros(2, 1), torch.tensor([1, 0]), torch.tensor([[2.0], [6.0], [99.0]]),
                      torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), partner="row", taylor=taylor)
    loss = part.main_loss(v)
    assert loss.item() == pytest.approx(math.log(2) + 0.09 * slope, abs=1e-6)
    assert torch.autograd.grad(loss, w)[0].item() == pytest.approx(0.09 * slope, abs=1e-6)


def test_one_average_for_the_whole_batch() -> None:
    """Slopes −½ and ½ along the same 2 cancel; along 2 with labels 1 and 1 they give −1. Shares stand for every row."""
    w = torch.ones(())
    for y, slope in (([1, 0], 0.0), ([1, 1], -1.0)):
        part, v = view_of(w, 0.1, torch.zeros(2, 1), torch.tensor(y), torch.tensor([[2.0]]), torch.tensor([[0.25, 0.75]]),
                          torch.tensor([0]))
        assert part.main_loss(v).item() == pytest.approx(math.log(2) + 0.09 * slope, abs=1e-6)


def test_naive_by_hand() -> None:
    """¾·4 + ¼·8 = 5; labels ¾ and ¼ of the shares (½, ½): 1/8 and 7/8."""
    part, v = view_of(torch.ones(()), 0.25, torch.tensor([[4.0]]), torch.tensor([1]), torch.tensor([[8.0]]), torch.tensor([[0.5, 0.5]]),
                      torch.tensor([0]), form="naive")
    assert v.batch.x.tolist() == [[5.0]]
    assert v.batch.target.tolist() == [[0.125, 0.875]]
    expected = -(0.125 * math.log(1 / (1 + math.exp(5))) + 0.875 * math.log(1 / (1 + math.exp(-5))))
    assert part.main_loss(v).item() == pytest.approx(expected, rel=1e-5)


def test_it_is_naivemix_to_first_order() -> None:
    """What is left out is of second order: half the λ, a quarter of the distance. With the release's slope it is of first order: half."""
    torch.manual_seed(0)
    x, y, mean = torch.randn(6, 1).double(), torch.tensor([0, 1, 1, 0, 1, 0]), torch.randn(6, 1).double()
    shares = torch.rand(6, 2).double().softmax(1)

    def distance(lam: float, taylor: str) -> float:
        losses = [part.main_loss(v).item() for part, v in (
            view_of(torch.tensor(1.3).double(), lam, x, y, mean, shares, torch.arange(6), partner="row", form=form, taylor=how)
            for form, how in (("fedmix", taylor), ("naive", "per_sample")))]
        return abs(losses[0] - losses[1])
    small = 0.01
    assert distance(2 * small, "per_sample") / distance(small, "per_sample") == pytest.approx(4, rel=0.05)
    assert distance(2 * small, "released") / distance(small, "released") == pytest.approx(2, rel=0.05)


# ---- the pool ------------------------------------------------------------------------------------------------------

def painted() -> Population:
    """Pictures of one brightness: 10 times the client's number plus the label."""
    y = rng.integers(rng.key(3), 3, (sum(SIZES),))
    client = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES))
    return Population((10 * client + y).float()[:, None, None, None].expand(-1, 1, 8, 8).clone(), y,
                      tuple(torch.arange(len(y)).split(list(SIZES))), 3, as_float)


def owners(shared: Any) -> list[float]:
    """Whose samples are in each average: its brightness less the mean label that its shares say. One client's only, if a whole number."""
    x, y = shared["x"], shared["y"]
    assert float((x - x.mean((1, 2, 3), keepdim=True)).abs().max()) < 1e-5
    assert torch.equal(y * 4, (y * 4).round())                                    # means of four labels
    torch.testing.assert_close(y.sum(1), torch.ones(len(y)))
    who = (x.mean((1, 2, 3)) - y @ torch.arange(3.0)) / 10
    torch.testing.assert_close(who, who.round(), rtol=0, atol=1e-5)
    return who.round().tolist()


def test_averages_are_of_one_client_and_come_with_their_labels() -> None:
    """All clients are in the pool of the first round, also those too small to train and those that come later."""
    fed = tiny_federation([Mix(pool=60, group=4)], population=painted())
    fed.round([0])
    first = {k: t.clone() for k, t in fed.shared["mix"].items()}
    who = owners(first)
    assert set(who) == {0.0, 1.0, 2.0, 3.0}
    assert max(who.count(i) for i in set(who)) < 30
    fed.round([1, 3])
    assert all(torch.equal(first[k], fed.shared["mix"][k]) for k in first)


def test_a_new_pool_every_round_is_of_its_clients() -> None:
    fed = tiny_federation([Mix(pool=60, group=4, refresh="round")], population=painted())
    seen = []
    for cohort in ([0, 1], [1, 3], [1, 3]):
        fed.round(cohort)
        assert set(owners(fed.shared["mix"])) == set(map(float, cohort))
        seen.append(fed.shared["mix"]["x"])
    assert not torch.equal(seen[1], seen[2])


def test_large_pools_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from consilience.parts import mix
    whole = run_tiny([Mix(pool=60)], rounds=1).shared["mix"]
    monkeypatch.setattr(mix, "AT_ONCE", 3)
    pieces = run_tiny([Mix(pool=60)], rounds=1).shared["mix"]
    assert all(torch.equal(whole[k], pieces[k]) for k in whole)


def test_rows_are_drawn_for_every_step() -> None:
    spec = tiny_federation().spec
    sizes = torch.full((2000,), 8)
    one, many = (Mix(pool=5, partner=partner).plan(rng.key(2), spec, sizes)["row"] for partner in ("batch", "row"))
    assert one.shape == (2000, 1)
    assert many.shape == (2000, 8)
    for rows in (one, many):
        assert (rows.flatten().bincount(minlength=5) / rows.numel()).tolist() == pytest.approx([0.2] * 5, abs=0.04)


# ---- a step --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("partner", ["batch", "row"])
@pytest.mark.parametrize("sizes", [(24, 17, 5, 40), (5, 17, 5, 40)])          # a full batch, and a smaller last one
def test_step_against_plain_modules(partner: str, sizes: tuple[int, ...]) -> None:
    lam = 0.2
    fed = tiny_federation([Mix(lam=lam, partner=partner, pool=6, group=3)], sizes=sizes, last_batch="keep", **ONE)
    fed.prepare()
    fed.round_number += 1
    rows = fed.plans(0, fed.samples.schedule(0, fed.phases), "round")["mix"]["row"][0][: min(8, sizes[0])]
    fed.round_number -= 1

    def task(net: Any, x: Tensor, y: Tensor) -> Tensor:
        x = ((1 - lam) * x).requires_grad_()
        logits = net(x)
        mean, shares = fed.shared["mix"]["x"][rows], fed.shared["mix"]["y"][rows]
        total = F.cross_entropy(logits, y, reduction="sum")
        (g,) = torch.autograd.grad((1 - lam) * total, x, create_graph=True)
        slopes = (g * mean).flatten(1).sum(1)
        return ((1 - lam) * F.cross_entropy(logits, y) - lam * (shares * logits.log_softmax(1)).sum(1).mean() + lam * slopes.mean())
    check_step(fed, 0, task=task)


def test_with_weight_0_no_slope_is_taken(open_round: Any) -> None:
    batch = open_round(Mix(lam=0.0, pool=4)).step().batch
    assert not batch.x.requires_grad
    assert not batch.target.is_floating_point()
    assert not Mix(lam=0.0).second_order
    assert not Mix(form="naive").second_order
    assert Mix().second_order
    for part in (Mix(pool=4), Mix(pool=4, lam=0.0), Mix(pool=4, form="naive")):
        assert tiny_federation([part]).program.network.twice == part.second_order     # no kernel without a second derivative


def test_presets() -> None:
    (fedmix,), (naive,) = parse_stack("fedmix").parts, parse_stack("naivemix(lam=0.2)").parts
    assert fedmix == Mix()
    assert naive == Mix(form="naive", lam=0.2)


def test_refusals() -> None:
    with pytest.raises(RefusedCombination, match="mix takes the gradient of a gradient, and sam has a gradient of its own"):
        Method([Mix(), Sam()])
    Method([Mix(form="naive"), Sam()])
    with pytest.raises(RefusedCombination, match="mix has soft labels, and ntd needs the one true class"):
        Method([Mix(), Ntd()])
    with pytest.raises(ConfigError, match="taylor says nothing"):
        tiny_federation([Mix(form="naive", taylor="released")])
    assert "have no average" in str(Mix().require(replace(tiny_federation().spec, tokens=True)))
    with pytest.raises(ConfigError, match="below 1"):
        Mix(lam=1.0)


def test_what_leaves_a_client_is_said() -> None:
    assert Mix().raw_averages == ("means of 10 training inputs of one client and of their labels, sent before the first round; "
                                  "all clients get them")
    said = Mix(group=1, refresh="round").raw_averages
    assert said.startswith("single training inputs and their labels, as they are, sent in every round")
