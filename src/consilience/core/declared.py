"""What a method declares of a federation's state before anything has happened: the homes' first tensors, and what travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import tree
from ..tree import Flat, Tree
from . import optimiser
from .returned import tensors, trainable

if TYPE_CHECKING:
    from .federation import Federation


def initial(fed: Federation, home: str) -> Tree:
    """What the parts declare for one home."""
    hook = "init_" + home
    checked = trainable if home == "personal" else tensors
    return {p.name: tree.map(lambda t: t.detach().clone().to(fed.device), checked(p, hook, getattr(p, hook)(fed.spec)))
            for p in fed.method.using(hook)}


def own_tensors(name: str, params: Flat, personal: Tree) -> Flat:
    """What a part's own steps move: what it attached to the model, and what it holds personally."""
    return {k: p for k, p in params.items() if k.startswith(name + ".")} | {f"personal/{path}": t for path, t in tree.paths(personal)}


def still(fed: Federation) -> Tree:
    """The optimisers' state before the first step: one for each phase, and under "apart" one for each part that takes steps of its own."""
    phases = {p.name: optimiser.init(fed.policy, tree.pick(fed.model["params"], p.keys)) for p in [*fed.phases, fed.plain_phase]}
    names = sorted(fed.method.stepping_apart)
    personal, policy = initial(fed, "personal") if names else {}, optimiser.for_own_steps(fed.policy)
    return {**phases, "apart": {n: optimiser.init(policy, own_tensors(n, fed.model["params"], personal.get(n, {}))) for n in names}}


def fresh_tensors(fed: Federation) -> Tree:
    """What a client holds before it first takes part."""
    local = {k: v for half in fed.model.values() for k, v in half.items() if k not in fed.spec.shared}
    return {"kept": initial(fed, "kept"), "personal": initial(fed, "personal"), "local": tree.clone(local),
            "previous": tree.clone(fed.model) if any(p.previous for p in fed.method.parts) else {},
            "own": tree.clone(fed.model) if fed.method.skips_exchanges else {},
            "optimiser": tree.clone(fed.still) if fed.policy.optimiser_state == "kept" else {}}


def moving_keys(fed: Federation) -> list[str]:
    """Keys that travel and can change: what is trained, what adversaries train, and running statistics."""
    stepping = {k for p in fed.phases if p.model == "model" for k in p.keys}
    return [k for half in fed.model.values() for k in half if k in fed.spec.shared
            and (k in stepping or k in fed.model["buffers"] or fed.method.trained_apart(k))]
