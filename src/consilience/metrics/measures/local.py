"""What local training does to the global model: seen on the next round, played without touching the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...options import option
from ..classification import class_accuracy
from ..clients import client_mean, worst
from ..forgetting import local_preservation
from ..gather import Answers, Asked, gather
from ..parameters import drift
from ..registry import Measure, register
from ..similarity import kl, linear_cka, rbf_cka
from ..subject import Subject

_ROWS = ("auto", "global", "test", "validation", "train")
_ROWS_DOC = "which samples; auto: the global test set, else all clients' test samples together"


def _accuracy(answers: Answers) -> float:
    return float((answers.predicted == answers.y).double().mean())


@dataclass(frozen=True)
class _OnCommonSamples(Measure):
    """Every model is asked about the same samples."""

    needs = ("classification",)
    rows: str = option("auto", _ROWS_DOC, choices=_ROWS)

    def chosen(self, s: Subject) -> str:
        return s.choose_rows(self.rows, first="global")

    def missing(self, s: Subject) -> str | None:
        return s.no_rows(self.chosen(s))

    def where(self, s: Subject) -> str:
        return {"global": "the global test set"}.get(self.chosen(s), f"all clients' {self.chosen(s)} samples together")

    def ask(self, s: Subject, model: Any, owner: int = 0) -> Answers:
        """One model, personal tensors left out."""
        number = s.number(owner)
        return gather(s.fed, [Asked(number, s.fed.client(number), model, False, s.everything(self.chosen(s)), owner)])

    def trained_models(self, s: Subject) -> list[int]:
        """Clients whose models the next round trains."""
        return [i for i in range(1 if s.fed.pooled else len(s.names)) if i in s.trained.outcomes]

    def local_answers(self, s: Subject, owner: int) -> Answers:
        return s.once(("local", self.chosen(s), owner), lambda: self.ask(s, s.trained.outcomes[owner].model, owner))


@register
@dataclass(frozen=True)
class LocalModels(_OnCommonSamples):
    """Accuracy on the global test set of the models clients have trained, before aggregation, and of their average, after it."""

    name = "local_models"
    formula = "mean, lowest and highest over clients of a(w_k); a(w) before the round and after aggregation"

    def measure(self, s: Subject) -> dict[str, Any]:
        each = {s.fed.name_of(i): _accuracy(self.local_answers(s, i)) for i in self.trained_models(s)}
        low, start = worst(each), None if s.fed.no_global_model else _accuracy(self.ask(s, s.fed.model))
        averaged = s.trained.exchanged and not s.fed.no_global_model
        return {"received": start, "before_aggregation": client_mean(each), "lowest": low[1] if low else None,
                "highest": max(each.values(), default=None),
                "after_aggregation": _accuracy(self.ask(s, s.trained.aggregated)) if averaged else None,
                "per_client": each, "scored": f"models of round {s.fed.round_number + 1} on {self.where(s)}"}


@register
@dataclass(frozen=True)
class Forgetting(_OnCommonSamples):
    """What local training keeps of each class (LfD's LP), over the classes a client has and over those it lacks."""

    name = "forgetting"
    formula = "LP = mean_c a_c(local after training) / a_c(received); classes with a_c(received) = 0 are skipped and counted"
    client: str = option("", "one client, or half: the client whose classes are nearest to half of all, the first of equals; "
                             "none: every client, and the mean over them")

    def measure(self, s: Subject) -> dict[str, Any]:
        owners = [s.choose_client(self.client)] if self.client else self.trained_models(s)
        each: dict[str, Any] = {}
        for owner in owners:
            number = s.number(owner)
            same = not s.fed.no_global_model
            start = s.once(("received", self.chosen(s), -1 if same else owner),
                           lambda number=number, same=same, owner=owner:  # type: ignore[misc]
                           self.ask(s, s.fed.model if same else s.fed.received(s.fed.client(number)), owner))
            end = self.local_answers(s, number)
            before, after = (class_accuracy(a.predicted, a.y, s.data.classes) for a in (start, end))
            name = s.fed.name_of(number) if s.fed.pooled else s.names[owner]
            present = set(range(s.data.classes)) if s.fed.pooled else s.present(owner)
            each[name] = {**local_preservation(before, after, present), "accuracy_received": _accuracy(start),
                          "accuracy_after": _accuracy(end)}
        out: dict[str, Any] = {}
        for group in ("present", "absent"):
            known = {name: e[group]["lp"] for name, e in each.items() if e[group]["lp"] is not None}
            out[group] = {"lp": client_mean(known), "clients": len(known),
                          "skipped_zero": sum(e[group]["skipped_zero"] for e in each.values())}
        one = {"client": s.names[owners[0]], "classes_present": len(s.present(owners[0]))} if self.client else {}
        return {**out, **one, "accuracy_received": client_mean({n: e["accuracy_received"] for n, e in each.items()}),
                "accuracy_after": client_mean({n: e["accuracy_after"] for n, e in each.items()}),
                "per_client": each, "scored": f"local training of round {s.fed.round_number + 1} on {self.where(s)}"}


@dataclass(frozen=True)
class _Path(_OnCommonSamples):
    """Along the local training of one client, against the model it received."""

    client: str = option("", "whose local training; none, or half: the client whose classes are nearest to half of all")
    looks: int = option(20, "about how many times the model is looked at on the way", low=1)
    samples: int = option(1000, "samples drawn to look at", low=2)

    def path(self, s: Subject, point: str) -> tuple[int, Any]:
        owner = s.choose_client(self.client)
        return owner, s.local_path(owner, self.chosen(s), point, self.looks, self.samples)

    def about(self, s: Subject, owner: int) -> dict[str, Any]:
        used = min(self.samples, s.count(self.chosen(s)))
        return {"client": s.names[owner], "classes_present": len(s.present(owner)), "samples": used,
                "scored": f"local training of round {s.fed.round_number + 1} on {used} of {self.where(s)}"}


@register
@dataclass(frozen=True)
class Cka(_Path):
    """Centred kernel alignment with the received model along a client's local training."""

    name = "cka"
    formula = "‖YᵀX‖²_F / (‖XᵀX‖_F ‖YᵀY‖_F), columns centred; rbf: the same with centred Gaussian kernels"
    point: str = option("logits", "of what: logits, features, or a module's name")
    kernel: str = option("linear", "linear, or Gaussian", choices=("linear", "rbf"))
    width: float = option(0.8, "the Gaussian's width, in median distances", above=0.0)

    def measure(self, s: Subject) -> dict[str, Any]:
        owner, path = self.path(s, self.point)
        start = path[0][2]
        alike = linear_cka if self.kernel == "linear" else lambda x, y: rbf_cka(x, y, self.width)
        values = [alike(start, seen) for _, _, seen in path]
        known = [v for v in values if v is not None]
        return {"last": values[-1], "lowest": min(known, default=None), "trace": {"step": [p[0] for p in path], "cka": values},
                **self.about(s, owner), "point": self.point, "kernel": self.kernel}


@register
@dataclass(frozen=True)
class Kl(_Path):
    """Kullback–Leibler divergence between the received model's answers and the local ones along a client's local training."""

    name = "kl"
    formula = "KL(p‖q) = Σ_c p_c ln(p_c / q_c), mean over samples, in nats"
    direction: str = option("global||local", "the direction that `last` and `highest` give; the trace has both",
                            choices=("global||local", "local||global"))

    def measure(self, s: Subject) -> dict[str, Any]:
        owner, path = self.path(s, "logits")
        start = path[0][1]
        both = {"global||local": [kl(start, seen) for _, seen, _ in path], "local||global": [kl(seen, start) for _, seen, _ in path]}
        chosen = both[self.direction]
        return {"last": chosen[-1], "highest": max(chosen), "direction": self.direction,
                "trace": {"step": [p[0] for p in path], **both}, **self.about(s, owner)}


@register
@dataclass(frozen=True)
class Drift(Measure):
    """How far the parameters of clients go from the received model in one round of local training, region by region."""

    name = "drift"
    formula = "‖w_k − w‖₂ over the parameters of a region, and divided by ‖w‖₂"

    def measure(self, s: Subject) -> dict[str, Any]:
        each: dict[str, Any] = {}
        for number, outcome in sorted(s.trained.outcomes.items()):
            start = s.fed.received(s.fed.client(number))["params"]
            each[s.fed.name_of(number)] = drift(outcome.model["params"], start, s.fed.spec.layout)
        regions: list[str] = list(next(iter(each.values()), {}))
        mean = {region: {kind: client_mean({n: e[region][kind] for n, e in each.items() if e[region][kind] is not None})
                         for kind in ("absolute", "relative")} for region in regions}
        return {**mean, "clients": len(each), "per_client": each, "scored": f"local training of round {s.fed.round_number + 1}"}
