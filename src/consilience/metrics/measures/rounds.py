"""What the records of the rounds say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...options import option
from ..clients import harmed
from ..criterion import validation_score
from ..curves import Curve, mean_of_best, rounds_to, speed_up
from ..registry import Measure, register
from ..subject import Subject

SCORES = ("accuracy", "mean", "worst")
WHOSE = ("auto", "global", "personalised")


def _part(record: dict[str, Any], model: str) -> dict[str, Any]:
    """A record's scores; auto: those a method stands for, its clients' own models where it has them."""
    return (record.get("personalised") or record.get("global") if model == "auto" else record.get(model)) or {}


def _curve(records: Any, model: str, score: str) -> Curve:
    return [(r["round"], v) for r in records if (v := _part(r, model).get(score)) is not None]


@register
@dataclass(frozen=True)
class Selection(Measure):
    """Last round, best round by validation, best round by test, and mean of the best rounds by test, each labelled."""

    name = "selection"
    needs = ("scores",)
    formula = "s(T); s(argmax validation); max s (chosen on test data: an upper bound); mean of the `best` highest s"
    best: int = option(5, "how many of the best rounds are averaged", low=1)

    def measure(self, s: Subject) -> dict[str, Any]:
        out: dict[str, Any] = {}
        judged = [r for r in s.records if validation_score(r) is not None]
        by_validation = max(judged, key=lambda r: (validation_score(r), -r["round"])) if judged else None
        for model in ("global", "personalised"):
            for score in SCORES:
                curve = _curve(s.records, model, score)
                if not curve:
                    continue
                best = max(curve, key=lambda point: (point[1], -point[0]))
                chosen = _part(by_validation, model).get(score) if by_validation else None
                out.setdefault(model, {})[score] = {
                    "last": curve[-1][1], "last_round": curve[-1][0],
                    "best_by_validation": chosen, "best_by_validation_round": by_validation["round"] if by_validation else None,
                    "best_by_test": best[1], "best_by_test_round": best[0],
                    f"mean_of_best_{self.best}": mean_of_best(curve, self.best)}
        return out


@register
@dataclass(frozen=True)
class RoundsTo(Measure):
    """The first scored round at or above each threshold ('-' if never), and the speed-up over the reference run."""

    name = "rounds_to"
    needs = ("scores",)
    formula = "r(θ) = first scored round with s ≥ θ; speed-up = r_reference(θ) / r(θ)"
    at: tuple[float, ...] = option((), "thresholds, as fractions; none: the last score of the reference run")
    model: str = option("auto", "whose score; auto: clients' own models where the method has them", choices=WHOSE)
    score: str = option("accuracy", "pooled over samples, mean over clients, or of the worst client", choices=SCORES)

    def missing(self, s: Subject) -> str | None:
        if not self.at and s.reference is None:
            return "it needs thresholds (rounds_to.at=0.6,0.7), or a run to compare with (--reference)"
        if not self.at and s.reference and not _curve(s.reference.records, self.model, self.score):
            return f"the reference run has no {self.score} to compare with"
        return None

    def measure(self, s: Subject) -> dict[str, Any]:
        own = _curve(s.records, self.model, self.score)
        other = _curve(s.reference.records, self.model, self.score) if s.reference else []
        rows = []
        for threshold in self.at or (other[-1][1],):
            mine, theirs = rounds_to(own, threshold), rounds_to(other, threshold)
            row: dict[str, Any] = {"threshold": threshold, "round": mine if mine is not None else "-"}
            if s.reference:
                row |= {"reference_round": theirs if theirs is not None else "-", "speed_up": speed_up(theirs, mine)}
            rows.append(row)
        about = {"reference": s.reference.about()} if s.reference else {}
        return {"thresholds": rows, **about}


@register
@dataclass(frozen=True)
class Harmed(Measure):
    """Clients that score lower than by training alone; the reference is a run of `local` on the same split."""

    name = "harmed"
    needs = ("scores", "reference")
    formula = "|{k : s_k < s_k(local) − margin}|, last scored rounds of both runs"
    model: str = option("auto", "whose score; auto: clients' own models where the method has them", choices=WHOSE)
    margin: float = option(0.0, "a client is harmed when it loses more than this", low=0.0)

    def _scored(self, s: Subject) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rounds of both runs with a score for every client."""
        assert s.reference is not None
        return ([r for r in s.records if _part(r, self.model).get("per_client")],
                [r for r in s.reference.records if _part(r, "auto").get("per_client")])

    def missing(self, s: Subject) -> str | None:
        assert s.reference is not None
        if s.reference.split_hash != s.data.split_hash():
            return ("the reference run divides its data differently, so its clients are not these clients; run local with the same "
                    "data, split, clients and seed")
        own, alone = self._scored(s)
        return None if own and alone else f"{'the reference' if own else 'this'} run has no score per client"

    def measure(self, s: Subject) -> dict[str, Any]:
        assert s.reference is not None
        own, alone = self._scored(s)
        mine, theirs = _part(own[-1], self.model), _part(alone[-1], "auto")
        return {**harmed(mine["per_client"], theirs["per_client"], self.margin), "round": own[-1]["round"],
                "reference_round": alone[-1]["round"], "scored": mine["scored"], "reference": s.reference.about()}
