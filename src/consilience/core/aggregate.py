"""The new global model from what the clients of a round trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import tree
from ..errors import NonFiniteError
from ..tree import Flat, Tree
from .diagnose import advice
from .part import Model
from .server import merge_counters, weighted_change

if TYPE_CHECKING:
    from .federation import Federation


def new_model(fed: Federation, ids: list[int], models: list[Flat], all_buffers: list[Flat], reduced: dict[str, Tree]) -> Model:
    """w + Σ p_k (w_k − w), with the parts' say in the weights and in the change."""
    p = fed.shares(ids)
    for part in fed.method.using("weights"):
        p = part.weights(fed.serve(part, "weights", ids, reduced=reduced.get(part.name, {})), p)
    params = {k: w for k, w in fed.model["params"].items() if k in fed.spec.shared}
    change = weighted_change(params, models, p)
    for guard in fed.method.using("publish"):
        moved = guard.publish(fed.serve(guard, "model", ids), "", tree.pick(change, [k for k in fed.moving if k in change]), {})
        change = {**change, **moved}
    for part in fed.method.using("aggregate"):
        change, server = part.aggregate(fed.serve(part, "aggregate", ids, reduced=reduced.get(part.name, {})), change)
        fed.keep("server", part, server)
    buffers = {k: b for k, b in fed.model["buffers"].items() if k in fed.spec.shared}
    floats = {k: b for k, b in buffers.items() if b.is_floating_point()}
    moved = weighted_change(floats, all_buffers, fed.shares(ids))      # statistics are averaged by the run's policy
    counters = {k: merge_counters([b[k] for b in all_buffers]) for k in buffers if k not in floats}
    # `out` keeps the strides: a plain sum forgets channels_last where there is one channel, and the next kernel would be another
    model = {"params": {**fed.model["params"], **{k: torch.add(w, change[k], out=torch.empty_like(w)) for k, w in params.items()}},
             "buffers": {**fed.model["buffers"], **{k: b + moved[k] for k, b in floats.items()}, **counters}}
    if not bool(tree.all_finite(model)):
        names = ", ".join(q.name for hook in ("publish", "aggregate") for q in fed.method.using(hook)) or "the average"
        raise NonFiniteError(f"Round {fed.round_number}: the new global model is not finite after aggregation ({names}). "
                             f"{advice(fed, 'the data')}")
    return model
