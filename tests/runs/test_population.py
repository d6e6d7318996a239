"""A run on mapped data with states on disk, in a process of its own: what it holds is neither the data nor the states."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from consilience.engines import estimate
from consilience.errors import ConfigError
from consilience.runs.config import RunConfig
from consilience.runs.run import build_federation, load_data, run_config

CLIENTS, SAMPLES, ROUNDS = 2000, 20, 6
SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import consilience
from consilience.engines import estimate
from consilience.runs.run import Listener

def held(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024

told = {}
real = estimate.estimate
def heard(*args, **kwargs):
    out = real(*args, **kwargs)
    told.update(out.record(), parts=dict(out.memory), disk=dict(out.disk))
    return out
sys.modules["consilience.runs.run"].estimate = heard
before = held("VmRSS")
class Ear(Listener):
    def __init__(self):
        self.most = self.private = 0
    def round_done(self, record):
        self.most, self.private = max(self.most, held("VmRSS")), max(self.private, held("RssAnon"))
ear = Ear()
settings = json.loads(sys.argv[1])
result = consilience.run("scaffold", f"arrays(path={sys.argv[2]!r})", out=sys.argv[3], listener=ear, **settings)
print(json.dumps({"before": before, "after": ear.most, "private": ear.private, "told": told, "store": result.measured["store"]}))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """316 MiB of images, nearly all of them holes in a file."""
    at = tmp_path_factory.mktemp("data")
    rows = CLIENTS * SAMPLES
    x = np.lib.format.open_memmap(at / "x.npy", "w+", np.uint8, (rows, 1, 88, 94))
    x[::SAMPLES, 0, 0, 0] = 255
    x.flush()
    np.save(at / "y.npy", np.arange(rows) % 3)
    np.save(at / "client.npy", np.repeat(np.arange(CLIENTS), SAMPLES))
    return at


SETTINGS = {"model": "mlp(hidden=16)", "participation": 20, "rounds": ROUNDS, "lr": 0.01, "batch": 5, "engine": "sequential",
            "eval_every": 3, "device": "cpu", "store": "disk"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_disk_are_what_was_estimated(data, tmp_path):
    """Model: 88·94·16 + 16 + 16·3 + 3 = 132,419 numbers, 0.5 MiB; 6 rounds of 20 clients visit about 2000 (1 − 0.99^6) = 117, so
    their variates take about 59 MiB. Neither they nor the 316 MiB of images may be in memory.
    """
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(SETTINGS), str(data), str(tmp_path / "r")], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    told = said["told"]
    assert said["store"] == "disk"
    assert told["parts"]["data"] == 0
    grown = said["after"] - said["before"]
    # a round's clients hold 20 models, variates, uploads and copies: 50 MiB; the C library keeps up to 150 MiB of what was freed
    assert grown < 280 * 2**20, grown / 2**20
    # libraries' files, 90 MiB or 400 with the build of PyTorch, are shared between processes and can be dropped
    assert told["memory_bytes"] / 2 < said["private"] < told["memory_bytes"] * 1.5
    used = sum(p.stat().st_size for p in (tmp_path / "r").rglob("*") if p.is_file())
    assert told["disk_bytes"] / 2.5 < used < told["disk_bytes"] * 1.2
    states = (tmp_path / "r" / "states" / "states.bin").stat().st_size
    assert told["disk"]["states"] / 2.5 < states < told["disk"]["states"] * 1.2


def test_what_cannot_fit_is_refused_with_advice(data, tmp_path, monkeypatch):
    config = RunConfig.make({**SETTINGS, "method": "scaffold", "data": f"arrays(path={str(data)!r})"})
    loaded = load_data(config)
    needs = estimate.states_bytes(build_federation(config, loaded), ROUNDS)
    monkeypatch.setattr(estimate, "free_disk", lambda folder: needs)
    with pytest.raises(ConfigError, match=r"of disk and .* are free .* are for states"):
        run_config(config, out=tmp_path / "r", data=loaded)
    monkeypatch.setattr(estimate, "free_disk", lambda folder: 100 * needs)
    monkeypatch.setattr(estimate, "available_memory", lambda: needs // 2)
    with pytest.raises(ConfigError, match=r"is for states: keep clients' states on disk \(store=disk\)"):
        run_config(config.replace(store="memory"), data=loaded)
