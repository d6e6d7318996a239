"""One local step, written once. Parts stay pure; only Program writes, in place, to the slot it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import ConfigError
from ..kernels.record import record
from ..tree import Flat, Tree
from . import correction, descent, optimiser, returned
from .correction import Correction
from .declared import own_tensors
from .gradients import Gradients
from .memory_layout import lay_out
from .method import Method
from .network import Network, Tap, Trace, in_float32
from .part import OWN_STEPS, Batch, Model, Part, Phase, Spec
from .recall import trace_of
from .slot import Slot
from .step_view import StepView
from .task import Task


class Pass:
    """The objective at one point in parameter space."""

    def __init__(self, step: Step, model: Model, train: bool = True) -> None:
        self.step, self.model, self.train = step, model, train
        self.trace: Trace | None = None
        self.scratch: Tree = step.slot.scratch
        self.memo: dict[Any, Any] = {}
        self.beside: dict[int, tuple[Trace, Tensor]] = {}         # id of what went through the main pass beside the batch -> its trace
        self.terms: list[tuple[str, Any]] = []
        self.relabelled: Tensor | None = None
        self.given: Batch | None = None                           # in place of the step's batch

    @property
    def batch(self) -> Batch:
        """The step's batch or the one given, with the target as this pass's taps have changed it."""
        batch = self.given or self.step.batch
        return batch if self.relabelled is None else batch._replace(target=self.relabelled)

    def views(self, hook: str) -> list[tuple[Any, StepView]]:
        return [(p, StepView(self, p)) for p in self.step.hooks[hook]]

    def tap(self, label: str, all_of_them: bool) -> Tap | None:
        """What the parts do at their points; not `all_of_them`, those alone that belong to the model."""
        parts = [p for p in self.step.hooks["tap"] if all_of_them or p.in_every_pass]
        if not parts:
            return None
        views = [(p, StepView(self, p, label)) for p in parts]

        def tapped(trace: Trace, point: str, x: Tensor) -> Tensor:
            for part, view in views:
                view._so_far = trace
                seen = x if part.narrow_maps else in_float32(x)
                out, note = returned.tapped(part, part.tap(view, point, seen))
                x = x if out is seen else out
                if note is not None:
                    trace.notes.setdefault(part.name, {})[point] = note
            return x
        return tapped

    def _dropout_key(self, label: str) -> Callable[[], Tensor]:
        return lambda: rng.key(self.step.key, "dropout", label)

    def forward(self, model: Model, x: Tensor, train: bool, taps: bool, label: str, learn: bool = False) -> Trace:
        mine = model is self.model
        learning = (mine or learn) and torch.is_grad_enabled()
        if mine and learning and train and id(x) in self.beside:
            return self.beside[id(x)][0]
        memo = self.memo if mine else self.step.memo
        call = (id(model), id(x), train, taps, label, learning)
        if call not in memo:
            trace = None if mine or train or taps else self.step.recalled(model, x)
            with torch.set_grad_enabled(learning):
                trace = trace or self.step.program.network.forward(model, x, train, self.tap(label, taps), key=self._dropout_key(label))
            memo[call] = trace, model, x          # model and x stay alive, so their ids stay theirs
        return memo[call][0]

    def _main_trace(self, main: bool) -> Trace:
        """The pass over the batch, and in the same one over what parts ask for beside it."""
        step, x = self.step, self.batch.x
        asked = [returned.beside(part, part.beside(view)) for part, view in self.views("beside")]
        beside = [b for b in asked if b is not None and b.shape[1:] == x.shape[1:] and b.dtype == x.dtype]
        if beside:
            x = torch.cat([x, *(lay_out(b, step.program.policy) for b in beside)])
        trace = step.program.network.forward(self.model, x, True, self.tap("batch", True), update_buffers=main,
                                             key=self._dropout_key("batch"))
        if not beside:
            return trace
        own, *others = trace.split([len(self.batch.x), *(len(b) for b in beside)])
        self.beside = {id(b): (other, b) for b, other in zip(beside, others)}        # b stays alive, so its id stays its own
        return own

    def objective(self, main: bool) -> Tensor:
        """Task loss plus added terms. Only the main (first) pass moves buffers and lets adversaries step."""
        step = self.step
        if main:
            for part, view in self.views("before"):
                step.program.step_apart(part, "before", view)
        self.trace = self._main_trace(main)
        for part, view in self.views("relabel"):
            self.relabelled = returned.target(part, part.relabel(view), len(self.batch.x))
        track = self.views("track")
        if track:
            self.scratch = {**self.scratch, **{p.name: p.track(v) for p, v in track}}
        if main:
            for part, view in self.views("adversary"):
                step.program.step_apart(part, "adversary", view)
        if step.hooks["main_loss"]:
            (part, view), = self.views("main_loss")
            self.terms.append((part.name, returned.term(part, "main_loss", part.main_loss(view), a_float=False)))
        else:
            self.terms.append(("task", step.program.task.loss(self.trace.logits, self.batch.target)))
        for part, view in self.views("terms"):
            if part in step.hooks["loss"]:
                self.terms.append((part.name, returned.term(part, "loss", part.loss(view))))
            own = step.corrections.get(part.name)
            if own is not None and own.target and part.name not in step.past_autograd:
                self.terms.append((part.name, correction.term(view.params, own)))
        loss = self.terms[0][1]
        for _, term in self.terms[1:]:
            loss = loss + term
        return loss


class Step:
    """What the passes of one step share."""

    def __init__(self, program: Program, slot: Slot, phase: Phase, size: int) -> None:
        self.program, self.slot, self.phase, self.hooks = program, slot, phase, program.hooks[phase.name]
        self.memo: dict[Any, Any] = {}
        self.result: tuple[Tensor, Tree] | None = None
        self.corrected: list[str] = []                # parts that changed the gradient after it was taken
        self.pulled = ""                              # the one whose pull a kernel adds to gradient and loss
        self.model = slot.model_of(phase)
        x, y = self._picked(size)
        self.batch = Batch(x, y, y)
        self.drawn = x                                # as it was before parts saw it
        self.first = Pass(self, self.model)
        for part, view in self.first.views("batch"):
            self.batch = returned.batch(part, part.batch(view))

    def _picked(self, size: int) -> tuple[Tensor, Tensor]:
        """The next `size` samples of the slot's order, transformed."""
        slot, program = self.slot, self.program
        if program.gather is not None:                # in one kernel, where transform and samples allow it
            picked = program.gather(slot.x, slot.y, slot.index, slot.counter, size, slot.key, program.channels_last)
            if picked is not None:
                return picked
        index = slot.index.index_select(0, slot.counter)[0][:size]
        x, y = program.transform(slot.x.index_select(0, index), slot.y.index_select(0, index),
                                 rng.key(self.key, "transform") if program.random_transform else None)
        return lay_out(x, program.policy), y.long()           # masks are stored in bytes

    @cached_property
    def key(self) -> Tensor:
        return rng.fold(self.slot.key, self.slot.counter[0])

    def recalled(self, model: Model, x: Tensor) -> Trace | None:
        """What a frozen model shows of the step's samples, where it was asked when the client began its round."""
        slot = self.slot
        name = next((n for n in getattr(slot, "answers", {}) if getattr(slot, n) is model), None)
        if name is None or x is not self.drawn:
            return None
        trace = trace_of(slot.answers[name], slot.places.index_select(0, slot.counter)[0][: len(x)])
        trace.buffers = model["buffers"]
        return trace

    @cached_property
    def corrections(self) -> dict[str, Correction]:
        """What parts declare, as far as the phase trains it."""
        params, keys = self.model["params"], self.phase.keys
        return {p.name: correction.declared(p, p.correction(v), params, keys) for p, v in self.first.views("correction")}

    @cached_property
    def takes_narrow(self) -> bool:
        """Whether a kernel makes this step, should gradients come in bfloat16."""
        return descent.possible(self)

    @cached_property
    def past_autograd(self) -> frozenset[str]:
        """Parts whose pull is added to the gradient past autograd: where a kernel is to do so, or where it is the first to act on the
        gradient of the step's loss, so that nobody could see the difference.
        """
        if not self.corrections or self.hooks["gradient"]:
            return frozenset()
        if self.takes_narrow:
            return frozenset(self.corrections)
        first = self.hooks["corrections"][0].name
        alone = first in self.corrections and correction.on_gpu(self.model["params"], self.corrections[first])
        return frozenset({first} if alone else ())

    def correct(self, g: Flat) -> Flat:
        """The gradient as parts change it after it was taken. A pull past autograd joins the loss here."""
        for part, view in self.first.views("corrections"):
            before, own = g, self.corrections.get(part.name, Correction())
            g = tree.add_where(g, own.add)
            if own.target and part.name in self.past_autograd:
                assert self.result is not None
                g, term = correction.pulled(g, view.params, own)
                self.first.terms.append((part.name, term))
                self.result = self.result[0] + term, self.result[1]
            if part in self.hooks["grad"]:
                given, g = g, part.grad(view, g)
                returned.check_form(part.name, "grad", g, given, "a gradient for every parameter that it was given")
            if g is not before:
                self.corrected.append(part.name)
        return g

    def planned(self, part: Part) -> Tree:
        return tree.map(lambda t: t.index_select(0, self.slot.counter)[0], self.slot.plan.get(part.name, {}))

    def grad_at(self, params: Flat, batch: Batch | None = None) -> Flat:
        """Gradient of the objective at `params`, for the phase's keys only; over `batch` where that is given, as a piece of the step's.
        Traces and buffers come from the first call.
        """
        came = self.gradients(params, batch)
        with torch.no_grad():
            return came.in_float32(params)

    def gradients(self, params: Flat, batch: Batch | None = None) -> Gradients:
        """The same as it came."""
        main = self.result is None
        at = self.first
        if params is not self.model["params"] or not main:
            here, trains = self.model["params"], self.program.trains[self.phase.name]
            # what is not elsewhere stays the model's own in the first pass, for adversaries step it
            leaf = {k: p if main and p is here[k] else p.detach().requires_grad_(k in trains) for k, p in params.items()}
            at = Pass(self, {"params": leaf, "buffers": self.model["buffers"]})
        at.given = batch
        own = [t for p in self.program.personal[self.phase.name] for t in tree.leaves(self.slot.personal[p])]
        loss = at.objective(main)
        if not loss.requires_grad:
            raise ConfigError(f"The loss of a step, of {', '.join(name for name, _ in at.terms)}, depends on nothing that the phase "
                              f"{self.phase.name!r} trains: on no parameter, or on values detached from them.")
        n, leaves = len(self.phase.keys), {k: at.model["params"][k] for k in self.phase.keys}
        self.program.network.hold(at.model)           # whose maps may be computed again on the way back
        with self.program.network.collecting(leaves.values()) as arrived:
            grads = torch.autograd.grad(loss, [*leaves.values(), *own], self.slot.one_for(loss), allow_unused=True)
        if main:
            self.result = loss.detach().to(self.slot.losses.dtype), at.scratch       # a term may be of float64, and then so is the sum
            for seen in ("given", "trace", "terms", "relabelled", "scratch"):          # what the step's other hooks are shown
                setattr(self.first, seen, getattr(at, seen))
        self.own, self.own_grads = own, [torch.zeros_like(t) if g is None else g for t, g in zip(own, grads[n:])]
        return Gradients.of(leaves, dict(zip(leaves, grads)), arrived)


class Program:
    """A method made ready: which parts act in which phase, and the step that folds them."""

    def __init__(self, network: Network, method: Method, phases: list[Phase], spec: Spec, task: Task,
                 transform: Callable[..., Any], samples_apart: bool = False) -> None:
        self.network, self.spec, self.policy, self.task = network, spec, spec.policy, task
        self.policy_of_own_steps = optimiser.for_own_steps(spec.policy)
        self.transform, self.random_transform = transform, getattr(transform, "random", True)
        self.gather = getattr(transform, "gather", None)
        self.channels_last = spec.policy.layout == "channels_last"
        self.trains = {p.name: frozenset(p.keys) for p in phases}
        self.travelling = {p.name: tuple(k for k in p.keys if k in set(spec.trained)) for p in phases}
        self.hooks = {p.name: method.hooks(p, uploads=bool(self.travelling[p.name]) or not spec.trained) for p in phases}
        for hooks in self.hooks.values():             # one pass for two batches: only where neither shows in what the other gives
            if not samples_apart or hooks["tap"] or hooks["relabel"] or hooks["gradient"]:
                hooks["beside"] = []
        # parts whose personal tensors descend the main loss in this phase
        self.personal = {p.name: [q.name for q in method.using("init_personal", "model")
                                  if p.model == "model" and q.name not in method.stepping_apart] for p in phases}

    def step_apart(self, part: Part, hook: str, view: StepView) -> None:
        """A part's own SGD step on what it attached or holds personally, apart from the main loss; the part has an optimiser to itself."""
        own, slot = own_tensors(part.name, view.params, view.personal), view._pass.step.slot
        loss = returned.term(part, hook, getattr(part, hook)(view))
        if not torch.is_tensor(loss):             # switched off by its settings
            return
        if not own:
            raise ConfigError(f"The hook {hook!r} of part {part.name!r} returns a loss, and the part has nothing that a step "
                              "of its own could move: attach a module in 'build', or declare tensors in 'init_personal'.")
        if not loss.requires_grad:
            raise ConfigError(f"The hook {hook!r} of part {part.name!r} returns a loss that depends on none of the tensors that its "
                              f"step moves ({', '.join(own)}), or on values detached from them. Return 0.0 where no step is to be made.")
        grads = torch.autograd.grad(loss, [*own.values()], slot.one_for(loss), materialize_grads=True)
        optimiser.update(self.policy_of_own_steps, own, dict(zip(own, grads)), slot.optimiser["apart"][part.name], view.lr)
        self.network.forget(own.values())

    def step(self, slot: Slot, phase: Phase, size: int) -> Step:
        """One step on the next `size` samples of the slot's order."""
        step = Step(self, slot, phase, size)
        exclusive = step.first.views("gradient")
        noted: Tree = {}
        descends: descent.Descent | None = None
        g: Flat | None = None
        if exclusive:
            (part, view), = exclusive
            step.corrected.append(part.name)
            given = part.gradient(view, step.grad_at)
            g, scratch = returned.gradient(part, given, tree.pick(step.model["params"], phase.keys), step.result is not None)
            noted = {} if scratch is None else {part.name: scratch}
        else:
            came = step.gradients(step.model["params"])
        assert step.result is not None
        with torch.no_grad():
            if g is None and came.narrow and step.takes_narrow:
                descends = descent.Descent(step, came)
            else:
                self._update(step, step.correct(came.in_float32(step.model["params"]) if g is None else g))
            loss, after = step.result
            tracked = {p.name: ("track", after[p.name]) for p in step.hooks["track"]} | {n: ("gradient", new) for n, new in noted.items()}
            for name, (hook, new) in tracked.items():
                returned.check_form(name, hook, new, slot.scratch.get(name, {}), "the tensors that 'init_scratch' declares", copied=True)
                if new:
                    slot.track(name, new)
            if slot.watch and step.first.trace is not None:
                slot.watched.index_copy_(0, slot.counter, step.first.trace.before[slot.watch].detach().mean(0)[None])
            record(loss, slot.losses, slot.counter)
            if descends is not None:
                descends.end()
        return step

    def _update(self, step: Step, g: Flat) -> None:
        """Parameters by a gradient in float32, and personal tensors by theirs."""
        slot, params = step.slot, step.model["params"]
        slot.settle()
        if step.own and optimiser.is_plain(self.policy) and slot.lr.is_cuda:         # all of them in one launch
            optimiser.descend([*(params[k] for k in g), *step.own], [*g.values(), *step.own_grads], slot.lr)
        else:
            optimiser.update(self.policy, params, g, slot.optimiser[step.phase.name], slot.lr)
            optimiser.descend(step.own, step.own_grads, slot.lr)
        self.network.forget(params[k] for k in g)

    @contextmanager
    def recording(self, slot: Slot) -> Iterator[None]:
        """Around steps that are recorded one after another, to be played again."""
        self.network.forget()
        try:
            with slot.handing_on():
                yield
        finally:
            self.network.forget()

    def begin(self, slot: Slot, phase: Phase) -> None:
        """Only what this phase trains (or its adversaries train) records a graph."""
        apart = [p.name for hook in OWN_STEPS for p in self.hooks[phase.name][hook]]
        prefixes = tuple(name + "." for name in apart)
        for k, p in slot.model_of(phase)["params"].items():
            p.requires_grad_(k in self.trains[phase.name] or k.startswith(prefixes))
        for name in (*self.personal[phase.name], *(n for n in apart if n in slot.personal)):
            tree.map(lambda t: t.requires_grad_(), slot.personal[name])
