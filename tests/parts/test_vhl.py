"""VHL: contrasts by hand, a step against plain tensors, and what the virtual images are."""

from __future__ import annotations

from collections.abc import Callable
from math import e, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_step import features, plain_net
from torch import Tensor

from consilience.core.method import Method
from consilience.errors import RefusedCombination
from consilience.parts import PARTS, _virtual_images
from consilience.parts.mixup import Mixup
from consilience.parts.vhl import Vhl, _contrast
from consilience.testing import differences, run_tiny, tiny_federation

SMALL: dict[str, Any] = {"images": 12, "virtual_batch": 5}


def test_contrast_by_hand() -> None:
    """Rows along (1, 0), (1, 0) and (0, 1) of classes 0, 0, 1 at τ = 1: the first two have the similarities 1 and 0 with the others, so
    −log share = ln(e + 1) − 1 each; the third is alone in its class and counts 0. Lengths do not matter.
    """
    z = torch.tensor([[1.0, 0], [5, 0], [0, 3]])
    labels = torch.tensor([[1.0, 0], [1, 0], [0, 1]])
    assert _contrast(z, labels, 1.0).item() == pytest.approx(2 * (log(e + 1) - 1) / 3)
    # At τ = ½ the similarities are 2 and 0.
    assert _contrast(z, labels, 0.5).item() == pytest.approx(2 * (log(e**2 + 1) - 2) / 3)


def test_contrast_of_soft_labels_by_hand() -> None:
    """The same rows, the second half of either class, the third of class 0. With L = ln(e + 1): row 1 has weights ½ and 1 on shares
    1 − L and −L, so L − ⅓; row 2 has ½ and ½ on 1 − L and −L, so L − ½; row 3 sees two similarities of 0: ln 2.
    """
    z = torch.tensor([[1.0, 0], [1, 0], [0, 1]])
    labels = torch.tensor([[1.0, 0], [0.5, 0.5], [1, 0]])
    far = log(e + 1)
    assert _contrast(z, labels, 1.0).item() == pytest.approx((far - 1 / 3 + far - 0.5 + log(2)) / 3)


def test_contrast_without_any_pair_is_zero() -> None:
    """One real sample beside two virtual ones, all of different classes: a client may hold none of the classes drawn."""
    z = torch.randn(3, 4).requires_grad_()
    value = _contrast(z, torch.eye(3), 0.07)
    (grad,) = torch.autograd.grad(value, z)
    assert value.item() == 0.0
    assert not grad.any()


def supcon(z: Tensor, y: Tensor) -> Tensor:
    """Row by row, as the release describes it."""
    z, total = F.normalize(z), torch.zeros(())
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        below = torch.stack([z[i] @ z[j] / 0.07 for j in others]).logsumexp(0)
        positive = [z[i] @ z[j] / 0.07 - below for j in others if y[j] == y[i]]
        total = total - (torch.stack(positive).mean() if positive else 0.0)
    return total / len(z)


def plain_terms(model: Any, x: Tensor, y: Tensor, virtual: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
    """The task's loss, what 2C outputs add for real and virtual images, and the contrasts, through an ordinary module."""
    net = plain_net(model)
    weight, bias = model["params"]["vhl.weight"].clone().requires_grad_(), model["params"]["vhl.bias"].clone().requires_grad_()
    z, z_virtual = features(net, x), features(net, virtual)
    logits, more = net.head(z), net.head(z_virtual)
    real = F.cross_entropy(torch.cat([logits, z @ weight.T + bias], 1), y)
    fake = F.cross_entropy(torch.cat([more, z_virtual @ weight.T + bias], 1), labels + 3)
    apart = supcon(torch.cat([z, z_virtual.detach()]), torch.cat([y, labels])) + 0.1 * supcon(z_virtual, labels)
    return F.cross_entropy(logits, y), real + fake, apart, {**dict(net.named_parameters()), "vhl.weight": weight, "vhl.bias": bias}


@pytest.mark.parametrize("epochs", [1, 5])
def test_steps_against_plain_modules(open_round: Callable[..., Any], epochs: int) -> None:
    """Client 0 makes three steps in each of two epochs: with align_epochs=1 the last three have no contrasts."""
    opened = open_round(Vhl(align_epochs=epochs, **SMALL), momentum=0.0, weight_decay=0.0)
    shared = opened.fed.shared["vhl"]
    for number, taken in enumerate(opened.rest(), start=1):
        drawn = taken.step.first.memo["vhl", "drawn"]
        task, both, apart, leaves = plain_terms(taken.before["model"], taken.batch.x, taken.batch.y, shared["x"][drawn], shared["y"][drawn])
        whole = both + (apart if number <= 3 * epochs else 0.0)
        assert (taken.terms["task"] + taken.terms["vhl"]).item() == pytest.approx(whole.item(), abs=1e-4)
        assert taken.terms["task"].item() == pytest.approx(task.item(), abs=1e-5)
        grads = torch.autograd.grad(whole, list(leaves.values()))
        for k, g in zip(leaves, grads):
            torch.testing.assert_close(taken.grads[k], g, atol=2e-4, rtol=2e-3, msg=k)
    assert number == 6


def test_virtual_images_are_the_same_for_all_and_tell_their_class() -> None:
    fed = run_tiny([Vhl(images=90, virtual_batch=5)], rounds=1)
    x, y = fed.shared["vhl"]["x"], fed.shared["vhl"]["y"]
    assert x.shape == (90, 1, 8, 8)
    assert y.bincount().tolist() == [30, 30, 30]
    torch.testing.assert_close((x.mean(), x.std()), (torch.zeros(()), torch.ones(())))
    means = torch.stack([x[:60][y[:60] == c].mean(0) for c in range(3)])
    near = torch.cdist(x[60:].flatten(1), means.flatten(1)).argmin(1)
    assert (near == y[60:]).double().mean() > 0.8
    assert not torch.equal(x, tiny_federation([Vhl(images=90)], seed=1).shared["vhl"]["x"])


@pytest.mark.parametrize("sample", [(3, 28, 28), (1, 5, 11), (2, 3, 3), (7,), (4, 6)])
def test_samples_of_any_shape(sample: tuple[int, ...]) -> None:
    spec: Any = SimpleNamespace(classes=3, sample=sample, key=tiny_federation().spec.key)
    x, y = _virtual_images.draw(spec, "vhl", 10)
    assert x.shape == (10, *sample)
    assert y.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert torch.isfinite(x).all()


def test_predictions_have_the_classes_of_the_data() -> None:
    fed = run_tiny([Vhl(**SMALL)])
    assert fed.look(0, fed.client(0), fed.model, fed.samples.x[:4], False, False).logits.shape == (4, 3)
    assert {"vhl.weight", "vhl.bias"} <= set(fed.spec.trained)
    assert not torch.equal(fed.model["params"]["vhl.weight"], fed.spec.model["params"]["vhl.weight"])


def test_virtual_images_are_sent_once() -> None:
    fed = tiny_federation([Vhl(**SMALL)])
    size = 12 * 64 * 4 + 12 * 8                                      # float32 pixels and int64 labels
    down = [fed.round([0]).bytes_down for _ in range(2)]
    assert down[0] - down[1] == size


def test_mixed_labels_and_a_client_that_comes_late() -> None:
    fed = tiny_federation([Vhl(**SMALL), Mixup(alpha=1.0)])
    fed.round([0, 3])
    fed.round([1])
    assert all(t.isfinite().all() for t in fed.model["params"].values())
    hard = tiny_federation([Vhl(**SMALL)])
    hard.round([0, 3])
    hard.round([1])
    assert differences(fed, hard, only=lambda k: k.startswith("model/params/vhl"))


def test_refusals() -> None:
    with pytest.raises(RefusedCombination, match=r"cosine and vhl.*vhl has extra outputs"):
        Method([Vhl(), PARTS["cosine"]()])
    spec: Any = SimpleNamespace(tokens=False, classes=10)
    assert "at least 10" in (Vhl(images=9).require(spec) or "")
    assert Vhl(images=10).require(spec) is None
    words: Any = SimpleNamespace(tokens=True, classes=2)
    assert "words of a text" in (Vhl().require(words) or "")
