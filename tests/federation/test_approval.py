"""An app that a site's operator has not approved: nothing of it runs there, and the run says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from consilience.federation.app import app_hash
from consilience.federation.approval import Approvals
from consilience.federation.follow import run_and_follow
from consilience.federation.processes import LaunchError

pytestmark = pytest.mark.federation
TRACE = """
import os, pathlib
pathlib.Path(os.environ["FLWR_HOME"], "imported").write_text("this app's code ran here")
"""


def changed_app(federation, tmp_path) -> Path:
    """The same app with a line more, which leaves a trace wherever it is imported."""
    app = tmp_path / "other"
    shutil.copytree(federation.app, app)
    (app / "app.py").write_text((app / "app.py").read_text() + TRACE)
    return app


def test_an_unapproved_app_runs_nowhere_but_on_the_server(federation, tmp_path):
    app = changed_app(federation, tmp_path)
    sha256 = app_hash(app)
    said: list[str] = []
    with pytest.raises(LaunchError, match=rf"0 of 3 sites enrolled[\s\S]*not approved the app with hash {sha256}"):
        run_and_follow(federation.launcher, federation.link, app, tmp_path / "run", {}, note=said.append, name="unapproved")
    assert any(sha256 in text for text in said)
    assert (federation.launcher.folder / "flower" / "server" / "imported").is_file()      # the trace works: the server did import it
    for running in federation.sites:
        store = running.site.store
        assert not (store / "flower" / "imported").exists()
        assert not [p for p in (store / "flower").rglob("*") if sha256[:8] in p.name]      # not even unpacked
        notes = [json.loads(line) for line in (store / "refused" / "refused.jsonl").read_text().splitlines()]
        assert notes[-1]["hash"] == sha256
        assert (store / "refused" / f"{sha256}.fab").is_file()
        assert f"the app with hash {sha256}" in running.starter.said()
        assert running.running                                                              # the site goes on
    assert not (tmp_path / "run" / "done").exists()


def test_the_run_goes_on_without_the_site_that_refuses(federation, tmp_path):
    """Two of three operators approve the changed app; two answers are enough for a round."""
    app = changed_app(federation, tmp_path)
    sha256 = app_hash(app)
    willing, unwilling = federation.sites[:2], federation.sites[2]
    for running in willing:
        Approvals(running.site.store).approve(sha256, ["rounds"])
    document = run_and_follow(federation.launcher, federation.link, app, tmp_path / "run", {"rounds": 1}, name="two-of-three")
    record = document["records"][-1]
    assert sorted(record["losses"]) == ["site-0", "site-1"]
    assert "site-2" in record["absent"]
    for running in willing:
        assert (running.site.store / "flower" / "imported").is_file()
        Approvals(running.site.store).revoke(sha256)
    assert not (unwilling.site.store / "flower" / "imported").exists()


def test_a_setting_that_may_not_be_changed(federation, tmp_path):
    """The approved app, with a setting of the run that the sites have not let go: batch is not among those a study varies."""
    with pytest.raises(LaunchError, match=r"not a change of batch by the run \(batch = 5 in place of 10\)"):
        run_and_follow(federation.launcher, federation.link, federation.app, tmp_path / "run", {"batch": 5}, name="changed")
