"""FedRep: head first, then the representation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..core.part import Part, Phase, Spec
from ..options import option
from ._reasons import WHOLE_MODELS


@dataclass(frozen=True)
class Rep(Part):
    """The head stays on the client; a round trains the head with a fixed base, then the base with a fixed head."""

    head_epochs: int = option(1, "epochs of the head's phase; the base trains for the run's local work", low=1, tune=(1, 5, 10))

    name = "rep"
    paper = "FedRep (Collins et al., ICML 2021)"
    helps = ("label skew",)
    departs = ("normalisation statistics still follow the batches while the base is fixed, as in the releases",)
    not_neutral = "it has no strength: the head stays local"

    @property
    def claims(self) -> Mapping[str, str]:
        return {"phases of the model": "trains head and base in turn", "head's place": "keeps it on the client"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"local head", "personal models"})

    @property
    def refuses(self) -> Mapping[str, str]:
        return {WHOLE_MODELS: "keeps the head on the client"}

    def share(self, key: str, spec: Spec) -> bool:
        return not spec.in_head(key)

    def phases(self, phases: list[Phase], spec: Spec) -> list[Phase]:
        main, *others = phases
        head = tuple(k for k in main.keys if spec.in_head(k))
        base = tuple(k for k in main.keys if not spec.in_head(k))
        return [replace(main, name="head", keys=head, epochs=self.head_epochs), replace(main, name="base", keys=base), *others]
