"""Every answer is checked before use: names, shapes, types, finiteness, size, and the round and site it answers for.

What is expected is not written down twice: the server runs the same hooks once on samples of zeros, and what comes out has the
names, shapes and types that every site's uploads must have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ... import tree
from ...core.client import consult, train_client
from ...core.federation import Federation
from ...tree import Tree
from .parcel import HEADER, Parcel, Refused, plain, real_number


class Expected:
    """What sites may send, by the method's own declaration."""

    def __init__(self, rehearsal: Federation, max_mb: float = 0.0) -> None:
        self.fed, self.max_mb = rehearsal, max_mb           # a federation of the same method and model over samples of zeros
        self.fed.prepared = True
        self._consulted: dict[tuple[str, str], Tree] = {}
        with torch.no_grad():
            self._uploads = train_client(rehearsal, 0, [0], rehearsal.downloads(0)).uploads

    def consulted(self, part: str, stage: str, round_number: int, cohort: list[int], number: int) -> Tree:
        """A template of what a part uploads before training. Where rows are joined, their number depends on the cohort."""
        joined = any(p.name == part and "concat" in p.reduce.values() for p in self.fed.method.parts)
        if joined or (part, stage) not in self._consulted:
            self.fed.round_number = round_number
            with torch.no_grad():
                self._consulted[part, stage] = consult(self.fed, number, (part, stage, cohort), None)
        return self._consulted[part, stage]

    def trained(self, with_model: bool) -> Tree:
        """A template of what comes back from training: uploads by part, and what moves of the model."""
        flat = {**self.fed.model["params"], **self.fed.model["buffers"]}
        return {"uploads": self._uploads, "model": tree.pick(flat, self.fed.moving) if with_model else {}}

    def read(self, answer: Parcel, template: Tree) -> Tree:
        """The answer's tensors in the template's shape and order, or `Refused`."""
        expected = dict(tree.paths(template))
        check_size(answer, expected, self.max_mb)
        names = answer.arrays.keys()
        for name in sorted(names ^ expected.keys()):
            raise Refused(f"{name[:80]!r} is {'missing' if name in expected else 'not expected'}")
        tensors = {name: answer.arrays[name].read(name, like) for name, like in expected.items()}
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise Refused(f"{name!r} is not finite")
        return tree.like(template, tensors)


def check_size(answer: Parcel, expected: Mapping[str, torch.Tensor], max_mb: float = 0.0) -> None:
    """Before any array is made: no more bytes than declared."""
    declared = sum(t.numel() * t.element_size() + HEADER for t in expected.values())
    most = min(declared, int(max_mb * 1e6)) if max_mb else declared
    if answer.bytes > most:
        raise Refused(f"the answer has {answer.bytes} bytes, at most {most} were expected")


def check_envelope(about: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """An answer names what it answers: federation, site, task and round."""
    if "error" in about:
        raise Refused(f"the site reports: {plain(about['error'], 500).rstrip('.')}")
    for name, value in expected.items():
        if about.get(name) != value:
            raise Refused(f"it answers for {name} {str(about.get(name))[:40]!r}, asked was {value!r}")


def check_loss(about: Mapping[str, Any]) -> float:
    """A mean training loss. Sites compute in float32, where a larger one would be infinite, and one infinite loss ends a round for all."""
    loss = real_number(about.get("loss"), "loss")
    if abs(loss) > torch.finfo(torch.float32).max:
        raise Refused(f"'loss' must be a finite number of type float32, not {loss:g}")
    return loss
