"""SGD of one step by gradients as they came in bfloat16, with what parts declare to be added to them, in a kernel for all tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels import sgd
from . import optimiser
from .correction import Correction
from .gradients import Gradients

if TYPE_CHECKING:
    from .step import Step


def possible(step: Step) -> bool:
    """Whether there is a kernel that makes this step, should gradients come in bfloat16. It adds one tree, and pulls to one."""
    program, hooks, own = step.program, step.hooks, step.corrections.values()
    return (program.network.half and program.policy.optimiser == "sgd" and not hooks["gradient"] and not hooks["grad"]
            and sum(bool(c.add) for c in own) <= 1 and sum(bool(c.target) for c in own) <= 1
            and sgd.usable([step.model["params"][k] for k in step.phase.keys]))


class Descent:
    """What is in reach of its maps moves at once; other weights make their steps later, several together. Where steps are recorded, the
    next one finds its weights in bfloat16.
    """

    def __init__(self, step: Step, came: Gradients) -> None:
        slot, network, policy = step.slot, step.program.network, step.program.policy
        pulls = {name: own for name, own in step.corrections.items() if own.target}
        pull = next(iter(pulls.values()), Correction())
        add = next((own.add for own in step.corrections.values() if own.add), {})
        step.corrected += [name for name, own in step.corrections.items() if own.add or own.target]
        step.pulled = next(iter(pulls), "")
        moves = came.moves(step.model["params"], slot.optimiser[step.phase.name].get("m", {}), add, pull.target)
        if not slot.hands_on:
            moves = [move._replace(narrow=None) for move in moves]
        self.slot, self.strength = slot, pull.strength
        self.how = slot.lr, policy.weight_decay, policy.momentum, pull.strength, slot.table
        self.away = sgd.descend(moves, *self.how)
        self.cut = [move._replace(grad=move.param, narrow=None) for move in moves if move.reach is not None]     # gradients need not wait
        # where the next pass looks at what is out of reach, or what a part declares may be another in the next step
        self.at_once = network.reads_kernels or any(
            part in step.hooks["track"] or part.name in slot.personal for part in step.hooks["correction"])
        for move in moves:
            if move.narrow is not None:
                network.keep(move.param, move.narrow, move.reach)
            else:
                network.forget([move.param])
        optimiser.descend(step.own, step.own_grads, slot.lr)

    def end(self) -> None:
        """When the step's loss is recorded: it lacks the pull's term, and so will those of steps that are put off."""
        self._note(self.away)
        if self.cut:
            self.slot.put_off(self._catch_up)
            if self.at_once:
                self.slot.settle()

    def _catch_up(self, steps: int) -> None:
        self._note(sgd.rest(self.cut, *self.how, steps))

    def _note(self, away: Tensor | None) -> None:
        sgd.note(away, 0.5 * self.strength, self.slot.losses, self.slot.counter)
