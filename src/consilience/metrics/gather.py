"""What models answer on samples: logits and features, gathered through the federation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.client import ClientState
from ..core.federation import Federation
from ..core.part import Model
from ..errors import ConfigError, did_you_mean


class Asked(NamedTuple):
    """A model, whose it is, and the rows it is asked about."""

    number: int                    # of the client, in the federation
    state: ClientState
    model: Model
    taps: bool                     # personal tensors act
    rows: Tensor
    owner: int                     # of the answers: place in the data set's clients


@dataclass(frozen=True)
class Answers:
    """One row per sample, on the host."""

    logits: Tensor
    values: Tensor                 # at the point asked for, flattened
    y: Tensor
    owner: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def probabilities(self) -> Tensor:
        return self.logits.double().softmax(1)

    @property
    def odds(self) -> Tensor:
        """ln p/(1 − p): what orders samples as their probabilities do, and tells them apart where these are 1 to the last bit.

        Sums run over the logits by size, so that samples with the same ones are equal in whichever order they have them.
        """
        z = self.logits.double()
        largest = z.sort(1, descending=True).values
        z, largest = z - largest[:, :1], largest - largest[:, :1]
        likely = z - largest.logsumexp(1, keepdim=True)
        return torch.where(z < 0, likely - torch.log1p(-likely.exp()), -largest[:, 1:].logsumexp(1, keepdim=True))

    @property
    def predicted(self) -> Tensor:
        return self.logits.argmax(1)

    def pick(self, rows: Tensor) -> Answers:
        return Answers(self.logits[rows], self.values[rows], self.y[rows], self.owner[rows])

    def of(self, owner: int) -> Answers:
        return self.pick(torch.nonzero(self.owner == owner).flatten())


@torch.no_grad()
def gather(fed: Federation, asked: Iterable[Asked], point: str = "logits") -> Answers:
    """Ask every model about its rows, in evaluation mode. `point`: logits, features (what the head receives, personal tensors
    included where they act), or the name of a module for its output."""
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    with _listening(fed, point) as caught:
        for a in asked:
            for x, y in fed.samples.batches(a.rows):
                trace = fed.look(a.number, a.state, a.model, x, False, a.taps)
                if point == "logits":
                    values = trace.logits
                elif point == "features":
                    values = trace.after[fed.spec.features]
                else:
                    values = caught[-1]
                    caught.clear()
                parts.append((trace.logits.float().cpu(), values.flatten(1).float().cpu(), y.cpu(), torch.full((len(y),), a.owner)))
    if not parts:
        nothing = torch.zeros(0, dtype=torch.int64)
        return Answers(torch.zeros(0, fed.spec.classes), torch.zeros(0, 1), nothing, nothing)
    return Answers(*(torch.cat(column) for column in zip(*parts)))


@contextlib.contextmanager
def _listening(fed: Federation, point: str) -> Iterator[list[Tensor]]:
    """Catch the output of a module that is no point of the method's own."""
    caught: list[Tensor] = []
    if point in ("logits", "features"):
        yield caught
        return
    modules = dict(fed.program.network.module.named_modules())
    if point not in modules or not point:
        known = ["features", "logits", *filter(None, modules)]
        raise ConfigError(f"The model has no module {point!r} to measure at.{did_you_mean(point, known)}")
    handle = modules[point].register_forward_hook(lambda _, args, out: caught.append(out))
    try:
        yield caught
    finally:
        handle.remove()
