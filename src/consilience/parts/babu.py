"""FedBABU: train the body, tune afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..core.client import ClientView
from ..core.part import Model, Part, Phase, Spec
from ..options import option


@dataclass(frozen=True)
class Babu(Part):
    """The head keeps its random initial values during federated training; a client fine-tunes the whole model before use."""

    fine_tune: int = option(5, "epochs of fine-tuning before a client's model is scored; 0 scores the global model", low=0,
                            tune=(1, 5, 10))
    tuned: str = option("whole", "what is fine-tuned: the whole model, or the head alone as DBE's section 2 says",
                        choices=("whole", "head"))

    name = "babu"
    paper = "FedBABU (Oh et al., ICLR 2022)"
    helps = ("label skew",)
    departs = ("5 epochs of fine-tuning, the official option; DBE's tables use 10",
               "with tuned=head all plain training is the head's, DBE's first epoch included")
    scored = "after aggregation and fine-tuning"
    not_neutral = "it has no strength: the head is never trained"
    trial = {"fine_tune": 1}

    @property
    def claims(self) -> Mapping[str, str]:
        return {"phases of the model": "never trains the head"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"a frozen random head", "personal models"})

    def phases(self, phases: list[Phase], spec: Spec) -> list[Phase]:
        main, *others = phases
        return [replace(main, keys=tuple(k for k in main.keys if not spec.in_head(k))), *others]

    def plain_keys(self, keys: tuple[str, ...], spec: Spec) -> tuple[str, ...]:
        return tuple(k for k in keys if spec.in_head(k)) if self.tuned == "head" else keys

    def personalise(self, c: ClientView) -> tuple[Model, bool]:
        return (c.train(c.received, self.fine_tune) if self.fine_tune else c.received), True
