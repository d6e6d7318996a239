"""FedBN: normalisation layers stay at home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.part import Part, Spec


@dataclass(frozen=True)
class Bn(Part):
    """Normalisation layers with running statistics never leave the client, neither scales nor statistics.

    Layers are found by type, not by name; BatchNorm in classifiers counts too.
    """

    name = "bn"
    paper = "FedBN (Li et al., ICLR 2021)"
    helps = ("feature shift",)
    not_neutral = "it has no strength; without such layers it is refused"

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"personal models"})

    @property
    def refuses(self) -> Mapping[str, str]:
        return {"no global model": "keeps layers of it on the clients"}

    def share(self, key: str, spec: Spec) -> bool:
        return key not in spec.norm

    def require(self, spec: Spec) -> str | None:
        return None if spec.norm else "needs a model with BatchNorm layers, and this one has none. Use fedavg, or another model."
