"""Find where training lost its footing. Draws are keyed, so the client's round can be run again, step by step, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import tree
from ..errors import NonFiniteError
from ..tree import Tree
from .client import LocalWork, Outcome
from .part import STEP_HOOKS

if TYPE_CHECKING:
    from .federation import Federation
    from .step import Step


def refuse_nonfinite(fed: Federation, ids: list[int], done: dict[int, Outcome], down: dict[int, dict[str, Tree]]) -> None:
    """Stop a round in which some client's numbers are not finite, naming client, round, step and part."""
    if _all_finite([(done[i].losses, done[i].model, done[i].uploads, done[i].state.tensors) for i in ids]):
        return
    sound = lambda o: torch.stack([o.losses.isfinite().all(), *(tree.all_finite(t).to(fed.device) for t in (
        o.model, o.uploads, o.state.tensors))])
    fine = torch.stack([sound(done[i]) for i in ids])
    number = next(i for i, ok in zip(ids, fine) if not bool(ok.all()))
    for part in fed.method.parts:
        parcels = done[number].uploads.get(part.name, {}), done[number].state.tensors["kept"].get(part.name, {})
        if bool(fine[ids.index(number)][:2].all()) and not bool(tree.all_finite(dict(enumerate(parcels)))):
            raise NonFiniteError(f"Training became non-finite: what part {part.name!r} keeps or uploads after the steps of client "
                                 f"{fed.name_of(number)!r}, round {fed.round_number}, step {len(done[number].losses)}. {advice(fed)}")
    with torch.enable_grad():
        raise NonFiniteError(find_nonfinite(fed, LocalWork(fed, number, fed.client(number), ids, down[number])))


def _all_finite(trees: Sequence[Any]) -> bool:
    """Whether all numbers are, asked once for all of them: on a GPU every question waits."""
    leaves = [t for several in trees for one in several for t in tree.leaves(one)]
    return all(bool(tree.all_finite(dict(enumerate(t for t in leaves if t.is_cuda is there)))) for there in (False, True))


def find_nonfinite(fed: Federation, work: LocalWork) -> str:
    """A sentence naming client, round, step and part."""
    where = f"client {fed.name_of(work.number)!r}, round {fed.round_number}"
    cure = advice(fed, averaged=fed.last_exchange > 0)
    slot = fed.make_slot(work)
    work.load(slot)
    number = 0
    for phase, sizes in work.schedule:
        fed.program.begin(slot, phase)
        for size in sizes:
            number += 1
            step = fed.program.step(slot, phase, size)
            for name, term in step.first.terms:
                if torch.is_tensor(term) and not bool(term.isfinite().all()):
                    what = "the task's loss" if name == "task" else f"the loss of part {name!r}"
                    return f"Training became non-finite: {what} at {where}, step {number}. {cure}"
            if step.pulled and not bool(slot.losses[number - 1].isfinite()):       # by a kernel, which adds its term to the others
                return f"Training became non-finite: the loss of part {step.pulled!r} at {where}, step {number}. {cure}"
            if not bool(tree.all_finite(slot.model)):
                return f"Training became non-finite: {_update(step)} at {where}, step {number}. {cure}"
    if guards := ", ".join(p.name for p in fed.method.using("release")):           # which act after the steps
        return f"Training became non-finite: what {guards} made of the model of {where}, after step {number}. {advice(fed)}"
    return f"Training became non-finite at {where}, but not when it was run again on its own. {cure}"


def _update(step: Step) -> str:
    """The update, with the parts that had a share in it: by a term of the loss, or by changing its gradient."""
    terms = [name for name, term in step.first.terms if torch.is_tensor(term) and name not in ("task", *step.corrected)]
    shares = [f"{how} {', '.join(parts)}" for how, parts in (("the loss of", terms), ("corrections by", step.corrected)) if parts]
    return f"the update (with {' and '.join(shares)})" if shares else "the update of the task's gradient"


def without_effect(fed: Federation, work: LocalWork) -> list[str]:
    """Parts whose term of the loss depends, in every phase, on nothing that trains, and that do not change its gradient either.

    Found by the first step of each phase, of which nothing stays.
    """
    slot = fed.make_slot(work)
    work.load(slot)
    adding, acting = [], set()
    for phase, sizes in work.schedule:
        fed.program.begin(slot, phase)
        with torch.enable_grad():
            step = fed.program.step(slot, phase, sizes[0])
        adding += [p.name for p in step.hooks["loss"]] + [name for name, own in step.corrections.items() if own.strength]
        acting |= {*step.corrected, *(name for name, term in step.first.terms if torch.is_tensor(term) and term.requires_grad)}
    return sorted({*adding} - acting)


def advice(fed: Federation, data: str = "the client's data", averaged: bool = True) -> str:
    """What may keep numbers finite. What the run was warned of at its start is the likelier cause, of parts that act in steps from the
    first one on, of others once something was put together."""
    cure = f"use a smaller learning rate than {fed.policy.lr:g}, or look at {data}."
    acting = [p for p in fed.method.parts if averaged or any(fed.method.has(p, hook) for hook in STEP_HOOKS)]
    warned = " ".join(f"{part.name} {said}" for part in acting if (said := part.caution(fed.spec)))
    return f"The likely cause: {warned} If that is not it, {cure}" if warned else cure[0].upper() + cure[1:]
