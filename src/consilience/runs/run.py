"""The loop around the rounds: build, train, score, record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import memory, rng
from ..core.engine import RoundReport
from ..core.federation import Federation
from ..core.population import Population
from ..core.task import task_named
from ..data import Dataset, FederatedData, load
from ..engines import Sequential
from ..engines.choose import Choice, choose
from ..engines.devices import existing_devices
from ..engines.estimate import Estimate, estimate, refuse_samples_without_room, refuse_what_cannot_fit, steps_per_round, time_client
from ..engines.rehearse import rehearse
from ..errors import ConfigError, DeviceError
from ..metrics.criterion import ACCURACY, validation_score
from ..metrics.subject import Subject
from ..models import Built, default_for, load_pretrained, make
from .config import RunConfig
from .folder import RunFolder
from .given import own_data, own_model
from .listener import Listener, RunWarner
from .progress import RunProgress, progress_bar
from .result import Result
from .scoring import NOT_SCORED, only, score_round, scored_clients, warnings_of
from .states import describe_store, settle_store
from .trackers import make_trackers


def load_data(config: RunConfig, source: Dataset | None = None) -> FederatedData:
    """The data set a configuration names, or the one given, divided as it says."""
    return load(config.run.data if source is None else source, **config.data_settings())


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


def devices_of(config: RunConfig) -> tuple[torch.device, ...]:
    """The devices of a run; sums are made on the first."""
    return existing_devices(config.run.devices) if config.run.devices else (choose_device(config.run.device),)


def start(device: torch.device) -> None:
    """Begin to use a device, so that one which cannot be used says so in our words, and before anything else is done."""
    if device.type == "cuda":
        try:
            torch.zeros(1, device=device)
        except RuntimeError as error:
            said = str(error).partition("\n")[0].rstrip(".")
            raise DeviceError(f"The GPU {device} cannot be used now: {said}. Another program may hold it or all of its memory (nvidia-smi "
                              "shows which), or it serves one program at a time. Start again when it is free, or use device=cpu.") from None


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
    devices = devices_of(config)
    for device in devices:
        start(device)
    proxy = load(config.run.proxy, "iid", 1, data_dir=config.run.data_dir).x if config.run.proxy else None
    population = Population(data.x, data.y, data.table.train, data.classes, data.transform, data.table.names, proxy,
                            task_named(data.task))
    built = build_model(config, data)
    refuse_samples_without_room(population.x, population.y, devices[0])
    return Federation(built.module, built.layout, config.stack().method(), population, config.policy, Sequential, devices[0])


def run(method: str = "fedavg", data: str | Dataset | FederatedData = "digits", *, out: str | Path | None = None,
        listener: Listener | None = None, progress: bool = False, again: bool = False, **settings: Any) -> Result:
    """Train `method` on `data` and return records and models.

    `data` is a name, a data set (`from_arrays`), which the settings divide, or one that `load` has divided. `model` is a name, or a class
    or function that makes the module.
    `settings` are the names of `RunConfig` (rounds=, lr=, clients=, split=, seed=, settings={'dbe.kappa': 5}, …). With `out` the
    run is kept in that folder and goes on from there if it was interrupted; a finished one is read, unless `again`. A run prints nothing
    unless it is asked to: `progress` shows what the command line shows, a bar, scores and warnings; a `listener` hears the same. Without
    either, warnings are Python's (`ConsilienceWarning`).
    """
    if progress and listener is not None:
        raise ConfigError("A run shows its progress or has a listener of yours, not both. Leave one out.")
    settings = own_data(data, settings)
    config = RunConfig.make({**settings, "method": method, "model": own_model(settings.get("model"))})
    given = load_data(config, data) if isinstance(data, Dataset) else data if isinstance(data, FederatedData) else None
    if not progress:
        return run_config(config, out=out, listener=listener or RunWarner(), again=again, data=given)
    with progress_bar() as bar:
        return run_config(config, out=out, listener=RunProgress(bar, config.stack().canonical), again=again, data=given)


def run_config(config: RunConfig, *, out: str | Path | None = None, listener: Listener | None = None, again: bool = False,
               data: FederatedData | None = None, cores: int | None = None, until: float | None = None) -> Result:
    """Train what a configuration says. `cores` bounds what the run may use, where several share the machine.

    At the time `until` (of `time.time`) the run is cut off between two rounds; its folder then holds a checkpoint to go on from.
    """
    from .measure import check_criterion, check_measures  # measures read runs, and so import this module
    data = data or load_data(config)
    if config.run.patience and not len(data.table.val.rows):         # they may be the data's own, so no setting tells
        raise ConfigError("The 'patience' option of the run needs validation samples: set validation=0.1 or so.")
    folder = RunFolder(out, again=again, spare=config.run.checkpoint_seconds) if out is not None else None
    if folder is not None:
        config = folder.keep_layout(config)
    fed = build_federation(config, data)
    check_measures(fed, data, config.run.measure)
    check_criterion(fed, data, config.run.criterion)
    result = Result(config.settled(fed.policy), config.stack().canonical,
                    {**data.description, "name": data.name, "classes": data.classes, "clients": data.population,
                     "hash": data.split_hash()}, [], fed, data.table.names)
    if config.run.track and folder is None:
        raise ConfigError("The 'track' option of the run needs a folder for what it writes: give `out`.")
    with make_trackers(config.run.track, folder.path if folder else Path(), result.config, also=listener or Listener()) as ear:
        if folder is None:
            settle_store(fed, config.run.store, config.run.rounds, None)
            _train(config, data, fed, result, ear, None, cores, until)
        else:
            with folder.locked():
                if folder.open(result, config):
                    _train(config, data, fed, result, ear, folder, cores, until)
            result.measured["folder"] = str(folder.path)
    return result


@contextmanager
def _engine(config: RunConfig, fed: Federation, folder: RunFolder | None, listener: Listener,
            cores: int | None) -> Iterator[tuple[Choice, Estimate]]:
    """Choose where steps run, say what the run will need, and put threads back afterwards."""
    threads, (step, visit) = torch.get_num_threads(), time_client(fed) if fed.device.type == "cpu" else (None, 0.0)
    left = config.run.rounds - fed.round_number
    choice = choose(config.run.engine, fed, None if step is None else step * steps_per_round(fed) * left, cores=cores,
                    devices=devices_of(config), cluster=config.run.ray, any_device=config.run.device == "auto")
    ask = partial(estimate, fed, config.run.rounds, processes=choice.processes, workers=choice.starts_processes, twins=choice.twins,
                  kept=folder is not None)
    needs = ask(step_seconds=step, visit_seconds=visit)
    refuse_what_cannot_fit(needs, folder.path if folder else None)
    choice.settle(fed)
    try:
        if choice.name == "slots" and not choice.devices and left > 0:
            seen = rehearse(fed)
            needs = ask(step_seconds=seen.step, visit_seconds=seen.visit, on_gpu=seen.memory)
        listener.noted(f"{choice.name} engine ({choice.why}); {needs.line()}")
        memory.trim()
        yield choice, needs
    finally:
        getattr(fed.engine, "close", lambda: None)()
        torch.set_num_threads(threads)


def _train(config: RunConfig, data: FederatedData, fed: Federation, result: Result, listener: Listener,
           folder: RunFolder | None, cores: int | None, until: float | None) -> None:
    with _engine(config, fed, folder, listener, cores) as (choice, needs):
        describe = lambda: choice.record(fed) | describe_store(fed) | {"estimate": needs.record()}
        if folder:
            folder.describe_environment(fed, describe())     # a run that is cut off says where it ran, too
        _rounds(config, data, fed, result, listener, folder, until)
        result.measured |= describe()
        if folder:
            folder.describe_environment(fed, describe())


def _rounds(config: RunConfig, data: FederatedData, fed: Federation, result: Result, listener: Listener,
            folder: RunFolder | None, until: float | None = None) -> None:
    for message in warnings_of(fed, data, config.run.rounds):
        listener.warned(message)
    if (drawn := scored_clients(fed, data, config.run.eval_clients)) is not None:
        listener.noted(f"{len(drawn)} of {data.population} clients, drawn by the seed, are scored; eval_clients=0 scores all")
    fed.on_client = listener.client_done
    listener.started(fed, config.run.rounds, fed.round_number)
    judge = _Patience(config.run.patience, result.records)
    if not fed.prepared:
        start = time.perf_counter()
        asked = describe_round(fed.prepare(), data.table.names) | NOT_SCORED
        _keep(result, folder, listener, asked | {"measured": {"seconds": time.perf_counter() - start}})
    took = 0.0
    while fed.round_number < config.run.rounds and not judge.over:
        if until is not None and time.time() + took >= until:          # the next round would end too late
            result.stopped = f"cut off at round {fed.round_number}"
            if folder:
                folder.checkpoint(fed, force=True)
            return
        start = time.perf_counter()
        record = _round(config, data, fed, drawn, result.records, listener)
        if _says_nothing(record, data) and not any("criterion" in r for r in result.records):
            listener.warned(f"{config.run.criterion} cannot be had on the validation samples (too few classes among them?), so no "
                            "round is chosen by it. Take more validation samples, or another criterion.")
        _keep(result, folder, listener, record)
        if folder:
            folder.keep_best(result, data, record)
            folder.checkpoint(fed)
        took = time.perf_counter() - start
        judge.hear(record)
    if judge.over:
        result.stopped = f"no better validation score in {config.run.patience} scorings"
    if folder:
        folder.finish(result, data)


def _round(config: RunConfig, data: FederatedData, fed: Federation, drawn: list[int] | None,
           records: Sequence[dict[str, Any]], listener: Listener) -> dict[str, Any]:
    """Make a round; its record, with scores and measures where they are due. `drawn` are the clients that are scored, None for all."""
    from .measure import criterion_of_round, measures_of_round
    run, start = config.run, time.perf_counter()
    report = fed.round()
    due = lambda every: report.number % every == 0 or report.number == run.rounds
    seconds = lambda: {"measured": {"seconds": time.perf_counter() - start}}
    record = describe_round(report, data.table.names)
    if not (due(run.eval_every) and report.exchanged):
        return record | NOT_SCORED | seconds()
    listener.scoring()
    # what models answer is asked once, for accuracy and for the criterion
    subject = Subject(fed, only(data, drawn), clients=drawn) if run.criterion != ACCURACY else None
    record |= score_round(fed, data, run.eval_clients, subject)
    if subject is not None:
        record["criterion"] = criterion_of_round(fed, data, run.criterion, drawn, subject)
    record |= seconds()
    if run.measure and due(run.measure_every or 1):
        record["measures"] = measures_of_round(fed, only(data, drawn), run.measure, [*records, record], clients=drawn, subject=subject)
    return record


def _says_nothing(record: dict[str, Any], data: FederatedData) -> bool:
    """Whether the criterion has no value on validation samples that are there."""
    return "criterion" in record and record["criterion"]["validation"] is None and len(data.table.val.rows) > 0


def _keep(result: Result, folder: RunFolder | None, listener: Listener, record: dict[str, Any]) -> None:
    result.records.append(record)
    if folder:
        folder.append(record)
    listener.round_done(record)


def describe_round(report: RoundReport, names: Sequence[str]) -> dict[str, Any]:
    """A round's own numbers, clients by name."""
    name = lambda i: names[i]
    losses = {name(i): loss for i, loss in report.losses.items()}
    return {"round": report.number, "cohort": [name(i) for i in report.cohort], "lost": [name(i) for i in report.lost],
            "idle": [name(i) for i in report.idle], "exchanged": report.exchanged,
            "loss": sum(losses.values()) / len(losses) if losses else None, "losses": losses,
            "bytes_up": report.bytes_up, "bytes_down": report.bytes_down, **({"privacy": report.privacy} if report.privacy else {})}


class _Patience:
    """Early stop: no better validation score for a while."""

    def __init__(self, patience: int, records: list[dict[str, Any]]) -> None:
        self.patience, self.best, self.since = patience, float("-inf"), 0
        for record in records:
            self.hear(record)

    def hear(self, record: dict[str, Any]) -> None:
        score = validation_score(record)
        if score is not None:
            self.best, self.since = (score, 0) if score > self.best else (self.best, self.since + 1)

    @property
    def over(self) -> bool:
        return bool(self.patience) and self.since >= self.patience


__all__ = ["Listener", "build_federation", "build_model", "load_data", "run", "run_config", "score_round"]
