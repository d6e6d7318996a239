"""Records of runs as CSV files, one per run, with an index beside them: small enough to keep under version control, and enough to
make every table again. Tensors, losses of single clients and scores of single clients beyond a few stay in the run's folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..report.gather import StoredRun
from ..runs.files import read_json, write_bytes, write_json

INDEX = "runs.json"
FEW = 10                     # with more clients than these their scores are left out
_SCORES = ("global", "personalised", "validation", "held_out")
_TAKEN = "measures"           # what the run measured on its way
_NUMBERS = ("round", "loss", "bytes_up", "bytes_down")


def csv_of(folder: Path) -> Path:
    """Where the records of the run with this folder's name stand as CSV."""
    return folder.with_name(f"{folder.name}.csv")


def flatten(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record that scores are made of, by place, as in global/per_client/dslr."""
    out = {name: record[name] for name in _NUMBERS if record.get(name) is not None}
    for part in (*_SCORES, _TAKEN):
        _walk(record.get(part) or {}, part, out)
    seconds = (record.get("measured") or {}).get("seconds")
    return out if seconds is None else {**out, "measured/seconds": round(seconds, 3)}


def _walk(value: Any, place: str, out: dict[str, float]) -> None:
    if isinstance(value, Mapping):
        if len(value) <= FEW or place.count("/") == 0:
            for name, inner in value.items():
                _walk(inner, f"{place}/{name}", out)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        out[place] = value


def unflatten(row: Mapping[str, str]) -> dict[str, Any]:
    """A record again; parts without a number are None."""
    record: dict[str, Any] = {"round": 0, "loss": None, "bytes_up": 0, "bytes_down": 0, **dict.fromkeys(_SCORES), "measured": {}}
    for place, text in row.items():
        if text == "":
            continue
        *above, last = place.split("/")
        inner = record
        for name in above:
            if inner.get(name) is None:
                inner[name] = {}
            inner = inner[name]
        inner[last] = int(text) if last in ("round", "bytes_up", "bytes_down") else float(text)
    for part in ("global", "personalised"):
        if record[part] is not None:
            record[part] = {"accuracy": None, "mean": None, "worst": None, "loss": None, "test": None, "per_client": {}, **record[part]}
    return record


def keep_as_csv(run: StoredRun, measures: Mapping[str, Any], into: Path) -> Path:
    """Write a run's records and what the index says of it; returns the CSV file."""
    rows = [flatten(r) for r in run.records]
    alike = all(r.get("global") == r.get("personalised") for r in run.records)       # no client has a model of its own
    if alike:
        rows = [{k: v for k, v in row.items() if not k.startswith("personalised/")} for row in rows]
    header = list(dict.fromkeys(["round", *(k for row in rows for k in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: v if isinstance(v, int) else f"{v:.6g}" for k, v in row.items()} for row in rows)
    path = csv_of(into / run.path.name.removesuffix(".csv"))
    write_bytes(path, text.getvalue().encode())
    entry = {"method": run.method, "config": run.config, "data": {k: run.about.get(k) for k in ("name", "split", "shift", "hash")},
             "environment": run.environment, "stopped": run.stopped, "no_personal_models": alike, "measures": _short(measures)}
    write_json(into / INDEX, dict(sorted({**_index(into), path.stem: entry}.items())))
    return path


def _short(measures: Mapping[str, Any]) -> Any:
    """Without what is listed client by client."""
    if isinstance(measures, Mapping):
        return {k: _short(v) for k, v in measures.items() if k != "per_client"}
    return measures


def _index(folder: Path) -> dict[str, Any]:
    file = folder / INDEX
    return _read_index(file, file.stat().st_mtime_ns) if file.is_file() else {}


@lru_cache(maxsize=4)
def _read_index(file: Path, changed: int) -> dict[str, Any]:
    return read_json(file)


def read_csv_run(folder: Path) -> StoredRun | None:
    """The run of this folder's name from the CSV beside it; None where there is none."""
    path = csv_of(folder)
    if not path.is_file():
        return None
    entry = _index(path.parent).get(path.stem)
    if entry is None:
        return None
    with path.open(encoding="utf-8", newline="") as file:
        records = [unflatten(row) for row in csv.DictReader(file)]
    if entry["no_personal_models"]:
        records = [{**r, "personalised": r["global"]} for r in records]
    return StoredRun(path, entry["method"], entry["config"], entry["data"], records, entry["environment"], entry["measures"],
                     entry["stopped"])
