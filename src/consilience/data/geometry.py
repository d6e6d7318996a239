"""Moving pixels without changing them: rotation, cropping and flipping by looking up source positions.

Every function gathers from (samples, channels, height, width) of any type, so uint8 images and integer masks keep their
values exactly. Nothing here looks at a value on the host: draws and angles stay on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_sources(degrees: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """For each angle (counter-clockwise) and each target pixel: the nearest source pixel, and whether it lies in the image.

    Positions are kept in 16.16 fixed point, as Pillow's `rotate` does: pixel centres at halves, the centre of rotation
    in the middle of the image, no change of size. Multiples of 90° are exact on square images.
    """
    radians = torch.deg2rad(degrees.to(torch.float64).remainder(360))
    cos, sin = (torch.round(f(radians) * 1e15) / 1e15 for f in (torch.cos, torch.sin))      # cos 90° is 0, not 6e-17
    middle_x, middle_y = width / 2, height / 2
    # Source x = cos·x − sin·y + from_x, source y = sin·x + cos·y + from_y, with x and y counted from the pixel's corner.
    from_x = middle_x - cos * middle_x + sin * middle_y + (cos - sin) * 0.5
    from_y = middle_y - sin * middle_x - cos * middle_y + (sin + cos) * 0.5
    cos, sin, from_x, from_y = ((v * 65536 + 0.5).floor().to(torch.int64)[..., None, None] for v in (cos, sin, from_x, from_y))
    y = torch.arange(height, device=degrees.device)[:, None]
    x = torch.arange(width, device=degrees.device)
    source_x = (from_x + cos * x - sin * y) >> 16
    source_y = (from_y + sin * x + cos * y) >> 16
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    return source_y.clamp(0, height - 1) * width + source_x.clamp(0, width - 1), inside


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotate every sample by its angle, or all by one (0-d); nearest pixel, what comes from outside is 0."""
    height, width = x.shape[-2:]
    source, inside = rotation_sources(degrees, height, width)
    if degrees.dim() == 0:
        source, inside = source.expand(len(x), height, width), inside.expand(len(x), height, width)
    index = source.reshape(len(x), 1, height * width).expand(-1, x.shape[1], -1)
    return torch.where(inside[:, None], x.flatten(2).gather(2, index).reshape(x.shape), 0)


def shift_window(x: Tensor, top: Tensor, left: Tensor, reflect: bool) -> Tensor:
    """The window of the same size whose corner is at (top, left), per sample. Outside is 0, or mirrored without the edge."""
    for dim, start in ((2, top), (3, left)):
        size = x.shape[dim]
        at = start[:, None] + torch.arange(size, device=x.device)
        if reflect:
            source = (size - 1) - ((size - 1) - at.abs()).abs()
        else:
            source = at.clamp(0, size - 1)
        shape = [len(x), 1, 1, 1]
        shape[dim] = size
        moved = x.gather(dim, source.reshape(shape).expand(x.shape))
        x = moved if reflect else torch.where((at == source).reshape(shape), moved, 0)
    return x


def flip(x: Tensor, which: Tensor, dim: int) -> Tensor:
    """Mirror the samples for which `which` is true."""
    return torch.where(which[:, None, None, None], x.flip(dim), x)


def quarter_turns(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each square sample counter-clockwise by `turns` (0 … 3) quarters."""
    out = x
    for k in (1, 2, 3):
        out = torch.where((turns == k)[:, None, None, None], torch.rot90(x, k, (2, 3)), out)
    return out
