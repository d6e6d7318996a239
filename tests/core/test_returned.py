"""What a hook returns in a wrong form is refused where it returns it, with the part, the hook and what was wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from core_parts import Plain, federation, seeded

from consilience import tree
from consilience.core.part import Part, Phase
from consilience.errors import ConfigError, NonFiniteError
from consilience.testing import differences, tiny_federation


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
    "another gradient of some": ({"gradient": lambda self, v, grad_at: pieces_of(grad_at(v.params))},
        r"'gradient' of part 'mine' must return a gradient for every parameter that the phase trains: 'stage1.0.weight' is missing"),
    "a gradient of all and of more": ({"gradient": lambda self, v, grad_at: {**grad_at(v.params), "nope": ONE}},
        r"'gradient' of part 'mine' must return .*: 'nope' is none of them\."),
    "a gradient of other shapes": ({"gradient": lambda self, v, grad_at: {k: g.sum() for k, g in grad_at(v.params).items()}},
        r"'stage1.0.weight' has the shape \(\), not \(4, 1, 3, 3\)"),
    "no gradient": ({"gradient": lambda self, v, grad_at: None},
        r"'gradient' of part 'mine' must return a gradient for every parameter that the phase trains. Got NoneType instead. Is a return"),
    "a gradient and too much": ({"gradient": lambda self, v, grad_at: (grad_at(v.params), {}, 1)},
        r"'gradient' of part 'mine' must return two things, the gradient and its scratch. Got 3 things"),
    "a gradient of nothing": ({"gradient": lambda self, v, grad_at: {k: torch.zeros_like(p) for k, p in v.params.items()}},
        r"'gradient' of part 'mine' never called grad_at, .*Call grad_at\(v.params\) once"),
    "a list to deliver": ({"deliver": lambda self, s, client: [ONE]},
        r"'deliver' of part 'mine' must return tensors by their names, as a dictionary.*Got list instead"),
    "a number to deliver": ({"deliver": lambda self, s, client: {"a": {"b": client}}},
        r"'deliver' of part 'mine' must return tensors by their names, and 'a/b' must be a tensor. Got int"),
    "what is published without its name": ({"survey": lambda self, c: {"a": ONE}, "publish": lambda self, s, owner, reduced, how: {}},
        r"'publish' of part 'mine' must return what was put together of mine's uploads: 'a' is missing\."),
    "one client's upload published": ({"survey": lambda self, c: {"a": ONE},
                                       "publish": lambda self, s, owner, reduced, how: tree.map(lambda t: t[0], reduced)},
        r"'publish' of part 'mine' must return what was put together of mine's uploads: 'a' has the shape \(\), not \(3,\)"),
    "some of the change published": ({"publish": lambda self, s, owner, reduced, how: pieces_of(reduced)},
        r"'publish' of part 'mine' must return the model's change that it was given: 'stage1.0.weight' is missing"),
    "nothing published": ({"publish": lambda self, s, owner, reduced, how: None},
        r"'publish' of part 'mine' must return the model's change that it was given. Got NoneType instead. Is a return missing\?"),
    "uploads released alone": ({"release": lambda self, c, uploads, model: uploads},
        r"'release' of part 'mine' must return two things, the uploads and the model, changed or not. Got dict"),
    "a model released in parts": ({"release": lambda self, c, uploads, model: (uploads, model["params"])},
        r"'release' of part 'mine' must return the whole model that it was given .*'params/stage1.0.weight' is missing"),
    "an upload released that was none": ({"finish": lambda self, c: (c.kept, {"a": ONE}),
                                          "release": lambda self, c, uploads, model: ({"mine": {"b": ONE}}, model)},
        r"'release' of part 'mine' must return the uploads of all parts that it was given: 'mine/a' is missing; 'mine/b' is none"),
    "a survey released without a name": ({"survey": lambda self, c: {"a": ONE}, "release": lambda self, c, uploads, model: ({}, model)},
        r"'release' of part 'mine' must return the uploads .*'mine/a' is missing\."),
    "an account without its state": ({"account": lambda self, s, releases: {"bits": 1}},
        r"'account' of part 'mine' must return two things, an entry of the round's record \(\{\} for none\) and its server state"),
    "an account of a tensor": ({"account": lambda self, s, releases: ({"bits": {"all": [1.0, ONE]}}, s.server)},
        r"'account' .* numbers, words and lists of them, and 'bits/all/1' must be one of these .*Got a tensor of shape \(\)"),
    "an account without end": ({"account": lambda self, s, releases: ({"bits": float("inf")}, s.server)},
        r"'account' .* numbers, words and lists of them, and 'bits' is inf, which a record cannot hold. Return None"),
    "an account by numbers": ({"account": lambda self, s, releases: ({7: 1.0}, s.server)},
        r"'account' of part 'mine' must return an entry .*, with words for names. Got int for the name 7 instead"),
    "an account as a word": ({"account": lambda self, s, releases: ("much", s.server)},
        r"'account' of part 'mine' must return an entry of the round's record, as a dictionary .*Got str instead"),
    "server state that nobody declared": ({"account": lambda self, s, releases: ({}, {"x": ONE})},
        r"'account' of part 'mine' must return the tensors that 'init_server' declares: 'x' is none of them\."),
    "a plan for another number of steps": ({"plan": lambda self, key, spec, sizes: {"a": torch.zeros(1, 2)}},
        r"'plan' of part 'mine' must return a row of draws for each of the 6 steps in 'a'. Got a tensor of shape \(1, 2\)"),
    "a plan of one number": ({"plan": lambda self, key, spec, sizes: {"a": ONE}},
        r"a row of draws for each of the 6 steps in 'a'. Got a tensor of shape \(\)"),
    "a plan as a tensor": ({"plan": lambda self, key, spec, sizes: sizes},
        r"'plan' of part 'mine' must return draws by their names, as a dictionary.*Got a tensor of shape \(6,\)"),
    "a gradient of some": ({"grad": lambda self, v, g: pieces_of(g)},
        r"'grad' of part 'mine' must return a gradient for every parameter that it was given: 'stage1.0.weight' is missing"),
    "samples without their targets": ({"batch": lambda self, v: v.batch._replace(x=v.batch.x[:3])},
        r"'batch' of part 'mine' must return as many samples as targets. Got 3 samples \(x\) and 8 targets instead"),
    "a batch of nothing": ({"batch": lambda self, v: v.batch._replace(x=None)},
        r"'batch' of part 'mine' must return a batch with tensors for x and target. Got NoneType in it"),
    # the first client's forms are those of the memory that others are loaded into
    "scratch of another shape on every client": ({"init_scratch": lambda self, c: {"of": torch.zeros(c.size)}},
        r"'init_scratch' of part 'mine' must return tensors of the same names, .* on every client: 'of' has the shape \(17,\), not"),
    "scratch of another name on every client": ({"init_scratch": lambda self, c: {f"of{c.id}": ONE}},
        r"tensors of the same names, shapes and types on every client: 'of0' is missing; 'of1' is none of them"),
    "draws of another shape on every client": ({"plan": lambda self, key, spec, sizes: {"of": torch.zeros(len(sizes), len(sizes))}},
        r"'plan' of part 'mine' must return tensors of the same names, .* on every client: 'of' has the shape \(4,\), not \(6,\)"),
    "parameters of another type to start from":
        ({"receive": lambda self, c: ({k: w.double() for k, w in c.received["params"].items()}, {})},
        r"'receive' of part 'mine' must return every parameter .*: 'stage1.0.weight' is of the type torch.float64, not torch.float32"),
    # the average of such statistics was float64 too, in a model whose checkpoints could not be read
    "a model released in another type":
        ({"release": lambda self, c, uploads, model: (uploads, tree.map(lambda t: t.double(), model))},
        r"'release' of part 'mine' must return the whole model .*'params/stage1.0.weight' is of the type torch.float64, not torch.float32"),
    "rows of a single number": ({"reduce": {"a": "concat"}, "finish": lambda self, c: (c.kept, {"a": ONE})},
        r"Part 'mine' uploads 'a' as a single number, which has no rows that 'concat' could join. Reduce it by 'stack'"),
    "no value at a point": ({"points": lambda self, layout: ("head",), "tap": lambda self, v, point, x: None},
        r"'tap' of part 'mine' must return the value at the point as a tensor, or that and a note. Got NoneType instead. Is a return"),
    "a value and too much": ({"points": lambda self, layout: ("head",), "tap": lambda self, v, point, x: (x, 1, 2)},
        r"'tap' of part 'mine' must return two things, the value at .* and a note. Got 3 things"),
    "no targets": ({"relabel": lambda self, v: None},                           # it was trained as if there were no such hook
        r"'relabel' of part 'mine' must return the targets of the batch's 8 samples as a tensor. Got NoneType"),
    "targets of some": ({"relabel": lambda self, v: v.batch.target[:3]},
        r"must return the targets of the batch's 8 samples as a tensor. Got a tensor of shape \(3,\)"),
    "a number for the task": ({"main_loss": lambda self, v: 1.0},
        r"'main_loss' of part 'mine' must return one number: a tensor without dimensions. Got float"),
    "a loss of nothing": ({"main_loss": lambda self, v: v.trace.logits.detach().mean()},
        r"The loss of a step, of mine, depends on nothing that the phase 'main' trains: on no parameter, or on values detached"),
    "no loss before the pass": ({"before": lambda self, v: None},               # for a float no step is made, and for nothing none was
        r"'before' of part 'mine' must return one number: a tensor without dimensions, or a float. Got NoneType .* Is a return"),
    "a loss for nothing to step": ({"adversary": lambda self, v: v.trace.logits.mean()},
        r"'adversary' of part 'mine' returns a loss, and the part has nothing .* attach a module in 'build', or .* 'init_personal'"),
    "a loss of its own that nothing made": ({"init_personal": lambda self, spec: {"p": ONE}, "adversary": lambda self, v: ONE},
        r"'adversary' of part 'mine' returns a loss that depends on none of the tensors that its step moves \(personal/p\)"),
    # what is tracked is copied to where scratch lies, and among whole numbers 0.5 was 0, without a word
    "a mean tracked among whole numbers": ({"init_scratch": lambda self, c: {"mean": torch.tensor(0)},
                                            "track": lambda self, v: {"mean": v.scratch["mean"] + 0.5}},
        r"'track' of part 'mine' must return .* 'init_scratch' declares: 'mean' is of the type torch.float32, not torch.int64"),
    # steps computed with the type of the first client in a process, and so otherwise in several processes than in one
    "scratch of another type on every client": ({"init_scratch": lambda self, c: {"share": torch.tensor(0 if c.id else 0.5)}},
        r"tensors of the same names, shapes and types on every client: 'share' is of the type torch.int64, not torch.float32"),
    "draws of another type on every client": ({"plan": lambda self, key, spec, sizes: {"of": sizes if len(sizes) < 6 else sizes / 8}},
        r"tensors of the same names, shapes and types on every client: 'of' is of the type torch.int64, not torch.float32"),
    # such state could be trained with, but its checkpoints could not be read again: "The snapshot does not fit this run"
    "kept state of another type": ({"init_kept": lambda self, spec: {"k": ONE},
                                    "finish": lambda self, c: ({"k": c.kept["k"].double()}, {})},
        r"'finish' of part 'mine' must return .* 'init_kept' declares: 'k' is of the type torch.float64, not torch.float32\."),
    "server state of another type": ({"init_server": lambda self, spec: {"n": torch.tensor(0)},
                                      "aggregate": lambda self, s, change: (change, {"n": s.server["n"] + 0.5})},
        r"'aggregate' of part 'mine' must return .* 'init_server' declares: 'n' is of the type torch.float32, not torch.int64"),
    "shared state of another type": ({"init_shared": lambda self, spec: {"c": ONE}, "finish": lambda self, c: (c.kept, {"a": ONE.double()}),
                                      "server": lambda self, s: ({"c": s.reduced["a"].sum()}, s.server)},
        r"'server' of part 'mine' must return .* 'init_shared' declares: 'c' is of the type torch.float64, not torch.float32"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_form_is_refused_and_nothing_of_the_round_stays(what):
    hooks, said = WRONG[what]
    fed = tiny_federation([part_with(**hooks)])
    with pytest.raises(ConfigError, match=said):
        fed.round()
    assert fed.round_number == 0


def test_what_trains_plainly_may_be_a_set_and_has_the_models_order():
    fed = tiny_federation([part_with(plain_keys=lambda self, keys, spec: {*reversed(keys)})])
    assert fed.plain_phase.keys == fed.phases[0].keys


def test_yes_and_no_may_be_numpys():
    """The error said that True or False was wanted, and that it got bool."""
    part = part_with(exchange=lambda self, round_number: np.array([False, False, True])[round_number])
    fed = tiny_federation([part])
    assert [fed.round().exchanged, fed.round().exchanged] == [False, True]


def test_what_is_tracked_may_be_of_another_type_that_loses_nothing_whole():
    """As numbers in bfloat16 are, which a module shows under autocast, or counts."""
    part = part_with(init_scratch=lambda self, c: {"a": torch.zeros(()), "n": torch.zeros(())}, init_kept=lambda self, spec: {"n": ONE},
                     track=lambda self, v: {"a": v.trace.logits.mean().bfloat16(), "n": v.round + 1},
                     finish=lambda self, c: ({"n": c.scratch["n"]}, {}))
    fed = tiny_federation([part])
    fed.round()
    assert fed.client(0).tensors["kept"]["mine"]["n"] == 2.0


def test_entries_of_two_parts_stand_beside_each_other_in_a_record():
    bits = part_with(account=lambda self, s, releases: ({"bits": 3, "who": [*releases["finish"]]}, s.server))
    more = dataclass(frozen=True)(type("More", (Part,), {"name": "more", "account": lambda self, s, releases: ({"kind": "x"}, s.server)}))()
    assert tiny_federation([bits, more]).round().privacy == {"bits": 3, "who": [0, 1, 3], "kind": "x"}
    same = dataclass(frozen=True)(type("Same", (Part,), {"name": "same", "account": lambda self, s, releases: ({"bits": 4}, s.server)}))()
    with pytest.raises(ConfigError, match="'account' of part 'same' records 'bits', which another part of the stack records already"):
        tiny_federation([bits, same]).round()


@pytest.mark.parametrize(("hooks", "said"), [
    ({"init_kept": lambda self, spec: {"a": 0.0}},
     r"'init_kept' of part 'mine' must return tensors by their names, and 'a' must be a tensor"),
    ({"init_personal": lambda self, spec: {"seen": torch.tensor(0)}},
     r"'init_personal' of part 'mine' must return tensors of floats, .*: 'seen' is of the type torch.int64. What .* in 'init_kept'"),
    ({"build": lambda self, module, spec: None}, r"'build' of part 'mine' must return the module, changed or not. Got NoneType"),
    ({"phases": lambda self, phases, spec: None}, r"'phases' of part 'mine' must return a list of phases. Got NoneType"),
    ({"phases": lambda self, phases, spec: []}, r"'phases' of part 'mine' leaves no phase, so that nothing would train"),
    # it was said that every client has too few samples
    ({"phases": lambda self, phases, spec: [replace(p, epochs=0) for p in phases]},
     r"'phases' of part 'mine' leaves no phase with an epoch, so that nothing would train"),
    ({"phases": lambda self, phases, spec: [replace(p, keys=("nope",)) for p in phases]},
     r"names 'nope' in the phase 'main', which is no parameter of the model. Its parameters: stage1.0.weight"),
    # without a return no parameter travelled, and clients trained alone without a word
    ({"share": lambda self, key, spec: None}, r"'share' of part 'mine' must return True or False. Got NoneType instead. Is a return"),
    ({"require": lambda self, spec: 3}, r"'require' of part 'mine' must return the reason to refuse .* in words, or None. Got int"),
    ({"points": lambda self, layout: "head"}, r"'points' of part 'mine' must return names of modules, as a tuple. Got str"),
    ({"points": lambda self, layout: (1,)}, r"'points' of part 'mine' must return names of modules, as a tuple of words. Got int in it"),
    ({"plain_keys": lambda self, keys, spec: ("nope",)}, r"'plain_keys' of part 'mine' names 'nope', which is no parameter of the model"),
    # keys, hooks, draws and optimisers are found by a phase's name: of two that share one, the last decided for both
    ({"phases": lambda self, phases, spec: [replace(phases[0], keys=phases[0].keys[:2]), *phases]},
     r"'phases' of part 'mine' returns a phase 'main', a name that is there more than once. Give every phase a name of its own"),
    ({"phases": lambda self, phases, spec: [replace(phases[0], name="plain")]}, r"a phase 'plain', a name that stands for something else"),
    ({"phases": lambda self, phases, spec: [replace(phases[0], name="apart")]}, r"a phase 'apart', a name that stands for something else"),
    # SAM's norm was summed in the order of the set, and differed from process to process
    ({"phases": lambda self, phases, spec: [replace(phases[0], keys=set(phases[0].keys))]},
     r"'phases' of part 'mine' names the keys in the phase 'main' as a set. They must be a tuple, which has an order"),
    ({"phases": lambda self, phases, spec: [replace(phases[0], keys="head.bias")]}, r"as a str. They must be a tuple, which has an order"),
    # of a model that nobody has, the model that travels was trained, without the parts
    ({"phases": lambda self, phases, spec: [replace(phases[0], model="modle")]},
     r"names the model 'modle' in the phase 'main', which is none: 'model' is the one that travels"),
    ({"phases": lambda self, phases, spec: [*phases, Phase("own", phases[0].keys, model="mine")]},
     r"names the model 'mine' in the phase 'own', which is none: .* whose 'init_personal' declares it"),
    # path lengths, of which SCAFFOLD's divisor is one, would count such a parameter's steps twice
    ({"phases": lambda self, phases, spec: [replace(phases[0], keys=(*phases[0].keys, "head.bias"))]},
     r"names 'head.bias' in the phase 'main' more than once"),
    ({"phases": lambda self, phases, spec: [replace(phases[0], epochs=1.5)]}, r"names 1.5 epochs in .* a whole number from 0 up, or None"),
    ({"phases": lambda self, phases, spec: [replace(phases[0], epochs=-1)]}, r"names -1 epochs in the phase 'main': it must be"),
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


def test_a_round_without_a_word_on_the_exchange():
    """Without a return, models never travelled."""
    with pytest.raises(ConfigError, match=r"'exchange' of part 'mine' must return True or False. Got NoneType instead. Is a return"):
        tiny_federation([part_with(exchange=lambda self, round_number: None)]).round()


def test_samples_beside_the_batch_are_a_tensor():
    fed = federation(seeded(Plain), part_with(beside=lambda self, v: [v.batch.x]))
    with pytest.raises(ConfigError, match=r"'beside' of part 'mine' must return samples as a tensor, or None. Got list instead"):
        fed.round()


def test_a_part_that_tracks_nothing():
    """As with a setting that leaves it nothing to track; it ended in a KeyError."""
    fed, plain = tiny_federation([part_with(track=lambda self, v: {})]), tiny_federation()
    fed.round(), plain.round()
    assert not differences(fed, plain)


def test_scratch_of_both_hooks_that_make_it():
    """What `receive` returned was lost where there was an `init_scratch` too."""
    fed = tiny_federation([part_with(receive=lambda self, c: (c.received["params"], {"r": ONE}),
                                     init_scratch=lambda self, c: {"i": 2 * ONE},
                                     finish=lambda self, c: (c.kept, {"a": torch.stack([c.scratch["r"], c.scratch["i"]])}),
                                     init_server=lambda self, spec: {"seen": torch.zeros(2)},
                                     server=lambda self, s: (s.shared, {"seen": s.reduced["a"].mean(0)}))])
    fed.round()
    assert fed.server["mine"]["seen"].tolist() == [1, 2]


def taught(v: Any) -> Any:
    """The task's loss, and beside plain training a pull to a model that was trained plainly."""
    loss = v.task_loss(v.trace.logits, v.batch.target)
    return loss if v.plain else loss + sum((v.params[k] - w).square().sum() for k, w in v.scratch["teacher"].items())


@pytest.mark.parametrize(("hooks", "said"), [
    ({"init_scratch": lambda self, c: {"teacher": c.train(c.received, steps=1)["params"]}, "main_loss": lambda self, v: taught(v)},
     r"'init_scratch' of part 'mine' asks for plain training, in which the part's hook 'main_loss' finds .*Ask for it in 'receive'"),
    ({"init_scratch": lambda self, c: {"seen": c.forward(c.received, c.take(torch.arange(8)), train=True, taps=True).logits},
      "points": lambda self, layout: ("head",), "tap": lambda self, v, point, x: x},
     r"'init_scratch' of part 'mine' asks for a training pass with taps, in which the part's hook 'tap' finds what 'init_scratch'"),
])
def test_scratch_that_would_have_to_be_there_before_it_is_made(hooks, said):
    """They called each other until Python stopped them."""
    with pytest.raises(ConfigError, match=said):
        tiny_federation([part_with(**hooks)]).round()


def test_scratch_that_plain_training_makes_comes_from_receive():
    receive = lambda self, c: (c.received["params"], {"teacher": c.train(c.received, steps=1)["params"]})
    tiny_federation([part_with(receive=receive, main_loss=lambda self, v: taught(v))]).round()


def test_a_term_of_the_loss_may_be_of_float64():
    """Its sum with the task's could not be noted among the losses."""
    one, other = (tiny_federation([part_with(loss=lambda self, v, t=t: v.trace.logits.to(t).square().mean())])
                  for t in (torch.float32, torch.float64))
    assert one.round().losses == pytest.approx(other.round().losses, rel=1e-4)
