"""CKA and KL: what they must not see, what they must, and numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from consilience import rng
from consilience.metrics.similarity import kl, linear_cka, rbf_cka

X = rng.normal(rng.key(0, "x"), (60, 8)).double()


def test_cka_of_rotated_scaled_and_shifted_features_is_one():
    rotation = torch.linalg.qr(rng.normal(rng.key(1, "q"), (8, 8)).double()).Q
    moved = 3.0 * X @ rotation + 5.0
    assert linear_cka(X, moved) == pytest.approx(1.0, abs=1e-12)
    assert rbf_cka(X, moved) == pytest.approx(1.0, abs=1e-9)        # the width follows the median distance


def test_cka_by_hand():
    # columns are centred already. x = (1, −1, 0), y = (1, 1, −2): xᵀy = 0. With y = (1, 0, −1): xᵀy = 1, ‖x‖² = ‖y‖² = 2,
    # CKA = 1² / (2 · 2)
    x = torch.tensor([[1.0], [-1.0], [0.0]])
    assert linear_cka(x, torch.tensor([[1.0], [1.0], [-2.0]])) == pytest.approx(0.0)
    assert linear_cka(x, torch.tensor([[1.0], [0.0], [-1.0]])) == pytest.approx(0.25)
    assert linear_cka(x, torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])) == pytest.approx(0.25)     # widths may differ
    assert linear_cka(x, torch.ones(3, 2)) is None
    assert rbf_cka(x, torch.ones(3, 2)) is None


def test_cka_of_unrelated_features_is_small_and_the_two_kernels_differ():
    other = rng.normal(rng.key(2, "y"), (60, 8)).double()
    assert linear_cka(X, other) < 0.4
    bent = X.sign() * X.abs() ** 3
    assert rbf_cka(X, bent) != pytest.approx(linear_cka(X, bent), abs=1e-3)


def test_rbf_cka_against_the_definition():
    # HSIC with H = I − 1/n, K_ij = exp(−‖x_i − x_j‖² / 2σ²), σ = .8 · median of the pairwise distances
    def kernel(x):
        pairs = torch.tensor([math.dist(x[i], x[j]) for i in range(60) for j in range(i + 1, 60)])
        width = 0.8 * pairs.median()
        return torch.tensor([[math.exp(-math.dist(a, b) ** 2 / (2 * width**2)) for b in x.tolist()] for a in x.tolist()])
    y = X[:, :3] ** 2
    h = torch.eye(60, dtype=torch.float64) - 1 / 60
    hsic = lambda k, l: (k.double() @ h @ l.double() @ h).trace()     # noqa: E741
    k, m = kernel(X), kernel(y)
    assert rbf_cka(X, y) == pytest.approx(float(hsic(k, m) / (hsic(k, k) * hsic(m, m)).sqrt()), rel=1e-5)


def test_kl_by_hand_and_its_directions():
    # p = (3/4, 1/4), q = (1/2, 1/2): KL(p‖q) = 3/4 ln(3/2) + 1/4 ln(1/2); KL(q‖p) = 1/2 ln(2/3) + 1/2 ln 2
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert kl(p, q) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert kl(q, p) == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert kl(X, X) == 0.0
    assert kl(X, X + 7.0) == pytest.approx(0.0, abs=1e-12)          # softmax does not see a shift
