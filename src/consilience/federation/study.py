"""`consilience federation study`: which method for our data? Several methods in turn over the real sites, tuned on their validation data.

Every run is an ordinary run of one app with other settings, so no data leave a site: what comes back are counts and sums over
validation and test rows. Runs are kept in a folder each; a study that was interrupted goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engines.flower.build import rehearse
from ..engines.flower.settings import FederationSettings
from ..errors import ConfigError
from ..metrics.criterion import measure_of, model_score, validation_score
from ..options import format_call
from ..parts.stack import parse_stack
from ..runs.entries import Entry, make_entries
from ..runs.scoring import cautions_of
from ..runs.tune import at, draw, space_of
from .commands import SuperLink
from .follow import Record, read_run, run_and_follow
from .launch import Launcher
from .processes import LaunchError

CANDIDATES = ("fedprox", "scaffold", "fedavg+dbe")
LEARNING_RATES = (0.01, 0.03, 0.1)
REFERENCES = ("local", "fedavg")


@dataclass(frozen=True)
class Trial:
    """One configuration of one method, as a run of the app with these settings."""

    method: str                              # as it was typed
    number: int
    point: Mapping[str, Any]                 # what the search chose
    overrides: Mapping[str, Any]

    @property
    def folder(self) -> str:
        name = "".join(ch if ch.isalnum() or ch in "+-_." else "-" for ch in self.method)
        return f"{name[:40]}-{hashlib.sha256(json.dumps(dict(self.overrides), sort_keys=True).encode()).hexdigest()[:10]}"


@dataclass
class Outcome:
    """What a trial gave: sums over the sites' rows, or why there is nothing."""

    trial: Trial
    validation: float | None = None
    loss: float | None = None
    accuracy: dict[str, float] = field(default_factory=dict)       # site -> on its test rows; the app's criterion, where that is another
    tests: dict[str, int] = field(default_factory=dict)            # site -> how many
    failure: str | None = None


class Listener:
    """Hears how a study goes on. Override what is needed."""

    def started(self, runs: int, rounds: int, done: int) -> None: ...
    def run_started(self, trial: Trial) -> None: ...
    def round_done(self, record: Record) -> None: ...
    def run_done(self, outcome: Outcome) -> None: ...
    def warned(self, message: str) -> None: ...


@dataclass
class Plan:
    """Which runs a study makes. The same for the same settings, so that finished runs are found again."""

    settings: FederationSettings
    entries: list[Entry]
    trials: list[Trial]
    spaces: dict[str, dict[str, list[Any]]]      # method -> what was searched
    budget: int
    remarks: list[str]


def make_plan(settings: FederationSettings, candidates: Sequence[str], *, budget: int = 3, rounds: int | None = None,
              learning_rates: Sequence[float] = LEARNING_RATES) -> Plan:
    """Local, FedAvg and the candidates, each with the same number of configurations; what cannot run is refused now."""
    if settings.run.settings:
        raise ConfigError(f"A study varies the method, so its app must not set a method's options ({', '.join(settings.run.settings)}). "
                          "Give them with the candidate, as in 'dbe(kappa=5)'.")
    if budget < 1:
        raise ConfigError(f"A study needs at least 1 configuration for every method. Got {budget} instead.")
    rounds = rounds or settings.run.run.rounds
    base = settings.run.replace(method="fedavg", rounds=rounds)
    entries, remarks = make_entries(["fedavg", *[c for c in candidates if c.strip() not in REFERENCES]], base)
    trials: list[Trial] = []
    spaces: dict[str, dict[str, list[Any]]] = {}
    for entry in entries:
        space = space_of(entry, base, learning_rates)
        points = draw(space, budget, settings.run.policy.seed, entry.method)
        spaces[entry.name] = {d.name: list(d.values) for d in space}
        for number, point in enumerate(points):
            chosen = at(entry, space, point)
            overrides = {"method": inline(chosen), "lr": chosen.values.get("lr", settings.run.policy.lr), "rounds": rounds,
                         "eval_every": rounds, "seed": settings.run.policy.seed}
            made = FederationSettings.make({**settings.flat(), **overrides})
            if number == 0:
                fed = rehearse(made)                            # model and method fit, or the error says why not
                remarks += [f"{entry.name}: {message}" for message in cautions_of(fed, rounds)]
            trials.append(Trial(entry.name, number, point, overrides))
    return Plan(settings, entries, trials, spaces, budget, remarks)


def inline(entry: Entry) -> str:
    """A method with its options in brackets: a run can override the method, not options that the app does not have."""
    parts = parse_stack(entry.method, entry.settings).parts
    text = "+".join(format_call(p.name, {f.name: getattr(p, f.name) for f in dataclasses.fields(p)  # type: ignore[arg-type]
                                         if getattr(p, f.name) != f.default}) for p in parts) or "fedavg"
    if parse_stack(text).parts != parts:
        raise ConfigError(f"The method {entry.name!r} with its options cannot be written in one line ({text}), as a study needs it.")
    return text


def run_study(plan: Plan, app: Path, out: Path, launcher: Launcher, link: SuperLink, listener: Listener | None = None) -> list[Outcome]:
    """All runs, one after another. A finished one is only read; one that fails is reported, and the others go on."""
    ear = listener or Listener()
    outcomes: list[Outcome] = []
    rounds = int(plan.trials[0].overrides["rounds"])
    done = sum((out / t.folder / "done").is_file() for t in plan.trials)
    ear.started(len(plan.trials), rounds, done)
    for trial in plan.trials:
        ear.run_started(trial)
        try:
            document = run_and_follow(launcher, link, app, out / trial.folder, trial.overrides, hear=ear.round_done, note=ear.warned,
                                      name=trial.folder)
            outcome = read_outcome(trial, document)
        except LaunchError as error:
            if "not approved" in str(error) or "not a change of" in str(error):
                raise LaunchError(f"{error} Sites let a study run with: consilience federation approve STORE HASH --study") from None
            launcher.check()                        # a federation that is gone fails every run
            outcome = Outcome(trial, failure=str(error))
        outcomes.append(outcome)
        ear.run_done(outcome)
    return outcomes


def read_outcome(trial: Trial, document: Mapping[str, Any]) -> Outcome:
    """The last round's scores. Of a record only validation sums and test sums per site are read."""
    last = document["records"][-1]
    judged, own = last.get("validation") or {}, model_score(last, "personalised")
    failure = None
    if not own.get("per_client"):
        tested = (last.get("personalised") or {}).get("per_client")
        failure = f"no site's test samples give {measure_of(last)} (too few classes?)" if tested else "no site has test samples"
    tests = {site: sizes["test"] for site, sizes in document["sizes"].items()}
    return Outcome(trial, validation_score(last), judged.get("loss"), dict(own.get("per_client") or {}), tests, failure)


def read_study(plan: Plan, out: Path) -> list[Outcome]:
    """What is finished of a study, from its folder alone."""
    return [read_outcome(t, read_run(out / t.folder)) for t in plan.trials if (out / t.folder / "done").is_file()]


def best_of(outcomes: Sequence[Outcome], method: str) -> Outcome | None:
    """By validation score, then validation loss, then the earliest drawn. Test scores are not looked at."""
    mine = [o for o in outcomes if o.trial.method == method and o.failure is None]
    if not any(o.validation is not None for o in mine):
        return mine[0] if mine else None
    return max((o for o in mine if o.validation is not None),
               key=lambda o: (o.validation, -(o.loss if o.loss is not None else math.inf), -o.trial.number))
