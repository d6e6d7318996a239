"""Weights from a safetensors file, checked name by name and shape by shape before anything is written."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import DataError


def load_pretrained(module: nn.Module, path: str | Path, *, head: str | None = None) -> list[str]:
    """Copy the file's tensors into the module and give the names that were written.

    With `head`, that module keeps its initial values and the file's own head is passed over: another task, other
    classes. Names as published elsewhere are understood where the architecture declares them (`published_names`).
    """
    tensors = _read(Path(path))
    renames: dict[str, str] = getattr(module, "published_names", {})
    found = {_rename(name, renames): tensor for name, tensor in tensors.items()}
    own = dict(module.state_dict(keep_vars=True))

    def skipped(name: str) -> bool:
        # num_batches_tracked is a counter that older files do not hold; BatchNorm with a momentum never reads it
        return (head is not None and name.startswith(head + ".")) or name.endswith("num_batches_tracked")

    problems = []
    missing = [n for n in own if n not in found and not skipped(n)]
    unexpected = [n for n in found if n not in own and not skipped(n)]
    shapes = [f"{n} is {tuple(found[n].shape)}, the model's is {tuple(own[n].shape)}" for n in own
              if n in found and not skipped(n) and found[n].shape != own[n].shape]
    if missing:
        problems.append(f"missing: {_some(missing)}")
    if unexpected:
        problems.append(f"not in the model: {_some(unexpected)}")
    if shapes:
        problems.append(f"other shapes: {_some(shapes)}")
    if problems:
        only_head = head is None and all("head." in text for text in (*missing, *unexpected, *shapes))
        hint = " Only the head differs: leave it out to load the rest." if only_head else ""
        raise DataError(f"{path} does not fit the model; nothing was loaded. " + "; ".join(problems) + "." + hint)
    written = [n for n in own if n in found and not skipped(n)]
    with torch.no_grad():
        for name in written:
            own[name].copy_(found[name])
    return written


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DataError(f"There is no file {path}; pretrained weights are read from a safetensors file.")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable safetensors file ({error}). Save weights with "
                        "safetensors.torch.save_file(module.state_dict(), path).") from error


def _rename(name: str, renames: dict[str, str]) -> str:
    for start, ours in renames.items():
        if name.startswith(start):
            return ours + name[len(start):]
    return name


def _some(items: list[str], most: int = 5) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
