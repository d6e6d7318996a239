"""Search a method's settings with Optuna. The objective is the validation score; test scores are never read.

A sweep's folder holds `sweep.json` (what is searched), `study.jsonl` (Optuna's journal, one JSON object a line) and one run
folder per configuration. Nothing that is read back is a pickle: the journal's file storage is JSON, and of Optuna's samplers only those
are offered that keep nothing in it (CMA-ES keeps a pickled optimiser there).
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf, prod
from pathlib import Path
from typing import Any

from .. import rng
from ..core.federation import Federation
from ..errors import ConfigError, ConsilienceError, unknown
from ..metrics.criterion import criterion_of, validation_score
from ..report.tables import Table
from .axes import Axis, parse_axis
from .config import RunConfig, spelled
from .entries import Entry, make_entries
from .files import DiskError, disk, drop_drafts, read_json, write_json
from .folder import default_folder, read_records
from .listener import Listener, RunsWarner, Watcher
from .lock import folder_lock
from .outside import code_of
from .run import run_config
from .tune import at, space_of, validation_scores, with_validation

SAMPLERS = {"tpe": "tree-structured Parzen estimators, which learn from earlier trials", "random": "independent draws"}
OBJECTIVES = {"last": "in the last round", "best_by_validation": "in its best round"}
JOURNAL = "study.jsonl"


@dataclass
class Sweep:
    """A sweep's trials, in the order in which they were made."""

    method: str
    folder: Path
    plan: Mapping[str, Any]
    trials: list[dict[str, Any]]
    remarks: Sequence[str] = ()

    def best(self) -> dict[str, Any] | None:
        """The highest validation accuracy of a trial that ran to its end; among equals the earliest."""
        return max((t for t in self.trials if t["state"] == "complete"), key=lambda t: (t["validation"], -t["trial"]), default=None)

    def table(self) -> Table:
        names, best = list(self.plan["over"]), self.best()
        rows = [[str(t["trial"]), *(_short(t["settings"][n]) for n in names), "–" if t["validation"] is None else f"{t['validation']:.3f}",
                 "best" if t is best else "" if t["state"] == "complete" else t["state"]] for t in self.trials]
        notes = [f"Validation {criterion_of(self.plan['config'])} {OBJECTIVES[self.plan['score']]}, the objective; a pruned trial's is its "
                 "last. Test scores have no part in a sweep.", *self.remarks]
        if best:
            notes.append(f"Settings of the best: {self.options(best['settings'])}")
        notes += [f"Trial {t['trial']} failed: {t['failure']}" for t in self.trials if t["failure"]]
        return Table(["trial", *names, "validation", ""], rows, f"{self.method}, {len(self.trials)} trials", notes, self.trials)

    def options(self, settings: Mapping[str, Any]) -> str:
        """A trial's settings as `consilience run` takes them."""
        return " ".join(f"{'--set' if '.' in k else '-o'} {shlex.quote(f'{k}={v}')}" for k, v in settings.items())

    def document(self) -> dict[str, Any]:
        return {"method": self.method, "folder": str(self.folder), **self.plan, "trials": self.trials, "best": self.best(),
                "remarks": list(self.remarks)}


def load_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("A sweep needs Optuna. Install it with: pip install 'consilience[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def sweep(method: str, base: RunConfig, over: Sequence[str], trials: int, *, out: str | Path | None = None, sampler: str = "tpe",
          prune: bool = False, score: str = "last", watcher: Watcher | None = None) -> Sweep:
    """Make trials until there are `trials` of them, going on with those the folder already holds.

    `over` lists settings as in 'prox.mu=0.001,0.01,0.1' or 'lr=0.01:0.1:log'; without any, the method's declared ranges and the
    learning rate. Each trial's draw is keyed by the seed and its number, so a sweep that was interrupted gives the same trials.
    No configuration is tried twice: a sweep ends early when there is none left.
    """
    optuna = load_optuna()
    for what, value, known in (("sampler", sampler, SAMPLERS), ("score of a sweep", score, OBJECTIVES)):
        if value not in known:
            raise unknown(what, value, known)
    if trials < 1:
        raise ConfigError(f"A sweep needs at least 1 trial. Got {trials} instead.")
    base, remarks = with_validation(base)
    (entry,), _ = make_entries([method], base, with_local=False)
    axes = _axes(over, entry, base)
    plan = json.loads(json.dumps({
        "over": {a.name: a.text for a in axes}, "score": score, "sampler": sampler, "prune": prune,
        "config": entry.config(base, base.policy.seed).portable() | _code(entry, base)}, default=list))
    folder = Path(out) if out is not None else _default_folder(entry, base, plan)
    with folder_lock(folder):
        _check_plan(folder, plan)
        drop_drafts(folder)
        trial_list = _Study(optuna, folder, entry, base, axes, plan).go_on(trials, watcher or RunsWarner())
    if len(trial_list) < trials:
        remarks = [*remarks, f"All {len(trial_list)} configurations of the settings swept were tried; {trials} trials were asked for."]
    return Sweep(method, folder, plan, trial_list, remarks)


def _code(entry: Entry, base: RunConfig) -> dict[str, Any]:
    """Trials of another version of the user's own code say nothing about this one."""
    code = code_of(entry.config(base, base.policy.seed))
    return {"code": code} if code else {}


def _axes(over: Sequence[str], entry: Entry, base: RunConfig) -> list[Axis]:
    if not over:
        return [Axis(d.name, d.targets, ",".join(map(str, d.values)), d.values) for d in space_of(entry, base)]
    axes = [parse_axis(text, entry, base) for text in over]
    for i, axis in enumerate(axes):
        for other in axes[:i]:
            if set(axis.targets) & set(other.targets):
                raise ConfigError(f"The sweep goes over {axis.targets[0]!r} twice: {other.name}={other.text} and {axis.name}={axis.text}.")
    return axes


def _default_folder(entry: Entry, base: RunConfig, plan: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:10]
    run = default_folder(entry.config(base, base.policy.seed))
    return run.with_name(f"sweep-{'-'.join(run.name.split('-')[:-2])}-{digest}")


def _check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    known = folder / "sweep.json"
    if known.is_file():
        old, new = read_json(known), dict(plan)
        pairs = {**{k: (old.get(k), v) for k, v in new.items() if k != "config"},
                 **{k: (spelled(k, old["config"].get(k)), v) for k, v in new["config"].items()}}
        for key, (was, now) in pairs.items():
            if was != now:
                raise ConfigError(f"The folder {str(folder)!r} holds a sweep with {key} = {was!r}, not {now!r}. Choose another --out.")
    elif any(p.name not in (".lock", ".sweep.json.draft") for p in folder.iterdir()):
        raise ConfigError(f"The folder {str(folder)!r} holds files, but no sweep. Choose an empty folder with --out.")
    else:
        write_json(known, plan)


class _Study:
    def __init__(self, optuna: Any, folder: Path, entry: Entry, base: RunConfig, axes: Sequence[Axis], plan: Mapping[str, Any]) -> None:
        self.optuna, self.folder, self.entry, self.base, self.axes, self.plan = optuna, folder, entry, base, axes, plan
        self.distributions = {a.name: a.distribution(optuna) for a in axes}
        journal = folder / JOURNAL
        _drop_torn_line(journal)
        backend = optuna.storages.journal.JournalFileBackend(str(journal), lock_obj=_Held())
        rounds = base.run.rounds
        pruner = optuna.pruners.MedianPruner(4, max(1, rounds // 4)) if plan["prune"] else optuna.pruners.NopPruner()
        self.study = optuna.create_study(storage=optuna.storages.JournalStorage(backend), study_name="sweep", direction="maximize",
                                         load_if_exists=True, pruner=pruner, sampler=self.sampler(0))

    def sampler(self, number: int, attempt: int = 0) -> Any:
        """A trial's; where what it drew was tried before, it is drawn again at random, for TPE would come back to what it likes."""
        seed = int(rng.key(self.base.policy.seed, "sweep", number, *([attempt] if attempt else []))) % (1 << 32)
        samplers = self.optuna.samplers
        return samplers.TPESampler(seed=seed) if self.plan["sampler"] == "tpe" and not attempt else samplers.RandomSampler(seed=seed)

    def ask(self, number: int, tried: set[tuple[str, ...]]) -> Any:
        """The trial of this number, with settings that were not tried before."""
        for attempt in count():
            self.study.sampler = self.sampler(number, attempt)
            trial = self.study.ask(fixed_distributions=self.distributions)
            if self.known_by(trial.params) not in tried:
                break
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)         # without a reason: no trial of ours
        return trial

    def known_by(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """What tells configurations apart."""
        return tuple(f"{v:.12g}" if isinstance(v := settings[a.name], float) else repr(v) for a in self.axes)

    def left(self, tried: set[tuple[str, ...]]) -> float:
        """How many configurations were not tried yet."""
        return prod(map(_values_of, self.distributions.values())) - len(tried)

    def go_on(self, most: int, watcher: Watcher) -> list[dict[str, Any]]:
        state, rounds = self.optuna.trial.TrialState, self.base.run.rounds
        for trial in self.study.get_trials(states=(state.RUNNING, state.WAITING)):
            # A process died in it. The same number draws the same settings again, and the run goes on in its folder.
            self.study.tell(trial.number, state=state.FAIL)
        done = self.made()
        tried = {self.known_by(t["settings"]) for t in done}
        many = int(min(most, len(done) + self.left(tried)))
        watcher.begin("sweeping", many, many * rounds)
        watcher.rounds_found(min(len(done), many) * rounds)
        for number in range(len(done), many):
            trial = self.ask(number, tried)
            tried.add(self.known_by(trial.params))
            failure = self.make(trial, watcher, number * rounds)
            watcher.rounds_done((number + 1) * rounds)
            watcher.run_done(f"trial {number}", failure)
        return self.made()

    def make(self, trial: Any, watcher: Watcher, before: int) -> str | None:
        """Run a trial and tell the study. Returns why it failed, if it did."""
        state = self.optuna.trial.TrialState
        row = at(self.entry, [a.dimension for a in self.axes], trial.params)
        try:
            config = row.config(self.base, self.base.policy.seed)
            path = self.folder / default_folder(config).name
            trial.set_user_attr("folder", path.name)
            result = run_config(config, out=path, listener=_Ear(trial if self.plan["prune"] else None, path, watcher, before))
        except DiskError:
            raise                                          # nothing to learn about the settings: stop, and go on later
        except _Pruned:
            self.study.tell(trial, state=state.PRUNED)
            return None
        except ConsilienceError as error:
            return self.failed(trial, str(error))
        found = validation_scores(result.records, self.plan["score"])
        if found is None:
            return self.failed(trial, "it has no validation score")
        self.study.tell(trial, found[0])
        return None

    def failed(self, trial: Any, why: str) -> str:
        trial.set_user_attr("failure", why)
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        return why

    def made(self) -> list[dict[str, Any]]:
        """Trials that came to an end. One that fails without a reason was interrupted, and was made again."""
        out: list[dict[str, Any]] = []
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        for t in self.study.get_trials(deepcopy=False):
            if t.state.name in names and (t.state.name != "FAIL" or "failure" in t.user_attrs):
                out.append({"trial": len(out), "settings": {a.name: t.params[a.name] for a in self.axes}, "validation": t.value,
                            "state": names[t.state.name], "failure": t.user_attrs.get("failure"), "folder": t.user_attrs.get("folder")})
        return out


def _values_of(distribution: Any) -> float:
    """How many values a setting may take; a range of numbers without a step has no end of them."""
    if hasattr(distribution, "choices"):
        return len(distribution.choices)
    return round((distribution.high - distribution.low) / distribution.step) + 1 if distribution.step else inf


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _Pruned(Exception):
    """Stops a run that does not promise much. Its folder can go on."""


class _Ear(Listener):
    """Shows progress, and reports validation scores to a trial that may be pruned."""

    def __init__(self, trial: Any | None, folder: Path, watcher: Watcher, before: int) -> None:
        self.trial, self.folder, self.watcher, self.before = trial, folder, watcher, before

    def started(self, federation: Federation, rounds: int, done: int) -> None:
        self.watcher.rounds_found(self.before + done)
        records = self.folder / "records.jsonl"
        for record in read_records(records) if records.is_file() else []:
            if record["round"] <= done:
                self.report(record)                         # the pruner looks at a trial's earlier rounds too

    def round_done(self, record: dict[str, Any]) -> None:
        self.watcher.rounds_done(self.before + record["round"])
        self.report(record)

    def report(self, record: dict[str, Any]) -> None:
        score = validation_score(record)
        if self.trial is not None and score is not None:
            self.trial.report(score, record["round"])
            if self.trial.should_prune():
                raise _Pruned

    def warned(self, message: str) -> None:
        if self.before == 0:
            self.watcher.warned(message)


def _drop_torn_line(journal: Path) -> None:
    """A power failure may leave half a line at the end; Optuna would append to it and then read neither."""
    if journal.is_file():
        with disk("read", journal):
            content = journal.read_bytes()
        if content and not content.endswith(b"\n"):
            with disk("mend", journal), open(journal, "r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)


class _Held:
    """The journal's lock. The folder's own is held already, and dies with the process; the journal's would not."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None
