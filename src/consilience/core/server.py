"""What happens on the server: declared reductions of uploads, and what a part may read there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import tree
from ..errors import ConfigError
from ..tree import Flat, Tree
from .part import Model, Part, Spec

if TYPE_CHECKING:
    from .network import Network


@dataclass(frozen=True)
class ServerView:
    """What a part may read on the server. `ids` are the clients that uploaded, in `choose` those that may be chosen, in ascending order."""

    stage: str
    shared: Tree
    server: Tree
    ids: list[int]
    population: int
    round: int                    # counts from 1; 0 in `prepare`
    spec: Spec
    model: Model                  # the global model before this round's aggregation
    key: Tensor
    p: Tensor                     # weights of the average by the run's policy, in the order of ids
    reduced: Tree = field(default_factory=dict)      # this part's uploads, reduced as it declared
    trained: Sequence[Flat] | None = None      # what `models` shows; None where the part does not declare that it reads them
    secret: bytes = b""           # the server's own entropy for noise; empty in a simulation, where noise is keyed
    network: Network | None = None
    asked: Mapping[str, list[int]] = field(default_factory=dict)     # release -> who was asked for it; in `account` only

    @property
    def models(self) -> Sequence[Flat]:
        """Travelling parameters as trained, client by client, in the order of ids; empty where nobody has trained yet."""
        if self.trained is None:
            raise AttributeError("s.models is there for parts that declare `reads_models = True`")
        return self.trained

    def apply(self, name: str, x: Tensor, model: Model | None = None, train: bool = False) -> Tensor:
        """One submodule (the head, an attached module) of s.model or of the model given. Gradients reach x and the model where they are
        enabled (`torch.enable_grad()`).
        """
        assert self.network is not None
        return self.network.apply(model or self.model, name, x, train)


def _weighted(x: Tensor, p: Tensor) -> Tensor:
    return torch.einsum("n...,n->...", x, p.to(x.dtype))


REDUCTIONS: dict[str, Callable[[list[Tensor], Tensor], Tensor]] = {
    "stack": lambda xs, p: torch.stack(xs),
    "concat": lambda xs, p: torch.cat(xs),
    "sum": lambda xs, p: torch.stack(xs).sum(0),
    "mean": lambda xs, p: torch.stack(xs).mean(0),
    "weighted": lambda xs, p: _weighted(torch.stack(xs), p),
}
AVERAGES = ("mean", "weighted")


def reduce_uploads(part: Part, uploads: list[Tree], p: Tensor) -> Tree:
    """Put one part's uploads together, client by client in the order given, as the part declares for each of them."""
    out: dict[str, Any] = {}
    things = [[path for path, _ in tree.paths(u)] for u in uploads]
    unlike = next((t for t in things if sorted(t) != sorted(things[0])), None)
    if unlike is not None:
        raise ConfigError(f"Part {part.name!r} uploads {', '.join(things[0]) or 'nothing'} from one client and "
                          f"{', '.join(unlike) or 'nothing'} from another. All clients upload the same things: zeros, say, for nothing.")
    for key in uploads[0]:
        how = part.reduce.get(key)
        if how not in REDUCTIONS:
            raise ConfigError(f"Part {part.name!r} uploads {key!r} but declares no reduction for it. "
                              f"Add it to `reduce` with one of: {', '.join(REDUCTIONS)}.")
        _refuse_unlike(part, key, how, uploads)
        if how in AVERAGES:
            _refuse_whole_numbers(part, key, how, uploads[0])
        out[key] = tree.map(lambda *xs, how=how: REDUCTIONS[how](list(xs), p), *(u[key] for u in uploads))
    return out


def _refuse_whole_numbers(part: Part, key: str, how: str, upload: Tree) -> None:
    """Refuse averages of whole numbers: weights are fractions, which as whole numbers are 0, and so would be the average."""
    for path, t in tree.paths({key: upload[key]}):
        if not (t.is_floating_point() or t.is_complex()):
            raise ConfigError(f"Part {part.name!r} uploads {path!r} as whole numbers ({t.dtype}), of which {how!r} makes no average. "
                              "Upload them as .float(), or reduce by 'sum' or 'stack'.")


def _refuse_unlike(part: Part, key: str, how: str, uploads: list[Tree]) -> None:
    """Refuse shapes that cannot be put together, of which PyTorch would say neither whose they are nor what helps."""
    first = 1 if how == "concat" else 0                 # along which clients may have different numbers of rows
    shapes = [{path: tuple(t.shape) for path, t in tree.paths({key: u[key]})} for u in uploads]
    for path in (path for path, shape in shapes[0].items() if how == "concat" and not shape):
        raise ConfigError(f"Part {part.name!r} uploads {path!r} as a single number, which has no rows that 'concat' could join. "
                          "Reduce it by 'stack'.")
    for other in shapes[1:]:
        for path, shape in other.items():
            if len(shape) != len(shapes[0][path]) or shape[first:] != shapes[0][path][first:]:
                raise ConfigError(f"Part {part.name!r} uploads {path!r} with shape {shapes[0][path]} from one client and {shape} from "
                                  f"another, which {how!r} cannot put together. Upload one shape"
                                  + (", but for the first dimension." if first else ", or reduce by 'concat', which joins rows."))
