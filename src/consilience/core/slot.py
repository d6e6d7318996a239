"""A slot: all tensors of the client in training, at addresses that never change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..tree import Tree
from .part import Model, Phase
from .returned import check_form

_STEPS = ("index", "plan", "places")      # one row per step: a client may have fewer steps than there is room for
_SAMPLES = ("answers",)                     # one row per training sample, likewise


def _nothing(steps: int) -> None:
    """No weight is behind."""


def known_one(device: torch.device) -> Tensor:
    """A 1 that the way back from a loss may start from: nothing to multiply by, and known without looking."""
    one = torch.ones((), device=device)
    one.always_one = True           # type: ignore[attr-defined]
    return one


class Slot:
    """The engine owns it: loading copies in, steps write in place, and what leaves is cloned."""

    model: Model
    received: Model
    previous: Tree
    shared: Tree
    kept: Tree
    personal: Tree
    scratch: Tree
    optimiser: Tree
    index: Tensor                 # rows of each step's samples
    places: Tensor                # the same samples by their number among the client's own, where `answers` are looked up
    answers: Tree                 # what frozen models show of those, name by name (core/recall.py)
    plan: Tree
    lr: Tensor
    round: Tensor
    first: Tensor
    client: Tensor
    key: Tensor

    def __init__(self, x: Tensor, y: Tensor, room: int, samples: int = 0) -> None:
        """With room for so many steps, and for answers on so many samples."""
        self.x, self.y, self.room, self.samples = x, y, max(room, 1), samples
        self.counter = torch.zeros(1, dtype=torch.int64, device=x.device)
        self.losses = torch.zeros(self.room, device=x.device)
        # a CPU has no launch to save, and for a 1 that is given PyTorch imports SymPy, a quarter of a second in every process
        self._one = None if x.device.type == "cpu" else known_one(x.device)
        self.watch = ""                       # a point whose batch means are recorded, step by step, in `watched`
        self.watched = torch.zeros(0, device=x.device)
        self._own: set[int] | None = None     # while steps hand on what they tracked: the memory that the slot's tensors lie in
        self._asked = 0                       # numbers in tables since a rehearsal began
        self._rooms: list[Tensor] = []        # for tables of recorded steps; they live as long as these may
        self._tables: list[tuple[Tensor, Tensor]] = []        # still to be filled, and with what
        self._behind = 0                      # steps that some weights have not made yet
        self._catch_up: Callable[[int], None] = _nothing      # makes them

    def one_for(self, loss: Tensor) -> Tensor | None:
        """Where the way back from a loss starts: a 1 that is there already; None lets autograd make its own."""
        one = self._one
        return one if one is not None and (loss.dtype, loss.shape, loss.device) == (one.dtype, one.shape, one.device) else None

    def watch_point(self, point: str, shape: tuple[int, ...]) -> None:
        self.watch, self.watched = point, torch.zeros((self.room, *shape), device=self.x.device)

    @torch.no_grad()
    def load(self, **trees: Any) -> None:
        """Copy trees in; names are attributes. The first load fixes addresses and shapes."""
        self.counter.zero_()
        pairs: list[tuple[Tensor, Tensor]] = []              # copied all at once
        for name, value in trees.items():
            if name in (*_STEPS, *_SAMPLES):
                room = self.room if name in _STEPS else self.samples
                if not hasattr(self, name):
                    setattr(self, name, tree.map(lambda t, room=room: t.new_zeros((room, *t.shape[1:])).to(self.x.device), value))
                self._check_form(name, value)
                pairs += [(home[: len(rows)], rows) for home, rows in tree.matched(getattr(self, name), value)]
            elif not hasattr(self, name):
                setattr(self, name, tree.map(lambda t: t.detach().to(self.x.device, copy=True), value))
            else:
                self._check_form(name, value)
                pairs += tree.matched(getattr(self, name), value)
        tree.copy_pairs(pairs)

    def _check_form(self, name: str, value: Any) -> None:
        """Refuse scratch and draws that have another form on one client than on another: they share a place in memory."""
        if hook := {"scratch": "init_scratch", "plan": "plan"}.get(name):
            one = (lambda tensors: tree.map(lambda t: t[0], tensors)) if name in _STEPS else (lambda tensors: tensors)
            for part, own in value.items():
                check_form(part, hook, one(own), one(getattr(self, name)[part]),
                           "tensors of the same names, shapes and types on every client", types=True)

    @contextmanager
    def handing_on(self) -> Iterator[None]:
        """For steps that are recorded one after another: what one tracked is handed to the next, and after the last copied to where it
        lies. A copy in every step would be one more kernel in each.
        """
        homes = [home for home in vars(self).values() if isinstance(home, (dict, Tensor))]
        fixed, self._own = self.scratch, {t.untyped_storage().data_ptr() for home in homes for t in tree.leaves(home)}
        try:
            yield
            self.settle()
            tree.copy_pairs((to, t) for to, t in tree.matched(fixed, self.scratch) if to is not t)
        finally:
            self.scratch, self._own, self._behind, self._catch_up = fixed, None, 0, _nothing

    @property
    def hands_on(self) -> bool:
        """Whether steps are being recorded, so that a later one may find what an earlier one left."""
        return self._own is not None

    def put_off(self, catch_up: Callable[[int], None]) -> None:
        """One more step that `catch_up` will make, together with others, for weights that no pass looks at; at once outside a recording."""
        self._behind, self._catch_up = self._behind + 1, catch_up
        if not self.hands_on:
            self.settle()

    def settle(self) -> None:
        """Make the steps that were put off. To be called before anybody looks at all weights."""
        steps, catch_up = self._behind, self._catch_up
        self._behind, self._catch_up = 0, _nothing
        if steps:
            catch_up(steps)

    def table(self, host: Tensor) -> Tensor:
        """Numbers on the device. While steps are recorded nothing can be copied from the host: `fill_tables` does that afterwards."""
        room = len(host) + len(host) % 2      # the next one begins at 16 bytes too
        if not (self.x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._asked += room
            return host.pin_memory().to(self.x.device, non_blocking=True) if self.x.is_cuda else host
        if len(self._rooms[-1]) < room:       # a kernel would read beyond its table; the engine takes this for steps it cannot record
            raise RuntimeError("a recorded step asks for larger tables than the steps before the recording")
        table, self._rooms[-1] = self._rooms[-1][: len(host)], self._rooms[-1][room:]
        self._tables.append((table, host))
        return table

    def rehearse(self) -> None:
        """Steps begin that are made as they will be recorded."""
        self._asked = 0
        self._tables.clear()                  # of a recording that broke off

    def reserve(self, steps: int) -> None:
        """Room for the tables of that many recorded steps. What a recording allocates itself does not last: others may use it again."""
        self._rooms.append(torch.empty(self._asked * steps, dtype=torch.int64, device=self.x.device))

    def fill_tables(self) -> None:
        """When a recording is over, and before it is played."""
        for table, host in self._tables:
            table.copy_(host)
        self._tables.clear()

    def track(self, name: str, new: Tree) -> None:
        """What a part tracked in a step becomes its scratch."""
        old = self.scratch[name]
        if self._own is None:
            changed = [(to, t) for to, t in tree.matched(old, new) if to is not t]
            written = {to.untyped_storage().data_ptr() for to, _ in changed}
            # what reads memory that another leaf is written to is read first, as one step's value that becomes the next one's "before"
            tree.copy_pairs((to, t.clone() if t.untyped_storage().data_ptr() in written else t) for to, t in changed)
        elif all(self._lasts(t, before) for before, t in tree.matched(old, new)):
            self.scratch = {**self.scratch, name: tree.map(lambda t: t.detach() if t.requires_grad else t, new)}
        else:
            copies = tree.map(torch.empty_like, old)
            tree.copy_into(copies, new)
            self.scratch = {**self.scratch, name: copies}

    def _lasts(self, new: Tensor, old: Tensor) -> bool:
        """Whether a tensor can stand for the old one, and no later step writes to it."""
        return new is old or (new.dtype == old.dtype and new.shape == old.shape and new.stride() == old.stride()
                              and new.untyped_storage().data_ptr() not in (self._own or ()))

    def model_of(self, phase: Phase) -> Model:
        return self.personal[phase.model]["model"] if phase.model in self.personal else self.model

    def written(self) -> Tree:
        """What a step changes."""
        return {n: getattr(self, n) for n in ("model", "personal", "scratch", "optimiser", "counter", "losses", "watched")}
