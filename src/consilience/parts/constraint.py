"""LfD's constraint study: tie one region of the model to the received one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .. import tree
from ..core.layout import Layout
from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..options import option

_REGIONS = ("extractor", "header", "head")


@dataclass(frozen=True)
class Constraint(Part):
    """Constrain outputs (mean squared error on the same batch) or parameters ((λ/2)‖·‖²) of a region of the model."""

    weight: float = option(0.1, "λ", low=0.0, tune=(0.001, 0.01, 0.1, 1.0))
    on: str = option("feature", "what is constrained", choices=("feature", "parameter"))
    region: str = option("head", "where: extractor, header, head (the classifier, its logits) or all three",
                         choices=(*_REGIONS, "all"))

    name = "constraint"
    paper = "LfD (Kim et al.), Table 1 and Fig. 1"
    helps = ("label skew",)
    departs = ("the paper gives neither distance nor λ; these are our readings",)
    neutral = {"weight": 0.0}

    @property
    def regions(self) -> tuple[str, ...]:
        return _REGIONS if self.region == "all" else (self.region,)

    def points(self, layout: Layout) -> tuple[str, ...]:
        return (layout.extracted, layout.features)

    def require(self, spec: Spec) -> str | None:
        there = {spec.layout.region(k) for k in spec.trained}
        if self.on == "feature" or there.intersection(self.regions):
            return None
        nothing = "no parameter" if self.region == "all" else f"no parameter of {self.region}"
        others = "".join(f", or region={r}" for r in _REGIONS if r in there)
        return f"has on=parameter, and {nothing} trains and travels. Use on=feature{others}."

    def loss(self, v: StepView) -> Any:
        if self.on == "parameter":
            keys = [k for k in v.travelling if v.spec.layout.region(k) in self.regions]
            return 0.5 * self.weight * tree.sq_dist(tree.pick(v.params, keys), v.received["params"])
        fixed = v.forward(v.received, v.batch.x)

        def output(trace: Any, region: str) -> Tensor:
            points = {"extractor": v.spec.layout.extracted, "header": v.spec.layout.features}
            return trace.logits if region == "head" else trace.before[points[region]]
        return self.weight * sum(F.mse_loss(output(v.trace, r), output(fixed, r)) for r in self.regions)
