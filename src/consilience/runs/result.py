"""What a run returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import tree
from ..core.federation import Federation
from ..metrics import criterion

_PER_CLIENT = frozenset({"round", "losses", "per_client", "gain_per_client"})      # too many series for a dashboard or a frame


def numbers_of(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """A record's numbers by path, as in personalised/accuracy; what is per client is left out."""
    out: dict[str, float] = {}
    for key, value in record.items():
        if key in _PER_CLIENT:
            continue
        if isinstance(value, Mapping):
            out.update(numbers_of(value, f"{prefix}{key}/"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out[f"{prefix}{key}"] = float(value)
    return out


@dataclass(repr=False)
class Result:
    """Records of every round and the trained federation."""

    config: dict[str, Any]                       # merged and validated
    method: str                                  # the stack in canonical order
    data: dict[str, Any]                         # what the data set says of itself, with the split's hash
    records: list[dict[str, Any]]                # round 0 is preparation, where the method has one
    federation: Federation
    names: tuple[str, ...] = ()
    stopped: str = "all rounds done"
    measured: dict[str, Any] = field(default_factory=dict)     # times, host, paths: what may differ between equal runs

    def __repr__(self) -> str:
        """A line: in a notebook the records alone would fill pages."""
        last = self.scored[-1] if self.scored else None
        by = "" if last is None or "criterion" not in last else f"{last['criterion']['measure']}: "
        said = [f"{by}{name} {value:.3f}" for name in ("global", "personalised")
                if last and (value := criterion.model_score(last, name).get("value")) is not None]
        rounds = max((r["round"] for r in self.records), default=0)
        return (f"<Result: {self.method} on {self.data.get('name')}, {rounds} round{'s' * (rounds != 1)}"
                f"{''.join(', ' + s for s in said)}; {self.stopped}>")

    @property
    def global_model(self) -> dict[str, Tensor]:
        """The final global model's state dict."""
        return {**self.federation.model["params"], **self.federation.model["buffers"]}

    def personal_state(self, client: str | int) -> dict[str, Tensor]:
        """What a client keeps for itself: personal tensors and model keys that do not travel."""
        number = client if isinstance(client, int) else self.names.index(client)
        homes = self.federation.client(number).tensors
        return dict(tree.paths({"personal": homes["personal"], "local": homes["local"]}))

    @property
    def scored(self) -> list[dict[str, Any]]:
        """Records of rounds in which models were scored."""
        return [r for r in self.records if r.get("personalised")]

    def rows(self) -> list[dict[str, float]]:
        """The numbers of every round by path, as in personalised/accuracy, for a data frame or a plot. What is per client is left out."""
        return [{"round": r["round"], **numbers_of(r)} for r in self.records]

    def summary(self) -> dict[str, Any]:
        """The last scores and the best ones, labelled."""
        return summarise(self.records, self.stopped)

    def document(self) -> dict[str, Any]:
        """One JSON-able document. What may differ between equal runs stands under `measured` alone."""
        records = [{k: v for k, v in r.items() if k != "measured"} for r in self.records]
        rounds = [{"round": r["round"], **r["measured"]} for r in self.records if "measured" in r]
        return {"method": self.method, "config": self.config, "data": self.data, "records": records, "summary": self.summary(),
                "measured": {**self.measured, "rounds": rounds}}


def served_accuracies(record: dict[str, Any]) -> dict[str, Any]:
    """Accuracies of the models a method stands for: its clients' own where it has them, else the global one."""
    return record["personalised"] or record["global"] or {}


def summarise(records: list[dict[str, Any]], stopped: str) -> dict[str, Any]:
    scored = [r for r in records if r.get("personalised")]
    out: dict[str, Any] = {"rounds": max((r["round"] for r in records), default=0), "stopped": stopped}
    if records and "privacy" in records[-1]:
        out["privacy"] = records[-1]["privacy"]
    if not scored:
        return out
    last = scored[-1]
    test = criterion.served_score

    def short(r: dict[str, Any]) -> dict[str, Any]:
        own = {"global": r["global"], "personalised": r["personalised"]}
        judged = {}
        if by := r.get("criterion"):
            judged["criterion"] = {k: {m: v[m] for m in ("value", "mean", "worst")} if isinstance(v, dict) else v for k, v in by.items()}
        return {"round": r["round"], **{k: {m: s[m] for m in ("accuracy", "mean", "worst", "loss", "test")} if s else None
                                        for k, s in own.items()}, **judged}
    out["last"] = short(last)
    if test(last) is not None:
        known = [(v, r) for r in scored if (v := test(r)) is not None]
        out["best_by_test"] = short(max(known, key=lambda pair: (pair[0], -pair[1]["round"]))[1])
        top = sorted((v for v, _ in known), reverse=True)[:5]
        out["mean_of_best_five"] = sum(top) / len(top)
    judged = [(v, r) for r in scored if (v := criterion.validation_score(r)) is not None]
    if judged:
        out["best_by_validation"] = short(max(judged, key=lambda pair: (pair[0], -pair[1]["round"]))[1])
    out["bytes_up"], out["bytes_down"] = sum(r["bytes_up"] for r in records), sum(r["bytes_down"] for r in records)
    return out
