"""FedProto: prototypes of the classes, shared by all clients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ..core.client import ClientView
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..options import option
from ..tree import Tree


@dataclass(frozen=True)
class Proto(Part):
    """Pull features to their class's prototype of the round before: + λ · mean over samples and dimensions of (h − P_y)².

    A client's prototype is the mean of the features that a class had while it trained; the server takes the mean over the clients
    that own the class. A class nobody showed keeps its prototype; one never shown adds nothing. Beside `local` no model travels,
    which is FedProto; beside FedAvg it is what FedFM calls generalised FedProto.
    """

    weight: float = option(1.0, "λ, weight of the pull", low=0.0, tune=(0.1, 1.0, 10.0))
    collect: str = option("epoch", "a client's features: those of the last epoch's steps, of the whole round's steps, or of a pass of the "
                                   "trained model over its samples", choices=("epoch", "round", "trained"))
    aggregation: str = option("uniform", "clients that own a class weigh the same in its prototype, or by their samples of it",
                              choices=("uniform", "weighted"))

    name, needs_vectors = "proto", True
    paper = "FedProto (Tan et al., AAAI 2022), eq. 3, 6 and 7"
    helps = ("label skew",)
    departs = ("features are taken while the model still moves, as in the release; collect=trained is eq. 3",
               "owners of a class weigh the same, as in the release; aggregation=weighted is by samples, eq. 6 without its second division",
               "the pull is the mean over samples and dimensions, as in the release; eq. 7 adds up one distance per class",
               "clients predict with their heads; PFLlib takes the nearest prototype")
    neutral = {"weight": 0.0}
    reduce = {"proto": "sum", "weight": "sum"}

    def init_shared(self, spec: Spec) -> Tree:
        return {"proto": torch.zeros(spec.classes, spec.width), "seen": torch.zeros(spec.classes)}

    def init_scratch(self, c: ClientView) -> Tree:
        if self.collect == "trained":
            return {}
        proto = c.shared["proto"]
        return {"sum": torch.zeros_like(proto), "count": proto.new_zeros(len(proto)), "wait": proto.new_full((), self._wait(c))}

    def _wait(self, c: ClientView) -> int:
        """Tracked steps before the last epoch: before the last ones that show no more samples than the client has."""
        if self.collect == "round":
            return 0
        travels = set(c.spec.trained)
        sizes = [n for phase, some in c.schedule if phase.model == "model" and (not travels or travels & {*phase.keys}) for n in some]
        return len(sizes) - max(1, sum(total <= c.size for total in accumulate(reversed(sizes))))

    def track(self, v: StepView) -> Tree:
        if self.collect == "trained":
            return v.scratch
        total, count, wait = (v.scratch[k] for k in ("sum", "count", "wait"))
        hot = as_probabilities(v.batch.target, v.spec.classes) * (wait <= 0)      # soft labels count by their parts
        return {"sum": torch.addmm(total, hot.T, v.features.detach()), "count": count + hot.sum(0), "wait": wait - 1}

    def loss(self, v: StepView) -> Any:
        h, target, proto, seen = v.features, v.batch.target, v.shared["proto"], v.shared["seen"]
        if target.is_floating_point():
            return self.weight * (target * seen * (h[:, None] - proto).square().mean(2)).sum(1).mean()
        return self.weight * (seen[target] * (h - proto[target]).square().mean(1)).mean()

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        total, count = self._of_a_pass(c) if self.collect == "trained" else (c.scratch["sum"], c.scratch["count"])
        if self.aggregation == "weighted":
            return c.kept, {"proto": total, "weight": count}
        return c.kept, {"proto": total / torch.where(count > 0, count, 1.0)[:, None], "weight": (count > 0).to(count.dtype)}

    def _of_a_pass(self, c: ClientView) -> tuple[Any, Any]:
        total = torch.zeros_like(c.shared["proto"])
        count = total.new_zeros(len(total))
        for x, y in c.batches():
            hot = as_probabilities(y, len(total))
            total, count = torch.addmm(total, hot.T, c.forward(c.model, x).before[c.spec.features]), count + hot.sum(0)
        return total, count

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        weight = s.reduced["weight"]
        there = weight >= 0.5                                # less is noise, of which a mean would be made by dividing by next to nothing
        mean = s.reduced["proto"] / torch.where(there, weight, 1.0)[:, None]
        return {"proto": torch.where(there[:, None], mean, s.shared["proto"]), "seen": s.shared["seen"].maximum(there.to(weight.dtype))}, {}
