"""Manifold Mixup: one layer a step, its labels, its draws, and what is refused."""

from __future__ import annotations

from dataclasses import replace
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
from consilience.parts.ditto import Ditto
from consilience.parts.manifold_mixup import ManifoldMixup
from consilience.parts.mixup import Mixup
from consilience.parts.ntd import Ntd
from consilience.testing import tiny_federation

MIX = {"weight": torch.tensor([1.0, 0.25, 1.0]), "order": torch.tensor([1, 0])}              # of this step: at the first stage, λ = ¼
STAGES = ("one", "two")


def test_by_hand() -> None:
    """¼·(0, 4) + ¾·(8, 8) = (6, 7) and ¼·(8, 8) + ¾·(0, 4) = (2, 5) at the first stage, nothing elsewhere; labels as the maps."""
    part, x = ManifoldMixup(), torch.tensor([[0.0, 4], [8, 8]])
    view = view_of(MIX, torch.tensor([0, 2]), stages=STAGES)
    assert part.tap(view, "one", x).tolist() == [[6, 7], [2, 5]]
    assert torch.equal(part.tap(view, "two", x), x)
    assert part.relabel(view).tolist() == [[0.25, 0, 0.75], [0.75, 0, 0.25]]
    assert part.batch(view).target.tolist() == [[1, 0, 0], [0, 0, 1]]                          # it was not the input's turn
    masks = view_of(MIX, torch.tensor([[[0, 1]], [[1, 1]]]), classes=2, stages=STAGES)
    assert part.relabel(masks)[0].tolist() == [[[0.25, 0]], [[0.75, 1]]]


def test_the_inputs_turn() -> None:
    """Inputs and labels are mixed in `batch`, and not once more afterwards."""
    part, plan = ManifoldMixup(), {**MIX, "weight": torch.tensor([0.25, 1.0, 1.0])}
    view = view_of(plan, torch.tensor([0, 2]), stages=STAGES)
    view.batch = view.batch._replace(x=torch.tensor([[0.0, 4], [8, 8]]))
    batch = part.batch(view)
    assert batch.x.tolist() == [[6, 7], [2, 5]]
    assert batch.target.tolist() == [[0.25, 0, 0.75], [0.75, 0, 0.25]]
    view.batch = batch
    assert torch.equal(part.relabel(view), batch.target)


def test_nothing_in_evaluation_and_without_a_plan() -> None:
    x = rng.normal(rng.key(0), (2, 3, 2, 2))
    assert torch.equal(ManifoldMixup().tap(view_of(MIX, train=False, stages=STAGES), "one", x), x)
    assert torch.equal(ManifoldMixup().tap(view_of({}, stages=STAGES), "one", x), x)
    assert torch.equal(ManifoldMixup().tap(view_of(MIX, stages=STAGES), "elsewhere", x), x)


def test_draws() -> None:
    """Every step has one layer, each as often as the others; Beta(2, 2) has mean ½ and variance 1/20."""
    spec = replace(tiny_federation().spec, layout=Layout(stages=("one", "two", "three")))
    sizes = torch.tensor([8, 8, 3] * 400)
    plan = ManifoldMixup().plan(rng.key(4), spec, sizes)
    mixing = plan["weight"] < 1
    assert mixing.sum(1).tolist() == [1] * 1200
    assert mixing.float().mean(0).tolist() == pytest.approx([1 / 3] * 3, abs=0.05)
    lam = plan["weight"].amin(1)
    assert lam.mean().item() == pytest.approx(0.5, abs=0.02)
    assert lam.var().item() == pytest.approx(1 / 20, abs=0.005)
    for order, n in zip(plan["order"], sizes.tolist()):
        assert sorted(order[:n].tolist()) == list(range(n))


def test_layers() -> None:
    layout = Layout(stages=("one", "two", "three"))
    assert ManifoldMixup()._layers(layout) == ("", "one", "two")
    assert ManifoldMixup(layers=(3, 0, 3))._layers(layout) == ("three", "")
    assert ManifoldMixup(layers=(3, 0)).points(layout) == ("three",)
    assert ManifoldMixup().points(Layout(stages=("one",))) == ("one",)


@pytest.mark.parametrize("sizes", [(24, 17, 5, 40), (5, 17, 5, 40)])          # a full batch, and a smaller last one
@pytest.mark.parametrize("layer", [0, 1])
def test_step_against_plain_modules(layer: int, sizes: tuple[int, ...]) -> None:
    fed = tiny_federation([ManifoldMixup(layers=(layer,))], sizes=sizes, last_batch="keep", **ONE)
    fed.round_number += 1
    plan = fed.plans(0, fed.samples.schedule(0, fed.phases), "round")["manifold_mixup"]
    fed.round_number -= 1
    lam, other = float(plan["weight"][0, 0]), plan["order"][0][: min(8, sizes[0])]
    assert 0.02 < lam < 0.98
    assert other.tolist() != list(range(len(other)))

    def task(net: Any, x: Tensor, y: Tensor) -> Tensor:
        mix = lambda h, at: lam * h + (1 - lam) * h[other] if at == layer else h
        logits = net.head(net.header(net.neck(mix(net.stage1(mix(x, 0)), 1))))
        return lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[other])
    check_step(fed, 0, task=task)


def test_labels_of_dittos_second_model_belong_to_what_it_saw(open_round: Any) -> None:
    """No tap acts there: where a stage has its turn, neither maps nor labels are mixed; where the input has, both are."""
    for layer, mixed in ((1, False), (0, True)):
        fed = tiny_federation([Ditto(), ManifoldMixup(layers=(layer,))], steps=1)
        taken = open_round(fed=fed).rest()
        assert len({t.phase.model for t in taken}) == 2
        for t in taken:
            soft = bool((t.batch.target.max(1).values < 0.99).any()) if t.batch.target.is_floating_point() else False
            assert soft == (mixed or t.phase.model == "model"), (layer, t.phase.model)


def test_after_mixup_labels_are_mixed_twice(open_round: Any) -> None:
    """λ₂(λ₁y + (1 − λ₁)y') + …: rows are probabilities still, with more than two classes in some."""
    target = open_round(Mixup(alpha=5.0), ManifoldMixup(layers=(1,))).step().batch.target
    torch.testing.assert_close(target.sum(1), torch.ones(len(target)))
    assert int((target > 0.01).sum(1).max()) == 3


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"'layers' option of manifold_mixup asks for \[0, 2\], but the model has stages 1 to 1"):
        tiny_federation([ManifoldMixup(layers=(0, 2))])
    with pytest.raises(ConfigError, match="no convolution stages; mixup mixes its input"):
        ManifoldMixup().points(Layout())
    with pytest.raises(RefusedCombination, match="manifold_mixup has soft labels, and ntd needs the one true class"):
        Method([ManifoldMixup(), Ntd()])
    words = replace(tiny_federation().spec, tokens=True)
    assert "words of a text" in str(ManifoldMixup().require(words))
    assert ManifoldMixup(layers=(1,)).require(words) is None
