"""What frozen models make of a client's samples, asked for once a round and looked up in every step.

MOON, LfD and others hold each batch against what the received model, or the client's previous one, makes of it. Neither model changes
while the client trains; where samples do not change either, every epoch would ask the same again. So a client begins its round with one
pass of each over its samples, and a step reads the rows of its batch: such a method then costs little more than FedAvg.

Not where answers may differ from step to step (augmentation, parts that change a batch, taps that belong to the model, layers that take
the statistics of a batch in evaluation too) or are wide (maps), nor where gradients are taken over pieces of a batch, of which the answers
kept are not, nor where a client's work is one epoch or counted in steps. Sizes of clients decide nothing: a site of a federation, which
knows its own alone, has to do what the simulation does for it, bit for bit.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from .. import tree
from ..errors import ConfigError
from ..tree import Tree
from .network import Trace
from .part import Model
from .samples import Samples

if TYPE_CHECKING:
    from .federation import Federation

MODELS = ("received", "previous")
WIDEST = 1 << 12                # numbers that a model shows of a sample
LOGITS = "logits"               # beside the points, whose names are of modules


def recalled_models(fed: Federation) -> tuple[str, ...]:
    """The frozen models that this federation's clients ask once a round, by their names in a step's view."""
    for part in fed.method.parts:
        if unknown := {*part.teachers} - {*MODELS}:
            raise ConfigError(f"Part {part.name!r}: its teachers can be {' and '.join(MODELS)}. Got {', '.join(sorted(unknown))} instead.")
        if "previous" in part.teachers and not part.previous:
            raise ConfigError(f"Part {part.name!r} names the previous model among its teachers, so it must say previous = True as well.")
    asked = tuple(name for name in MODELS if any(name in part.teachers for part in fed.method.parts))
    changes = (fed.program.random_transform or fed.method.using("batch") or any(p.in_every_pass for p in fed.method.using("tap"))
               or fed.program.network.mixes_samples(fed.spec.model))
    wide = any(len(shape) > 1 for shape in (*fed.spec.shapes.values(), fed.spec.output)) or numbers_of(fed) > WIDEST
    counted = [fed.policy.epochs if p.epochs is None else p.epochs for p in fed.phases]
    by_steps = fed.policy.steps is not None and any(p.epochs is None for p in fed.phases)
    cut = any(part.pieces > 1 for part in fed.method.using("gradient"))
    return () if changes or wide or cut or by_steps or sum(counted) < 2 else asked


def numbers_of(fed: Federation) -> int:
    """What a model shows of one sample: at its points, and the logits."""
    return sum(prod(shape) for shape in (*fed.spec.shapes.values(), fed.spec.output))


def bytes_of(fed: Federation) -> int:
    """Of the answers on the largest client's samples."""
    return 4 * numbers_of(fed) * most_samples(fed.samples) * len(fed.recalled) if fed.recalled else 0


def most_samples(samples: Samples) -> int:
    """Training samples of the client that has most."""
    return max(samples.rows.different_sizes)


@torch.no_grad()
def answers(fed: Federation, number: int, models: dict[str, Model]) -> Tree:
    """What each model shows of the client's training samples, one row per sample, in the order of its rows."""
    network, seen = fed.program.network, {name: list[Trace]() for name in models}
    for x, _ in fed.samples.batches(fed.samples.rows[number].train, joined=True):
        for name, model in models.items():
            seen[name].append(network.forward(model, x))
    return {name: {LOGITS: torch.cat([t.logits for t in traces]),
                   **{point: torch.cat([t.before[point] for t in traces]) for point in traces[0].before}} for name, traces in seen.items()}


def trace_of(answers: Tree, rows: torch.Tensor) -> Trace:
    """The trace of a pass over these samples."""
    picked = tree.map(lambda t: t.index_select(0, rows), answers)
    trace = Trace()
    trace.logits = picked.pop(LOGITS)
    for point, shown in picked.items():
        trace.before[point] = trace.after[point] = shown
    return trace
