"""A run's folder: what is in it, how it goes on after damage, and who may write to it."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch

import consilience
from consilience.errors import ConfigError, DataError
from consilience.runs import folder as folders
from consilience.runs.files import DiskError, read_tensors, whole_folder, write_bytes, write_tensors
from consilience.runs.folder import RunFolder, read_records
from consilience.runs.lock import folder_lock
from consilience.runs.reload import open_run
from consilience.runs.run import Listener

TINY = {"data": "synthetic(samples=160, classes=3, clients=4, features=6)", "rounds": 3, "lr": 0.1, "validation": 0.2}


class Stop(Exception):
    """A crash, for tests."""


def records(folder) -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if k != "measured"} for line in (folder / "records.jsonl").read_text().splitlines()]


def models(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for name in ("final", "best") for p in (folder / name).rglob("*.safetensors")}


def crash_after(monkeypatch, round_number: int, name: str = "checkpoint") -> None:
    """The process ends right after `name` was done for this round."""
    real = getattr(RunFolder, name)

    def call(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        fed = args[0] if name == "checkpoint" else args[0].federation
        if fed.round_number == round_number:
            raise Stop
        return out
    monkeypatch.setattr(RunFolder, name, call)


@pytest.fixture(scope="module", params=["memory", "disk"])
def once(request, tmp_path_factory):
    """A run of five rounds, and the same interrupted right after its checkpoint of round 3; those of rounds 2 and 3 are kept."""
    at, settings = tmp_path_factory.mktemp("once"), {**TINY, "rounds": 5, "participation": 0.5, "store": request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "CHECKPOINT_SHARE", float("inf"))            # one after every round
        consilience.run("scaffold+dbe", out=at / "whole", **settings)
        crash_after(patch, 3)
        with pytest.raises(Stop):
            consilience.run("scaffold+dbe", out=at / "r", **settings)
    return at, settings


@pytest.fixture
def interrupted(once, tmp_path, monkeypatch):
    """A copy of the interrupted run's folder, the whole one's, and how to go on."""
    at, settings = once
    monkeypatch.setattr(folders, "CHECKPOINT_SHARE", float("inf"))
    shutil.copytree(at / "r", tmp_path / "r")
    return tmp_path / "r", at / "whole", lambda: consilience.run("scaffold+dbe", out=tmp_path / "r", **settings)


def test_what_is_in_it(trained):
    at = trained("dbe")
    assert {p.name for p in at.iterdir()} == {".lock", "config.json", "environment.json", "records.jsonl", "checkpoints", "final", "best",
                                              "done"}
    config = json.loads((at / "config.json").read_text())
    assert config["data"]["hash"]
    assert config["config"]["lr"] == 0.1
    environment = json.loads((at / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["device"]
    assert environment["tf32"] is None                   # of a GPU only
    assert environment["estimate"]["memory_bytes"] > 0
    assert environment["estimate"]["gpu_bytes"] == 0
    assert [p.name for p in sorted((at / "checkpoints").iterdir())][-1] == "round-000003"
    assert len(list((at / "checkpoints").iterdir())) <= 2
    names = open_run(at).data.clients
    assert {p.stem for p in (at / "final" / "clients").iterdir()} == {c.name for c in names}
    assert read_tensors(at / "final" / "clients" / f"{names[0].name}.safetensors").keys() == {"personal/prbm/shift"}


def test_a_run_that_was_cut_off_says_where_it_ran(interrupted):
    """Pages of results name the engine of every run, and many runs are cut off."""
    environment = json.loads((interrupted[0] / "environment.json").read_text())
    assert environment["engine"] == "sequential"
    assert environment["estimate"]["memory_bytes"] > 0


def test_settings_of_a_newer_version_are_said_to_be(trained, tmp_path, monkeypatch):
    shutil.copytree(trained("dbe"), tmp_path / "r")
    stored = json.loads((tmp_path / "r" / "config.json").read_text())
    stored["config"]["horizon"] = 3
    (tmp_path / "r" / "config.json").write_text(json.dumps(stored))
    monkeypatch.setattr("consilience.runs.reload.version_of", lambda name: "0.1.0")
    made = json.loads((tmp_path / "r" / "environment.json").read_text())
    for version, said in (("0.1.0", False), ("7.2.0", True)):
        made["packages"]["consilience"] = version
        (tmp_path / "r" / "environment.json").write_text(json.dumps(made))
        with pytest.raises(ConfigError, match=r"run in '.*r' cannot be read here.*no option 'horizon'") as refused:
            open_run(tmp_path / "r")
        assert ("It was made with consilience 7.2.0, and this is 0.1.0" in str(refused.value)) == said


@pytest.mark.parametrize("text", ['{"architectures": ["Bert"]}', "[1, 2]"])
def test_a_config_json_of_another_program_is_no_run(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"holds no run: its config\.json is another program's"):
        open_run(tmp_path)


def test_equal_runs_are_equal_bytes(trained, tiny, tmp_path):
    consilience.run("dbe", out=tmp_path / "b", **tiny)
    assert models(trained("dbe")) == models(tmp_path / "b")
    assert len(models(tmp_path / "b")) == 2 * (1 + 4)


def test_a_run_keeps_the_memory_layout_it_was_begun_with(tmp_path, tiny, monkeypatch):
    """As when it was begun on a GPU, whose choice differs, and goes on without one."""
    whole = consilience.run("scaffold", out=tmp_path / "whole", **{**tiny, "layout": "channels_last", "rounds": 3})
    monkeypatch.setattr(folders, "CHECKPOINT_SHARE", float("inf"))
    with monkeypatch.context() as patch:
        crash_after(patch, 1)
        with pytest.raises(Stop):
            consilience.run("scaffold", out=tmp_path / "r", **{**tiny, "layout": "channels_last", "rounds": 3})
    gone_on = consilience.run("scaffold", out=tmp_path / "r", **{**tiny, "rounds": 3})
    assert gone_on.config["layout"] == gone_on.federation.policy.layout == "channels_last"
    assert models(tmp_path / "r") == models(tmp_path / "whole")
    assert whole.config == gone_on.config
    with pytest.raises(ConfigError, match="holds a run with layout = 'channels_last', not 'contiguous'"):
        consilience.run("scaffold", out=tmp_path / "r", **{**tiny, "layout": "contiguous", "rounds": 3})
    assert consilience.run("scaffold", out=tmp_path / "r", again=True, **{**tiny, "rounds": 3}).config["layout"] == "contiguous"


def test_a_run_goes_on_to_the_same_end(interrupted):
    folder, whole, go_on = interrupted
    assert [r["round"] for r in records(folder)] == [0, 1, 2, 3]
    go_on()
    assert records(folder) == records(whole)
    assert models(folder) == models(whole)
    assert (folder / "done").read_bytes() == (whole / "done").read_bytes()


@pytest.mark.parametrize("damage", [
    lambda at: (at / "state.safetensors").write_bytes((at / "state.safetensors").read_bytes()[:-7]),
    lambda at: (at / "state.safetensors").write_bytes(b"\0" * 99),
    lambda at: (at / "state.json").write_text("{"),
    lambda at: (at / "state.json").write_text((at / "state.json").read_text().replace('"round_number": 3', '"round_number": 4')),
    lambda at: (at / "state.json").unlink(),
    lambda at: (at / "state.safetensors").unlink(),
    lambda at: (at / "state.json").write_text("[]"),
], ids=["short", "zeros", "half a JSON", "a changed number", "no JSON", "no tensors", "another JSON"])
def test_a_damaged_checkpoint_is_passed_over(interrupted, damage):
    folder, whole, go_on = interrupted
    damage(folder / "checkpoints" / "round-000003")
    go_on()
    assert records(folder) == records(whole)
    assert models(folder) == models(whole)


def test_without_any_sound_checkpoint_it_begins_again(interrupted):
    folder, whole, go_on = interrupted
    for at in (folder / "checkpoints").iterdir():
        (at / "state.json").write_text("")
    go_on()
    assert records(folder) == records(whole)
    assert models(folder) == models(whole)


@pytest.mark.parametrize("tail", ['{"round": 4, "coh', "\0\0\0\0", '{"round": 4}', ""])
def test_a_torn_last_line_is_dropped(interrupted, tail):
    folder, whole, go_on = interrupted
    with open(folder / "records.jsonl", "a") as file:
        file.write(tail)
    assert len(read_records(folder / "records.jsonl")) == (5 if tail.endswith("}") else 4)
    go_on()
    assert records(folder) == records(whole)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_lost_records_are_made_again(interrupted, kept):
    """A file system that lost more than the last line: the run goes on from a checkpoint that the records reach."""
    folder, whole, go_on = interrupted
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[:kept]))
    go_on()
    assert records(folder) == records(whole)
    assert models(folder) == models(whole)


def test_damage_among_the_records_is_said(interrupted):
    folder, _, go_on = interrupted
    lines = (folder / "records.jsonl").read_text().splitlines()
    (folder / "records.jsonl").write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    with pytest.raises(DataError, match="damaged in line 2"):
        go_on()


def test_a_finished_run_with_a_damaged_checkpoint_loses_nothing(interrupted):
    folder, whole, go_on = interrupted
    go_on()
    (folder / "checkpoints" / "round-000005" / "state.json").write_text("")
    go_on()
    assert records(folder) == records(whole)
    assert models(folder) == models(whole)
    shutil.rmtree(folder / "checkpoints")
    before = records(folder)
    with pytest.raises(DataError, match="--again"):
        go_on()
    assert records(folder) == before


@pytest.mark.parametrize("moment", ["keep_best", "checkpoint"])
def test_early_stop_survives(tmp_path, tiny, monkeypatch, moment):
    """Stopped for want of a better score, and killed before that was written down: no further round is made."""
    monkeypatch.setattr(folders, "CHECKPOINT_SHARE", float("inf"))
    settings = {**tiny, "rounds": 9, "lr": 1e-12, "patience": 2}
    with monkeypatch.context() as crash:
        crash_after(crash, 3, moment)
        with pytest.raises(Stop):
            consilience.run("fedavg", out=tmp_path / "r", **settings)
    result = consilience.run("fedavg", out=tmp_path / "r", **settings)
    assert [r["round"] for r in result.records] == [1, 2, 3]
    assert result.stopped == "no better validation score in 2 scorings"
    again = consilience.run("fedavg", out=tmp_path / "r", **settings)
    assert again.stopped == result.stopped


def test_best_holds_the_first_of_the_best_rounds(tmp_path, tiny):
    """The model in best/ scores on validation samples what the record of the best round says."""
    result = consilience.run("fedavg", out=tmp_path / "r", **tiny | {"rounds": 6})
    best = result.summary()["best_by_validation"]["round"]
    stored = read_tensors(tmp_path / "r" / "best" / "global.safetensors")
    redone = consilience.run("fedavg", **tiny | {"rounds": best})
    assert all(torch.equal(stored[k], v) for k, v in redone.global_model.items())


# ---- who may write -------------------------------------------------------------------------------------------------

def test_two_never_write_one_folder(tmp_path, tiny):
    with folder_lock(tmp_path / "r"), pytest.raises(ConfigError, match="Another process is writing"):
        consilience.run("fedavg", out=tmp_path / "r", **tiny)
    consilience.run("fedavg", out=tmp_path / "r", **tiny)                     # the lock is let go


def test_again_leaves_a_folder_of_ours_wherever_it_is_cut(tmp_path, tiny, monkeypatch):
    """A crash while a folder is emptied: the next --again goes through, and half a run never looks finished."""
    folder = tmp_path / "r"
    consilience.run("fedavg", out=folder, **tiny)
    for step in range(1, 7):
        calls = 0

        def stop(real, step=step):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == step:
                    raise Stop
                return real(*args, **kwargs)
            return call
        with monkeypatch.context() as crash:
            crash.setattr(folders.shutil, "rmtree", stop(shutil.rmtree))
            crash.setattr(folders.Path, "unlink", stop(folders.Path.unlink))
            with pytest.raises(Stop):
                consilience.run("fedavg", out=folder, again=True, **tiny)
        assert step == 1 or not (folder / "done").exists()
        assert (folder / "config.json").is_file()
        consilience.run("fedavg", out=folder, again=True, **tiny)
        assert (folder / "done").is_file()


def test_a_crash_while_the_settings_are_written(tmp_path, tiny):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".config.json.draft").write_text("{")
    consilience.run("fedavg", out=tmp_path / "r", **tiny)
    assert (tmp_path / "r" / "done").is_file()


def drafts(folder):
    return [p for p in folder.rglob("*") if "draft" in p.name]


def test_what_a_killed_process_left_half_written_goes(interrupted):
    """Checkpoints are spaced by time, so that the one under way need not be written again: its draft stayed for good."""
    folder, whole, go_on = interrupted
    for place in (".", "checkpoints", "best", "best/clients", "final", "final/clients"):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / ".other.json.draft").write_text("{")
    (folder / "checkpoints" / ".draft-round-000099").mkdir()
    (folder / "checkpoints" / ".draft-round-000099" / ".state.safetensors.draft").write_bytes(b"half")
    (folder / "states").mkdir(exist_ok=True)
    (folder / "states" / ".mine.draft").write_text("in a folder in which no file is written so")
    go_on()
    assert [p.name for p in drafts(folder)] == [".mine.draft"]
    assert models(folder) == models(whole)


def test_what_is_in_a_folder_of_somebody_else_stays(tmp_path, tiny):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".letter.draft").write_text("Dear all")
    with pytest.raises(ConfigError, match="no run of ours"):
        consilience.run("fedavg", out=tmp_path / "r", **tiny)
    assert (tmp_path / "r" / ".letter.draft").is_file()


def test_the_next_checkpoint_removes_drafts_of_others(tmp_path):
    (tmp_path / ".draft-round-000007").mkdir()
    with whole_folder(tmp_path / "round-000008") as draft:
        write_bytes(draft / "a", b"1")
    assert [p.name for p in tmp_path.iterdir()] == ["round-000008"]
    with pytest.raises(DiskError), whole_folder(tmp_path / "round-000008") as draft:
        write_bytes(draft / "a" / ("b" * 1000), b"2")        # no name that a disk takes
    assert [p.name for p in tmp_path.iterdir()] == ["round-000008"]
    assert (tmp_path / "round-000008" / "a").read_bytes() == b"1"


# ---- the disk ------------------------------------------------------------------------------------------------------

def test_full_disk_stops_with_nothing_lost(interrupted, monkeypatch):
    """Writing the checkpoint of round 4 fails half-way; what stood before stands, and with room the run ends as it should."""
    folder, whole, go_on = interrupted
    real = os.fsync
    calls = 0

    def full(handle):
        nonlocal calls
        calls += 1
        if calls == 6:
            os.ftruncate(handle, os.fstat(handle).st_size // 2)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(DiskError, match=r"No space left on device.*intact") as stopped:
            go_on()
    assert stopped.value.exit_code == 4
    assert [r["round"] for r in records(folder)][:4] == [0, 1, 2, 3]
    assert not drafts(folder)                                # half a checkpoint would keep the disk full
    go_on()
    assert records(folder) == records(whole)
    assert models(folder) == models(whole)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not stop this user")
def test_read_only_folder(tmp_path, tiny):
    (tmp_path / "r").mkdir(mode=0o555)
    with pytest.raises(DiskError, match="Permission denied"):
        consilience.run("fedavg", out=tmp_path / "r", **tiny)


def test_read_only_disk(tmp_path, tiny, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DiskError, match="Read-only file system"):
        consilience.run("fedavg", out=tmp_path / "r", **tiny)


def test_a_finished_run_is_read_from_a_read_only_disk(trained, tiny, tmp_path, monkeypatch):
    """It could not be locked, which nobody needs who writes nothing."""
    at = shutil.copytree(trained("fedavg"), tmp_path / "r", ignore=shutil.ignore_patterns(".lock"))
    before = {p: p.read_bytes() for p in at.rglob("*") if p.is_file()}

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    assert consilience.run("fedavg", out=at, **tiny).records == read_records(at / "records.jsonl")
    assert {p: p.read_bytes() for p in at.rglob("*") if p.is_file()} == before
    with pytest.raises(DiskError, match="Read-only file system"):
        consilience.run("fedavg", out=at, again=True, **tiny)


def test_tensors_that_share_memory_are_written(tmp_path):
    """Clients that never trained hold the same initial tensors."""
    one = torch.arange(6.0)
    write_tensors(tmp_path / "t.safetensors", {"a": one, "b": one, "c": one[2:4]})
    got = read_tensors(tmp_path / "t.safetensors")
    assert torch.equal(got["a"], one)
    assert torch.equal(got["b"], one)
    assert got["c"].tolist() == [2.0, 3.0]


def test_a_run_that_prepared_for_nothing_in_an_earlier_version_goes_on(tmp_path, tiny):
    """Its records begin with round 0, which the method no longer has; that is no gap."""
    result = consilience.run("fedbr", out=tmp_path, **tiny)
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(result.records[0] | {"round": 0, "exchanged": False}) + "\n" + path.read_text())
    (tmp_path / "done").unlink()
    heard = []

    class Ear(Listener):
        def started(self, federation, rounds, done):
            heard.append(done)
    again = consilience.run("fedbr", out=tmp_path, listener=Ear(), **tiny)
    assert heard == [tiny["rounds"]]
    assert [r["round"] for r in again.records] == [0, 1, 2, 3]
