"""Scores of models on samples: the global model's and those of the models clients are served by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...data import FederatedData
from ...errors import some
from ...options import option
from .. import classification
from ..accuracy import Scores, score_each, score_model
from ..classification import auroc, balanced_accuracy, calibration
from ..clients import bottom_decile, client_mean, worst
from ..gather import Answers, Asked
from ..registry import Measure, register
from ..subject import ROWS, TRAINING, Subject

_ROWS_DOC = "which samples; auto: clients' test samples, else the global test set"
_TRAINING_DOC = "before the next round's local training, or after it"


def _both(s: Subject, training: str, score: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """For the global model where there is one, and for the models clients are served by where these are others."""
    out: dict[str, Any] = {}
    if s.no_model("global", training) is None:
        out["global" if training == "before" else "local"] = score("global")
    if s.fed.personal or not out:
        out["personalised"] = score("personalised")
    return out


def _spread(each: dict[str, float]) -> dict[str, Any]:
    low = worst(each)
    return {"client_mean": client_mean(each), "worst": low[1] if low else None, "worst_client": low[0] if low else None,
            "bottom_decile": bottom_decile(each), "per_client": each}


def class_names(data: FederatedData) -> list[str]:
    known = data.description.get("class_names") or ()
    return [str(name) for name in known] or [str(c) for c in range(data.classes)]


def scores_of(s: Subject, model: str, training: str, rows: str) -> Scores:
    """Per client, as sums over its samples; one owner for one global model on the global test set."""
    scored = s.described(model, training, rows)
    if model == "global" and training == "before":
        if rows == "global":
            return score_model(s.fed, s.fed.model, [s.data.test], ["global test set"], scored)
        return score_model(s.fed, s.fed.model, s.rows(rows), s.names, scored)
    asked = (Asked(*s.model_of(i, model, training), own, i) for i, own in enumerate(s.rows(rows)) if len(own))
    return score_each(s.fed, asked, s.names, scored)


@dataclass(frozen=True)
class _Scored(Measure):
    rows: str = option("auto", _ROWS_DOC, choices=ROWS)
    training: str = option("before", _TRAINING_DOC, choices=TRAINING)

    def missing(self, s: Subject) -> str | None:
        return s.no_rows(s.choose_rows(self.rows))


@register
@dataclass(frozen=True)
class Accuracy(_Scored):
    """Accuracy of the global model and of the models clients are served by: pooled, client mean, worst client, bottom decile."""

    name = "accuracy"
    formula = "pooled Σ_k n_k a_k / Σ n_k; client mean Σ a_k / K; worst min a_k; bottom decile: mean of the ⌈K/10⌉ lowest a_k"

    def measure(self, s: Subject) -> dict[str, Any]:
        def score(model: str) -> dict[str, Any]:
            scores = scores_of(s, model, self.training, s.choose_rows(self.rows))
            return {"pooled": scores.pooled("accuracy"), **_spread(scores.with_samples("accuracy")), "loss": scores.pooled("loss"),
                    "samples": sum(scores.counts), "scored": scores.scored}
        return _both(s, self.training, score)


@register
@dataclass(frozen=True)
class Dice(_Scored):
    """Dice of masks, with the background (as FedFA reports it) and without."""

    name = "dice"
    needs = ("segmentation",)
    formula = "2|P∩T| / (|P| + |T| + 1e-5) per image and class; mean over images, then over classes"

    def measure(self, s: Subject) -> dict[str, Any]:
        def score(model: str) -> dict[str, Any]:
            scores = scores_of(s, model, self.training, s.choose_rows(self.rows))
            out = {}
            for label, measure in (("with_background", "dice"), ("foreground", "dice_foreground")):
                out[label] = {"pooled": scores.pooled(measure), **_spread(scores.with_samples(measure))}
            return {**out, "samples": sum(scores.counts), "scored": scores.scored}
        return _both(s, self.training, score)


@dataclass(frozen=True)
class Answered(_Scored):
    """One number from answers, over all samples together and client by client."""

    needs = ("classification",)

    def value(self, answers: Answers) -> float | None:
        raise NotImplementedError

    def no_class(self, classes: Sequence[str]) -> str | None:
        """Why it cannot be had of these classes, or None."""
        return None

    def scorer(self, classes: Sequence[str]) -> tuple[Callable[[Answers], float | None], str]:
        """What scores answers about these classes, and what is to be said of it beside the samples."""
        return self.value, ""

    def more(self, answers: Answers) -> dict[str, Any]:
        return {}

    def judged(self, s: Subject, model: str, rows: str, names: Sequence[str]) -> dict[str, Any]:
        """Of a model on these rows, whose owners are named."""
        value, said = self.scorer(class_names(s.data))
        answers = s.answers(model, self.training, rows)
        each = {name: v for i, name in enumerate(names) if len(own := answers.of(i)) and (v := value(own)) is not None}
        spread = {"client_mean": client_mean(each), "per_client": each} if each else {}
        return {"pooled": value(answers), **spread, **self.more(answers), "samples": len(answers),
                "scored": s.described(model, self.training, rows) + said}

    def measure(self, s: Subject) -> dict[str, Any]:
        return _both(s, self.training, lambda model: self.judged(s, model, s.choose_rows(self.rows), s.names))


@register
@dataclass(frozen=True)
class BalancedAccuracy(Answered):
    """Mean over the classes present of the share of their samples that are right."""

    name = "balanced_accuracy"
    judges = True
    formula = "1/|C| Σ_{c∈C} correct_c / n_c, C the classes with samples"

    def value(self, answers: Answers) -> float | None:
        return balanced_accuracy(answers.predicted, answers.y)


@register
@dataclass(frozen=True)
class Auroc(Answered):
    """Area under the ROC curve, each class against the rest, mean over the classes present."""

    name = "auroc"
    judges = True
    formula = "1/|C| Σ_{c∈C} AUC(y = c, p_c), C the classes with samples on both sides"

    def value(self, answers: Answers) -> float | None:
        return auroc(answers.odds, answers.y)


@dataclass(frozen=True)
class _OneClass(Answered):
    """One class against the rest: the class that matters, or of many classes each in turn."""

    judges = True
    positive: str | int | None = option(None, "the class that matters, by its name or number; none: of two classes the second, of more the "
                                              "mean over those that occur")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positive is not None:                    # a class named 1 may be written with quotes or without
            object.__setattr__(self, "positive", str(self.positive))

    def against(self, answers: Answers, positive: int) -> float | None:
        raise NotImplementedError

    def missing(self, s: Subject) -> str | None:
        return self.no_class(class_names(s.data)) or super().missing(s)

    def no_class(self, classes: Sequence[str]) -> str | None:
        wrong = self.positive is not None and self.positive not in classes
        return f"there is no class {self.positive!r} among {some(classes)}" if wrong else None

    def scorer(self, classes: Sequence[str]) -> tuple[Callable[[Answers], float | None], str]:
        if self.positive is None and len(classes) != 2:
            return self._mean, ", mean over the classes that occur"
        chosen = 1 if self.positive is None else list(classes).index(str(self.positive))
        return (lambda answers: self.against(answers, chosen)), f"; positive is class {classes[chosen]}"

    def _mean(self, answers: Answers) -> float | None:
        each = [v for c in answers.y.unique().tolist() if (v := self.against(answers, c)) is not None]
        return sum(each) / len(each) if each else None


@register
@dataclass(frozen=True)
class Sensitivity(_OneClass):
    """Share of the positive samples that are found (recall)."""

    name = "sensitivity"
    formula = "TP / (TP + FN)"

    def against(self, answers: Answers, positive: int) -> float | None:
        return classification.sensitivity(answers.predicted, answers.y, positive)


@register
@dataclass(frozen=True)
class Specificity(_OneClass):
    """Share of the other samples that are not taken for positive."""

    name = "specificity"
    formula = "TN / (TN + FP)"

    def against(self, answers: Answers, positive: int) -> float | None:
        return classification.specificity(answers.predicted, answers.y, positive)


@register
@dataclass(frozen=True)
class Precision(_OneClass):
    """Share of the samples taken for positive that are; 0 where none is taken for it."""

    name = "precision"
    formula = "TP / (TP + FP)"

    def against(self, answers: Answers, positive: int) -> float | None:
        return classification.precision(answers.predicted, answers.y, positive)


@register
@dataclass(frozen=True)
class F1(_OneClass):
    """Harmonic mean of precision and sensitivity."""

    name = "f1"
    formula = "2 TP / (2 TP + FP + FN)"

    def against(self, answers: Answers, positive: int) -> float | None:
        return classification.f1(answers.predicted, answers.y, positive)


@register
@dataclass(frozen=True)
class AveragePrecision(_OneClass):
    """Area under the curve of precision over sensitivity; a model that knows nothing reaches the share of positive samples."""

    name = "average_precision"
    formula = "Σ_n (S_n − S_{n−1}) P_n over the thresholds of the positive class's probability"

    def against(self, answers: Answers, positive: int) -> float | None:
        return classification.average_precision(answers.odds, answers.y, positive)


@register
@dataclass(frozen=True)
class Calibration(Answered):
    """Expected calibration error, the largest error of a bin, and mean confidence."""

    name = "calibration"
    formula = "ECE = Σ_b |B_b|/n · |accuracy(B_b) − confidence(B_b)|, bins of equal width over the highest probability"
    bins: int = option(15, "number of bins", low=1)

    def value(self, answers: Answers) -> float | None:
        return calibration(answers.probabilities, answers.y, self.bins)["ece"]

    def more(self, answers: Answers) -> dict[str, Any]:
        scores = calibration(answers.probabilities, answers.y, self.bins)
        return {"largest_bin_error": scores["mce"], "confidence": scores["confidence"],
                "accuracy": float((answers.predicted == answers.y).double().mean()) if len(answers) else None}
