"""Progress: the bar of a terminal, and lines where none can be drawn, as in the log of a batch job."""

from __future__ import annotations

import contextlib
import re

import pytest

import consilience
from consilience.runs import progress
from consilience.runs.config import RunConfig
from consilience.runs.folder import RunFolder
from consilience.runs.listener import Watcher
from consilience.runs.many import Job, run_many
from consilience.runs.progress import RunProgress, RunsProgress, progress_bar

DATA = "synthetic(samples=160, classes=3, clients=4, features=6)"


def test_a_log_has_a_line_now_and_then(log):
    class Waiting(RunProgress):
        def round_done(self, record):
            super().round_done(record)
            if record["round"] < 3:
                log.wait_for(f"fedavg · {record['round']} of 3 after ", " · loss ", " · accuracy ")
    with progress_bar() as bar:
        consilience.run("fedavg", DATA, rounds=3, steps=1, engine="sequential", listener=Waiting(bar, "fedavg"))
    lines = log.read()
    assert any("2 of 3 after " in line and " to go · loss " in line for line in lines)
    assert not any("3 of 3" in line for line in lines)          # the last round ends the bar, which is then shown itself
    assert "3/3" in lines[-1]                                   # and nothing after it


def test_a_log_says_when_models_are_scored(log):
    class Waiting(RunProgress):
        def scoring(self):
            super().scoring()
            log.wait_for("fedavg · scoring · 0 of 1 after ")
    with progress_bar() as bar:
        consilience.run("fedavg", DATA, rounds=1, steps=1, engine="sequential", listener=Waiting(bar, "fedavg"))
    assert "scoring" not in log.read()[-1]


def test_work_that_reports_nothing_has_lines_too(log):
    with progress_bar() as bar:
        bar.add_task("reading", total=None, note="")
        assert log.wait_for("reading after 0:0").startswith("reading after 0:0")


def test_a_short_run_has_none(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 3600.0)
    consilience.run("fedavg", DATA, rounds=3, steps=1, engine="sequential", progress=True)
    said = capsys.readouterr().err
    assert " after " not in said
    assert "3/3" in said


def test_a_terminal_has_the_bar_alone(monkeypatch, log):
    monkeypatch.setenv("FORCE_COLOR", "1")               # what Rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    consilience.run("fedavg", DATA, rounds=2, steps=1, engine="sequential", progress=True)
    said = "\n".join(log.read())
    assert "2/2" in said
    assert " after 0:00:" not in said


def test_a_terminal_that_cannot_go_back_has_lines(monkeypatch, log):
    """TERM=dumb, as in editors' shells: Rich draws nothing there before the end."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    with progress_bar() as bar:
        bar.update(bar.add_task("training", total=4, note=""), completed=1)
        log.wait_for("training · 1 of 4 after ")


@pytest.mark.parametrize("columns", [80, 120])
def test_counts_and_times_are_whole_beside_a_long_note(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with progress_bar() as bar:
        task = bar.add_task("reproducing dbe/table5", total=200, note="1 of 2 runs · FedAvg+DBE, AG News, practical, seed 0")
        bar.update(task, completed=7)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"  7/200 0:00:0\d -:--:-- 1 of ", line)
    assert len(line) <= columns


def test_the_time_left_is_known_where_a_round_takes_minutes():
    """And rounds that an earlier command made say nothing of it."""
    with progress_bar() as bar:
        now = 0.0
        bar.get_time = lambda: now
        ear = RunsProgress(bar)
        ear.begin("comparing", 2, 200)
        ear.rounds_found(90)
        for rounds in (91, 92, 93):
            now += 100.0
            ear.rounds_done(rounds)
        (task,) = bar.tasks
        assert (task.completed, task.time_remaining) == (93, 10700)


def test_runs_say_which_client_they_train_and_what_was_made_before(tmp_path, monkeypatch):
    checkpoint = RunFolder.checkpoint
    monkeypatch.setattr(RunFolder, "checkpoint", lambda self, fed, force=False: checkpoint(self, fed, force=True))

    class Ear(Watcher):
        def __init__(self, stop):
            self.heard, self.stop = [], stop

        def rounds_done(self, rounds):
            self.heard.append(rounds)
            if rounds == self.stop:
                raise KeyboardInterrupt

        def rounds_found(self, rounds):
            self.heard.append(f"found {rounds}")

        def noted(self, label, note):
            self.heard.append(f"{label}: {note}")

    def run(stop=None):
        config = RunConfig.make({"method": "fedavg", "data": DATA, "rounds": 4, "steps": 1, "engine": "sequential"})
        ear = Ear(stop)
        with contextlib.suppress(KeyboardInterrupt):
            run_many([Job("a", config, str(tmp_path))], "training", workers=1, watcher=ear)
        return ear.heard
    noted = lambda round_number: [*(f"a: round {round_number}, client {n} of 4" for n in range(1, 5)), f"a: round {round_number}, scoring"]
    assert run(stop=2) == [*noted(1), 1, *noted(2), 2]                   # the interrupted round has no checkpoint yet
    assert run(stop=3) == ["found 1", *noted(2), 2, *noted(3), 3]
    assert run() == ["found 2", *noted(3), 3, *noted(4), 4]
    assert run() == ["found 4"]
