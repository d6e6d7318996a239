"""The loop around the rounds: build, train, score, record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import rng
from ..core.federation import Federation, RoundReport
from ..core.population import Population
from ..core.task import task_named
from ..data import FederatedData, load
from ..engines import Sequential
from ..engines.choose import Choice, choose
from ..engines.estimate import estimate, refuse_what_cannot_fit, steps_per_round, time_step
from ..errors import ConfigError
from ..metrics.accuracy import Scores, score_global, score_model, score_personal
from ..models import Built, default_for, load_pretrained, make
from .config import RunConfig
from .folder import RunFolder
from .result import Result, headline


class Listener:
    """Hears how a run goes on; for progress displays and trackers. Override what is needed."""

    def started(self, federation: Federation, rounds: int, done: int) -> None: ...
    def client_done(self, done: int, of: int) -> None: ...
    def round_done(self, record: dict[str, Any]) -> None: ...
    def warned(self, message: str) -> None: ...
    def noted(self, message: str) -> None: ...


def load_data(config: RunConfig) -> FederatedData:
    """The data set a configuration names."""
    r = config.run
    seed = config.policy.seed if r.data_seed is None else r.data_seed
    return load(r.data, r.split, r.clients, seed, shift=r.shift, train=r.train, validation=r.validation, test=r.test, pool=r.pool,
                data_dir=r.data_dir, transform=r.transform, split_file=r.split_file, train_fraction=r.train_fraction,
                hold_out=[int(c) if c.isdigit() else c for c in r.hold_out])


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"The 'device' option of the run must be cpu, cuda or cuda:N. Got {name!r} instead.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("The 'device' option of the run asks for cuda, but this machine has none. Use device=cpu.")
    return device


def build_model(config: RunConfig, data: FederatedData) -> Built:
    """The model a configuration names, with initial values drawn from the seed."""
    vocabulary = (data.description.get("vocabulary") or {}).get("size")
    x, _ = data.transform(data.x[:1], data.y[:1], None)
    sample = tuple(x.shape[1:])
    text = config.run.model or default_for(data.name, sample, vocabulary=vocabulary, task=data.task)
    built = make(text, sample=sample, classes=data.classes, key=rng.key(config.policy.seed, "model"), vocabulary=vocabulary,
                 taps=config.run.taps)
    if config.run.pretrained:
        load_pretrained(built.module, config.run.pretrained)
    return built


def build_federation(config: RunConfig, data: FederatedData) -> Federation:
    """Everything up to the first round."""
    proxy = load(config.run.proxy, "iid", 1, data_dir=config.run.data_dir).x if config.run.proxy else None
    population = Population(data.x, data.y, tuple(c.train for c in data.clients), data.classes, data.transform,
                            tuple(c.name for c in data.clients), proxy, task_named(data.task))
    built = build_model(config, data)
    return Federation(built.module, built.layout, config.stack().method(), population, config.policy, Sequential,
                      choose_device(config.run.device))


def run(method: str = "fedavg", data: str | FederatedData = "digits", *, out: str | Path | None = None,
        listener: Listener | None = None, again: bool = False, **settings: Any) -> Result:
    """Train `method` on `data` and return records and models.

    `settings` are the names of `RunConfig` (rounds=, lr=, clients=, split=, seed=, settings={'dbe.kappa': 5}, …). With `out` the
    run is kept in that folder and goes on from there if it was interrupted; a finished one is read, unless `again`.
    """
    given = data if isinstance(data, FederatedData) else None
    config = RunConfig.make({**settings, "method": method, "data": given.name if given else data})
    return run_config(config, out=out, listener=listener, again=again, data=given)


def run_config(config: RunConfig, *, out: str | Path | None = None, listener: Listener | None = None, again: bool = False,
               data: FederatedData | None = None, cores: int | None = None) -> Result:
    """Train what a configuration says. `cores` bounds what the run may use, where several share the machine."""
    from .measure import check_measures  # measures read runs, and so import this module
    from .trackers import make_trackers
    data = data or load_data(config)
    fed = build_federation(config, data)
    check_measures(fed, data, config.run.measure)
    result = Result({**config.portable(), "weights": fed.policy.weights}, config.stack().canonical,
                    {**data.description, "name": data.name, "classes": data.classes, "clients": data.population,
                     "hash": data.split_hash()}, [], fed, tuple(c.name for c in data.clients))
    folder = RunFolder(out, again=again) if out is not None else None
    if config.run.track and folder is None:
        raise ConfigError("The 'track' option of the run needs a folder for what it writes: give `out`.")
    with make_trackers(config.run.track, folder.path if folder else Path(), result.config, also=listener or Listener()) as ear:
        if folder is None:
            _train(config, data, fed, result, ear, None, cores)
        else:
            with folder.locked():
                if folder.open(result, config):
                    _train(config, data, fed, result, ear, folder, cores)
            result.measured["folder"] = str(folder.path)
    return result


@contextmanager
def _engine(config: RunConfig, fed: Federation, folder: RunFolder | None, listener: Listener, cores: int | None) -> Iterator[Choice]:
    """Choose where steps run, say what the run will need, and put threads back afterwards."""
    threads, step = torch.get_num_threads(), time_step(fed) if fed.device.type == "cpu" else None
    left = config.run.rounds - fed.round_number
    choice = choose(config.run.engine, fed, None if step is None else step * steps_per_round(fed) * left, cores=cores)
    needs = estimate(fed, config.run.rounds, processes=choice.processes, workers=choice.name == "workers", kept=folder is not None,
                     step_seconds=step)
    refuse_what_cannot_fit(needs, folder.path if folder else None)
    listener.noted(f"{choice.name} engine ({choice.why}); {needs.line()}")
    choice.settle(fed)
    try:
        yield choice
    finally:
        getattr(fed.engine, "close", lambda: None)()
        torch.set_num_threads(threads)


def _train(config: RunConfig, data: FederatedData, fed: Federation, result: Result, listener: Listener,
           folder: RunFolder | None, cores: int | None) -> None:
    with _engine(config, fed, folder, listener, cores) as choice:
        _rounds(config, data, fed, result, listener, folder)
        result.measured |= choice.record(fed)
        if folder:
            folder.describe_environment(fed, choice.record(fed))


def _rounds(config: RunConfig, data: FederatedData, fed: Federation, result: Result, listener: Listener,
            folder: RunFolder | None) -> None:
    from .measure import measures_of_round
    for message in warnings_of(fed, data):
        listener.warned(message)
    fed.on_client = listener.client_done
    listener.started(fed, config.run.rounds, fed.round_number)
    judge = _Patience(config.run.patience, result.records)
    if not fed.prepared:
        start = time.perf_counter()
        _keep(result, folder, listener, _describe(fed.prepare(), data) | {"global": None, "personalised": None, "validation": None,
                                                                          "measured": {"seconds": time.perf_counter() - start}})
    while fed.round_number < config.run.rounds and not judge.over:
        start = time.perf_counter()
        report = fed.round()
        record = _describe(report, data)
        due = report.number % config.run.eval_every == 0 or report.number == config.run.rounds
        record |= score_round(fed, data) if due and report.exchanged else {"global": None, "personalised": None, "validation": None}
        record["measured"] = {"seconds": time.perf_counter() - start}
        if config.run.measure and due and report.exchanged:
            record["measures"] = measures_of_round(fed, data, config.run.measure, [*result.records, record])
        _keep(result, folder, listener, record)
        if folder:
            folder.keep_best(result, data, record)
            folder.checkpoint(fed)
        judge.hear(record)
    if judge.over:
        result.stopped = f"no better validation score in {config.run.patience} scorings"
    if folder:
        folder.finish(result, data)


def _keep(result: Result, folder: RunFolder | None, listener: Listener, record: dict[str, Any]) -> None:
    result.records.append(record)
    if folder:
        folder.append(record)
    listener.round_done(record)


def _describe(report: RoundReport, data: FederatedData) -> dict[str, Any]:
    """A round's own numbers, clients by name."""
    name = lambda i: data.clients[i].name
    losses = {name(i): loss for i, loss in report.losses.items()}
    return {"round": report.number, "cohort": [name(i) for i in report.cohort], "lost": [name(i) for i in report.lost],
            "idle": [name(i) for i in report.idle], "exchanged": report.exchanged,
            "loss": sum(losses.values()) / len(losses) if losses else None, "losses": losses,
            "bytes_up": report.bytes_up, "bytes_down": report.bytes_down}


def score_round(fed: Federation, data: FederatedData) -> dict[str, Any]:
    """Global and personalised scores on test rows, and the validation score that selection may use."""
    names = [c.name for c in data.clients]
    reason = fed.no_global_model

    def both(rows: list[torch.Tensor]) -> tuple[Scores | None, Scores]:
        whole = score_global(fed, rows, names) if reason is None else None
        return whole, (score_personal(fed, rows, names) if fed.personal or whole is None else whole)

    whole, own = both([c.test for c in data.clients])
    out: dict[str, Any] = {"global": whole.record() if whole else None, "personalised": own.record()}
    if whole is None:
        out["no_global_model"] = reason
    for scores in (out["global"], out["personalised"]):
        if scores is not None:
            scores["test"] = None
    if len(data.test) and out["global"] is not None:
        on_test = score_model(fed, fed.model, [data.test], ["test"], "after aggregation, before local training").pooled("accuracy")
        out["global"]["test"] = on_test
        if out["global"]["accuracy"] is None:                 # clients have no test rows of their own
            out["global"]["accuracy"] = on_test
            if not fed.personal:
                out["personalised"] = out["global"]
    if data.held_out and out["global"] is not None:
        theirs = [c.test if len(c.test) else torch.cat([c.train, c.val]) for c in data.held_out]
        out["held_out"] = score_global(fed, theirs, [c.name for c in data.held_out]).record()
    valid = [c.val for c in data.clients]
    if any(len(v) for v in valid):
        judged = (both(valid)[1] if fed.personal else both(valid)[0] or both(valid)[1]).record()
        out["validation"] = {k: judged[k] for k in ("accuracy", "mean", "worst", "loss")}
    else:
        out["validation"] = None
    return out


def warnings_of(fed: Federation, data: FederatedData) -> list[str]:
    """What a user should know before the first round."""
    out = []
    idle = [fed.name_of(i) for i in range(fed.size) if not fed.samples.schedule(i, fed.phases)]
    if idle:
        shown = ", ".join(idle[:5]) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
        out.append(f"{len(idle)} of {fed.size} clients have fewer samples than a batch of {fed.policy.batch} and will never train: "
                   f"{shown}. Use a smaller batch, or last_batch=keep.")
    if data.task == "classification":
        seen = torch.cat([data.y[c.train] for c in data.clients]).unique()
        if len(seen) < data.classes:
            missing = sorted(set(range(data.classes)) - set(seen.tolist()))
            out.append(f"No client has training samples of class {', '.join(map(str, missing))}.")
    if fed.size == 1 and not fed.pooled:
        out.append("There is only one client: this is ordinary training, without federation.")
    return out


class _Patience:
    """Early stop: no better validation score for a while."""

    def __init__(self, patience: int, records: list[dict[str, Any]]) -> None:
        self.patience, self.best, self.since = patience, float("-inf"), 0
        for record in records:
            self.hear(record)

    def hear(self, record: dict[str, Any]) -> None:
        score = (record.get("validation") or {}).get("accuracy")
        if score is not None:
            self.best, self.since = (score, 0) if score > self.best else (self.best, self.since + 1)

    @property
    def over(self) -> bool:
        return bool(self.patience) and self.since >= self.patience


__all__ = ["Listener", "build_federation", "build_model", "headline", "load_data", "run", "run_config", "score_round"]
