"""The new global model from what the clients of a round trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import tree
from ..errors import NonFiniteError
from ..tree import Flat, Tree
from . import returned
from .diagnose import advice
from .part import Model

if TYPE_CHECKING:
    from .federation import Federation


def new_model(fed: Federation, ids: list[int], models: list[Flat], all_buffers: list[Flat], reduced: dict[str, Tree]) -> Model:
    """w + Σ p_k (w_k − w), with the parts' say in the weights and in the change."""
    p = fed.shares(ids)
    serve = lambda part, stage: fed.serve(part, stage, ids, reduced=reduced.get(part.name, {}), models=models)
    for part in fed.method.using("weights"):
        p = returned.weights(part, part.weights(serve(part, "weights"), p), p)
    params = {k: w for k, w in fed.model["params"].items() if k in fed.spec.shared}
    change = weighted_change(params, models, p)
    for guard in fed.method.using("publish"):
        moving = tree.pick(change, [k for k in fed.moving if k in change])
        moved = guard.publish(fed.serve(guard, "model", ids), "", moving, {})
        returned.check_form(guard.name, "publish", moved, moving, "the model's change that it was given")
        change = {**change, **moved}
    for part in fed.method.using("aggregate"):
        new, server = returned.two(part, "aggregate", part.aggregate(serve(part, "aggregate"), change), "the change", "its server state")
        returned.check_form(part.name, "aggregate", new, change, "a change for every parameter of the one it was given")
        change = new
        fed.keep("server", part, "aggregate", returned.tensors(part, "aggregate", server, "server tensors"))
    buffers = {k: b for k, b in fed.model["buffers"].items() if k in fed.spec.shared}
    floats = {k: b for k, b in buffers.items() if b.is_floating_point()}
    moved = weighted_change(floats, all_buffers, fed.shares(ids))      # statistics are averaged by the run's policy
    counters = {k: merge_counters([b[k] for b in all_buffers]) for k in buffers if k not in floats}
    # `out` keeps the strides: a plain sum forgets channels_last where there is one channel, and the next kernel would be another
    model = {"params": {**fed.model["params"], **{k: torch.add(w, change[k], out=torch.empty_like(w)) for k, w in params.items()}},
             "buffers": {**fed.model["buffers"], **{k: b + moved[k] for k, b in floats.items()}, **counters}}
    if not bool(tree.all_finite(model)):
        if not bool(p.isfinite().all()):
            weighing = ", ".join(q.name for q in fed.method.using("weights"))
            raise NonFiniteError(f"Round {fed.round_number}: the clients' weights in the average are not finite "
                                 f"({', '.join(f'{x:g}' for x in p.tolist()[:5])}{', …' if len(p) > 5 else ''}), "
                                 f"as the hook 'weights' of {weighing} returned them. A sum of weights that is 0 cannot be divided by.")
        names = ", ".join(q.name for hook in ("publish", "aggregate") for q in fed.method.using(hook)) or "the average"
        raise NonFiniteError(f"Round {fed.round_number}: the new global model is not finite after aggregation ({names}). "
                             f"{advice(fed, 'the data')}")
    return model


def weighted_change(model: Flat, trained: list[Flat], p: Tensor) -> Flat:
    """Σ p_k (w_k − w), summed in the order given."""
    if not model:
        return {}
    start = [*model.values()]
    total = torch._foreach_mul(torch._foreach_sub([trained[0][k] for k in model], start), p[0])
    for k, own in enumerate(trained[1:], start=1):
        moved = torch._foreach_mul(torch._foreach_sub([own[key] for key in model], start), p[k])
        torch._foreach_add_(total, moved)
    return dict(zip(model, total))


def merge_counters(values: list[Tensor]) -> Tensor:
    """Integer buffers (batch counters) are copied, never averaged: the largest stands for all."""
    return torch.stack(values).amax(0)
