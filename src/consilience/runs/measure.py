"""Measure a run: a finished one from its folder, or one that is going on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..core.federation import Federation
from ..data import FederatedData
from ..engines.workers import one_thread
from ..errors import ConfigError, DataError
from ..metrics.clients import worst
from ..metrics.criterion import ACCURACY, of_served
from ..metrics.measures.scores import Answered
from ..metrics.registry import Measure, as_plain, installed_measures, make_measures
from ..metrics.subject import HELD_OUT, Halfway, OutOfTime, Reference, Subject
from ..report.tables import Table
from .files import read_json, write_json
from .folder import read_records
from .reload import OpenedRun, open_run, read_run_config
from .scoring import drawn_words, only, scored_clients

FILE = "measures.json"
Tell = Callable[[str, str, int, int], None]          # measure, what it is doing, done, of
_ASIDE = ("per_client", "gain_per_client", "curve", "trace")      # in JSON only: too long for a table


def read_reference(path: str | Path) -> Reference:
    """Records of the run in a folder; its data and models are not needed."""
    path = Path(path)
    config, about = read_run_config(path)
    if not (path / "records.jsonl").is_file():
        raise DataError(f"The reference run in {str(path)!r} has no records yet.")
    return Reference(config.stack().canonical, config.policy.seed, about["hash"], read_records(path / "records.jsonl"))


def measure(run: OpenedRun | str | Path, names: str | Sequence[str] = (), options: Mapping[str, Any] | None = None, *,
            reference: Reference | str | Path | None = None, tell: Tell = lambda name, what, done, of: None,
            keep: Callable[[Path, Mapping[str, Any]], None] | None = None, until: float | None = None,
            halfway: Halfway | None = None) -> dict[str, Any]:
    """Measure what a run's folder holds: `run` is the folder, or the run that `open_run` opened. `names` is one name or several.

    Returns {name: {"round", "settings", "result", "measured"}}, JSON-able, and adds each entry to the folder's measures.json as
    soon as it is there (`keep` may do something else with it). Names may carry options, as in mdl(steps=500). Without names
    everything is measured that is quick and can be; "left_out" in an entry says why one could not be. A measure asked for by name
    that cannot be is an error, before any is begun.

    At the time `until` (of `time.time`) a measure under way is given up with OutOfTime; those before it are kept. `halfway` holds what a
    long one has found so far: with the same measure of the same run it goes on from there.
    """
    run = run if isinstance(run, OpenedRun) else open_run(run)
    names = [names] if isinstance(names, str) else names
    if reference is not None and not isinstance(reference, Reference):
        reference = read_reference(reference)
    chosen = scored_clients(run.federation, run.data, run.config.run.eval_clients)
    subject = Subject(run.federation, only(run.data, chosen), run.records, reference, clients=chosen)
    looked_at = {"eval_clients": {"scored": len(chosen), "of": run.data.population}} if chosen is not None else {}
    measures = make_measures(names, options) if names else _quick(options)
    reasons = {m.name: m.why_not(subject) for m in measures}
    if names:
        _refuse(reasons)
    out: dict[str, Any] = {}
    # as in a run: sums are added in the same order on any number of cores, in the round that is trained for a measure too
    with one_thread() if run.federation.device.type == "cpu" else nullcontext():
        for one in measures:
            if reasons[one.name]:
                out[one.name] = {"left_out": reasons[one.name]}
                continue
            subject.tell, subject.halfway = _told(one.name, tell, until), Halfway() if halfway is None else halfway
            subject.tell("", 0, 1)
            start = time.perf_counter()
            result = as_plain(one.measure(subject))
            out[one.name] = {"round": run.federation.round_number, "settings": as_plain(one.settings), "result": result, **looked_at,
                             "measured": {"seconds": time.perf_counter() - start}}
            (keep or save_measures)(run.path, {one.name: out[one.name]})
    return out


def _told(name: str, tell: Tell, until: float | None) -> Callable[[str, int, int], None]:
    """Hands on what a measure tells of itself, and stops it there when its time is up."""
    def told(what: str, done: int, of: int) -> None:
        if until is not None and done < of and time.time() >= until:
            raise OutOfTime(f"The time was up before the measure {name!r} had ended ({what or 'begun'} {done} of {of}).")
        tell(name, what, done, of)
    return told


def _quick(options: Mapping[str, Any] | None) -> list[Measure]:
    quick = [name for name, cls in installed_measures().items() if cls.quick]
    asked = {path.partition(".")[0] for path in options or {}}
    return make_measures([*quick, *sorted(asked - set(quick))], options)


def _refuse(reasons: Mapping[str, str | None]) -> None:
    for name, reason in reasons.items():
        if reason:
            raise ConfigError(f"The measure {name!r} cannot be taken here: {reason}.")


def save_measures(path: Path, entries: Mapping[str, Any]) -> None:
    """Add entries to a folder's measures.json; a measure taken again replaces the older one."""
    file = path / FILE
    known = read_json(file) if file.is_file() else {}
    write_json(file, dict(sorted({**known, **{k: v for k, v in entries.items() if "left_out" not in v}}.items())))


def check_measures(fed: Federation, data: FederatedData, names: Sequence[str]) -> None:
    """Refuse, before a run begins, measures that it could never take."""
    # a stand-in for the records a run will have by its first scoring
    subject = Subject(fed, data, [{"round": 1, "personalised": {"accuracy": 0.0}}])
    _refuse({m.name: m.why_not(subject) for m in make_measures(names)})


def check_criterion(fed: Federation, data: FederatedData, text: str) -> None:
    """Refuse, before a run begins, what it cannot be judged by."""
    if text != ACCURACY:
        (one,) = make_measures([text])
        if not one.judges:
            able = [ACCURACY, *(name for name, cls in installed_measures().items() if cls.judges)]
            raise ConfigError(f"A run cannot be judged by {one.name!r}. Criteria: {', '.join(able)}.")
        if "rows" not in one.settings:
            raise ConfigError(f"A run cannot be judged by {one.name!r}: it must have an option `rows`, 'auto' where nobody sets it, to be "
                              "told which samples to take.")
        if one.settings["rows"] != "auto":
            raise ConfigError(f"The rows of the criterion {text!r} are the run's: validation samples to choose by, test samples to report. "
                              "Leave `rows` out.")
        subject = Subject(fed, data, [])
        if not any(subject.count(rows) for rows in ("test", "global", "validation")):
            raise ConfigError(f"A run cannot be judged by {text!r} without test or validation samples. Leave some: train must be below 1.")
        reasons = [m.why_not(subject) for m in (one, dataclasses.replace(one, rows="validation"))]  # type: ignore[type-var]
        _refuse({one.name: reasons[0] if all(reasons) else None})


def criterion_of_round(fed: Federation, data: FederatedData, text: str, clients: Sequence[int] | None = None,
                       subject: Subject | None = None) -> dict[str, Any]:
    """The scores of a round by the run's criterion: on test samples for each model, and on validation samples of the one that counts.

    `subject` may know already what the models answer.
    """
    subject = subject or Subject(fed, data, [], clients=clients)
    (one,) = make_measures([text])
    result = as_plain(one.measure(subject)) if one.why_not(subject) is None else {}
    rows = subject.choose_rows("auto")
    out: dict[str, Any] = {"measure": text, "global": None, "personalised": None, "validation": None}
    for model, scores in (("global", result.get("global")), ("personalised", of_served(result))):
        if scores:
            of_nobody = rows == "global" and scores is result.get("global")               # the global test set, by the global model
            out[model] = _judged(scores, "" if of_nobody else drawn_words(clients, data))
    if subject.no_rows("validation") is None:
        judged = as_plain(dataclasses.replace(one, rows="validation").measure(subject))  # type: ignore[type-var]
        out["validation"] = of_served(judged)["pooled"]
    # clients that take no part have no model of their own, and do not train
    if data.held_out and fed.no_global_model is None and isinstance(one, Answered) and one.training == "before":
        out[HELD_OUT] = _judged(as_plain(one.judged(subject, "global", HELD_OUT, [c.name for c in data.held_out])))
    return out


def _judged(scores: Mapping[str, Any], drawn: str = "") -> dict[str, Any]:
    """A model's scores by the criterion, as records have them. The words on the class that is positive stay last."""
    each = scores.get("per_client") or {}
    low, (scored, *more) = worst(each), scores["scored"].split("; ", 1)
    return {"value": scores["pooled"], "mean": scores.get("client_mean"), "worst": low[1] if low else None,
            "worst_client": low[0] if low else None, "per_client": each, "scored": "; ".join([scored + drawn, *more])}


def measures_of_round(fed: Federation, data: FederatedData, names: Sequence[str], records: Sequence[dict[str, Any]] = (),
                      clients: Sequence[int] | None = None, subject: Subject | None = None) -> dict[str, Any]:
    """Measures of a federation as it stands in a run: {name: result}. The federation is not changed.

    `records` are those of the rounds so far, the one just scored included. `clients`: who is looked at, where that is not everybody.
    `subject` may know already what the models answer.
    """
    subject = subject or Subject(fed, data, clients=clients)
    subject.records = records
    out = {}
    for one in make_measures(names):
        reason = one.why_not(subject)
        out[one.name] = {"left_out": reason} if reason else as_plain(one.measure(subject))
    return out


def table_of(entries: Mapping[str, Any], title: str = "") -> Table:
    """One line for every number; lists per client and traces stand in the JSON alone."""
    rows, notes = [], []
    for name, entry in entries.items():
        if "left_out" in entry:
            notes.append(f"{name}: left out, {entry['left_out']}.")
            continue
        rows += [[name, what, _text(value)] for what, value in _numbers(entry["result"])]
        notes += [f"{name}: {text}." for text in dict.fromkeys(_said(entry["result"]))]
        if "eval_clients" in entry:
            notes.append(f"{name}: of {entry['eval_clients']['scored']} of {entry['eval_clients']['of']} clients, drawn by the seed.")
    return Table(["measure", "of what", "value"], rows, title, notes, [{"name": n, **e} for n, e in entries.items()])


def _numbers(result: Any, prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in result.items():
        path = f"{prefix} {key}".strip().replace("_", " ")
        if key in _ASIDE or key == "scored":
            continue
        if isinstance(value, dict):
            out += _numbers(value, path)
        elif isinstance(value, list):
            for row in value:
                if isinstance(row, dict):
                    (_, first), *rest = row.items()
                    out += _numbers(dict(rest), f"{path} {_text(first)}")
        else:
            out.append((path, value))
    return out


def _said(result: Any) -> list[str]:
    """Sentences on what was scored, from any depth."""
    out = []
    for key, value in result.items():
        if key == "scored":
            out.append(str(value))
        elif isinstance(value, dict) and key not in _ASIDE:
            out += _said(value)
    return out


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
