"""Folders of runs in the form that runs write, with made-up numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from consilience.runs.config import RunConfig
from consilience.runs.run import load_data


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
    settled = dataclasses.replace(config.policy, weights=settings.get("weights", "samples"), layout="contiguous")
    known, own = _about(split, clients, seed)
    names = names or own
    path = top / (folder or f"{re.sub('[^a-z]', '-', method)}-seed{seed}-{config.digest()}")
    path.mkdir(parents=True)
    stored = {"method": method, "config": config.settled(settled), "data": {**known, **(about or {})},
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
