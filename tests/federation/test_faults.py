"""Processes that are killed, nodes that nobody admitted, and clients without TLS, in a real federation on loopback.

What a site answers wrongly (NaN, shapes, sizes, old rounds, nothing) is in tests/engines/flower, where every bit can be looked at.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from consilience import tree
from consilience.cli.federation_site import let_in, watch
from consilience.engines.flower.settings import FederationSettings
from consilience.errors import ConfigError
from consilience.federation.admitted import Door
from consilience.federation.app import app_hash
from consilience.federation.approval import STUDY, Approvals
from consilience.federation.certificates import NodeKey, make_key
from consilience.federation.commands import SuperLink
from consilience.federation.demo import digits_federation
from consilience.federation.follow import read_run, run_and_follow
from consilience.federation.launch import NotLetIn
from consilience.federation.processes import LaunchError, marked
from consilience.federation.site import join_sites, load_site
from consilience.runs.files import read_json, read_tensors
from consilience.runs.folder import read_records
from consilience.runs.run import build_federation

pytestmark = pytest.mark.federation
PATIENCE = 240.0              # seconds before a test gives up; a busy machine is slow


@pytest.fixture
def lenient(federation) -> Iterator:
    """Sites that let a run change anything."""
    sha256 = app_hash(federation.app)
    for running in federation.sites:
        Approvals(running.site.store).approve(sha256, ["*"])
    yield federation
    for running in federation.sites:
        Approvals(running.site.store).approve(sha256, STUDY)


def await_that(what: Callable[[], object], message: str) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, message
        time.sleep(0.05)


def records_of(folder: Path) -> list[dict]:
    path = folder / "records.jsonl"
    return read_records(path) if path.is_file() else []


def answered(record: dict) -> list[int]:
    return [int(name.removeprefix("site-")) for name in record["losses"]]


def assert_equals_simulation(federation, folder: Path, **changed) -> None:
    """Every bit is that of a simulation in which the same sites took part in the same rounds."""
    settings = FederationSettings.make({**federation.settings.flat(), **changed})
    sites = [load_site(s.site.data, number=s.site.number, classes=settings.agreed.classes, class_names=settings.agreed.class_names)
             for s in federation.sites]
    fed = build_federation(settings.run.replace(device="cpu"), replace(join_sites(sites), transform=settings.make_transform()))
    torch.set_num_threads(1)
    for record in records_of(folder):
        if record["round"]:
            fed.round(answered(record))
    trained = read_tensors(folder / "final" / "global.safetensors")
    mine = {**fed.model["params"], **fed.model["buffers"]}
    assert [k for k in trained if not torch.equal(trained[k], mine[k])] == []
    token = read_json(folder / "federation.json")["token"]
    for number, running in enumerate(federation.sites):
        own = fed.client(number)
        store = running.site.store / "state" / token / f"site-{number}" / f"round-{own.own_round:06d}"
        kept = read_tensors(store / "state.safetensors")
        assert [k for k, t in tree.paths(own.tensors) if not torch.equal(kept[k], t)] == []


def test_a_site_is_killed_during_training_and_comes_back_with_its_state(lenient, tmp_path):
    """SCAFFOLD's variates and DBE's personal vectors lie at the sites. Site 2 dies in round 2; the others go on and finish. Then
    it is started again, and the run goes on with all three.
    """
    federation, folder, changed = lenient, tmp_path / "run", {"method": "scaffold+dbe", "epochs": 5}
    victim = federation.sites[2]
    already = len(victim.starter.said())
    federation.launcher.flwr_run(federation.app, federation.link, {**changed, "rounds": 3, "folder": str(folder)}, "killed-site")
    await_that(lambda: "Site 2, round 2: asked to train" in victim.starter.said()[already:], "round 2 never reached site 2")
    victim.kill()
    for child in (victim.node, victim.starter):
        federation.launcher.children.remove(child)
    await_that((folder / "done").is_file, "the run did not end")
    token = read_json(folder / "federation.json")["token"]
    assert (victim.site.store / "state" / token / "site-2" / "round-000001").is_dir()
    federation.sites[2] = started_again(federation, victim.site)
    run_and_follow_on(federation, folder, {**changed, "rounds": 4})
    records = {r["round"]: r for r in read_run(folder)["records"]}
    assert [answered(records[i]) for i in (1, 2, 3, 4)] == [[0, 1, 2], [0, 1], [0, 1], [0, 1, 2]]
    assert records[2]["lost"] == ["site-2"]
    assert_equals_simulation(federation, folder, **changed, rounds=4)


def run_and_follow_on(federation, folder: Path, changed: dict) -> None:
    """More rounds in the folder of a run that is done."""
    (folder / "done").unlink()
    run_and_follow(federation.launcher, federation.link, federation.app, folder, changed, name="more-rounds")


def started_again(federation, site):
    """At once, as its operator would: Flower lets a node in again when it believes the old one gone, some seconds after it was killed."""
    return let_in(federation.launcher, federation.launcher.site(site, wait=False), print)


def test_the_server_is_killed_and_goes_on_from_its_checkpoint(federation, tmp_path):
    folder, changed = tmp_path / "run", {"method": "scaffold", "rounds": 4}
    witness = federation.sites[0]
    already = len(witness.starter.said())
    run = federation.launcher.flwr_run(federation.app, federation.link, {**changed, "folder": str(folder)}, "killed-server")
    await_that(lambda: "Site 0, round 3: asked to train" in witness.starter.said()[already:], "round 3 never reached site 0")
    victims = [pid for pid in marked(federation.launcher.mark) if "serverapp" in command_of(pid)]
    assert victims
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await_that(lambda: not alive(victims), "the server's app did not die")
    run.follow.stop(1.0)
    with contextlib.suppress(LaunchError):
        run.stop()                                     # Flower may not have noticed yet
    assert not (folder / "done").is_file()
    before = [r["round"] for r in records_of(folder)]
    assert before[-1] in (2, 3)
    document = run_and_follow(federation.launcher, federation.link, federation.app, folder, changed, name="server-again")
    assert [r["round"] for r in document["records"]] == [1, 2, 3, 4]
    assert_equals_simulation(federation, folder, **changed)


def test_everything_is_killed_at_once_and_goes_on(tmp_path):
    """A power cut: SuperLink, ServerApp and all sites die in the middle of a run. Started again with the same folders, the run goes on."""
    values = {"method": "scaffold+dbe", "rounds": 4, "wait": 30.0, "retries": 0}
    folder = tmp_path / "run"
    with digits_federation(tmp_path / "federation", values) as first:
        first.launcher.flwr_run(first.app, first.link, {"folder": str(folder)}, "first")
        await_that(lambda: [r for r in records_of(folder) if r["round"] == 2], "round 2 never ended")
        victims = marked(first.launcher.mark)
        assert any("superlink" in command_of(pid) for pid in victims)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await_that(lambda: not alive(victims), "some process did not die")
    assert not (folder / "done").is_file()
    with digits_federation(tmp_path / "federation", values) as second:
        document = run_and_follow(second.launcher, second.link, second.app, folder, {}, name="second")
        assert [r["round"] for r in document["records"]] == [0, 1, 2, 3, 4]
        assert all(answered(r) == [0, 1, 2] for r in document["records"] if r["round"])
        assert_equals_simulation(second, folder)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def alive(pids: list[int]) -> list[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""
    return [pid for pid in pids if state(pid) not in ("", "Z")]


@contextlib.contextmanager
def intruder(federation, **how) -> Iterator:
    """A SuperNode of someone else's, that says it is site 0."""
    known = federation.sites[0].site
    running = federation.launcher.site(replace(known, **how), wait=False)
    try:
        yield running
    finally:
        running.stop()
        for child in (running.node, running.starter):
            federation.launcher.children.remove(child)


def test_a_node_without_an_admitted_key_is_not_let_in(federation, tmp_path):
    key: NodeKey = make_key(tmp_path / "stranger")
    with intruder(federation, store=tmp_path / "stranger", key=key) as running, \
            pytest.raises(LaunchError, match="does not know this site's key"):
        federation.launcher.await_site(running, PATIENCE)


def test_a_key_that_is_taken_back(federation, tmp_path, capsys):
    """The site is told and ends; the key is not admitted again, and nobody says that it was."""
    key = make_key(tmp_path / "leaving")
    door = Door(federation.launcher, federation.link)
    node = door.admit(key.public)
    assert door.admit(key.public) is None
    with intruder(federation, store=tmp_path / "leaving", key=key) as running:
        federation.launcher.await_site(running, PATIENCE)
        assert door.dismiss(str(key.public)) == node
        with pytest.raises(NotLetIn, match="has taken this site's key back"):
            watch(federation.launcher, running, Approvals(tmp_path / "leaving"))
    with pytest.raises(ConfigError, match="was taken back, and Flower admits a key once"):
        door.admit(key.public)


def test_a_node_without_tls_is_not_let_in(federation, tmp_path):
    plain = SuperLink(federation.link.address, None)
    with intruder(federation, store=tmp_path / "plain", superlink=plain, key=None) as running:
        with pytest.raises(LaunchError):
            federation.launcher.await_site(running, 20.0)
        assert "SuperNode ID:" not in running.node.said()
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(f"http://{federation.link.address}/health", timeout=10)


def test_the_sites_train_on_after_all_that(federation, tmp_path):
    """Neither strangers nor the dead have harmed anybody."""
    document = run_and_follow(federation.launcher, federation.link, federation.app, tmp_path / "run", {"method": "fedper", "rounds": 2},
                              name="afterwards")
    assert [answered(r) for r in document["records"]] == [[0, 1, 2], [0, 1, 2]]
    assert_equals_simulation(federation, tmp_path / "run", method="fedper")
