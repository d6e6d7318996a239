"""What a method declares of a federation's state before anything has happened: the homes' first tensors, and what travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import tree
from ..errors import ConfigError
from ..tree import Flat, Tree
from . import optimiser

if TYPE_CHECKING:
    from .federation import Federation


def initial(fed: Federation, home: str) -> Tree:
    """What the parts declare for one home."""
    return {p.name: tree.map(lambda t: t.detach().clone().to(fed.device), getattr(p, "init_" + home)(fed.spec))
            for p in fed.method.using("init_" + home)}


def own_tensors(name: str, params: Flat, personal: Tree) -> Flat:
    """What a part's own steps move: what it attached to the model, and what it holds personally."""
    return {k: p for k, p in params.items() if k.startswith(name + ".")} | {f"personal/{path}": t for path, t in tree.paths(personal)}


def check_form(part: str, hook: str, given: Tree, declared: Tree, by: str) -> None:
    """Refuse tensors that are not those declared: they would be found missing later, far from the part that gave them."""
    shapes, wanted = ({path: tuple(t.shape) for path, t in tree.paths(of)} for of in (given, declared))
    if shapes == wanted:
        return
    wrong = [f"{path!r} is missing" for path in wanted if path not in shapes]
    for path, shape in shapes.items():
        if path not in wanted:
            wrong.append(f"{path!r} is none of them")
        elif shape != wanted[path]:
            wrong.append(f"{path!r} has the shape {shape}, not {wanted[path]}")
    raise ConfigError(f"The hook {hook!r} of part {part!r} must return the tensors that {by!r} declares: {'; '.join(wrong)}.")


def still(fed: Federation) -> Tree:
    """The optimisers' state before the first step: one for each phase, and under "apart" one for each part that takes steps of its own."""
    phases = {p.name: optimiser.init(fed.policy, tree.pick(fed.model["params"], p.keys)) for p in [*fed.phases, fed.plain_phase]}
    names = sorted({p.name for hook in ("before", "adversary") for p in fed.method.using(hook)})
    personal, policy = initial(fed, "personal") if names else {}, optimiser.apart(fed.policy)
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
    apart = tuple(p.name + "." for hook in ("before", "adversary") for p in fed.method.using(hook))
    return [k for half in fed.model.values() for k in half if k in fed.spec.shared
            and (k in stepping or k in fed.model["buffers"] or k.startswith(apart))]
