"""What the parts' fused CUDA kernels share.

Inside a captured step a small kernel costs its launch, not its arithmetic, and a loss written in tensor operations takes dozens of them.
A fused loss computes value and gradient in one kernel: rows go to programs in blocks, a block's share of the loss is one number, and the
gradients wait, already worked out, for the factor that arrives in the backward pass. The formula in tensor operations stays in the part:
it is the reference, and what runs on the CPU, in other number types and for widths that no program can hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.derivatives import first_order

try:
    import triton
except ImportError:
    triton = None

DEVICE = "cuda"             # tests put the CPU here, where Triton's interpreter runs the kernels
WIDEST = 512                # numbers of a row that one program holds
ROWS = 16                   # rows of a block


def ready(*tensors: Tensor, width: int = 1, classes: int = 1) -> bool:
    """Whether kernels can work on these tensors, which must have one row per sample."""
    return (triton is not None and not torch.jit.is_tracing() and width <= WIDEST and classes <= 128
            and all(t.device.type == DEVICE and t.dtype == torch.float32 and t.is_contiguous() and t.numel() for t in tensors))


def above(n: int, least: int = 1) -> int:
    """The next power of two, and no less than `least`."""
    return max(1 << (n - 1).bit_length(), least)


def blocks(rows: int, size: int = ROWS) -> int:
    return (rows + size - 1) // size


def launch(kernel: Any, programs: int, *args: Any, warps: int = 4) -> None:
    """One launch on the device of the first argument."""
    with torch.cuda.device_of(args[0]):
        kernel[(programs,)](*args, num_warps=warps)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *inputs_and_grads: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs_and_grads[count:])
        ctx.shapes = [t.shape for t in inputs_and_grads[:count]]
        return loss.view_as(loss)

    @staticmethod
    @first_order
    def backward(ctx: Any, *above: Tensor) -> Any:
        grads = ctx.saved_tensors
        if getattr(above[0], "always_one", False):        # the step's own start of the way back: sums hand it on as it is
            scaled = grads
        else:
            scaled = torch._foreach_mul(grads, above[0]) if len(grads) > 1 else [grads[0] * above[0]]      # one kernel either way
        return None, None, *(g.expand(shape) for g, shape in zip(scaled, ctx.shapes)), *[None] * len(grads)


def known(loss: Tensor, inputs: list[Tensor], grads: list[Tensor]) -> Tensor:
    """A loss whose gradients have been computed along with it; one that is the same for every row needs one row."""
    total = loss.sum() if loss.dim() and len(loss) > 1 else loss.reshape(())
    out: Tensor = _Known.apply(total, len(inputs), *inputs, *grads)
    return out
