"""Fewer checkpoints, a best model that waits for them, and runs that are cut off by the clock."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from consilience.runs.config import RunConfig
from consilience.runs.files import read_tensors
from consilience.runs.folder import RunFolder, read_records
from consilience.runs.many import LATE, Job, run_many
from consilience.runs.run import run_config

BASE = {"data": "digits", "clients": 4, "rounds": 4, "lr": 0.1, "validation": 0.2, "split": "iid"}


def test_checkpoints_can_be_spared_and_the_best_model_is_written_all_the_same(tmp_path: Path) -> None:
    often = run_config(RunConfig.make(BASE), out=tmp_path / "often")
    seldom = run_config(RunConfig.make({**BASE, "checkpoint_seconds": 3600.0}), out=tmp_path / "seldom")
    assert often.records[-1]["global"] == seldom.records[-1]["global"]
    names = lambda folder: sorted(p.name for p in (tmp_path / folder / "checkpoints").iterdir())
    assert names("seldom") == ["round-000004"]                        # the last one alone, which a finished run must have
    one, other = (read_tensors(tmp_path / f / "best" / "global.safetensors") for f in ("often", "seldom"))
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_the_setting_is_the_machine_s_and_no_part_of_what_a_run_is() -> None:
    plain, spared = RunConfig.make(BASE), RunConfig.make({**BASE, "checkpoint_seconds": 60.0})
    assert plain.digest() == spared.digest()
    assert "checkpoint_seconds" not in spared.portable()


def test_a_cut_off_run_has_a_checkpoint_and_no_end(tmp_path: Path) -> None:
    config = RunConfig.make({**BASE, "checkpoint_seconds": 3600.0})
    cut = run_config(config, out=tmp_path / "run", until=time.time() - 1)
    assert cut.stopped == "cut off at round 0"
    assert not (tmp_path / "run" / "done").exists()
    whole = run_config(config, out=tmp_path / "run")
    assert whole.stopped == "all rounds done"
    assert [r["round"] for r in read_records(tmp_path / "run" / "records.jsonl")] == [1, 2, 3, 4]
    assert RunFolder(tmp_path / "run").done


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    jobs = [Job(f"run {i}", RunConfig.make({**BASE, "seed": i}), str(tmp_path / str(i))) for i in range(2)]
    assert run_many(jobs, "trying", workers=1, until=time.time() - 1) == [LATE, LATE]
    assert not any(tmp_path.iterdir())
