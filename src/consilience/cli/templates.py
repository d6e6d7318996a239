"""The files that `consilience new` writes."""

PART = '''"""{cls}: say the idea in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from consilience import Part, option, tree


@dataclass(frozen=True)
class {cls}(Part):
    """Pull the parameters that train and travel towards the received ones; replace this by your idea.

    Fields are settings; hooks are pure functions of what they are given. A hook that is not written costs nothing. Inside
    a step nothing may read a tensor's value on the host (.item(), if tensor, boolean masks).
    """

    strength: float = option(0.01, "what it does", low=0.0, tune=(0.001, 0.01, 0.1))

    name = "{name}"
    paper = "where the idea was published"
    helps = ("label skew",)
    neutral = {{"strength": 0.0}}      # settings at which FedAvg comes out bit for bit
    refuses = {{"no global model": "pulls towards it"}}      # beside `local` nothing travels, and it would change nothing

    def loss(self, v: Any) -> Any:
        """A term added to the loss. `v` holds the batch, the trace of the forward pass, parameters, shared state, …

        Where nothing but such a pull is left of your idea, declare it with the hook `correction`: a GPU computes it for less.
        """
        return 0.5 * self.strength * tree.sq_dist(tree.pick(v.params, v.travelling), v.received["params"])
'''

PART_TEST = '''"""The contract that every part keeps, and the number that makes this one right."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from consilience.testing import check_part, in_model, run_tiny, differences
from {name} import {cls}


def test_contract():
    check_part({cls})


def test_it_changes_training():
    assert differences(run_tiny(), run_tiny([{cls}(strength=1.0)]), only=in_model)
'''
