"""What happens on one client in a round: load, train, finish. Pure towards the federation; writes only to its slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import ConfigError
from ..tree import Tree
from .network import Trace
from .part import TASK_HOOKS, Model, Part, Phase
from .recall import answers
from .returned import check_state, released, start, tensors, two
from .samples import Schedule, steps_in
from .slot import Slot

if TYPE_CHECKING:
    from .federation import Federation


@dataclass(frozen=True)
class ClientState:
    """What a client holds between rounds."""

    tensors: Tree                 # homes: kept, personal, local, previous, own, optimiser
    first: bool = True            # it has not taken part yet
    seen: int = -1                # the federation's clock when it last received something
    own_round: int = 0            # round in which `own`, its model between two exchanges, was trained


class Outcome(NamedTuple):
    """What one client's round leaves behind; all of it copies."""

    state: ClientState
    uploads: dict[str, Tree]
    model: Model                  # as it leaves the client, and what does not travel
    losses: Tensor                # one per step


_THERE = {"previous": "for parts that declare `previous = True`", "download": "in the hook 'receive' only",
          **dict.fromkeys(("model", "scratch", "steps", "path", "moves", "losses"), "in the hook 'finish' only"),
          **dict.fromkeys(("moving", "expected", "secret"), "in the hook 'release' only")}


class ClientView:
    """What a part may read on a client outside its steps."""

    previous: Model               # as it was last trained, at first the initial one; where a part declares `previous`
    model: Model                  # as trained; in `finish` only
    scratch: Tree                 # in `finish` only
    download: Tree                # what `deliver` sent; in `receive` only
    steps: int                    # of the model that travels; in `finish` only
    path: dict[str, float]        # key -> momentum-aware length of the path walked; in `finish` only
    moves: dict[str, int]         # key -> steps that trained it; in `finish` only
    losses: Tensor                # training loss of each of those steps; in `finish` only
    moving: list[str]             # keys of the model that are about to be uploaded; in `release` only
    expected: int                 # clients whose uploads are to be put together, as far as settings tell; in `release` only
    secret: bytes                 # the site's own entropy for noise, empty in a simulation; in `release` only

    def __init__(self, fed: Federation, number: int, part: Part, received: Model, state: ClientState, stage: str,
                 cohort: list[int], **more: Any) -> None:
        self._fed, self._state, self._part, self._stage = fed, state, part, stage
        self.id, self.received, self.first, self.cohort = number, received, state.first, cohort
        self.shared: Tree = fed.shared.get(part.name, {})
        self.kept: Tree = state.tensors["kept"].get(part.name, {})
        self.personal: Tree = state.tensors["personal"].get(part.name, {})
        self.round, self.spec = fed.round_number, fed.spec
        self.common_key = rng.key(fed.policy.seed, part.name, stage, fed.round_number)    # the same on every client
        self.key = rng.key(self.common_key, number)
        if state.tensors["previous"]:
            self.previous = state.tensors["previous"]
        self.__dict__.update(more)

    def __getattr__(self, name: str) -> Any:             # asked for what was not found alone
        if name in _THERE:
            raise AttributeError(f"c.{name} is there {_THERE[name]}")
        return object.__getattribute__(self, name)       # says what is wrong, inside a property too

    @property
    def size(self) -> int:
        """Number of training samples."""
        return self._fed.samples.size_of(self.id)

    @property
    def schedule(self) -> Schedule:
        """The batches of its round, as (phase, sizes) one after another; empty where it cannot make one."""
        return self._fed.samples.schedule(self.id, self._fed.phases)

    @property
    def epoch_steps(self) -> int:
        """Steps of one epoch over them."""
        return self._fed.samples.steps_for(self.size, [Phase("epoch", (), epochs=1)])

    def batches(self, reserved: bool = False, augmented: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """The client's training samples (or those held back), in order, transformed as in evaluation, or `augmented` as in training. On
        a GPU small samples come in larger batches than those of evaluation, for launching a pass takes longer than the pass.
        """
        rows, key = self._fed.samples.rows[self.id], rng.key(self.key, "augment") if augmented else None
        yield from self._fed.samples.batches(rows.reserved if reserved else rows.train, joined=True, key=key)

    def take(self, index: Tensor) -> Tensor:
        """Inputs of the client's training samples number `index`, any shape, transformed as in evaluation."""
        return self.take_both(index)[0]

    def take_both(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The same with their labels."""
        rows = self._fed.samples.rows[self.id].train[index.flatten().to("cpu")]
        x, y = self._fed.samples.inputs(rows)
        return x.reshape(*index.shape, *x.shape[1:]), y.reshape(*index.shape, *y.shape[1:])

    def labels(self) -> Tensor:
        samples = self._fed.samples
        return samples.y[tree.to(samples.rows[self.id].train, samples.device)]

    def forward(self, model: Model, x: Tensor, train: bool = False, taps: bool = False, learn: bool = False) -> Trace:
        """A forward pass outside training. Gradients reach x and the model where it is to `learn`, and nothing else."""
        if train and taps:
            self._refuse_circle("a training pass with taps", "tap")
        return self._fed.look(self.id, self._state, model, x, train, taps, learn)

    def apply(self, name: str, x: Tensor, model: Model, train: bool = False) -> Tensor:
        """One submodule (the head, an attached module) of a model. Gradients reach x and the model where they are enabled
        (`torch.enable_grad()`).
        """
        return self._fed.program.network.apply(model, name, x, train)

    def train(self, model: Model, epochs: int = 1, steps: int | None = None, pace: float = 1.0) -> Model:
        """The model after plain local training: the task alone, no added terms. It ends after `steps` where they are given, and has
        `pace` times the run's learning rate.
        """
        self._refuse_circle("plain training", *TASK_HOOKS)
        return self._fed.train_plainly(self.id, self._state, model, epochs, steps=steps, pace=pace)[0]

    def train_watching(self, model: Model, point: str, epochs: int = 1) -> Tensor:
        """Plain local training; the mean over the batch at a point, as each step's forward pass showed it."""
        self._refuse_circle("plain training", *TASK_HOOKS)
        return self._fed.train_plainly(self.id, self._state, model, epochs, point)[1]

    def _refuse_circle(self, what: str, *hooks: str) -> None:
        """Scratch cannot come of what begins with that very scratch."""
        there = self._fed.program.hooks[self._fed.phases[0].name]
        acting = [hook for hook in hooks if self._stage == "init_scratch" and self._part in there[hook]]
        if acting:
            raise ConfigError(f"The hook 'init_scratch' of part {self._part.name!r} asks for {what}, in which the part's hook "
                              f"{acting[0]!r} finds what 'init_scratch' returns. Ask for it in 'receive', which may return scratch too.")


class LocalWork:
    """One client's training in three acts, so that an engine may interleave several clients.

    `load` fills a slot, the engine runs `schedule`, `finish` says what comes out.
    """

    kind = "round"

    def __init__(self, fed: Federation, number: int, state: ClientState, cohort: list[int], download: dict[str, Tree]) -> None:
        self.fed, self.number, self.state, self.cohort, self.download = fed, number, state, cohort, download
        self.schedule = fed.samples.schedule(number, fed.phases)

    def _view(self, part: Part, stage: str, received: Model, **more: Any) -> ClientView:
        return ClientView(self.fed, self.number, part, received, self.state, stage, self.cohort, **more)

    @property
    def steps(self) -> int:
        """How many it makes, in all phases."""
        return steps_in(self.schedule)

    def load(self, slot: Slot) -> None:
        fed = self.fed
        places = fed.samples.places(self.number, fed.round_number, self.schedule)    # here, for it may run in another process
        received: Model = fed.received(self.state, copied=False)            # the slot copies it
        scratch: Tree = {}
        for part in fed.method.using("receive"):
            view = self._view(part, "receive", received, download=self.download.get(part.name, {}))
            params, scratch[part.name] = start(part, part.receive(view), received["params"])
            received = {**received, "params": params}
        for part in fed.method.using("init_scratch"):
            own = tensors(part, "init_scratch", part.init_scratch(self._view(part, "init_scratch", received)))
            scratch[part.name] = {**scratch.get(part.name, {}), **own}             # beside what its `receive` made
        homes = self.state.tensors
        slot.load(model=received, received=received, previous=homes["previous"], shared=fed.shared, kept=homes["kept"],
                  personal=homes["personal"], scratch=scratch, optimiser=homes["optimiser"] or fed.still,
                  index=fed.samples.rows_at(self.number, places), plan=fed.plans(self.number, self.schedule, self.kind),
                  **fed.scalars(self.number, self.state, self.kind))
        if fed.recalled:
            slot.load(places=places, answers=answers(fed, self.number, {name: getattr(slot, name) for name in fed.recalled}))

    def finish(self, slot: Slot) -> Outcome:
        fed, homes = self.fed, self.state.tensors
        finishing = fed.method.using("finish")
        lengths, losses = (self.path(), self._losses_of_the_model(slot)) if finishing else ({}, slot.losses)
        moves = self.moves() if finishing else {}
        uploads: dict[str, Tree] = {}
        kept = dict(homes["kept"])
        received = slot.received
        for part in finishing:
            view = self._view(part, "finish", received, model=slot.model, scratch=slot.scratch.get(part.name, {}),
                              steps=len(losses), path=lengths, moves=moves, losses=losses)
            new, upload = two(part, "finish", part.finish(view), "what it keeps (c.kept)", "what it uploads ({} for nothing)")
            uploads[part.name] = tensors(part, "finish", upload, "uploads")
            if new:
                check_state(part, "finish", new, kept.get(part.name, {}), "kept")
                kept[part.name] = new
        model: Model = slot.model
        if fed.method.using("release"):
            uploads, model = release(fed, self.number, self.state, self.cohort, "finish", uploads, model, fed.models_travel)
        flat = {k: v for half in slot.model.values() for k, v in half.items()}
        after = {"kept": kept, "personal": slot.personal, "local": {k: flat[k] for k in homes["local"]},
                 "previous": slot.model if homes["previous"] else {}, "own": slot.model if homes["own"] else {},
                 "optimiser": slot.optimiser if homes["optimiser"] else {}}
        state = replace(self.state, tensors=tree.clone(after), first=False, own_round=fed.round_number)
        copies = tree.clone({"uploads": uploads, "model": model, "losses": slot.losses[: self.steps]})
        return Outcome(state, copies["uploads"], copies["model"], copies["losses"])

    def _losses_of_the_model(self, slot: Slot) -> Tensor:
        """Loss of each step that trained the model that travels, not a part's second one. Slices, for the host would wait
        until a list of step numbers has reached a GPU.
        """
        ends = accumulate(len(sizes) for _, sizes in self.schedule)
        return torch.cat([slot.losses[end - len(sizes): end] for (phase, sizes), end in zip(self.schedule, ends)
                          if phase.model == "model"] or [slot.losses[:0]])

    def path(self) -> dict[str, float]:
        """key -> length of the path a constant unit gradient would have walked (METHODS.md 7.4)."""
        lengths: dict[str, float] = {}
        lr = self.fed.policy.lr_at(self.fed.round_number)
        for phase, sizes in self.schedule:
            if phase.model == "model":
                for k in phase.keys:
                    lengths[k] = lengths.get(k, 0.0) + self.fed.policy.path_length(len(sizes), lr)
        return lengths

    def moves(self) -> dict[str, int]:
        """key -> steps of the phases that train it; FedRep's head and base have different numbers."""
        steps: dict[str, int] = {}
        for phase, sizes in self.schedule:
            if phase.model == "model":
                for k in phase.keys:
                    steps[k] = steps.get(k, 0) + len(sizes)
        return steps


class PlainWork:
    """Plain local training of a given model: the task alone. What parts ask for with `c.train`.

    Hooks that define the task act here too, and find their scratch as it is at the beginning of a round.
    """

    def __init__(self, fed: Federation, number: int, state: ClientState, model: Model, epochs: int, watch: str, steps: int | None,
                 pace: float) -> None:
        self.fed, self.number, self.state, self.model, self.watch, self.pace = fed, number, state, model, watch, pace
        self.kind = f"plain{epochs}{watch}" if steps is None else f"plain{epochs}{watch}:{steps}"
        self.schedule = [(phase, sizes[:steps]) for phase, sizes in fed.samples.schedule(number, [replace(fed.plain_phase, epochs=epochs)])]
        self.index = fed.samples.order(number, fed.round_number, self.schedule)

    def load(self, slot: Slot) -> None:
        fed, state = self.fed, self.state
        homes, numbers = state.tensors, fed.scalars(self.number, state, self.kind)
        hooks = fed.program.hooks[fed.plain_phase.name]
        acting = [*hooks["batch"], *hooks["main_loss"]]
        if self.watch and not slot.watch:
            slot.watch_point(self.watch, fed.spec.shapes[self.watch])
        slot.load(model=self.model, received=self.model, previous=homes["previous"], shared=fed.shared, kept=homes["kept"],
                  personal=homes["personal"], scratch=fed.first_scratch(self.number, state, self.model, acting),
                  optimiser=fed.still, index=self.index,
                  plan=fed.plans(self.number, self.schedule, self.kind), **(numbers | {"lr": self.pace * numbers["lr"]}))

    def finish(self, slot: Slot) -> tuple[Model, Tensor]:
        steps = steps_in(self.schedule)
        return tree.clone(slot.model), (slot.watched[:steps].clone() if self.watch else slot.losses[:steps].clone())


def release(fed: Federation, number: int, state: ClientState, cohort: list[int], what: str, uploads: dict[str, Tree], model: Model,
            travels: bool) -> tuple[dict[str, Tree], Model]:
    """What leaves the client at once, as the parts that guard it let it go. They see it beside the server's model."""
    expected = fed.size if what.startswith("prepare") else fed.policy.cohort_size(fed.size)
    for part in fed.method.using("release"):
        view = ClientView(fed, number, part, fed.model, state, what, cohort, moving=fed.moving if travels else [], expected=expected,
                          secret=fed.secret)
        uploads, model = released(part, part.release(view, uploads, model), uploads, model)
    return uploads, model


def consult(fed: Federation, number: int, common: tuple[str, str, list[int]], own: Any) -> Tree:
    """What a part uploads when it looks at a client's data before training: its hook `stage` on one client."""
    name, stage, cohort = common
    part = next(p for p in fed.method.parts if p.name == name)
    state = fed.client(number)
    received = fed.received(state, copied=False)          # parts only read it, and what they upload is copied below
    upload = tensors(part, stage, getattr(part, stage)(ClientView(fed, number, part, received, state, stage, cohort)), "uploads")
    if upload and fed.method.using("release"):
        upload = release(fed, number, state, cohort, f"{stage} {name}", {name: upload}, fed.model, False)[0][name]
    return tree.clone(upload)


def train_client(fed: Federation, number: int, cohort: list[int], download: dict[str, Tree]) -> Outcome:
    """A client's whole round of local work."""
    with torch.enable_grad():
        return next(iter(fed.engine.run([LocalWork(fed, number, fed.client(number), cohort, download)])))
