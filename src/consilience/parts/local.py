"""No communication: every client trains a model of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.part import Part, Spec
from ._reasons import OWN_MODEL


@dataclass(frozen=True)
class Local(Part):
    """Every client trains a model of its own; nothing of the model travels.

    The row that shows whether federated training helps a client at all. What other parts of the stack exchange
    (anchors, statistics) still travels.
    """

    name = "local"
    paper = "the baseline without communication"
    helps = ("none: the reference for every client",)
    scored = "after local training"
    not_neutral = "it removes the average that FedAvg is made of"

    @property
    def claims(self) -> Mapping[str, str]:
        return {"question of what travels": "lets nothing travel"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"no global model", "local head", OWN_MODEL})

    def share(self, key: str, spec: Spec) -> bool:
        return False
