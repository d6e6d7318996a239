"""MoEx: moments exchanged by hand, the labels that go with them, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_step import ONE, check_step
from tap_view import view_of
from torch import Tensor

from consilience import rng
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.errors import ConfigError, RefusedCombination
from consilience.parts.moex import MoEx
from consilience.parts.ntd import Ntd
from consilience.testing import tiny_federation

ROOT = math.sqrt(3)
SWAP = {"on": torch.tensor(True), "order": torch.tensor([1, 0])}
SWAPPED = torch.tensor([[4 - 2 / ROOT, 4 - 2 / ROOT, 4 + 4 / ROOT], [1 - ROOT, 1, 1 + ROOT]])


@pytest.mark.parametrize("moments", ["pono", "instance"])
def test_by_hand(moments: str) -> None:
    """(0, 0, 3) has mean 1 and variance (1 + 1 + 4)/2 = 3; (2, 4, 6) has mean 4 and deviation 2. Normalised they are (−1, −1, 2)/√3 and
    (−1, 0, 1), and each takes the other's moments. pono: three channels at one position; instance: three positions of one channel.
    """
    numbers = torch.tensor([[0.0, 0, 3], [2, 4, 6]])
    x = numbers[:, :, None, None] if moments == "pono" else numbers[:, None, None]
    out = MoEx(moments=moments).tap(view_of(SWAP), "q", x)
    torch.testing.assert_close(out.reshape(2, 3), SWAPPED, rtol=0, atol=1e-4)                  # ε = 1e-5 inside the root


def test_gradients_flow_through_the_moments() -> None:
    """A sample has its partner's mean afterwards: Σ x̂ of the first is Σ x of the second, so its slope is 0 at the first and 1 there."""
    x = torch.tensor([[0.0, 0, 3], [2, 4, 6]])[:, :, None, None].requires_grad_()
    (slope,) = torch.autograd.grad(MoEx().tap(view_of(SWAP), "q", x)[0].sum(), x)
    torch.testing.assert_close(slope.reshape(2, 3), torch.tensor([[0.0, 0, 0], [1, 1, 1]]), rtol=0, atol=1e-5)


def test_labels_by_hand() -> None:
    """λ = 0.8 of the own label, 0.2 of the partner's; the coin that leaves the maps alone leaves the labels alone."""
    y = torch.tensor([0, 2])
    torch.testing.assert_close(MoEx(lam=0.8).relabel(view_of(SWAP, y)), torch.tensor([[0.8, 0, 0.2], [0.2, 0, 0.8]]))
    off = {**SWAP, "on": torch.tensor(False)}
    assert MoEx(lam=0.8).relabel(view_of(off, y)).tolist() == [[1, 0, 0], [0, 0, 1]]
    masks = torch.tensor([[[0, 1]], [[1, 1]]])                                              # of 1×2 pixels: mixed as probabilities
    mixed = MoEx(lam=0.75).relabel(view_of(SWAP, masks, classes=2))
    torch.testing.assert_close(mixed[0], torch.tensor([[[0.75, 0]], [[0.25, 1]]]))


@pytest.mark.parametrize("case", ["coin", "evaluation", "no plan", "another point"])
def test_what_is_left_alone(case: str) -> None:
    plan = {} if case == "no plan" else {**SWAP, "on": torch.tensor(case != "coin")}
    x = rng.normal(rng.key(0), (2, 3, 2, 2))
    view = view_of(plan, train=case != "evaluation")
    assert torch.equal(MoEx().tap(view, "elsewhere" if case == "another point" else "q", x), x)


def test_flat_maps_stay_finite() -> None:
    x = torch.zeros(2, 3, 2, 2, requires_grad=True)
    out = MoEx().tap(view_of(SWAP), "q", x)
    (slope,) = torch.autograd.grad(out.square().sum(), x)
    assert out.isfinite().all()
    assert slope.isfinite().all()


def test_draws() -> None:
    spec = tiny_federation().spec
    sizes = torch.tensor([8, 8, 3] * 400)
    plan = MoEx(p=0.25).plan(rng.key(4), spec, sizes)
    assert plan["on"].float().mean().item() == pytest.approx(0.25, abs=0.05)
    for order, n in zip(plan["order"], sizes.tolist()):
        assert sorted(order[:n].tolist()) == list(range(n))


@pytest.mark.parametrize("sizes", [(24, 17, 5, 40), (5, 17, 5, 40)])          # a full batch, and a smaller last one
def test_step_against_plain_modules(sizes: tuple[int, ...]) -> None:
    """λCE(y) + (1 − λ)CE(y') of the exchanged maps."""
    fed = tiny_federation([MoEx(lam=0.7)], sizes=sizes, last_batch="keep", **ONE)
    fed.round_number += 1
    other = fed.plans(0, fed.samples.schedule(0, fed.phases), "round")["moex"]["order"][0][: min(8, sizes[0])]
    fed.round_number -= 1
    assert other.tolist() != list(range(len(other)))

    def task(net: Any, x: Tensor, y: Tensor) -> Tensor:
        h = net.stage1(x)
        m, s = h.mean(1, keepdim=True), (h.var(1, keepdim=True) + 1e-5).sqrt()
        h = (h - m) / s * s[other] + m[other]
        logits = net.head(net.header(net.neck(h)))
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[other])
    check_step(fed, 0, task=task)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"'stage' option of moex asks for \[2\], but the model has stages 1 to 1"):
        tiny_federation([MoEx(stage=2)])
    with pytest.raises(ConfigError, match="no convolution stages"):
        MoEx().points(Layout())
    with pytest.raises(RefusedCombination, match="moex has soft labels, and ntd needs the one true class"):
        Method([MoEx(), Ntd()])


@pytest.mark.parametrize(("moments", "shape", "said"), [
    ("pono", (1, 4, 4), "at least two channels"), ("pono", (8,), "at least two channels"), ("pono", (8, 1, 1), None),
    ("instance", (8, 1, 1), "at least two positions"), ("instance", (1, 4, 4), None)])
def test_maps_need_more_than_one_number_to_have_moments(moments: str, shape: tuple[int, ...], said: str | None) -> None:
    class Spec:
        layout, shapes = Layout(stages=("q",)), {"q": shape}
    answer = MoEx(moments=moments).require(Spec())                                           # type: ignore[arg-type]
    assert answer is None if said is None else said in str(answer)
