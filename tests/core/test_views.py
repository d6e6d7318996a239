"""What parts read on clients and on the server outside of steps, and what they are told of what is not there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from consilience.core.part import Part
from consilience.testing import check_part, run_tiny, state_of, tiny_federation


@dataclass(frozen=True)
class Middle(Part):
    """The median of the clients' models, coordinate by coordinate."""

    name = "middle"
    not_neutral = "a median is no average"
    reads_models = True

    def aggregate(self, s: Any, change: Any) -> Any:
        apart = lambda key: torch.stack([m[key] - s.model["params"][key] for m in s.models])
        return {key: apart(key).median(0).values for key in change}, s.server


@dataclass(frozen=True)
class Nearest(Part):
    """All weight to the client whose head moved least."""

    name = "nearest"
    not_neutral = "one client has all the weight"
    reads_models = True

    def weights(self, s: Any, p: Any) -> Any:
        far = torch.stack([(m["head.weight"] - s.model["params"]["head.weight"]).norm() for m in s.models])
        return F.one_hot(far.argmin(), len(p)).to(p.dtype)


@dataclass(frozen=True)
class Old(Part):
    """Starts from the head it trained last, after a step of its own by a gradient through the head."""

    name = "old"
    not_neutral = "heads are the clients' own"
    previous = True

    def receive(self, c: Any) -> Any:
        x, y = next(iter(c.batches()))
        h = c.forward(c.received, x).before[c.spec.features]
        with torch.enable_grad():
            head = {k: w.clone().requires_grad_() for k, w in c.previous["params"].items() if c.spec.in_head(k)}
            logits = c.apply(c.spec.layout.head, h, {**c.received, "params": {**c.received["params"], **head}})
            moved = torch.autograd.grad(F.cross_entropy(logits, y), list(head.values()))
        return {**c.received["params"], **{k: w.detach() - 0.1 * g for (k, w), g in zip(head.items(), moved)}}, {}


@pytest.mark.parametrize("part", [Middle, Nearest, Old])
def test_they_keep_the_contract(part):
    check_part(part)


def test_models_are_there_where_the_average_is_made():
    """Three clients train, so the median of a weight is the one between the other two: here of clients that train without the part."""
    plain, fed = tiny_federation(), tiny_federation([Middle()])
    trained = [next(iter(plain.engine.run([work]))).model["params"] for work in _works(plain)]
    fed.round()
    for key, w in fed.model["params"].items():
        torch.testing.assert_close(w, torch.stack([t[key] for t in trained]).median(0).values)


def _works(fed: Any) -> list[Any]:
    from consilience.core.client import LocalWork
    fed.round_number = 1
    with torch.enable_grad():
        return [LocalWork(fed, i, fed.client(i), [0, 1, 3], {}) for i in (0, 1, 3)]


def test_a_client_shows_the_model_it_trained_last():
    seen: list[Any] = []

    @dataclass(frozen=True)
    class Looks(Part):
        name = "looks"
        previous = True

        def finish(self, c: Any) -> Any:
            seen.append((c.id, c.previous["params"]["head.bias"].clone(), c.model["params"]["head.bias"].clone()))
            return c.kept, {}
    fed = run_tiny([Looks()], rounds=2)
    first, second = {i: (b, m) for i, b, m in seen[:3]}, {i: b for i, b, _ in seen[3:]}
    assert all(torch.equal(before, fed.spec.model["params"]["head.bias"]) for before, _ in first.values())
    assert all(torch.equal(second[i], trained) for i, (_, trained) in first.items())


def test_the_server_runs_one_module_with_gradients():
    got: dict[str, Any] = {}

    @dataclass(frozen=True)
    class Asks(Part):
        name = "asks"
        reads_models = True

        def server(self, s: Any) -> Any:
            head = {k: s.model["params"][k].clone().requires_grad_() for k in ("head.weight", "head.bias")}
            with torch.enable_grad():
                out = s.apply("head", torch.ones(2, 12), {**s.model, "params": {**s.model["params"], **head}})
                got["grad"], = torch.autograd.grad(out.sum(), [head["head.weight"]])
            got["same"] = torch.equal(s.apply("head", torch.ones(2, 12)), out)
            return s.shared, s.server
    run_tiny([Asks()], rounds=1)
    assert got["same"]
    assert torch.equal(got["grad"], torch.full((3, 12), 2.0))      # each of two rows of ones adds 1 to every weight


@pytest.mark.parametrize(("hooks", "said"), [
    ({"survey": lambda self, c: {"a": c.model}}, r"^c.model is there in the hook 'finish' only$"),
    ({"finish": lambda self, c: (c.kept, c.download)}, r"^c.download is there in the hook 'receive' only$"),
    ({"finish": lambda self, c: (c.kept, c.previous)}, r"^c.previous is there for parts that declare `previous = True`$"),
    ({"finish": lambda self, c: (c.kept, c.nothing)}, r"'ClientView' object has no attribute 'nothing'"),
    ({"aggregate": lambda self, s, change: (s.models[0], {})}, r"^s.models is there for parts that declare `reads_models = True`$"),
])
def test_what_is_not_there_says_where_it_is(hooks, said):
    cls = dataclass(frozen=True)(type("Mine", (Part,), {"name": "mine", **hooks}))
    with pytest.raises(AttributeError, match=said):
        tiny_federation([cls()]).round()


@dataclass(frozen=True)
class Fixed(Part):
    """A head that a part makes and freezes, with a projection before it that learns."""

    name = "fixed"
    not_neutral = "it replaces the head"

    def build(self, module: Any, spec: Any) -> Any:
        module.head = nn.Sequential(nn.Linear(12, 3, bias=False), nn.Linear(3, 3, bias=False))
        module.head[1].weight.requires_grad_(False)
        return module


def test_what_a_part_freezes_when_the_model_is_built_does_not_train():
    fed = run_tiny([Fixed()], rounds=1)
    start = fed.spec.model["params"]
    assert torch.equal(fed.model["params"]["head.1.weight"], start["head.1.weight"])
    assert not torch.equal(fed.model["params"]["head.0.weight"], start["head.0.weight"])
    assert "head.1.weight" not in fed.moving
    assert "head.0.weight" in fed.moving
    assert {k for k in state_of(fed) if k.startswith("model/params")} == {f"model/params/{k}" for k in start}


@dataclass(frozen=True)
class Awake(Part):
    """Its loss is that of the task times a number that the client keeps: 0 before its first round, 1 after it."""

    name = "awake"

    def init_kept(self, spec: Any) -> Any:
        return {"on": torch.zeros(())}

    def main_loss(self, v: Any) -> Any:
        return v.kept["on"] * v.task_loss(v.trace.logits, v.batch.target)

    def finish(self, c: Any) -> Any:
        return {"on": torch.ones(())}, {}

    def personalise(self, c: Any) -> Any:
        return c.train(c.received), False


def test_plain_training_is_of_the_state_that_a_view_shows():
    """A measure looks at clients as they will be after the next round, of which the federation knows nothing: there c.kept was the new
    state, and c.train trained with the old one. Of a loss times 0 nothing moves."""
    fed = tiny_federation([Awake()], weight_decay=0.0)
    old, model = fed.client(0), fed.received(fed.client(0))
    new = replace(old, tensors={**old.tensors, "kept": {"awake": {"on": torch.ones(())}}})
    trained = {which: fed.served(0, state, model)[0]["params"]["head.weight"] for which, state in (("old", old), ("new", new))}
    assert torch.equal(trained["old"], model["params"]["head.weight"])
    assert not torch.equal(trained["new"], model["params"]["head.weight"])
