"""What `explain` forecasts of a run is what its parts count in the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from consilience.core.part import Part
from consilience.parts.stack import parse_stack
from consilience.runs.privacy import forecast
from consilience.testing import run_tiny, tiny_federation


@dataclass(frozen=True)
class Counting(Part):
    """Counts in its own way: how often it was asked, of how many clients, up to which round. It has no hash, for it holds a list."""

    name = "counting"
    clients: Any = field(default_factory=list)

    def init_server(self, spec: Any) -> Any:
        return {"asked": torch.tensor(0)}

    def account(self, s: Any, releases: Mapping[str, list[int]]) -> Any:
        asked = s.server["asked"] + 1
        return {"asked": int(asked), "clients": len(s.ids), "round": s.round}, {"asked": asked}


@pytest.mark.parametrize("beside", ["fedavg", "fedmix"])           # FedMix asks all clients before the first round
def test_a_part_of_the_users_own_is_forecast_as_it_counts(beside: str) -> None:
    parts, how = [Counting(), *parse_stack(beside).parts], {"participation": 2, "sizes": (16, 17, 24, 24)}
    assert forecast(tiny_federation(parts, **how), 3) == {"rounds": 3, **run_tiny(parts, rounds=2, **how).round().privacy}
