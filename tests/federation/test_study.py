"""A study over running sites: tuned by validation, reported per site, and going on where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from consilience.federation.follow import read_run
from consilience.federation.study import Listener, make_plan, run_study
from consilience.federation.study_report import Report

pytestmark = pytest.mark.federation


def consilience(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "consilience", *arguments], cwd=cwd, capture_output=True, text=True, timeout=570)


def test_a_study_of_a_running_federation(federation, tmp_path):
    server, app = federation.launcher.folder, federation.app
    words = ["federation", "study", str(app), "--server", str(server), "--candidate", "fedavg+dbe", "--tune", "1", "--lrs", "0.03,0.1",
             "--rounds", "1", "--out", "s", "--json"]
    first = consilience(*words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["methods"] == ["local", "fedavg", "fedavg+dbe"]
    assert len(document["trials"]) == 3
    assert {r["site"] for r in document["sites"]} == {"site-0", "site-1", "site-2"}
    for method in document["methods"]:
        mine = [t for t in document["trials"] if t["method"] == method]
        best = max(mine, key=lambda t: (t["validation"], -t["validation_loss"]))
        row = next(r for r in document["summary"] if r["method"] == method)
        assert row["settings"] == best["settings"]                    # chosen by validation
        kept = read_run(tmp_path / "s" / "runs" / best["folder"])["records"][-1]["personalised"]["per_client"]
        for site in document["sites"]:
            if site["method"] == method:
                assert site["accuracy"] == kept[site["site"]]         # reported from the test rows of that very run
    gains = {(r["site"], r["method"]): r for r in document["sites"]}
    one = gains["site-1", "fedavg+dbe"]
    assert one["gain_over_local"] == pytest.approx(one["accuracy"] - gains["site-1", "local"]["accuracy"])
    assert "What each site would gain or lose" in (tmp_path / "s" / "study.md").read_text()

    plan = make_plan(federation.settings, ["fedavg+dbe"], budget=1, rounds=1, learning_rates=(0.03, 0.1))
    started: list[str] = []
    ear = type("Ear", (Listener,), {"round_done": lambda self, record: None})()
    was, federation.launcher.flwr_run = federation.launcher.flwr_run, lambda *a, **k: started.append("a run")   # none may start
    try:
        again = Report(plan, run_study(plan, app, tmp_path / "s" / "runs", federation.launcher, federation.link, ear)).document()
    finally:
        federation.launcher.flwr_run = was
    assert started == []
    assert again["sites"] == document["sites"]                        # finished runs are read, not repeated


def test_sites_that_have_not_agreed_to_a_study(federation, tmp_path):
    from consilience.federation.app import app_hash
    from consilience.federation.approval import STUDY, Approvals
    sha256 = app_hash(federation.app)
    stores = [Approvals(r.site.store) for r in federation.sites]
    for store in stores:
        store.approve(sha256)
    try:
        said = consilience("federation", "study", str(federation.app), "--server", str(federation.launcher.folder), "--tune", "1",
                           "--rounds", "1", cwd=tmp_path)
    finally:
        for store in stores:
            store.approve(sha256, STUDY)
    assert said.returncode == 3
    assert "not a change of" in said.stderr
    assert "--study" in said.stderr
    assert "Traceback" not in said.stderr
