"""The server's loop: enrol, then round after round of the core's federation, scored and recorded like a simulation.

Killed at any moment, it goes on from its last checkpoint when it is started again with the same folder; sites roll back to
the round that the checkpoint knows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ...core.federation import Federation
from ...core.population import RowTable
from ...core.samples import ClientRows
from ...metrics.criterion import measure_of, served_score
from ...runs.privacy import privacy_line
from ...runs.run import describe_round
from ...runs.scoring import NOT_SCORED, cautions_of
from .build import build_for_server, declaration, rehearse
from .checks import Expected
from .ledger import Ledger, server_folder
from .parcel import Parcel
from .remote import Remote
from .roster import Link, Roster, TooFewAnswers
from .scoring import read_scores, record_scores
from .settings import FederationSettings

log = logging.getLogger("consilience.federation")
LOOK_EVERY = 1.0               # seconds between two looks for sites that are awaited


class Server:
    """One run of a federation. `pause` and `now` are the clock, given by tests that have no time to wait."""

    def __init__(self, settings: FederationSettings, link: Link, *, pause: Callable[[float], None] = time.sleep,
                 now: Callable[[], float] = time.monotonic) -> None:
        self.settings, self.link, self.pause, self.now = settings, link, pause, now
        self.ledger = Ledger(server_folder(settings), settings)
        self.expected = Expected(rehearse(settings), settings.agreed.max_upload_mb)       # a method that cannot run is refused here

    def run(self) -> list[dict[str, Any]]:
        """All rounds; returns the records."""
        with self.ledger.locked():
            self.roster = Roster(self.settings, self.link, self.ledger.open(), declaration(self.expected.fed))
            self.roster.members = {m.number: m for m in self.ledger.members()}
            self._await_sites()
            self.fed = self._build()
            if not self.ledger.done:
                for message in cautions_of(self.expected.fed, self.settings.run.run.rounds):
                    log.warning("%s", message)
                self._rounds()
                self.ledger.finish(self.fed, "all rounds done")
            if told := self.ledger.records[-1].get("privacy"):
                log.info("Privacy: %s.", privacy_line(told))
            log.info("The federation is done: %d rounds. Its folder is %s.", self.fed.round_number, self.ledger.path)
        return self.ledger.records

    def _await_sites(self) -> None:
        agreed, least = self.settings.agreed, self.settings.least
        end, told = self.now() + agreed.wait, False
        while len(there := self.roster.refresh()) < agreed.sites and self.now() < end:
            if not told:
                log.info("Waiting up to %g s for the sites %s.", agreed.wait, [i for i in range(agreed.sites) if i not in there])
                told = True
            self.pause(min(LOOK_EVERY, max(end - self.now(), 0.0)))
        if len(there) < least:
            raise TooFewAnswers(f"{len(there)} of {agreed.sites} sites enrolled in {agreed.wait:g} s; at least {least} are needed. "
                                f"{self.roster.refusals} Are the SuperNodes running, with the right address and certificates?")
        if len(there) < agreed.sites:
            missing = [i for i in range(agreed.sites) if i not in there]
            log.warning("Beginning without the sites %s, which have not enrolled; they may join later.", missing)

    def _build(self) -> Federation:
        fed = build_for_server(self.settings, self.roster.sizes, self.roster.names)
        fed.engine = self.engine = Remote(fed, self.roster, self.expected)
        fed.secret = self.ledger.secret() if any(fed.method.using(hook) for hook in ("release", "publish")) else b""
        self.ledger.restore(fed)
        self.roster.accepted = lambda number: fed.client(number).own_round
        self.ledger.describe(fed, self.roster)
        if fed.round_number:
            log.info("Going on after round %d.", fed.round_number)
        return fed

    def _rounds(self) -> None:
        fed, run = self.fed, self.settings.run.run
        if not fed.prepared:
            self._once(self._prepare, "the preparation")
        while fed.round_number < run.rounds:
            self._once(self._round, f"round {fed.round_number + 1}")

    def _once(self, work: Callable[[], None], what: str) -> None:
        """Do it; where too few sites answer, wait and try again. Nothing of a failed attempt stays, here or at a site."""
        for attempt in range(self.settings.agreed.retries + 1):
            try:
                return work()
            except TooFewAnswers as error:
                if attempt == self.settings.agreed.retries:
                    raise TooFewAnswers(f"{str(error).rstrip('.')}. Tried {attempt + 1} times; what was done before is in "
                                        f"{str(self.ledger.path)!r}, and the same command resumes from there.") from None
                log.warning("%s is tried again in %g s: %s", what.capitalize(), self.settings.agreed.retry_pause, error)
                self.pause(self.settings.agreed.retry_pause)

    def _present(self) -> list[int]:
        """Sites that are there now. A newcomer's size is told to the federation."""
        there = self.roster.refresh()
        if len(there) < self.settings.least:
            raise TooFewAnswers(f"{len(there)} sites are reachable; at least {self.settings.least} are needed.")
        samples = self.fed.samples
        if samples.rows.table.sizes.tolist() != self.roster.sizes:
            samples.rows = ClientRows(RowTable.of([samples.rows.table.rows[:1].expand(n) for n in self.roster.sizes]),
                                      samples.rows.seed, samples.rows.share)
        return there

    def cohort(self, there: list[int]) -> list[int]:
        """The simulation's where all are there; where some are not, drawn or chosen in the same way among those that are."""
        return self.fed.cohort(self.fed.round_number + 1, there)

    def _prepare(self) -> None:
        start = self.now()
        there = self._present()
        self.engine.begin(there)
        self._note(0, there)
        self._keep(self.fed.prepare(), start, NOT_SCORED)

    def _round(self) -> None:
        fed, run, start = self.fed, self.settings.run.run, self.now()
        there = self._present()
        cohort = self.cohort(there)
        self.engine.begin(cohort)
        self._note(fed.round_number + 1, cohort)
        report = fed.round(cohort)
        due = report.number % run.eval_every == 0 or report.number == run.rounds
        scores = self._score() if due and report.exchanged else NOT_SCORED
        self._keep(report, start, {**scores, "absent": [self.roster.names[i] for i in range(fed.size) if i not in there]})

    def _note(self, round_number: int, asked: list[int]) -> None:
        """Who is asked, before anybody is. What a site sends is counted also where the round is done again without it."""
        if self.fed.method.using("account"):
            self.fed.asked_before = self.ledger.asked(round_number, [i for i in asked if self.fed.trains(i) or not round_number])

    def _score(self) -> dict[str, Any]:
        fed, roster, judge = self.fed, self.roster, self.settings.judge

        def read(number: int, answer: Parcel) -> dict[str, Any]:
            return read_scores(answer.about, fed, roster.members[number].sizes, judge is not None)
        answers = roster.ask(fed, "score", roster.present, read)
        return record_scores(fed, answers, roster.names, self.settings.run.run.criterion, judge[1] if judge else "")

    def _keep(self, report: Any, start: float, more: dict[str, Any]) -> None:
        names, roster = self.roster.names, self.roster
        record = describe_round(report, names) | more
        record["measured"] = {"seconds": round(self.now() - start, 3), "wire_up": roster.wire["up"], "wire_down": roster.wire["down"],
                              "sites": {names[i]: s for i, s in sorted(roster.seconds.items())}}
        roster.wire, roster.seconds = {"up": 0, "down": 0}, {}
        self.ledger.append(record)                       # first: a record without a checkpoint is cut and made again, the reverse is a gap
        self.ledger.checkpoint(self.fed, roster)
        log.info("Round %d: %d of %d sites answered, loss %s, %s %s.", record["round"], len(record["losses"]) or
                 len(record["cohort"]) - len(record["lost"]), len(record["cohort"]), _short(record["loss"]),
                 measure_of(record), _short(served_score(record)))


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
