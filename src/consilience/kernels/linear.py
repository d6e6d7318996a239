"""A linear layer for small batches as one CUDA kernel forward, its ReLU included, and one backward.

PyTorch launches two kernels forward and five backward; with batches of ten to a few hundred they take longer to launch than to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .derivatives import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LARGEST_BATCH, WIDEST, LARGEST = 256, 4096, 1 << 21      # samples, inputs or outputs, weights: beyond these cuBLAS is better
PRECISION = "tf32x3"                                     # three products of tensor cores: as exact as float32

if triton is not None:
    @triton.jit
    def _forward(x, w, b, y, M, N, K, RELU: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 PRECISION: tl.constexpr):
        """y = x wᵀ + b for a block of samples and a block of outputs."""
        m, n, k = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            at = start + k
            rows = tl.load(x + m[:, None] * K + at[None, :], mask=(m < M)[:, None] & (at < K)[None, :], other=0.0)
            cols = tl.load(w + n[None, :] * K + at[:, None], mask=(n < N)[None, :] & (at < K)[:, None], other=0.0)
            total = tl.dot(rows, cols, total, input_precision=PRECISION)
        if BIAS:
            total += tl.load(b + n, mask=n < N, other=0.0)[None, :]
        if RELU:
            total = tl.where(total < 0.0, 0.0, total)
        tl.store(y + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])

    @triton.jit
    def _arrived(g, y, m, n, M, N, RELU: tl.constexpr):
        """The gradient before the ReLU, for a block of samples and outputs."""
        place, mask = m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
        out = tl.load(g + place, mask=mask, other=0.0)
        if RELU:
            out = tl.where(tl.load(y + place, mask=mask, other=0.0) > 0.0, out, 0.0)
        return out

    @triton.jit
    def _inputs(g, y, w, dx, at, M, N, K, RELU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                PRECISION: tl.constexpr):
        """dx = g w for a block of samples and a block of inputs."""
        k, m = (at % tl.cdiv(K, BK)) * BK + tl.arange(0, BK), (at // tl.cdiv(K, BK)) * BM + tl.arange(0, BM)
        total = tl.zeros((BM, BK), tl.float32)
        for start in range(0, N, BN):
            n = start + tl.arange(0, BN)
            cols = tl.load(w + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
            total = tl.dot(_arrived(g, y, m, n, M, N, RELU), cols, total, input_precision=PRECISION)
        tl.store(dx + m[:, None] * K + k[None, :], total, mask=(m < M)[:, None] & (k < K)[None, :])

    @triton.jit
    def _weights(g, y, x, dw, db, at, M, N, K, RELU: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 PRECISION: tl.constexpr):
        """dw = gᵀ x and db = Σ g for a block of outputs and a block of inputs."""
        k, n = (at % tl.cdiv(K, BK)) * BK + tl.arange(0, BK), (at // tl.cdiv(K, BK)) * BN + tl.arange(0, BN)
        total, sums = tl.zeros((BN, BK), tl.float32), tl.zeros((BN,), tl.float32)
        for start in range(0, M, BM):
            m = start + tl.arange(0, BM)
            came = _arrived(g, y, m, n, M, N, RELU)
            rows = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
            total = tl.dot(tl.trans(came), rows, total, input_precision=PRECISION)
            sums += tl.sum(came, 0)
        tl.store(dw + n[:, None] * K + k[None, :], total, mask=(n < N)[:, None] & (k < K)[None, :])
        if BIAS:                                                           # noqa: SIM102  (one is known when compiling, one is not)
            if at % tl.cdiv(K, BK) == 0:
                tl.store(db + n, sums, mask=n < N)

    @triton.jit
    def _backward(g, y, x, w, dx, dw, db, M, N, K, of_inputs, RELU: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr, PRECISION: tl.constexpr):
        """The first programs make the inputs' gradient, the others the weights'."""
        at = tl.program_id(0)
        if at < of_inputs:
            _inputs(g, y, w, dx, at, M, N, K, RELU, BM, BN, BK, PRECISION)
        else:
            _weights(g, y, x, dw, db, at - of_inputs, M, N, K, RELU, BIAS, BM, BN, BK, PRECISION)


def usable(x: Tensor, layer: nn.Linear) -> bool:
    if triton is None or not x.is_cuda or torch.jit.is_tracing():
        return False
    if x.dim() != 2 or x.dtype != torch.float32 or layer.weight.dtype != torch.float32:
        return False
    n, k = layer.weight.shape
    return (0 < len(x) <= LARGEST_BATCH and max(n, k) <= WIDEST and n * k <= LARGEST and layer.weight.is_contiguous()
            and not torch.is_autocast_enabled("cuda"))


# Sizes of the blocks of samples, outputs and inputs, found by trying on an H200 (benchmarks/kernels_stage.py).

def forward_blocks(m: int, n: int, k: int) -> dict[str, int]:
    return {"BM": 16 if m <= 16 else 32, "BN": 16, "BK": 128 if k >= 512 else 64, "num_warps": 4}


def backward_blocks(m: int, n: int, k: int) -> dict[str, int]:
    return {"BM": 16 if m <= 16 else 32, "BN": 32, "BK": 32, "num_warps": 4}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, relu: bool) -> Tensor:
        x = x.contiguous()
        (m, k), n = x.shape, len(w)
        y = x.new_empty(m, n)
        how = forward_blocks(m, n, k)
        with torch.cuda.device_of(x):
            _forward[(triton.cdiv(n, how["BN"]), triton.cdiv(m, how["BM"]))](x, w, w if b is None else b, y, m, n, k, relu, b is not None,
                                                                         PRECISION=PRECISION, **how)
        ctx.relu, ctx.bias = relu, b is not None
        ctx.save_for_backward(x, w, y if relu else x)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        g = grads[0].contiguous()
        (m, k), n = x.shape, len(w)
        how = backward_blocks(m, n, k)
        inputs, weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        wide = triton.cdiv(k, how["BK"])
        of_inputs = wide * triton.cdiv(m, how["BM"]) if inputs else 0
        of_weights = wide * triton.cdiv(n, how["BN"]) if weights else 0
        dx = torch.empty_like(x) if inputs else None
        dw = torch.empty_like(w) if weights else None
        db = x.new_empty(n) if weights and ctx.bias else None
        absent = x                                                         # something to point at where nothing is written
        with torch.cuda.device_of(x):
            _backward[(of_inputs + of_weights,)](g, y, x, w, absent if dx is None else dx, absent if dw is None else dw,
                                                 absent if db is None else db, m, n, k, of_inputs, ctx.relu, ctx.bias,
                                                 PRECISION=PRECISION, **how)
        return dx, dw, db, None


def linear(x: Tensor, w: Tensor, b: Tensor | None, relu: bool) -> Tensor:
    """x wᵀ + b, and where it is negative 0 if `relu`."""
    out: Tensor = _Linear.apply(x, w, b, relu)
    return out
