"""Pooling at the speed of the memory. The same numbers as PyTorch's; on CPUs backward too, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import max_pool
from ..kernels.derivatives import transformed, twice

FEWEST_CHANNELS, FEWEST_NUMBERS = 16, 2**15      # a vector of channels to compare at once; work to outweigh one more call
FEWEST_FOR_PLACES = 2**18                        # work to outweigh a dozen calls


class _Pooled(torch.autograd.Function):
    """PyTorch's CPU kernel compares one number at a time in contiguous maps, and a vector of channels in channels_last.

    So maps are turned round for the comparison alone, and the result turned back: an element keeps its value and the place
    of the largest element in its window is a number within the map, whatever the layout. Maps of few channels are not worth turning;
    their windows of 2×2 are compared slice by slice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, by_slices: bool, *window: Any) -> Tensor:
        if by_slices:
            out, place = _largest_and_places(x)
        else:
            out, place = torch.ops.aten.max_pool2d_with_indices(x.contiguous(memory_format=torch.channels_last), *window)
        ctx.save_for_backward(x, place)
        ctx.window = window
        return out.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, place = ctx.saved_tensors
        back = torch.ops.aten.max_pool2d_with_indices_backward(grads[0].contiguous(), x, *ctx.window, place.contiguous())
        return back, None, *([None] * len(ctx.window))


class MaxPool2d(nn.MaxPool2d):
    """PyTorch's layer with a faster way for contiguous maps in the memory of the host, and for channels_last on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        if self.return_indices or torch.jit.is_tracing() or transformed():
            return super().forward(input)
        if max_pool.usable(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode):
            return max_pool.max_pool(input, self.kernel_size, self.stride, self.padding)          # type: ignore[arg-type]
        if not _compared_one_by_one(input):
            return super().forward(input)
        if by_twos(self) and not (torch.is_grad_enabled() and input.requires_grad):
            return _largest(input)                        # cheaper than turning, where nobody asks for the places
        turning = _worth_turning(input)
        if not turning and not (by_twos(self) and _worth_slicing(input)):
            return super().forward(input)
        window = map(_pair, (self.kernel_size, self.stride, self.padding, self.dilation))
        return _Pooled.apply(input, not turning, *window, self.ceil_mode)


def by_twos(pool: nn.MaxPool2d) -> bool:
    """Whether this is a pooling of 2×2 windows side by side."""
    return (pool.kernel_size in (2, (2, 2)) and pool.stride in (2, (2, 2)) and pool.padding in (0, (0, 0)) and pool.dilation in (1, (1, 1))
            and not pool.ceil_mode and not pool.return_indices)


def _largest(x: Tensor) -> Tensor:
    """Of every 2×2 window."""
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    rows = torch.maximum(x[:, :, 0:height:2], x[:, :, 1:height:2])
    return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


def _largest_and_places(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same with their places in the maps; of equal numbers the first counts, row by row, as in PyTorch's kernel. In a window with
    a number that is none the place may be another than PyTorch's.
    """
    width, (h, w) = x.shape[3], (x.shape[2] // 2, x.shape[3] // 2)
    a, b = x[:, :, 0:2 * h:2, 0:2 * w:2], x[:, :, 0:2 * h:2, 1:2 * w:2]
    c, d = x[:, :, 1:2 * h:2, 0:2 * w:2], x[:, :, 1:2 * h:2, 1:2 * w:2]
    upper, lower = torch.maximum(a, b), torch.maximum(c, d)
    within = torch.where(lower > upper, (d > c).long() + width, (b > a).long())
    corners = torch.arange(0, 2 * h, 2, device=x.device)[:, None] * width + torch.arange(0, 2 * w, 2, device=x.device)
    return torch.maximum(upper, lower), within.add_(corners)


class _Averaged(torch.autograd.Function):
    """The average over positions, whose gradient is one number for all of them. PyTorch writes it out, in a layout that is not the map's;
    here it is a view of that number, and who needs a map makes one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return F.adaptive_avg_pool2d(x, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] / (ctx.shape[2] * ctx.shape[3])).expand(ctx.shape)


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """PyTorch's layer with a shorter way back where all positions of a map on a GPU become one."""

    def forward(self, input: Tensor) -> Tensor:
        alone = self.output_size in (1, (1, 1)) and input.is_cuda and input.dim() == 4
        if not alone or torch.jit.is_tracing() or (transformed() and not twice()):      # its way back can be differentiated
            return super().forward(input)
        return average(input)


def average(x: Tensor) -> Tensor:
    """Of all positions of a map."""
    return _Averaged.apply(x)


def _compared_one_by_one(x: Tensor) -> bool:
    """Whether PyTorch would compare these maps one number at a time, and there are numbers enough to outweigh a few more calls."""
    return x.device.type == "cpu" and x.dim() == 4 and x.numel() >= FEWEST_NUMBERS and x.is_contiguous()


def _worth_turning(x: Tensor) -> bool:
    """Whether turning the maps round costs less than it saves. Channels a whole number of pages apart fall on each other
    in the cache, so that maps of 32×32 are slow to turn.
    """
    return x.shape[1] >= FEWEST_CHANNELS and x.shape[2] * x.shape[3] * x.element_size() % 4096 != 0


def _worth_slicing(x: Tensor) -> bool:
    """Whether finding the places slice by slice costs less than PyTorch's comparison."""
    return x.shape[1] < FEWEST_CHANNELS and x.numel() >= FEWEST_FOR_PLACES


def _pair(n: Any) -> list[int]:
    return [n, n] if isinstance(n, int) else list(n)


def pool_swiftly(module: nn.Module) -> None:
    """Let every pooling layer use the faster way. Its name, its settings and the hooks on it stay."""
    for layer in module.modules():
        if type(layer) in SWIFT:
            layer.__class__ = SWIFT[type(layer)]


SWIFT: dict[type, type] = {nn.MaxPool2d: MaxPool2d, nn.AdaptiveAvgPool2d: AdaptiveAvgPool2d}
