"""Progress where no bar can be drawn: in the log of a batch job."""

from __future__ import annotations

import consilience
from consilience.runs import progress

DATA = "synthetic(samples=160, classes=3, clients=4, features=6)"


def told(monkeypatch, capsys, every):
    """Lines of a run of three rounds with so many seconds between two of them."""
    monkeypatch.setattr(progress, "EVERY", every)
    consilience.run("fedavg", DATA, rounds=3, steps=1, engine="sequential", progress=True)
    return [line for line in capsys.readouterr().err.splitlines() if " after " in line]


def test_a_log_has_a_line_now_and_then(monkeypatch, capsys):
    lines = told(monkeypatch, capsys, 0.0)
    assert any(line.startswith("fedavg · 1 of 3 after ") and " · loss " in line and " · accuracy " in line for line in lines)
    assert any(line.startswith("fedavg · 2 of 3 after ") and " to go · loss " in line for line in lines)
    assert not any("3 of 3" in line for line in lines)          # the last round ends the bar, which is then shown itself


def test_a_short_run_has_none(monkeypatch, capsys):
    assert not told(monkeypatch, capsys, 3600.0)


def test_a_terminal_has_the_bar_alone(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")               # what Rich takes for a terminal
    monkeypatch.setattr(progress, "EVERY", 0.0)
    consilience.run("fedavg", DATA, rounds=2, steps=1, engine="sequential", progress=True)
    said = capsys.readouterr().err
    assert "2/2" in said
    assert " after 0:00:" not in said
