"""What a run is judged by, read from its records: accuracy, or another measure that its settings name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACCURACY = "accuracy"


def criterion_of(config: Mapping[str, Any]) -> str:
    """The criterion of a run by its settings, which name it where it is not accuracy."""
    return config.get("criterion") or ACCURACY


def measure_of(record: Mapping[str, Any]) -> str:
    """What a round was judged by."""
    return (record.get("criterion") or {}).get("measure", ACCURACY)


def model_score(record: Mapping[str, Any], model: str) -> dict[str, Any]:
    """A model's score in a round: value, worst and per_client; nothing where the model does not exist or was not scored."""
    judged = record.get("criterion")
    if judged is not None:
        return judged[model] or {}
    scores = record.get(model) or {}
    return {"value": scores.get("accuracy"), "worst": scores.get("worst"), "per_client": scores.get("per_client") or {}} if scores else {}


def served_score(record: Mapping[str, Any]) -> float | None:
    """The score a method stands for, by the criterion: of its clients' own models where it has them, else of the global one."""
    return model_score(record, "personalised" if record.get("personalised") else "global").get("value")


def of_served(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a measure's result the part for the models that clients are served by. Where nothing is personal that is the global one, or after
    local training ("local") what each client made of it."""
    found = result.get("personalised") or result.get("local") or result.get("global")
    return found if isinstance(found, Mapping) else {}


def pooled_measure(record: Mapping[str, Any], name: str) -> float | None:
    """A measure of the round over all samples, for the models that clients are served by."""
    return of_served((record.get("measures") or {}).get(name) or {}).get("pooled")


def validation_score(record: Mapping[str, Any]) -> float | None:
    """What a round is chosen by. Test samples have no part in it."""
    judged = record.get("criterion")
    return judged["validation"] if judged is not None else (record.get("validation") or {}).get("accuracy")
