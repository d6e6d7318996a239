"""Records sent on to TensorBoard, MLflow or Weights & Biases while a run goes on. The run's folder stays the truth.

    with make_trackers(("tensorboard", "mlflow"), folder, config, also=progress) as listener:
        …                                       # train with `listener`

Nothing is written before `started`, so that an empty folder stays empty until the run has it. A tracker that fails in the
middle of a run is dropped with a warning; training goes on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.federation import Federation
from ..errors import ConfigError, unknown
from .files import read_json, write_json
from .listener import Listener
from .lock import folder_lock
from .result import numbers_of


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text, a method's options by their paths."""
    flat = {k: v for k, v in config.items() if k != "settings"} | dict(config.get("settings") or {})
    return {k: v if isinstance(v, str) else json.dumps(v, default=list) for k, v in flat.items()}


class Tracker:
    """One place to send records to."""

    name = ""
    packages: tuple[str, ...] = ()               # what must be importable

    @classmethod
    def needs(cls) -> tuple[str, ...]:
        return cls.packages

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, settings_of(config)
        for package in self.needs():
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"Tracking with {self.name} needs the package {package!r}, which is not installed: "
                                  f"pip install 'consilience[{self.name}]'.")

    def start(self, done: int) -> None:
        """`done` rounds were made before, by a run that goes on now."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def finish(self, outcome: str) -> None:
        """`outcome`: FINISHED, FAILED or KILLED."""

    def remembered(self, fresh: Callable[[], Any]) -> Any:
        """What this tracker calls the run, the same when the run goes on later."""
        path = self.folder / "tracking" / "names.json"
        known = read_json(path) if path.is_file() else {}
        if self.name not in known:
            known[self.name] = fresh()
            write_json(path, known)
        return known[self.name]


class TensorBoard(Tracker):
    """Event files in tracking/tensorboard of the run's folder."""

    name = "tensorboard"
    packages = ("tensorboard",)

    def start(self, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        # what an interrupted process wrote after its last checkpoint is purged: those rounds come again
        self.writer = SummaryWriter(str(self.folder / "tracking" / "tensorboard"), purge_step=done + 1 if done else None)
        self.writer.add_text("settings", "\n".join(f"    {k} = {v}" for k, v in self.settings.items()), done)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self, outcome: str) -> None:
        self.writer.close()


class MLflow(Tracker):
    """The server that MLFLOW_TRACKING_URI names; without it a database mlflow/mlflow.db beside the run's folder, shared by all runs
    there."""

    name = "mlflow"
    packages = ("mlflow",)
    experiment = "consilience"

    @classmethod
    def needs(cls) -> tuple[str, ...]:
        return cls.packages if os.environ.get("MLFLOW_TRACKING_URI") else (*cls.packages, "sqlalchemy", "alembic")

    def start(self, done: int) -> None:
        from mlflow.tracking import MlflowClient
        home = self.folder.resolve().parent / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        # two runs may begin at once, and making the tables of a new database is not safe against that
        with contextlib.nullcontext() if uri else _waiting_lock(home):
            self.client = MlflowClient(tracking_uri=uri or f"sqlite:///{home / 'mlflow.db'}")
            found = self.client.get_experiment_by_name(self.experiment)
            where = None if uri else (home / "artifacts").as_uri()
            number = found.experiment_id if found else self.client.create_experiment(self.experiment, artifact_location=where)
            self.run_id = self.remembered(lambda: self.client.create_run(number, run_name=self.folder.name).info.run_id)
        self.client.update_run(self.run_id, status="RUNNING")
        from mlflow.entities import Param
        self.client.log_batch(self.run_id, params=[Param(k, v[:500]) for k, v in self.settings.items()])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric
        now = int(time.time() * 1000)
        self.client.log_batch(self.run_id, metrics=[Metric(k, v, now, step) for k, v in numbers.items()])

    def finish(self, outcome: str) -> None:
        self.client.set_terminated(self.run_id, outcome)


class WeightsAndBiases(Tracker):
    """Files in tracking/wandb of the run's folder, to be sent with `wandb sync`; WANDB_MODE=online sends them at once."""

    name = "wandb"
    packages = ("wandb",)

    def start(self, done: int) -> None:
        import wandb
        (self.folder / "tracking").mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(project=os.environ.get("WANDB_PROJECT", "consilience"), name=self.folder.name, config=self.settings,
                              dir=str(self.folder / "tracking"), id=self.remembered(lambda: uuid.uuid4().hex[:12]),
                              mode=mode, resume="allow", settings=wandb.Settings(silent=True))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def finish(self, outcome: str) -> None:
        self.run.finish(exit_code=0 if outcome == "FINISHED" else 1)


TRACKERS: dict[str, type[Tracker]] = {t.name: t for t in (TensorBoard, MLflow, WeightsAndBiases)}


class Trackers(Listener):
    """Hears a run and tells every tracker, and another listener. As a context it ends the trackers with the run's outcome."""

    def __init__(self, trackers: Sequence[Tracker], also: Listener | None = None) -> None:
        self.trackers, self.also, self._begun = list(trackers), also or Listener(), False

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        stopped = "FAILED" if kind is not None and issubclass(kind, Exception) else "KILLED"
        if self._begun:
            self._tell("finish", stopped if kind else "FINISHED")

    def started(self, federation: Federation, rounds: int, done: int) -> None:
        self._begun = True
        self._tell("start", done)
        self.also.started(federation, rounds, done)

    def client_done(self, done: int, of: int) -> None:
        self.also.client_done(done, of)

    def scoring(self) -> None:
        self.also.scoring()

    def round_done(self, record: dict[str, Any]) -> None:
        self._tell("log", record["round"], numbers_of(record))
        self.also.round_done(record)

    def warned(self, message: str) -> None:
        self.also.warned(message)

    def noted(self, message: str) -> None:
        self.also.noted(message)

    def _tell(self, what: str, *words: Any) -> None:
        for tracker in list(self.trackers):
            try:
                getattr(tracker, what)(*words)
            except Exception as error:        # of any kind: a dashboard must not end a night's training
                self.trackers.remove(tracker)
                self.also.warned(f"{tracker.name} failed and is left out from now on: {' '.join(str(error).split())[:300]}")


def make_trackers(names: Sequence[str], folder: str | Path, config: Mapping[str, Any], also: Listener | None = None) -> Trackers:
    """The trackers named, for the run in `folder`. A name that is unknown or not installed is refused now."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return Trackers([TRACKERS[name](Path(folder), config) for name in dict.fromkeys(names)], also)


@contextlib.contextmanager
def _waiting_lock(folder: Path, seconds: float = 120.0) -> Iterator[None]:
    """Hold a folder; wait while another process does."""
    until = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder_lock(folder))
                break
            except ConfigError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
        yield
