"""FedBR's two terms as one fused CUDA kernel: the contrast of projected features, the pseudo-data's cross-entropy, and both gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from . import fused

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

EPS = 1e-8                  # least norm of a projected row, as in `debias`

if triton is not None:
    @triton.jit
    def _unit(t, row, rows, wide, d, D, EPS: tl.constexpr):
        """Rows of t over their norms, those norms, and whether the norm counted as a function of the row."""
        value = tl.load(t + row[:, None] * D + d[None, :], mask=rows[:, None] & wide[None, :], other=0.0)
        long = tl.sqrt_rn(tl.sum(value * value, 1))
        norm = tl.maximum(long, EPS)
        return value / norm[:, None], norm, long >= EPS

    @triton.jit
    def _store_back(out, row, rows, wide, d, D, unit, norm, bends, grad):
        """∂x = (∂u − u⟨u, ∂u⟩)/‖x‖, for u = x/‖x‖."""
        along = tl.where(bends, tl.sum(unit * grad, 1), 0.0)
        tl.store(out + row[:, None] * D + d[None, :], (grad - unit * along[:, None]) / norm[:, None], mask=rows[:, None] & wide[None, :])

    @triton.jit
    def _terms(t, logits, labels, losses, t_grad, logits_grad, N, D, M, C, a1, a2, mu, lam, EPS: tl.constexpr, CONTRAST: tl.constexpr,
               PSEUDO: tl.constexpr, UNIFORM: tl.constexpr, RR: tl.constexpr, DD: tl.constexpr, CC: tl.constexpr):
        """One block of rows. t: N rows each of the pseudo-data, of the received model's pseudo-data and of the batch; logits: M rows."""
        b = tl.program_id(0) * RR + tl.arange(0, RR)
        total = tl.zeros((RR,), tl.float32)
        if CONTRAST:
            d = tl.arange(0, DD)
            rows, wide = b < N, d < D
            p, p_norm, p_bends = _unit(t, b, rows, wide, d, D, EPS)
            near, near_norm, near_bends = _unit(t, N + b, rows, wide, d, D, EPS)
            far, far_norm, far_bends = _unit(t, 2 * N + b, rows, wide, d, D, EPS)
            pull = a2 * far - a1 * near
            s = tl.sum(p * pull, 1)
            e = tl.exp(-tl.abs(s))
            # log(1 + e) with what rounding took from 1 + e given back: exact where e is tiny, as log1p is
            one = 1.0 + e
            soft = tl.maximum(s, 0.0) + tl.where(one == 1.0, e, tl.log(one) * (e / (one - 1.0 + (one == 1.0))))
            total += tl.where(rows, soft * (mu / N), 0.0)
            slope = (tl.where(s >= 0.0, 1.0, e) / one * (mu / N))[:, None]
            _store_back(t_grad, b, rows, wide, d, D, p, p_norm, p_bends, slope * pull)
            _store_back(t_grad, N + b, rows, wide, d, D, near, near_norm, near_bends, -a1 * slope * p)
            _store_back(t_grad, 2 * N + b, rows, wide, d, D, far, far_norm, far_bends, a2 * slope * p)
        if PSEUDO:
            c = tl.arange(0, CC)
            rows = b < M
            place, mask = b[:, None] * C + c[None, :], rows[:, None] & (c < C)[None, :]
            value = tl.load(logits + place, mask=mask, other=float("-inf"))
            value = tl.where(rows[:, None], value, 0.0)
            if UNIFORM:
                q = tl.where(mask, 1.0 / C, 0.0)
            else:
                q = tl.load(labels + place, mask=mask, other=0.0)
            top = tl.max(value, 1)
            e = tl.exp(value - top[:, None])
            whole = tl.sum(e, 1)
            apart = tl.where(mask, tl.log(whole)[:, None] + (top[:, None] - value), 0.0)
            total += tl.where(rows, tl.sum(q * apart, 1) * (lam / M), 0.0)
            tl.store(logits_grad + place, (e / whole[:, None] * tl.sum(q, 1)[:, None] - q) * (lam / M), mask=mask)
        tl.store(losses + tl.program_id(0), tl.sum(total, 0))


def usable(projected: Tensor | None, logits: Tensor | None) -> bool:
    return ((projected is None or fused.ready(projected, width=projected.shape[1]))
            and (logits is None or fused.ready(logits, classes=logits.shape[1])))


def terms(projected: Tensor | None, a1: float, a2: float, mu: float, logits: Tensor | None = None, labels: Tensor | None = None,
          lam: float = 0.0) -> Tensor:
    """μ·contrast of the three projected thirds + λ·cross-entropy of the logits. Without labels they are uniform."""
    inputs = [t for t in (projected, logits) if t is not None]
    grads = [torch.empty_like(t.detach()) for t in inputs]
    some = inputs[0].detach()                             # something to point at where there is nothing
    n, d = (len(projected) // 3, projected.shape[1]) if projected is not None else (1, 1)
    m, c = logits.shape if logits is not None else (1, 1)
    size = fused.ROWS if d <= 256 else fused.ROWS // 2          # three rows of each have to fit into registers
    programs = fused.blocks(max(n, m), size)
    losses = some.new_empty(programs)
    fused.launch(_terms, programs, some if projected is None else projected.detach(), some if logits is None else logits.detach(),
                  some if labels is None else labels.contiguous(), losses, grads[0], grads[-1], n, d, m, c, a1, a2, mu, lam, EPS,
                  projected is not None, logits is not None, labels is None, size, fused.above(d), fused.above(c), warps=8)
    return fused.known(losses, inputs, grads)
