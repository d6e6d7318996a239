"""Scores without data: sites send how many rows they scored and sums over them; the server pools the sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.federation import Federation
from ...metrics.accuracy import Scores, answers_in, score_sums
from ...metrics.clients import client_mean, worst
from ...metrics.criterion import ACCURACY
from ...metrics.gather import Answers
from .parcel import Refused, real_number, whole_number

MODELS, ROWS = ("global", "personal"), ("test", "val")
CRITERION = "criterion"
Judge = Callable[[Answers], float | None]
AFTER = "after aggregation, before local training"


def score_site(fed: Federation, number: int, rows: Mapping[str, Tensor], judge: Judge | None = None) -> dict[str, Any]:
    """model -> rows -> count and sums, for the models that the method has; and what `judge` says, where one is agreed on."""
    out: dict[str, Any] = {}
    with torch.no_grad():
        state = fed.client(number)
        for model in models_scored(fed):
            what, taps = (fed.model, False) if model == "global" else fed.personal_model(number)
            out[model] = {}
            for name, own in rows.items():
                sums = score_sums(fed, number, state, what, taps, own, judge is not None)
                said = answers_in(sums, torch.zeros(len(own), dtype=torch.int64))
                out[model][name] = {"count": len(own), **{measure: float(total) for measure, total in sums.items()}}
                if judge is not None and said is not None:
                    out[model][name][CRITERION] = judge(said)
    return out


def models_scored(fed: Federation) -> list[str]:
    """The global model where there is one; clients' own where something is personal or there is no other."""
    whole = fed.no_global_model is None
    return [m for m, there in (("global", whole), ("personal", fed.personal or not whole)) if there]


def read_scores(about: Mapping[str, Any], fed: Federation, sizes: Mapping[str, int], judged: bool = False) -> dict[str, Any]:
    """A site's sums, checked: the models and rows asked for, as many rows as it enrolled with, finite sums, a share as the criterion."""
    given = about.get("scores")
    if not isinstance(given, dict) or sorted(given) != sorted(models_scored(fed)):
        raise Refused("the scores are not those asked for")
    measures = {"accuracy", "loss", *([CRITERION] if judged else [])}
    measures |= ({"dice", "dice_foreground"} if fed.population.task.name == "segmentation" else set())
    for model, by_rows in given.items():
        if not isinstance(by_rows, dict) or sorted(by_rows) != sorted(ROWS):
            raise Refused(f"the scores of the {model} model are not those asked for")
        for rows, sums in by_rows.items():
            if not isinstance(sums, dict) or whole_number(sums, "count") != sizes[rows]:
                raise Refused(f"it scored other rows than it enrolled with ({rows})")
            if set(sums) - {"count"} != (measures if sums["count"] else set()):
                raise Refused(f"the scores on its {rows} rows are not those asked for")
            if judged and sums["count"] and sums[CRITERION] is not None and not 0 <= real_number(sums[CRITERION], CRITERION) <= 1:
                raise Refused(f"its criterion on its {rows} rows is {sums[CRITERION]}")
            for measure in set(sums) - {"count", CRITERION}:
                total = real_number(sums[measure], measure)
                most = sums["count"] * (torch.finfo(torch.float32).max if measure == "loss" else 1.0)      # of losses in float32
                if total < 0 or total > most * (1 + 1e-6):
                    raise Refused(f"{measure} adds up to {total} on {sums['count']} rows")
    return given


def pool(answers: Mapping[int, Mapping[str, Any]], names: list[str], model: str, rows: str, scored: str) -> Scores:
    """All sites' sums as one table; sites that did not answer have no rows."""
    nothing: dict[str, Any] = {"count": 0}
    sums = [answers[i][model][rows] if i in answers else nothing for i in range(len(names))]
    measures = sorted({m for s in sums for m in s} - {"count", CRITERION}) or ["accuracy", "loss"]
    values = {m: tuple(s.get(m, 0.0) / max(s["count"], 1) for s in sums) for m in measures}
    return Scores(tuple(names), tuple(s["count"] for s in sums), values, scored)


def judged_sites(answers: Mapping[int, Mapping[str, Any]], names: list[str], model: str, rows: str, scored: str) -> dict[str, Any]:
    """The sites' own values of the criterion. Together: their mean by rows, for a curve over all rows would need these at the server."""
    there = {names[i]: (float(s[CRITERION]), int(s["count"])) for i in sorted(answers)
             if (s := answers[i][model][rows]).get(CRITERION) is not None}
    each, total = {name: v for name, (v, _) in there.items()}, sum(n for _, n in there.values())
    low = worst(each)
    return {"value": sum(v * n for v, n in there.values()) / total if total else None, "mean": client_mean(each),
            "worst": low[1] if low else None, "worst_client": low[0] if low else None, "per_client": each, "scored": scored}


def record_scores(fed: Federation, answers: Mapping[int, Mapping[str, Any]], names: list[str], criterion: str = ACCURACY,
                  said: str = "") -> dict[str, Any]:
    """As a simulation's record has them."""
    there = models_scored(fed)
    whole = pool(answers, names, "global", "test", AFTER).record() if "global" in there else None
    own = pool(answers, names, "personal", "test", fed.personal_scoring).record() if "personal" in there else whole
    out: dict[str, Any] = {"global": whole, "personalised": own, "validation": None}
    if whole is None:
        out["no_global_model"] = fed.no_global_model
    for scores in (out["global"], out["personalised"]):
        if scores is not None:
            scores["test"] = None
    judged = pool(answers, names, "personal" if "personal" in there else "global", "val", "").record()
    if judged["accuracy"] is not None:
        out["validation"] = {k: judged[k] for k in ("accuracy", "mean", "worst", "loss")}
    if criterion != ACCURACY:
        of = lambda model, rows: judged_sites(answers, names, model, rows, f"at every site, mean over sites by their rows{said}")
        test = {model: of(model, "test") for model in there}
        out["criterion"] = {"measure": criterion, "global": test.get("global"), "personalised": test.get("personal") or test["global"],
                            "validation": of("personal" if "personal" in there else "global", "val")["value"]}
    return out
