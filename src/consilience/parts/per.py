"""FedPer: a head of one's own."""

from __future__ import annotations

from collections.abc import Mapping
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
    def claims(self) -> Mapping[str, str]:
        return {"head's place": "keeps it on the client"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"local head", "personal models"})

    @property
    def refuses(self) -> Mapping[str, str]:
        return {"no global model": "keeps the head of it on the clients", "a frozen random head": "lets every client train its own"}

    def share(self, key: str, spec: Spec) -> bool:
        return not spec.in_head(key)
