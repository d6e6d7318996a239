"""FedBR's two terms of the loss: the contrast of projected features, and the cross-entropy of pseudo-data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels import debias as kernel


def terms(projected: Tensor | None, a1: float, a2: float, mu: float, logits: Tensor | None = None, labels: Tensor | None = None,
          lam: float = 0.0) -> Any:
    """μ·mean softplus(a₂ s₂ − a₁ s₁) of the three projected thirds (pseudo-data, the same in the received model, batch) + λ·cross-entropy
    of the logits, whose labels are uniform where none are given. One kernel where it can be.
    """
    if kernel.usable(projected, logits):
        return kernel.terms(projected, a1, a2, mu, logits, labels, lam)
    total: Any = 0.0
    if logits is not None:
        total = lam * F.cross_entropy(logits, torch.full_like(logits, 1 / logits.shape[1]) if labels is None else labels)
    if projected is not None:      # on unit vectors a₂⟨p, far⟩ − a₁⟨p, near⟩ = ⟨p, a₂·far − a₁·near⟩
        p, near, far = F.normalize(projected, eps=kernel.EPS).chunk(3)
        total = total + mu * F.softplus((p * (a2 * far - a1 * near)).sum(1)).mean()
    return total
