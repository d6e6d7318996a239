"""FedDecorr: correlations by hand, against plain modules, and with what the release does differently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from one_step import ONE, check_step, features

from consilience.parts.decorr import Decorr, _correlation
from consilience.parts.mixup import Mixup
from consilience.testing import TinyNet, differences, run_tiny, tiny_federation


def test_by_hand() -> None:
    """Columns (1, 2, 3) and (1, 3, 2) have mean 2 and deviation 1, so Z has (−1, 0, 1) and (−1, 1, 0), and K = ZᵀZ/3 has 2/3 on its
    diagonal and 1/3 beside it. Mean of K² over all four: (2·4/9 + 2·1/9)/4 = 10/36. Beside the diagonal: 1/9, three times that: 1/3.
    """
    z = torch.tensor([[1.0, 1], [2, 3], [3, 2]])
    assert _correlation(z, "paper").item() == pytest.approx(10 / 36)
    assert _correlation(z, "official").item() == pytest.approx(1 / 3)


def test_dead_dimensions_add_nothing() -> None:
    """With a third column of zeros K has five more zeros: (2·4/9 + 2·1/9)/9, and 3·(2/9)/6 beside the diagonal. Gradients are finite."""
    z = torch.tensor([[1.0, 1, 0], [2, 3, 0], [3, 2, 0]]).requires_grad_()
    assert _correlation(z, "paper").item() == pytest.approx(10 / 81)
    value = _correlation(z, "official")
    assert value.item() == pytest.approx(1 / 9)
    (grad,) = torch.autograd.grad(value, z)
    assert torch.isfinite(grad).all()


def test_one_dimension_has_no_other() -> None:
    assert _correlation(torch.tensor([[1.0], [2], [4]]), "official").item() == 0.0


@given(st.integers(4, 9), st.integers(2, 6), st.integers(0, 99))
def test_against_numpy(samples: int, dimensions: int, seed: int) -> None:
    z = np.random.default_rng(seed).normal(size=(samples, dimensions))
    c = np.corrcoef(z.T) * (samples - 1) / samples                              # of deviations over n − 1, then over n
    beside = c[~np.eye(dimensions, dtype=bool)]
    assert _correlation(torch.tensor(z), "paper").item() == pytest.approx((c**2).mean(), rel=1e-3)
    assert _correlation(torch.tensor(z), "official").item() == pytest.approx(samples * (beside**2).mean(), rel=1e-3)


@pytest.mark.parametrize("scale", ["paper", "official"])
def test_step_against_plain_modules(scale: str) -> None:
    fed = tiny_federation([Decorr(beta=0.5, scale=scale)], **ONE)
    fed.round([0])

    def term(net: TinyNet, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = features(net, x)
        z = (z - z.mean(0)) / (z.var(0) + 1e-8).sqrt()
        c = torch.einsum("bi,bj->ij", z, z) / len(z)
        away = 0.0 if scale == "paper" else 1.0
        weights = 1 - away * torch.eye(len(c))
        return 0.5 * (c**2 * weights).sum() / weights.sum() * (1.0 if scale == "paper" else len(z))
    assert check_step(fed, 0, term) > 1e-3


def test_a_batch_of_one_is_left_alone() -> None:
    """It has no deviation. Our models with BatchNorm never see one, so the part is asked by itself."""
    class View:
        features = torch.ones(1, 4, requires_grad=True)
    assert Decorr().loss(View()).item() == 0.0                                  # type: ignore[arg-type]


def test_soft_labels_do_not_matter() -> None:
    """It looks at features alone, so it goes with Mixup."""
    fed = run_tiny([Mixup(alpha=0.2), Decorr()])
    assert differences(fed, run_tiny([Mixup(alpha=0.2)]))
