"""FedPer: a head of one's own."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.part import Part, Spec


@dataclass(frozen=True)
class Per(Part):
    """The head never leaves the client; everything trains jointly."""

    name = "per"
    paper = "FedPer (Arivazhagan et al., 2019)"
    helps = ("label skew",)
    not_neutral = "it has no strength: the head stays local"

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"local head", "personal models"})

    def share(self, key: str, spec: Spec) -> bool:
        return not spec.in_head(key)
