"""The engine of a real federation: clients are sites, asked through a roster. The round itself is the core's, as in simulation.

The server never has a client's state. What it notes of a site is in which round it was last accepted and what it has seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ... import tree
from ...core.client import LocalWork, Outcome, consult
from ...core.engine import ClientTask, Work
from ...core.federation import Federation
from ...errors import ConfigError
from .checks import Expected, check_loss
from .parcel import Parcel, Raw
from .roster import Roster, TooFewAnswers


class Remote:
    """Sends work to sites and reads their answers. None stands for a site that gave none, or a wrong one."""

    def __init__(self, fed: Federation, roster: Roster, expected: Expected) -> None:
        self.fed, self.roster, self.expected = fed, roster, expected
        self.least = 1

    def begin(self, cohort: Sequence[int]) -> None:
        """Before a round: how many of its sites must answer. Those that cannot fill a batch are not asked."""
        fed = self.fed
        active = [i for i in cohort if fed.trains(i)]
        self.least = max(1, min(self.roster.settings.least, len(active)))

    def run(self, works: Iterable[Work]) -> Iterator[Outcome | None]:
        fed, local = self.fed, [w for w in works if isinstance(w, LocalWork)]
        template = self.expected.trained(fed.models_travel)
        downloads = {w.number: {path: Raw.of(leaf) for path, leaf in tree.paths(w.download)} for w in local}

        def read(number: int, answer: Parcel) -> Outcome:
            loss = check_loss(answer.about)
            got = self.expected.read(answer, template)
            new = {half: {k: got["model"].get(k, old) for k, old in flat.items()} for half, flat in fed.model.items()}
            state = replace(fed.client(number), first=False, own_round=fed.round_number)
            return Outcome(state, got["uploads"], new, torch.tensor([loss]))

        cohort = local[0].cohort if local else []
        answers = self.roster.ask(fed, "train", [w.number for w in local], read, downloads=downloads, least=self.least,
                                  cohort=cohort)
        self._need(answers, "in training", self.least)
        yield from (answers.get(w.number) for w in local)

    def map(self, fed: Federation, task: ClientTask, numbers: Sequence[int], common: Any, given: Sequence[Any]) -> Iterator[Any]:
        if task is not consult:
            raise ConfigError("Sites of a federation can be asked to prepare, survey, train and score; nothing else leaves the server.")
        part, stage, cohort = common

        def read(number: int, answer: Parcel) -> tree.Tree:
            template = self.expected.consulted(part, stage, fed.round_number, cohort, number)
            return self.expected.read(answer, template)

        answers = self.roster.ask(fed, "consult", list(numbers), read, least=self.least, part=part, stage=stage, cohort=cohort)
        there = [n for n in numbers if n in self.roster.present]      # a part may ask sites of an earlier round, which may be gone
        self._need(answers, f"when {part} asked before training", len(there))
        yield from (answers.get(number) for number in numbers)

    def _need(self, answered: dict[int, Any], when: str, of: int) -> None:
        least = min(self.least, of)
        if len(answered) < least:
            raise TooFewAnswers(f"Round {self.fed.round_number}: {len(answered)} sites answered {when}; at least {least} are needed.")
