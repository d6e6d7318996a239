"""What is measured: a federation as it stands, its data, its records, and a run to compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import rng
from ..core.federation import Federation
from ..core.part import Model
from ..core.population import RowTable
from ..core.samples import steps_in
from ..data import FederatedData
from ..errors import ConfigError, ConsilienceError, did_you_mean
from .gather import Answers, Asked, gather
from .local_training import Trained, train_all, watch_client

T = TypeVar("T")

ROWS = ("auto", "test", "validation", "train", "global")
MODELS = ("auto", "global", "personalised")
TRAINING = ("before", "after")
HELD_OUT = "held_out"          # rows of clients that take no part; the global model alone can be asked about them
HALF = "half"                  # in place of a client's name


class OutOfTime(ConsilienceError):
    """The time allowed was up before a measure had ended."""


class Halfway(dict[str, Any]):
    """What a long measure has found so far. Whoever can keep it overrides `save`, and the measure goes on from there another time."""

    def save(self) -> None: ...


@dataclass(frozen=True)
class Reference:
    """Another run's records, to compare with."""

    method: str
    seed: int
    split_hash: str
    records: Sequence[dict[str, Any]]

    def about(self) -> dict[str, Any]:
        return {"method": self.method, "seed": self.seed}


class Subject:
    """Gathers what measures ask for, each thing once. Nothing here changes the federation."""

    def __init__(self, fed: Federation, data: FederatedData, records: Sequence[dict[str, Any]] = (), reference: Reference | None = None,
                 clients: Sequence[int] | None = None) -> None:
        """`clients`: who is looked at where they are too many; nobody else then has samples in `data`."""
        self.fed, self.data, self.records, self.reference, self.clients = fed, data, records, reference, clients
        self.tell: Callable[[str, int, int], None] = lambda what, done, of: None        # whoever measures puts a listener here
        self.halfway = Halfway()
        self._memo: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What `compute` gives, computed once however many measures ask."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def key(self, *words: str | int) -> Tensor:
        """A key for a measure's draws; the same for every method and round of one seed, so that numbers can be compared."""
        return rng.key(self.fed.policy.seed, "measure", *words)

    @property
    def names(self) -> tuple[str, ...]:
        return self.data.table.names

    def number(self, owner: int) -> int:
        """A client's number in the federation, which has one only where data are pooled."""
        return 0 if self.fed.pooled else owner

    @cached_property
    def trained(self) -> Trained:
        """Every client looked at after the next round's local training."""
        return train_all(self.fed, lambda done, of: self.tell("local training", done, of), None if self.fed.pooled else self.clients)

    # ---- samples -----------------------------------------------------------------------------------------------------

    def choose_rows(self, rows: str, first: str = "test") -> str:
        """What "auto" means: `first` (clients' test samples, or the global test set), else the other of the two."""
        if rows != "auto":
            return rows
        order = ("test", "global") if first == "test" else ("global", "test")
        return next((r for r in order if self.count(r)), first)

    def rows(self, rows: str) -> Sequence[Tensor]:
        """The rows of every client; the same for all where they are the global test set."""
        if rows == "global":
            return [self.data.test] * len(self.data.clients)
        table = self.data.table
        return {"test": table.test, "validation": table.val, "train": table.train}[rows]

    def count(self, rows: str) -> int:
        return len(self.everything(rows))

    def no_rows(self, rows: str) -> str | None:
        """Why there is nothing to measure on, or None."""
        if self.count(rows):
            return None
        what = "there is no global test set" if rows == "global" else f"no client has {rows} samples"
        there = [r for r in ("test", "global", "validation", "train") if self.count(r)]
        return f"{what}. Set rows={there[0]}" if there else what

    def everything(self, rows: str) -> Tensor:
        """All rows once."""
        held = self.rows(rows) if rows != "global" else None
        return held.rows if isinstance(held, RowTable) else self.data.test

    def present(self, owner: int) -> set[int]:
        """Classes among a client's training samples."""
        return set(self.data.y[self.data.clients[owner].train].unique().tolist())

    # ---- models --------------------------------------------------------------------------------------------------------

    def choose_model(self, model: str, training: str = "before") -> str:
        """What "auto" means: the global model where there is one (after local training: models without personal tensors)."""
        if model != "auto":
            return model
        return "global" if self.fed.no_global_model is None or training == "after" else "personalised"

    def no_model(self, model: str, training: str = "before") -> str | None:
        if model == "global" and training == "before" and self.fed.no_global_model:
            return f"{self.fed.no_global_model}. Set model=personalised"
        return None

    def described(self, model: str, training: str, rows: str) -> str:
        """What an answer is an answer of."""
        who = {("global", "before"): "the global model", ("global", "after"): "clients' models, personal tensors left out,",
               ("personalised", "before"): "the models clients are served by",
               ("personalised", "after"): "the models clients are served by,"}[model, training]
        when = "after the next round's local training" if training == "after" else (
            self.fed.personal_scoring if model == "personalised" and self.fed.personal else "after aggregation, before local training")
        where = {"global": "the global test set", HELD_OUT: "clients that take no part"}.get(rows, f"clients' own {rows} samples")
        return f"{who} {when}, on {where}"

    def model_of(self, owner: int, model: str, training: str) -> tuple[int, Any, Model, bool]:
        """(number, state, model, taps) for a client."""
        fed, number = self.fed, self.number(owner)
        state = fed.client(number)
        if training == "after" and number in self.trained.outcomes:
            outcome = self.trained.outcomes[number]
            if model == "global":
                return number, outcome.state, outcome.model, False
            return number, outcome.state, *fed.served(number, outcome.state, outcome.model)
        if model == "global":
            # a client that made no step holds what it received
            return number, state, fed.model if training == "before" else fed.received(state), False
        return number, state, *fed.personal_model(number)

    def answers(self, model: str, training: str, rows: str, point: str = "logits") -> Answers:
        """What the models answer. One global model asked about the global test set answers once, for owner −1."""
        return self.once(("answers", model, training, rows, point), lambda: self._ask(model, training, rows, point))

    def know(self, model: str, rows: str, answers: Answers) -> None:
        """What models answered before local training, where somebody has asked them already."""
        self._memo["answers", model, "before", rows, "logits"] = answers

    def _ask(self, model: str, training: str, rows: str, point: str) -> Answers:
        if model == "global" and training == "before":
            each = [self.data.test] if rows == "global" else self.data.held_out_rows if rows == HELD_OUT else self.rows(rows)
            owner = torch.repeat_interleave(torch.arange(len(each)), torch.tensor([len(own) for own in each]))
            # one client's rows behind another's, as in the scores of a round: outputs depend on the batch in their last bits
            said = gather(self.fed, [Asked(0, self.fed.client(0), self.fed.model, False, torch.cat(list(each)), -1)], point)
            return said if rows == "global" else dataclasses.replace(said, owner=owner)

        def asked() -> Any:
            for owner, own in enumerate(self.rows(rows)):
                if len(own):
                    number, state, held, taps = self.model_of(owner, model, training)
                    yield Asked(number, state, held, taps, own, owner)
                    self.tell("asking models", owner + 1, len(self.data.clients))
        return gather(self.fed, asked(), point)

    # ---- one client --------------------------------------------------------------------------------------------------

    def choose_client(self, name: str) -> int:
        """A client by name. Without one, or by "half", that whose training samples cover nearest to half of the classes (LfD's choice);
        of equals the first in the order of the data's clients."""
        if name and (name != HALF or HALF in self.names):
            if name not in self.names:
                raise ConfigError(f"There is no client {name!r}.{did_you_mean(name, self.names)}")
            owner = self.names.index(name)
            if not self.fed.trains(self.number(owner)):
                raise ConfigError(f"The client {name!r} has too few samples for a batch, so it never trains.")
            return owner
        able = [i for i in (range(len(self.names)) if self.clients is None else self.clients) if self.fed.trains(self.number(i))]
        return min(able, key=lambda i: (abs(len(self.present(i)) - self.data.classes / 2), i))

    def local_path(self, owner: int, rows: str, point: str, looks: int, samples: int) -> list[tuple[int, Tensor, Tensor]]:
        """(step, logits, values at the point) along a client's local training, on samples drawn once; step 0 is what it received."""
        def walk() -> list[tuple[int, Tensor, Tensor]]:
            number = self.number(owner)
            state, every = self.fed.client(number), self.everything(rows)
            drawn = every[rng.permutation(self.key("path", rows), len(every))[:samples]]
            total = steps_in(self.fed.samples.schedule(number, self.fed.phases))
            seen: list[tuple[int, Tensor, Tensor]] = []

            def show(step: int, of: int, model: Model) -> None:
                said = gather(self.fed, [Asked(number, state, model, False, drawn, owner)], point)
                seen.append((step, said.logits, said.values))
                self.tell(f"local training of {self.names[owner]}", step, of)
            watch_client(self.fed, number, max(1, round(total / looks)), show, None if self.fed.pooled else self.clients)
            return seen
        return self.once(("path", owner, rows, point, looks, samples), walk)
