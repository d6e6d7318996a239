"""Trackers: what they are told, that they can be missing or fail without harm, and that each store holds the numbers."""

from __future__ import annotations

import importlib.util
import logging
import time

import pytest

from consilience.errors import ConfigError
from consilience.runs import trackers
from consilience.runs.run import Listener
from consilience.runs.trackers import Tracker, Trackers, make_trackers, numbers_of, settings_of

CONFIG = {"method": "dbe", "lr": 0.05, "split": None, "settings": {"dbe.kappa": 5}}


def record(number: int, accuracy: float) -> dict:
    return {"round": number, "cohort": ["a"], "exchanged": True, "loss": 1.5, "losses": {"a": 1.5}, "bytes_up": 10, "global": None,
            "personalised": {"accuracy": accuracy, "worst_client": "a", "per_client": {"a": accuracy}},
            "measured": {"seconds": 0.25}}


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def play(names, folder, rounds=((1, 0.5), (2, 0.75)), done=0) -> None:
    with make_trackers(names, folder, CONFIG) as listener:
        listener.started(None, 2, done)
        for number, accuracy in rounds:
            listener.round_done(record(number, accuracy))
        assert listener.trackers, "a tracker failed"


def test_numbers_are_paths_without_clients_and_flags():
    assert numbers_of(record(3, 0.5)) == {"loss": 1.5, "bytes_up": 10.0, "personalised/accuracy": 0.5, "measured/seconds": 0.25}


def test_settings_are_text():
    assert settings_of(CONFIG) == {"method": "dbe", "lr": "0.05", "split": "null", "dbe.kappa": "5"}


def test_unknown_name_offers_the_nearest():
    with pytest.raises(ConfigError, match=r"Unknown tracker 'mlfow'\. Did you mean 'mlflow'"):
        make_trackers(("mlfow",), "x", CONFIG)


@pytest.mark.parametrize("name", sorted(trackers.TRACKERS))
def test_missing_package_names_the_extra(name, monkeypatch, tmp_path):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"pip install 'consilience\[{name}\]'"):
        make_trackers((name,), tmp_path, CONFIG)


class Heard(Listener):
    def __init__(self):
        self.calls = []

    def started(self, federation, rounds, done):
        self.calls.append(("started", rounds, done))

    def client_done(self, done, of):
        self.calls.append(("client", done, of))

    def scoring(self):
        self.calls.append("scoring")

    def round_done(self, record):
        self.calls.append(("round", record["round"]))

    def warned(self, message):
        self.calls.append(("warned", message))


class Diary(Tracker):
    name = "diary"

    def __init__(self, folder, fails_at=None):
        super().__init__(folder, CONFIG)
        self.calls, self.fails_at = [], fails_at

    def start(self, done):
        self.calls.append(("start", done))

    def log(self, step, numbers):
        if step == self.fails_at:
            raise RuntimeError("disk full")
        self.calls.append((step, numbers["personalised/accuracy"]))

    def finish(self, outcome):
        self.calls.append(outcome)


def test_the_other_listener_hears_everything(tmp_path):
    heard, diary = Heard(), Diary(tmp_path)
    with Trackers([diary], heard) as listener:
        listener.started(None, 5, 2)
        listener.client_done(1, 4)
        listener.scoring()
        listener.round_done(record(3, 0.5))
        listener.warned("careful")
    assert heard.calls == [("started", 5, 2), ("client", 1, 4), "scoring", ("round", 3), ("warned", "careful")]
    assert diary.calls == [("start", 2), (3, 0.5), "FINISHED"]


def test_a_failing_tracker_is_dropped_and_training_goes_on(tmp_path):
    heard, bad, good = Heard(), Diary(tmp_path, fails_at=2), Diary(tmp_path)
    with Trackers([bad, good], heard) as listener:
        listener.started(None, 3, 0)
        for number in (1, 2, 3):
            listener.round_done(record(number, 0.5))
    assert bad.calls == [("start", 0), (1, 0.5)]
    assert good.calls == [("start", 0), (1, 0.5), (2, 0.5), (3, 0.5), "FINISHED"]
    assert [c for c in heard.calls if c[0] == "warned"] == [("warned", "diary failed and is left out from now on: disk full")]


@pytest.mark.parametrize(("error", "outcome"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_outcome_of_a_broken_run(tmp_path, error, outcome):
    diary = Diary(tmp_path)

    def broken():
        with Trackers([diary]) as listener:
            listener.started(None, 3, 0)
            raise error

    with pytest.raises(error):
        broken()
    assert diary.calls[-1] == outcome


def test_nothing_is_written_before_the_run_starts(tmp_path):
    names = [n for n, t in trackers.TRACKERS.items() if all(importlib.util.find_spec(p) for p in t.needs())]
    with make_trackers(names, tmp_path / "run", CONFIG):
        pass
    assert not list(tmp_path.iterdir())


@needs("tensorboard")
def test_tensorboard_holds_the_numbers_and_purges_rounds_made_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    play(("tensorboard",), tmp_path)
    play(("tensorboard",), tmp_path, rounds=((2, 0.8), (3, 0.9)), done=1)
    events = EventAccumulator(str(tmp_path / "tracking" / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("personalised/accuracy")] == [(1, 0.5), (2, 0.8), (3, 0.9)]


@needs("mlflow", "sqlalchemy", "alembic")
def test_mlflow_embedded_store(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    from mlflow.tracking import MlflowClient
    folder = tmp_path / "runs" / "dbe-seed0"
    play(("mlflow",), folder)
    play(("mlflow",), folder, rounds=((3, 0.9),), done=2)                 # goes on: the same MLflow run
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'runs' / 'mlflow' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("consilience").experiment_id])
    assert [r.info.run_name for r in runs] == ["dbe-seed0"]
    assert runs[0].info.status == "FINISHED"
    assert runs[0].data.params["dbe.kappa"] == "5"
    history = client.get_metric_history(runs[0].info.run_id, "personalised/accuracy")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.75), (3, 0.9)]


@needs("wandb")
def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    play(("wandb",), tmp_path)
    files = list((tmp_path / "tracking" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    until = time.monotonic() + 20                     # its own process writes the file, and may do so after `finish` has returned
    while b"personalised/accuracy" not in files[0].read_bytes() and time.monotonic() < until:
        time.sleep(0.1)
    assert b"personalised/accuracy" in files[0].read_bytes()
