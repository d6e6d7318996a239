"""Progress where no bar can be drawn: in the log of a batch job."""

from __future__ import annotations

import consilience
from consilience.runs import progress
from consilience.runs.progress import RunProgress, progress_bar

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
