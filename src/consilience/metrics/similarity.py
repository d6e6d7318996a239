"""How alike two models answer: centred kernel alignment and Kullback–Leibler divergence."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cka(x: Tensor, y: Tensor) -> float | None:
    """‖YᵀX‖²_F / (‖XᵀX‖_F ‖YᵀY‖_F) on centred columns. One row per sample; widths may differ. None where a side is constant."""
    x, y = (t.double() - t.double().mean(0) for t in (x, y))
    norm = torch.linalg.matrix_norm
    below = norm(x.T @ x) * norm(y.T @ y)
    return float(norm(y.T @ x) ** 2 / below) if below > 0 else None


def rbf_cka(x: Tensor, y: Tensor, share: float = 0.8) -> float | None:
    """HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)) with Gaussian kernels whose width is `share` times the median distance."""
    one, two = _centred_kernel(x, share), _centred_kernel(y, share)
    below = torch.linalg.matrix_norm(one) * torch.linalg.matrix_norm(two)
    return float((one * two).sum() / below) if below > 0 else None


def _centred_kernel(x: Tensor, share: float) -> Tensor:
    distance = torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")
    apart = distance[torch.triu(torch.ones_like(distance, dtype=torch.bool), 1)]
    width = share * apart.median() if len(apart) else distance.new_zeros(())
    if width == 0:
        return torch.zeros_like(distance)
    kernel = torch.exp(-distance**2 / (2 * width**2))
    return kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()


def kl(p_logits: Tensor, q_logits: Tensor) -> float:
    """KL(p‖q) = Σ_c p_c (ln p_c − ln q_c) of the two softmax answers, mean over samples, in nats."""
    p, q = p_logits.double().log_softmax(1), q_logits.double().log_softmax(1)
    return float((p.exp() * (p - q)).sum(1).mean())
