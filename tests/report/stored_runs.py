"""Folders of runs in the form that runs write, with made-up numbers; and a browser to open pages in."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from consilience.runs.config import RunConfig
from consilience.runs.run import load_data

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")


@lru_cache(maxsize=64)
def _about(split: str, clients: int, seed: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    data = load_data(RunConfig.make({"data": "digits", "split": split, "clients": clients, "seed": seed}))
    about = {**data.description, "name": data.name, "classes": data.classes, "clients": data.population, "hash": data.split_hash()}
    return about, tuple(c.name for c in data.clients)


def scores(names, accuracy: float, number: int) -> dict[str, Any]:
    each = {n: round(max(0.0, min(1.0, accuracy + 0.02 * math.sin(7 * i + number))), 4) for i, n in enumerate(names)}
    worst = min(each, key=lambda n: (each[n], n))
    return {"accuracy": accuracy, "mean": sum(each.values()) / len(each), "worst": each[worst], "worst_client": worst, "loss": 2 - accuracy,
            "per_client": each, "scored": "after aggregation, before local training", "test": None}


def write_run(top: Path, method: str = "fedavg", seed: int = 0, rounds: int = 5, level: float = 0.8, clients: int = 6, done: bool = True,
              names: tuple[str, ...] | None = None, about: dict[str, Any] | None = None, folder: str | None = None, split: str = "iid",
              **settings: Any) -> Path:
    """One run whose accuracy rises to `level`."""
    config = RunConfig.make({"method": method, "data": "digits", "split": split, "clients": clients, "seed": seed, "rounds": rounds,
                             **settings})
    known, own = _about(split, clients, seed)
    names = names or own
    path = top / (folder or f"{re.sub('[^a-z]', '-', method)}-seed{seed}-{config.digest()}")
    path.mkdir(parents=True)
    stored = {"method": method, "config": {**config.portable(), "weights": "samples"}, "data": {**known, **(about or {})},
              "places": {"data_dir": None}}
    (path / "config.json").write_text(json.dumps(stored))
    environment = {"python": "3.11",
                   "platform": "Linux", "packages": {"torch": "2.3"}, "engine": "sequential", "device": "cpu", "gpu": None,
                   "git": {"commit": "abc", "changed": False}}
    (path / "environment.json").write_text(json.dumps(environment))
    with open(path / "records.jsonl", "w") as file:
        for number in range(1, rounds + 1):
            accuracy = level * (1 - math.exp(-3 * number / rounds)) + 0.01 * math.sin(number + seed)
            both = scores(names, accuracy, number)
            file.write(json.dumps({"round": number, "cohort": list(names), "lost": [], "idle": [], "exchanged": True, "loss": 2 - accuracy,
                                   "losses": dict.fromkeys(names, 2 - accuracy), "bytes_up": 1000, "bytes_down": 500,
                                   "global": None if method == "local" else both, "personalised": both, "validation": None,
                                   "measured": {"seconds": 0.5}}) + "\n")
    if done:
        (path / "done").write_text(json.dumps({"stopped": "all rounds done", "summary": {}}))
    return path


def open_page(path: Path, *flags: str, then: str = "") -> str:
    """The page's DOM after a real browser has run it. `then` is a script that runs after the page's own, allowed for the test."""
    if then:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"script-src 'sha256-[^']+'", "script-src 'unsafe-inline'", text)
        path = path.with_name("driven.html")
        path.write_text(text.replace("</body>", f"<script>{then}</script></body>"), encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run([str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                               "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
                               f"--user-data-dir={profile}", "--window-size=1100,900", *flags, "--dump-dom", path.resolve().as_uri()],
                              capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr[-2000:]
    return done.stdout


def told(dom: str) -> Any:
    """What a driving script wrote into <html data-told>."""
    found = re.search(r'data-told="([^"]*)"', dom)
    assert found, "the script did not come to its end"
    return json.loads(unescape(found[1]))
