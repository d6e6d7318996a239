"""What a study says: what each site would gain or lose with each method, against training alone and against FedAvg."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..metrics.criterion import ACCURACY
from ..report.tables import Table
from ..runs.files import write_bytes, write_json
from .study import REFERENCES, Outcome, Plan, best_of

WORDS = {"local": "gain over local", "fedavg": "gain over fedavg"}


@dataclass
class Report:
    """The outcomes of a study, with each method's best configuration by validation."""

    plan: Plan
    outcomes: Sequence[Outcome]

    @property
    def criterion(self) -> str:
        return self.plan.settings.run.run.criterion

    @property
    def methods(self) -> list[str]:
        return [e.name for e in self.plan.entries]

    def best(self, method: str) -> Outcome | None:
        return best_of(self.outcomes, method)

    @property
    def sites(self) -> list[str]:
        return sorted({s for m in self.methods if (b := self.best(m)) for s in b.accuracy})

    def recommended(self) -> str | None:
        """The method with the best validation score over all sites' validation rows."""
        judged = [(b.validation, m) for m in self.methods if (b := self.best(m)) and b.validation is not None]
        return max(judged, key=lambda pair: pair[0])[1] if judged else None

    def gain(self, method: str, over: str, site: str) -> tuple[float, float | None] | None:
        """Difference of accuracies on a site's test rows, and half of a 95 % interval if its rows were drawn independently.

        Two accuracies p, q on n rows each differ with variance at most about (p(1 − p) + q(1 − q)) / n.
        """
        mine, other = self.best(method), self.best(over)
        if mine is None or other is None or site not in mine.accuracy or site not in other.accuracy:
            return None
        p, q, n = mine.accuracy[site], other.accuracy[site], mine.tests.get(site, 0)
        if self.criterion != ACCURACY:                          # no mean over rows: its spread does not follow from their number
            return p - q, None
        return p - q, 1.96 * math.sqrt((p * (1 - p) + q * (1 - q)) / n) if n else None

    def per_site(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for site in self.sites:
            for method in self.methods:
                best = self.best(method)
                row: dict[str, Any] = {"site": site, "method": method, "accuracy": best.accuracy.get(site) if best else None,
                                       "test_samples": best.tests.get(site) if best else None}
                for over in REFERENCES:
                    found = self.gain(method, over, site) if method != over else None
                    row[f"gain_over_{over}"] = found and found[0]
                    row[f"gain_over_{over}_half_width"] = found and found[1]
                rows.append(row)
        return rows

    def summary(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for method in self.methods:
            best = self.best(method)
            gains = [g[0] for s in self.sites if method != "local" and (g := self.gain(method, "local", s))]
            total = sum(best.tests.get(s, 0) for s in best.accuracy) if best else 0
            rows.append({
                "method": method, "settings": dict(best.trial.point) if best else None, "validation": best.validation if best else None,
                "accuracy": sum(a * best.tests.get(s, 0) for s, a in best.accuracy.items()) / total if best and total else None,
                "worst_site": min(best.accuracy.values()) if best and best.accuracy else None,
                "sites_above_local": sum(g > 0 for g in gains) if gains else None, "lowest_gain_over_local": min(gains) if gains else None,
                "failures": [o.failure for o in self.outcomes if o.trial.method == method and o.failure] or None})
        return rows

    def tables(self) -> list[Table]:
        number = lambda v, form="{:.3f}": "–" if v is None else form.format(v)
        signed = lambda g, half: "" if g is None else f"{g:+.3f}" + (f" ± {half:.3f}" if half is not None else "")
        summary, each = self.summary(), self.per_site()
        rows = [[r["method"], _words(r["settings"]), number(r["validation"]), number(r["accuracy"]), number(r["worst_site"]),
                 "" if r["sites_above_local"] is None else f"{r['sites_above_local']} of {len(self.sites)}",
                 number(r["lowest_gain_over_local"], "{:+.3f}") if r["lowest_gain_over_local"] is not None else ""] for r in summary]
        budget = f"{self.plan.budget} configuration{'s' if self.plan.budget > 1 else ''}"
        notes = [f"Every method chose among {budget} by {self.criterion} on all sites' validation samples; the other columns are of test "
                 "samples, which no choice looked at.",
                 *(f"Searched for {m}: {'; '.join(f'{k} in {v}' for k, v in self.plan.spaces[m].items())}." for m in self.methods)]
        notes += [f"{o.trial.method}, configuration {o.trial.number + 1} failed: {o.failure}" for o in self.outcomes if o.failure]
        if chosen := self.recommended():
            notes.append(f"Best by validation: {chosen}.")
        notes += self.plan.remarks
        per_site = [[r["site"] if r["method"] == self.methods[0] else "", r["method"], number(r["accuracy"]),
                     *(signed(r[f"gain_over_{o}"], r[f"gain_over_{o}_half_width"]) for o in REFERENCES)] for r in each]
        tests = {r["site"]: r["test_samples"] for r in each}
        title = f"{self.criterion[0].upper()}{self.criterion[1:]}"
        why = [f"{title} of the model each site would use, on its own test samples ({', '.join(f'{s}: {n}' for s, n in tests.items())}).",
               "±: half of a 95 % interval for a difference of two accuracies on so many samples; other seeds would add to it."
               if self.criterion == ACCURACY else
               "Together: the mean over sites, by their rows. Sites without it have too few classes to test on."]
        by = self.criterion
        return [Table(["method", "chosen settings", "validation", by, "worst site", "sites above local", "lowest gain over local"],
                      rows, "Which method for these sites", notes, summary),
                Table(["site", "method", by, *(WORDS[o] for o in REFERENCES)], per_site, "What each site would gain or lose", why, each)]

    def document(self) -> dict[str, Any]:
        trials = [{"method": o.trial.method, "configuration": o.trial.number, "settings": dict(o.trial.point), "validation": o.validation,
                   "validation_loss": o.loss, "failure": o.failure, "folder": o.trial.folder} for o in self.outcomes]
        return {"methods": self.methods, "recommended": self.recommended(), "summary": self.summary(), "sites": self.per_site(),
                "trials": trials, "searched": self.plan.spaces, "budget": self.plan.budget, "settings": self.plan.settings.flat()}

    def save(self, out: Path) -> None:
        """study.json and study.md, beside the runs."""
        write_json(out / "study.json", self.document())
        text = "\n\n".join("\n\n".join([Table(t.header, t.rows, t.title).markdown(), *t.notes]) for t in self.tables())
        write_bytes(out / "study.md", (text + "\n").encode())


def _words(settings: dict[str, Any] | None) -> str:
    return "none finished" if settings is None else ", ".join(f"{k}={v}" for k, v in settings.items()) or "as given"
