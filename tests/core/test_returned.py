"""What a hook returns in a wrong form is refused where it returns it, with the part, the hook and what was wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from consilience.core.part import Part
from consilience.errors import ConfigError, NonFiniteError
from consilience.testing import tiny_federation


def part_with(**hooks: Any) -> Part:
    """A part that has these hooks, given as functions, and uploads "a"."""
    cls = type("Mine", (Part,), {"name": "mine", "reduce": {"a": "stack"}, **hooks})
    return dataclass(frozen=True)(cls)()      # type: ignore[no-any-return]


def pieces_of(change: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: w for k, w in change.items() if k.startswith("head")}


ONE = torch.ones(())
WRONG = {
    "weights of some": ({"weights": lambda self, s, p: p[:2]},
        r"'weights' of part 'mine' must return a tensor with one weight for each of the 3 clients. Got a tensor of shape \(2,\)"),
    "weights as a list": ({"weights": lambda self, s, p: p.tolist()},
        r"one weight for each of the 3 clients. Got list instead"),
    "no weights": ({"weights": lambda self, s, p: None},
        r"Got NoneType instead. Is a return missing\?"),
    "a change of some": ({"aggregate": lambda self, s, change: (pieces_of(change), s.server)},
        r"'aggregate' of part 'mine' must return a change for every parameter.*'stage1.0.weight' is missing;.*and 5 more\."),
    "a change of another shape": ({"aggregate": lambda self, s, change: ({k: w.mean() for k, w in change.items()}, s.server)},
        r"'stage1.0.weight' has the shape \(\), not \(4, 1, 3, 3\)"),
    "a change alone": ({"aggregate": lambda self, s, change: change},
        r"'aggregate' of part 'mine' must return two things, the change and its server state. Got dict instead"),
    "server state that is none": ({"aggregate": lambda self, s, change: (change, None)},
        r"must return server tensors by their names.*Got NoneType"),
    "shared state alone": ({"finish": lambda self, c: (c.kept, {"a": ONE}), "server": lambda self, s: s.shared},
        r"'server' of part 'mine' must return two things, its shared state \(s.shared\) and its server state"),
    "uploads alone": ({"finish": lambda self, c: {"a": ONE}},
        r"'finish' of part 'mine' must return two things, what it keeps"),
    "a number as an upload": ({"finish": lambda self, c: (c.kept, {"a": 1.0})},
        r"must return uploads by their names, and 'a' must be a tensor. Got float"),
    "a survey with what it keeps": ({"survey": lambda self, c: (c.kept, {"a": ONE})},
        r"'survey' of part 'mine' must return uploads by their names, as a dictionary.*Got 2 things instead"),
    "rows that are stacked": ({"survey": lambda self, c: {"a": torch.ones(c.size)}},
        r"uploads 'a' with shape \(24,\) from one client and \(17,\) from another, which 'stack' cannot .*'concat'"),
    "some parameters to start from": ({"receive": lambda self, c: (pieces_of(c.received["params"]), {})},
        r"'receive' of part 'mine' must return every parameter that it received: 'stage1.0.weight' is missing"),
    "parameters alone": ({"receive": lambda self, c: c.received["params"]},
        r"two things, the parameters to start from and its scratch"),
    "a number as scratch": ({"init_scratch": lambda self, c: {"b": 0.0}},
        r"'init_scratch' of part 'mine'.*'b' must be a tensor. Got float"),
    "another batch": ({"batch": lambda self, v: (v.batch.x, v.batch.y)},
        r"'batch' of part 'mine' must return a batch, such as v.batch._replace"),
    "a gradient of some": ({"grad": lambda self, v, g: pieces_of(g)},
        r"'grad' of part 'mine' must return a gradient for every parameter that it was given: 'stage1.0.weight' is missing"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_form_is_refused_and_nothing_of_the_round_stays(what):
    hooks, said = WRONG[what]
    fed = tiny_federation([part_with(**hooks)])
    with pytest.raises(ConfigError, match=said):
        fed.round()
    assert fed.round_number == 0


@pytest.mark.parametrize(("hooks", "said"), [
    ({"init_kept": lambda self, spec: {"a": 0.0}},
     r"'init_kept' of part 'mine' must return tensors by their names, and 'a' must be a tensor"),
    ({"build": lambda self, module, spec: None}, r"'build' of part 'mine' must return the module, changed or not. Got NoneType"),
    ({"phases": lambda self, phases, spec: None}, r"'phases' of part 'mine' must return a list of phases. Got NoneType"),
    ({"phases": lambda self, phases, spec: []}, r"'phases' of part 'mine' leaves no phase, so that nothing would train"),
    ({"phases": lambda self, phases, spec: [replace(p, keys=("nope",)) for p in phases]},
     r"names 'nope' in the phase 'main', which is no parameter of the model. Its parameters: stage1.0.weight"),
])
def test_a_wrong_form_is_refused_when_the_federation_is_made(hooks, said):
    with pytest.raises(ConfigError, match=said):
        tiny_federation([part_with(**hooks)])


@pytest.mark.parametrize(("personalise", "said"), [
    (lambda self, c: c.received, r"two things, a model .* and whether taps act in it. Got dict instead"),
    (lambda self, c: (c.received["params"], True), r"a whole model.*'params/stage1.0.weight' is missing"),
])
def test_a_personal_model_of_a_wrong_form(personalise, said):
    fed = tiny_federation([part_with(personalise=personalise)])
    with pytest.raises(ConfigError, match="'personalise' of part 'mine' must return " + said):
        fed.personal_model(0)


def test_rows_may_differ_where_they_are_joined_but_not_what_a_row_is():
    rows = lambda self, c: {"a": torch.ones(c.size, 2)}
    tiny_federation([part_with(reduce={"a": "concat"}, survey=rows)]).round()
    with pytest.raises(ConfigError, match=r"\(5, 24\) from one client and \(5, 17\).*Upload one shape, but for the first dimension"):
        tiny_federation([part_with(reduce={"a": "concat"}, survey=lambda self, c: {"a": torch.ones(5, c.size)})]).round()


def test_weights_that_are_not_finite_are_not_blamed_on_the_learning_rate():
    fed = tiny_federation([part_with(weights=lambda self, s, p: p * 0 / (p * 0).sum())])
    with pytest.raises(NonFiniteError, match=r"weights in the average are not finite \(nan, nan, nan\), as the hook 'weights' of mine"):
        fed.round()
