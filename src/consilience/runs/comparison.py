"""What the runs of a comparison say together: rows, paired differences, one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConsilienceError, unknown
from ..metrics.criterion import ACCURACY, criterion_of, model_score, of_served, pooled_measure, served_score, validation_score
from ..metrics.registry import installed_measures
from ..parts.stack import parse_stack
from ..report.tables import Table
from .files import write_bytes, write_json
from .scoring import too_late
from .statistics import paired, spread

if TYPE_CHECKING:
    from ..core.method import Method
    from .tune import Tuning

Row = dict[str, Any]
MOST_NAMED = 8                 # clients that a note names
COLUMNS = (("global", "global", "value"), ("personalised", "personalised", "value"), ("worst", "personalised", "worst"))
SCORES = {
    "last": "of the last round",
    "best_by_validation": "of the round with the best validation score",
    "best_by_test": "of the round with the best test score, chosen by the test samples themselves and so too high",
    "mean_of_best_five": "averaged over the five rounds with the best test scores, chosen by the test samples themselves and so too high",
}


def check_score(score: str) -> str:
    if score not in SCORES:
        raise unknown("score", score, SCORES)
    return score


def chosen_rounds(records: Sequence[dict[str, Any]], score: str) -> list[dict[str, Any]]:
    """The records a score is taken from. Among equals the earliest round."""
    scored = [r for r in records if r.get("personalised")]
    if score == "last":
        return scored[-1:]
    judge = validation_score if score == "best_by_validation" else served_score
    judged = [(v, r) for r in scored if (v := judge(r)) is not None]
    ranked = [r for _, r in sorted(judged, key=lambda pair: (-pair[0], pair[1]["round"]))]
    return ranked[: 5 if score == "mean_of_best_five" else 1]


def _method(config: Mapping[str, Any]) -> Method | None:
    """The method of a run's settings; None for one of another version, or with a part of the user's own that is not here."""
    try:
        return parse_stack(config["method"], config.get("settings")).method()
    except (KeyError, ConsilienceError):
        return None


def _weights(config: Mapping[str, Any]) -> str | None:
    """How a run's average weighs clients by its settings; None where they decide nothing, or where that is not known."""
    method = _method(config)
    if method is None:
        return None
    apart = any(part.pools or "no global model" in part.traits for part in method.parts)
    return None if apart or method.using("weights") else config.get("weights")


def _summary(values: list[float | None]) -> dict[str, Any] | None:
    summary = spread(values)
    return None if summary is None else {"mean": summary.mean, "std": summary.std, "values": values}


def _apart(name: str, summary: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Mean and deviation as two columns."""
    return {name: (summary or {}).get("mean"), f"{name} std": (summary or {}).get("std")}


def _cell(summary: Mapping[str, Any] | None) -> str:
    return "–" if summary is None else f"{summary['mean']:.3f}" + (f" ± {summary['std']:.3f}" if summary["std"] is not None else "")


def _p(value: float | None) -> str:
    return "–" if value is None else "<0.001" if value < 0.0005 else f"{value:.3f}"       # no p is 0


@dataclass
class Comparison:
    """The runs by row and seed. A row lacks the seeds whose run failed."""

    methods: Sequence[str]
    seeds: Sequence[int]
    documents: Mapping[tuple[str, int], dict[str, Any]]
    failures: Mapping[tuple[str, int], str]
    reference: str
    score: str = "last"
    config: Mapping[str, Any] = field(default_factory=dict)      # what all rows share
    folders: Mapping[tuple[str, int], str | None] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        for seed in self.seeds:
            hashes = {self.documents[m, seed]["data"]["hash"]: m for m in self.methods if (m, seed) in self.documents}
            if len(hashes) > 1:
                raise ConfigError(f"The runs of seed {seed} were made on different data, so they cannot be compared: "
                                  f"{' and '.join(hashes.values())}. Was the data set changed? Run them anew with --again.")

    def __repr__(self) -> str:
        """A line: the documents would fill pages."""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<Comparison: {', '.join(self.methods)}; {len(self.seeds)} seeds{failed}. Its table: print(comparison)>"

    def __str__(self) -> str:
        return self.table().plain()

    def _repr_markdown_(self) -> str:                   # what a notebook shows
        return self.table().markdown()

    @property
    def local(self) -> str | None:
        """The row of clients training alone, where there is one beside the reference."""
        return "local" if "local" in self.methods and self.reference != "local" else None

    @property
    def bases(self) -> dict[str, str]:
        """What gains are counted from, by their place in a row; nothing where there is one method only."""
        if len(self.methods) < 2:
            return {}
        return {"gain": self.reference, **({"gain_over_local": self.local} if self.local else {})}

    @cached_property
    def criterion(self) -> str:
        """What all runs were judged by; accuracy, which all have, where they were not judged alike."""
        found = {criterion_of(doc.get("config", {})) for doc in self.documents.values()}
        return found.pop() if len(found) == 1 else ACCURACY

    @cached_property
    def measures(self) -> list[str]:
        """What the runs measured beside, of those that say more the higher they are."""
        seen = {name: None for doc in self.documents.values() for r in doc["records"] for name in r.get("measures") or ()}
        known = installed_measures() if seen else {}
        return [name for name in seen if name in known and known[name].judges]

    def values(self, method: str, model: str, measure: str) -> list[float | None]:
        """One value per seed of what a record says of a model, as in "personalised" and "accuracy"."""
        return self.read(method, lambda r: (r[model] or {}).get(measure))

    def read(self, method: str, read: Callable[[dict[str, Any]], float | None]) -> list[float | None]:
        """One value per seed, of what is read from the rounds that count."""
        out: list[float | None] = []
        for seed in self.seeds:
            rounds = chosen_rounds(self.documents.get((method, seed), {}).get("records", []), self.score)
            known = [v for r in rounds if (v := read(r)) is not None]
            out.append(sum(known) / len(known) if known else None)
        return out

    def _score(self, record: dict[str, Any], model: str) -> dict[str, Any]:
        return model_score(record if self.criterion != ACCURACY else {**record, "criterion": None}, model)

    def rows(self) -> list[Row]:
        return [self._row(method) for method in self.methods]

    def _row(self, method: str) -> Row:
        row: Row = {"name": method, "seeds": list(self.seeds), "score": self.score}
        for label, model, measure in COLUMNS:
            row[label] = _summary(self.read(method, lambda r, of=model, what=measure: self._score(r, of).get(what)))  # type: ignore[misc]
        if names := self.measures:
            row["measures"] = {n: _summary(self.read(method, lambda r, what=n: pooled_measure(r, what))) for n in names}  # type: ignore[misc]
        row["gain"] = self._gain(method, self.reference)
        row["gain_over_local"] = self._gain(method, self.local) if self.local else None
        row["tuned"] = self.tuning.chosen(method) if self.tuning else None
        row["failures"] = {str(s): self.failures[method, s] for s in self.seeds if (method, s) in self.failures} or None
        row["folders"] = {str(s): f for s in self.seeds if (f := self.folders.get((method, s)))} or None
        return row

    def _gain(self, method: str, over: str) -> dict[str, Any] | None:
        measured = lambda name: self.read(name, lambda r: self._score(r, "personalised").get("value"))
        gain = paired(measured(method), measured(over)) if method != over else None
        return None if gain is None else gain.as_dict() | {"over": over}

    def notes(self) -> list[str]:
        n = len(self.seeds)
        over = " and ".join(f"{name}'s" for name in self.bases.values())
        what = "Accuracies" if self.criterion == ACCURACY else f"Global, personalised and worst client: {self.criterion}"
        out = [f"{what} {SCORES[self.score]}, on the clients' test samples, mean ± standard deviation over {n} "
               f"seed{'s' if n > 1 else ''}; – where a method has no such model."]
        if over:
            out.append(f"Gain: personalised {self.criterion} minus {over}, seed by seed, with a 95 % t interval and the paired t test's p, "
                       "not corrected for the number of methods.")
        if any(gain and gain["p_value"] is None for row in self.rows() for gain in (row[place] for place in self.bases)):
            out.append("No interval and – for p: one seed, or seeds that all differ by the same, leave nothing to measure a difference by.")
        out += self._pooled()
        out += self._positives()
        out += self._averages()
        out += self._too_late()
        out += self.remarks
        if self.tuning:
            out += self.tuning.notes()
        return out + self.failed()

    def _pooled(self) -> list[str]:
        """Over which samples a criterion is taken, and which clients have none of their own."""
        if self.criterion == ACCURACY:
            return []
        without: dict[str, set[int]] = {}
        for (_, seed), doc in self.documents.items():
            for r in chosen_rounds(doc["records"], self.score):
                scored = self._score(r, "personalised").get("per_client", {})
                for client in r["personalised"].get("per_client", {}).keys() - scored.keys():
                    without.setdefault(client, set()).add(seed)
        out = ["Global and personalised take all clients' test samples together."]
        if without:
            named = [f"{client} in {len(without[client])} of {len(self.seeds)} seeds" for client in sorted(without)]
            more = f" and {len(named) - MOST_NAMED} more clients" if len(named) > MOST_NAMED else ""
            out.append(f"Test samples that give no {self.criterion} of their own: {', '.join(named[:MOST_NAMED])}{more}. "
                       "The worst client is one of the others.")
        return out

    def _positives(self) -> list[str]:
        """Which class a measure of one class against the rest speaks of."""
        said: dict[str, None] = {}
        for doc in self.documents.values():
            for r in doc["records"][-1:]:
                scores = {name: (r.get("measures") or {}).get(name) for name in self.measures}
                if self.criterion != ACCURACY:
                    scores[self.criterion] = r.get("criterion")
                for name, each in scores.items():
                    if positive := of_served(each or {}).get("scored", "").partition("; ")[2]:
                        said[f"{name[0].upper()}{name[1:]}: {positive}."] = None
        return list(said)

    def _averages(self) -> list[str]:
        """Whose averages weigh clients otherwise than others': methods bring their papers' weights along."""
        weights = {m: _weights(doc.get("config", {})) for (m, _), doc in self.documents.items()}
        uniform, samples = (", ".join(m for m in self.methods if weights.get(m) == how) for how in ("uniform", "samples"))
        if not uniform or not samples:
            return []
        return [f"Averages: every client weighs the same in {uniform}, by its samples in {samples}; -o weights=samples or "
                "-o weights=uniform makes them alike."]

    def _too_late(self) -> list[str]:
        """Rows whose method has a part that never acted: their numbers are another method's."""
        said: dict[str, None] = {}
        for (name, _), doc in self.documents.items():
            config = doc.get("config", {})
            if method := _method(config):
                made = max((r["round"] for r in doc["records"]), default=math.inf)
                cause = "patience" if made < config.get("rounds", made) else "rounds"
                said |= dict.fromkeys(f"{name}: {line}" for line in too_late(method.parts, made, cause))
        return list(said)

    def failed(self) -> list[str]:
        """What failed and why, a line for all seeds of a method that failed in the same way."""
        seeds: dict[tuple[str, str], list[int]] = {}
        for (method, seed), why in self.failures.items():
            seeds.setdefault((method, why), []).append(seed)
        return [f"{method}, seed{'s' if len(which) > 1 else ''} {', '.join(map(str, which))} failed: {why}"
                for (method, why), which in seeds.items()]

    def table(self, title: str = "") -> Table:
        header = ["method", "global", "personalised", "worst client", *self.measures]
        header += [title for name in self.bases.values() for title in (f"gain over {name}", "p")]
        rows = self.rows()
        return Table(header, [self._cells(row) for row in rows], title, self.notes(), rows, [self._numbers(row) for row in rows],
                     self._best(rows))

    def _best(self, rows: Sequence[Row]) -> set[tuple[int, int]]:
        """The cells with the highest mean of their column as it is printed, among rows that have all seeds."""
        best: set[tuple[int, int]] = set()
        for column, (label, _, _) in enumerate(COLUMNS, 1):
            means = {i: round(row[label]["mean"], 3) for i, row in enumerate(rows) if row[label] is not None and not row["failures"]}
            if len(means) > 1:
                best |= {(i, column) for i, mean in means.items() if mean == max(means.values())}
        return best

    def client_table(self) -> Table:
        """What each client would get of every method: a row for every client, where the clients are the same ones with every seed."""
        documents = list(self.documents.values())
        drawn = any(not doc["data"].get("split", "").startswith("by_group") for doc in documents)
        if drawn and len({doc["data"]["hash"] for doc in documents}) > 1:
            why = "Every seed divides the data anew, so no client is there twice: -o data_seed=0 keeps them, or --seeds 1."
            return Table(["client"], [], "Client by client", [why])
        rounds = [r for doc in documents for r in chosen_rounds(doc["records"], self.score)]
        clients = sorted({name for r in rounds for name in r["personalised"]["per_client"]})       # some may lack this score
        data = [{"client": client, **{m: self._of_client(m, client) for m in self.methods}} for client in clients]
        rows = [[client, *(_cell(row[m]) for m in self.methods)] for client, row in zip(clients, data)]
        said = (f"{self.criterion[0].upper()}{self.criterion[1:]} {SCORES[self.score]}: the models that clients are served by, each on the "
                "client's own test samples, mean ± standard deviation over seeds; – where a client has no such score.")
        numbers = [{"client": row["client"], **{k: v for m in self.methods for k, v in _apart(m, row[m]).items()}} for row in data]
        return Table(["client", *self.methods], rows, "Client by client", [said, *self._pooled()[1:]], data, numbers)

    def long_table(self) -> Table:
        """Both tables as one, for CSV, which holds one: a row for every method, then one for every method and client."""
        methods = [{"method": row["method"], "client": None, **row} for row in self.table().numbers]
        empty = dict.fromkeys(methods[0])
        clients = [{**empty, "method": row["method"], "client": served["client"], "seeds": row["seeds"],
                    **_apart("personalised", served[row["method"]])} for row in methods for served in self.client_table().data]
        numbers = [*methods, *clients]
        return Table([*empty], [["" if cell is None else str(cell) for cell in row.values()] for row in numbers], numbers=numbers)

    def _of_client(self, method: str, client: str) -> dict[str, Any] | None:
        return _summary(self.read(method, lambda r: self._score(r, "personalised").get("per_client", {}).get(client)))

    def _numbers(self, row: Row) -> dict[str, Any]:
        """A row with one number a cell."""
        out: dict[str, Any] = {"method": row["name"], "seeds": len(self.seeds) - len(row["failures"] or ())}
        out |= _apart("global", row["global"]) | _apart("personalised", row["personalised"]) | _apart("worst client", row["worst"])
        for name, summary in (row.get("measures") or {}).items():
            out |= _apart(name, summary)
        for place, over in self.bases.items():
            gain = row[place] or {}
            out |= {f"gain over {over}{' ' * bool(what)}{what}": gain.get(key)
                    for what, key in (("", "difference"), ("low", "low"), ("high", "high"), ("p", "p_value"))}
        return out

    def _cells(self, row: Row) -> list[str]:
        there = len(self.seeds) - len(row["failures"] or ())
        cells = [row["name"] + (f" ({there} of {len(self.seeds)} seeds)" if row["failures"] else "")]
        for cell in (*(row[label] for label, _, _ in COLUMNS), *(row.get("measures") or {}).values()):
            cells.append(_cell(cell))
        for gain in (row[place] for place in self.bases):
            if gain is None:
                cells += ["", ""]
            else:
                interval = f" [{gain['low']:+.3f}, {gain['high']:+.3f}]" if gain["low"] is not None else ""
                cells += [f"{gain['difference']:+.3f}{interval}", _p(gain["p_value"])]
        return cells

    def document(self, per_client: bool = False) -> dict[str, Any]:
        """One JSON-able document, the same for equal comparisons."""
        what = "accuracies" if self.criterion == ACCURACY else self.criterion
        return {"methods": list(self.methods), "seeds": list(self.seeds), "reference": self.reference, "score": self.score,
                "score_meaning": f"{what} {SCORES[self.score]}", "rows": self.rows(),
                "tuning": self.tuning.document() if self.tuning else None, "remarks": list(self.remarks), "config": dict(self.config),
                **({"clients": self.client_table().data} if per_client else {})}

    def markdown(self, title: str = "", per_client: bool = False) -> str:
        clients = [t] if per_client and (t := self.client_table()).rows else []
        tables = [self.table(title), *clients, *([self.tuning.table()] if self.tuning else [])]
        return "\n\n".join(t.markdown(paragraphs=True) for t in tables) + "\n"

    def save(self, out: str | Path, per_client: bool = False) -> None:
        write_json(Path(out) / "comparison.json", self.document(per_client))
        write_bytes(Path(out) / "comparison.md", self.markdown(per_client=per_client).encode())
