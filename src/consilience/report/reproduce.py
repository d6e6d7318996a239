"""How to get a run again: the exact command, and what it was run with."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import yaml

from ..core.policy import Policy
from ..runs.config import RunConfig
from .gather import Group, StoredRun

# settings that have an option of their own; the others go through -o name=value
_FLAGS = ("data", "split", "shift", "clients", "rounds", "seed", "model", "taps", "lr", "batch", "epochs", "steps", "participation",
          "eval_every")
_ELSEWHERE = frozenset({"method", "settings", "engine", "device", "data_dir", "track"})


def command_of(run: StoredRun) -> str:
    """One line for a shell. Settings that are at their defaults are left out, the seed is always said."""
    defaults = RunConfig().flat()
    words = ["consilience", "run", run.method]
    rest = []
    for name, value in run.config.items():
        plain = tuple(value) if isinstance(value, list) else value                # as stored, a list stands for a tuple
        if name in _ELSEWHERE or (plain == defaults.get(name) and name not in ("seed", "data", "rounds")):
            continue
        text = _text(value)
        if name in _FLAGS:
            words += [f"--{name.replace('_', '-')}", text]
        else:
            rest += ["-o", f"{name}={text}"]
    for path, value in (run.config.get("settings") or {}).items():
        rest += ["--set", f"{path}={_quoted(value)}"]
    return shlex.join(words + rest)


def _quoted(value: Any) -> str:
    """For --set, which reads values as YAML: text that looks like something else needs quotes."""
    try:
        plain = yaml.safe_load(_text(value))
    except yaml.YAMLError:
        plain = None
    return json.dumps(value) if isinstance(value, str) and plain != value else "null" if value is None else _text(value)


def _text(value: Any) -> str:
    """As the command line reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return json.dumps(list(value))
    return str(value)


def settings_table(groups: list[Group]) -> list[dict[str, Any]]:
    """Every setting with its value in each group; `differs` where the groups do not agree, `default` where nobody changed it."""
    defaults = RunConfig().flat()
    options = {f.name for f in dataclasses.fields(Policy)}
    per_group = [_settings(g) for g in groups]
    keys = list(dict.fromkeys(k for s in per_group for k in s))
    rows = []
    for key in keys:
        values = [s.get(key, "–") for s in per_group]
        rows.append({"name": key, "values": values, "differs": len(set(values)) > 1,
                     "default": key in defaults and all(v == _text(defaults[key]) for v in values),
                     "of": "training" if key in options else "run"})
    return rows


def _settings(group: Group) -> dict[str, str]:
    """Values over the seeds of a group: one where they agree, else all of them."""
    flat = [{**{k: v for k, v in r.config.items() if k != "settings"}, **(r.config.get("settings") or {}),
             "split hash": r.about.get("hash"), "data fingerprint": r.about.get("fingerprint")} for r in group.runs]
    return {k: ", ".join(dict.fromkeys(_text(f.get(k)) for f in flat)) for k in dict.fromkeys(k for f in flat for k in f)}


def environments(groups: list[Group]) -> list[str]:
    """The different machines and versions, in words."""
    out: dict[str, None] = {}
    for run in (r for g in groups for r in g.runs):
        e = run.environment
        if e:
            packages = ", ".join(f"{k} {v}" for k, v in (e.get("packages") or {}).items())
            git = e.get("git") or {}
            commit = f"; git commit {git['commit']}{' with changes' if git.get('changed') else ''}" if git.get("commit") else ""
            device = e.get("gpu") or e.get("device") or "?"
            where = f"Python {e.get('python', '?')} on {e.get('platform', '?')}, {device}, engine {e.get('engine', '?')}"
            out[f"{where}; {packages}{commit}"] = None
    return list(out)
