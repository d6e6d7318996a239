"""The part of a convolution's kernel that ever meets the map.

Where maps are smaller than kernels the rest of a kernel sees padding alone: on a map of one position a 3×3 convolution is the product with
its middle. ResNet-18 with ImageNet's stem has such maps on 32×32 images, and 62 % of its weights see nothing there. Leaving them out of
the convolution changes no number but by the order of sums, and their gradient is 0.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Span(NamedTuple):
    """Of a kernel along one side: the places from `first` to before `end`, and the padding that the map then needs."""

    first: int
    end: int
    padding: int


class Reach(NamedTuple):
    """The places of a kernel that meet the map."""

    rows: Span
    columns: Span

    def of(self, weight: Tensor) -> Tensor:
        """That part of a weight, of its gradient or of anything alike: a view."""
        return weight[:, :, self.rows.first: self.rows.end, self.columns.first: self.columns.end]

    @property
    def padding(self) -> tuple[int, int]:
        return self.rows.padding, self.columns.padding


def reach(conv: nn.Conv2d, height: int, width: int) -> Reach | None:
    """What of the kernel meets a map of this size; None where it is all of it, or the rest cannot be left out."""
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return None
    sides = [_span(size, conv.kernel_size[i], int(conv.padding[i]), conv.stride[i], conv.dilation[i])
             for i, size in enumerate((height, width))]
    whole = [span == (0, conv.kernel_size[i], conv.padding[i]) for i, span in enumerate(sides)]
    return None if all(whole) else Reach(*sides)


def _span(size: int, kernel: int, padding: int, stride: int, dilation: int) -> Span:
    def positions(places: int, around: int) -> int:
        return (size + 2 * around - dilation * (places - 1) - 1) // stride + 1
    out = positions(kernel, padding)
    met = [t for t in range(kernel) if any(0 <= o * stride - padding + t * dilation < size for o in range(out))]
    if met:
        first, end = met[0], met[-1] + 1
        around = padding - first * dilation
        if around >= 0 and positions(end - first, around) == out:       # padding is the same before and after the map
            return Span(first, end, around)
    return Span(0, kernel, padding)
