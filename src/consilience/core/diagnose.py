"""Find where training lost its footing. Draws are keyed, so the client's round can be run again, step by step, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import tree

if TYPE_CHECKING:
    from .client import LocalWork
    from .federation import Federation


def find_nonfinite(fed: Federation, work: LocalWork) -> str:
    """A sentence naming client, round, step and part."""
    where = f"client {fed.name_of(work.number)!r}, round {fed.round_number}"
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
                    return f"Training became non-finite: {what} at {where}, step {number}. {_advice(fed)}"
            if not bool(tree.all_finite(slot.model)):
                parts = [p.name for hook in ("gradient", "grad") for p in step.hooks[hook]]
                what = f"the update (with corrections by {', '.join(parts)})" if parts else "the update of the task's gradient"
                return f"Training became non-finite: {what} at {where}, step {number}. {_advice(fed)}"
    return f"Training became non-finite at {where}, but not when it was run again on its own. {_advice(fed)}"


def _advice(fed: Federation) -> str:
    return f"Use a smaller learning rate than {fed.policy.lr:g}, or look at the client's data."
