"""Centralised training on the pooled data of all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.part import Part
from ._reasons import OWN_MODEL


@dataclass(frozen=True)
class Union(Part):
    """One model trained on all clients' samples together: the upper reference that federation cannot have.

    A round is one pass over the pooled data (or the run's number of steps); LfD's Union row is 300 such epochs.
    """

    name = "union"
    paper = "LfD, Table 2 (centralised training)"
    helps = ("none: the reference without skew",)
    not_neutral = "it pools the data that FedAvg keeps apart"
    pools = True

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({OWN_MODEL})

    @property
    def refuses(self) -> Mapping[str, str]:
        return {"personal models": "pools all clients into one, so that nothing is personal",
                "no global model": "trains one global model",
                "a comparison of clients": "pools all clients into one, so that there is nothing to compare"}
