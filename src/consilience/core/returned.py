"""What hooks return, checked where they return it: a wrong form would be found later, far from the part that gave it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import tree
from ..errors import ConfigError
from ..tree import Flat, Tree
from .part import Batch, Model, Part, Phase


def refuse(part: str, hook: str, wanted: str, given: Any, where: str = "") -> ConfigError:
    """The error for something of another kind than wanted; `where` says that it is but a piece of what was returned."""
    if torch.is_tensor(given):
        got = f"a tensor of shape {tuple(given.shape)}"
    elif isinstance(given, tuple) and not hasattr(given, "_fields"):
        got = f"{len(given)} things"
    else:
        got = type(given).__name__
    missing = " Is a return missing?" if given is None else ""
    return ConfigError(f"The hook {hook!r} of part {part!r} must return {wanted}. Got {got}{where} instead.{missing}")


def two(part: Part, hook: str, given: Any, first: str, second: str) -> tuple[Any, Any]:
    """Two things, both of them named in the error."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise refuse(part.name, hook, f"two things, {first} and {second}", given)
    return given


def tensors(part: Part, hook: str, given: Any, what: str = "tensors") -> Tree:
    """A tree: dictionaries by names, with nothing but tensors in them."""
    if not isinstance(given, dict):
        raise refuse(part.name, hook, f"{what} by their names, as a dictionary (an empty one for nothing)", given)
    for path, leaf in tree.paths(given):
        if not torch.is_tensor(leaf):
            raise refuse(part.name, hook, f"{what} by their names, and {path!r} must be a tensor", leaf)
    return given


def trainable(part: Part, hook: str, given: Any) -> Tree:
    """Personal tensors, which train with the model; those of a part with phases of its own may be buffers of its second model."""
    for path, t in tree.paths(tensors(part, hook, given)):
        if part.acts_on == "model" and not t.is_floating_point():
            raise ConfigError(f"The hook {hook!r} of part {part.name!r} must return tensors of floats, which train with the model: "
                              f"{path!r} is of the type {t.dtype}. What a client keeps and does not train belongs in 'init_kept'.")
    return dict(given)


def check_form(part: str, hook: str, given: Tree, wanted: Tree, whose: str, types: bool = False, copied: bool = False) -> None:
    """Refuse tensors that are not those wanted, by their names, shapes and, where these matter, types; `whose` says which these are.
    Where they are `copied` to tensors of the wanted types, refuse those that would be cut: 0.5 is 0 among whole numbers.
    """
    if not isinstance(given, dict):
        raise refuse(part, hook, whose, given)
    found, expected = dict(tree.paths(given)), dict(tree.paths(wanted))
    wrong = [f"{path!r} is missing" for path in expected if path not in found]
    for path, t in found.items():
        if path not in expected:
            wrong.append(f"{path!r} is none of them")
        elif not torch.is_tensor(t):
            wrong.append(f"{path!r} is no tensor")
        elif t.shape != expected[path].shape:
            wrong.append(f"{path!r} has the shape {tuple(t.shape)}, not {tuple(expected[path].shape)}")
        elif (types and t.dtype != expected[path].dtype) or (copied and not torch.can_cast(t.dtype, expected[path].dtype)):
            wrong.append(f"{path!r} is of the type {t.dtype}, not {expected[path].dtype}")
    if wrong:
        raise ConfigError(f"The hook {hook!r} of part {part!r} must return {whose}: {_first(wrong)}.")


def check_state(part: Part, hook: str, given: Tree, declared: Tree, home: str) -> None:
    """Refuse state that is not as its `init_` hook declared it. Its type counts too: a checkpoint is read as what was declared."""
    check_form(part.name, hook, given, declared, f"the tensors that 'init_{home}' declares", types=True)


def _first(wrong: list[str]) -> str:
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"{'; '.join(wrong[:3])}{more}"


def decision(part: Part, hook: str, given: Any) -> bool:
    """Yes or no. Nothing would pass for a no, and a part whose `share` lacks a return would keep the model from travelling."""
    if not isinstance(given, (bool, np.bool_)):          # NumPy's own, whose type is called bool too
        raise refuse(part.name, hook, "True or False", given)
    return bool(given)


def reason(part: Part, given: Any) -> str | None:
    """Why the part cannot run, or None."""
    if given is not None and not isinstance(given, str):
        raise refuse(part.name, "require", "the reason to refuse these data, model or settings in words, or None", given)
    return given


def names(part: Part, hook: str, given: Any, wanted: str) -> tuple[str, ...]:
    """Names of modules or parameters. A single word would be taken for its letters."""
    if not isinstance(given, (tuple, list, set, frozenset)):
        raise refuse(part.name, hook, f"{wanted}, as a tuple", given)
    for name in given:
        if not isinstance(name, str):
            raise refuse(part.name, hook, f"{wanted}, as a tuple of words", name, " in it")
    return tuple(given)


def plain_keys(part: Part, given: Any, keys: Flat) -> tuple[str, ...]:
    """What plain training trains."""
    named = names(part, "plain_keys", given, "names of parameters")
    if unknown := [k for k in named if k not in keys]:
        raise ConfigError(f"The hook 'plain_keys' of part {part.name!r} names {unknown[0]!r}, which is no parameter of the model. "
                          f"Its parameters: {', '.join(keys)}.")
    return tuple(k for k in keys if k in named)          # in the model's order, for a set has another in every process


def weights(part: Part, given: Any, p: Tensor) -> Tensor:
    """One weight for each client."""
    if not torch.is_tensor(given) or given.shape != p.shape:
        raise refuse(part.name, "weights", f"a tensor with one weight for each of the {len(p)} clients", given)
    return given


def chosen(part: Part, given: Any, there: Set[int], size: int) -> list[int]:
    """The clients of a round: different ones, of those that are there, no more than the run has in a round."""
    numbers = given.tolist() if torch.is_tensor(given) and given.dim() == 1 and not given.is_floating_point() else given
    wanted = f"the numbers of up to {size} clients, as a list of whole numbers (of a tensor, its .tolist())"
    if not isinstance(numbers, (list, tuple)):
        raise refuse(part.name, "choose", wanted, given)
    for number in numbers:
        if type(number) is not int:
            raise refuse(part.name, "choose", wanted, number, " in it")
    times = Counter(numbers)
    wrong = [*(f"{i} is none of s.ids" for i in sorted(times.keys() - there)),
             *(f"{i} stands there more than once" for i in sorted(i for i, n in times.items() if n > 1)),
             *([f"there are {len(numbers) or 'none'} of them"] if not 1 <= len(numbers) <= size else [])]
    if wrong:
        raise ConfigError(f"The hook 'choose' of part {part.name!r} must return different clients of s.ids, 1 to {size} of them, as the "
                          f"run has in a round ('participation'): {_first(wrong)}.")
    return sorted(numbers)


def start(part: Part, given: Any, received: Flat) -> tuple[Flat, Tree]:
    """Parameters that training starts from, and scratch."""
    params, scratch = two(part, "receive", given, "the parameters to start from", "its scratch ({} for none)")
    check_form(part.name, "receive", params, received, "every parameter that it received", types=True)
    return params, tensors(part, "receive", scratch, "scratch tensors")


def served(part: Part, given: Any, received: Model) -> tuple[Model, bool]:
    """A client's own model, and whether taps act in it."""
    model, taps = two(part, "personalise", given, 'a model ({"params": …, "buffers": …})', "whether taps act in it")
    check_form(part.name, "personalise", model, dict(received), 'a whole model ({"params": …, "buffers": …})', types=True)
    return model, bool(taps)


def released(part: Part, given: Any, uploads: dict[str, Tree], model: Model) -> tuple[dict[str, Tree], Model]:
    """What leaves a client: as much as was about to, with other values."""
    sent, moved = two(part, "release", given, "the uploads", "the model, changed or not")
    check_form(part.name, "release", sent, uploads, "the uploads of all parts that it was given", types=True)
    check_form(part.name, "release", moved, dict(model), 'the whole model that it was given ({"params": …, "buffers": …})', types=True)
    return sent, moved


def accounted(part: Part, given: Any, so_far: dict[str, Any]) -> tuple[dict[str, Any], Tree]:
    """An entry of a round's record, joined to those of other parts, and server state."""
    said, server = two(part, "account", given, "an entry of the round's record ({} for none)", "its server state (s.server)")
    if not isinstance(said, dict):
        raise refuse(part.name, "account", _ENTRY, said)
    _check_entry(part, said)
    for key in said.keys() & so_far.keys():
        raise ConfigError(f"The hook 'account' of part {part.name!r} records {key!r}, which another part of the stack records already. "
                          "Give it another name.")
    return {**so_far, **said}, tensors(part, "account", server, "server tensors")


_ENTRY = "an entry of the round's record, as a dictionary of numbers, words and lists of them"


def _check_entry(part: Part, entry: Any, path: str = "") -> None:
    """Refuse what a record, which is JSON, cannot hold."""
    if isinstance(entry, (dict, list, tuple)):
        for key, value in entry.items() if isinstance(entry, dict) else enumerate(entry):
            if isinstance(entry, dict) and not isinstance(key, str):
                raise refuse(part.name, "account", f"{_ENTRY}, with words for names", key, f" for the name {key!r}")
            _check_entry(part, value, f"{path}/{key}" if path else f"{key}")
    elif entry is not None and not isinstance(entry, (bool, int, float, str)):
        raise refuse(part.name, "account", f"{_ENTRY}, and {path!r} must be one of these (of a tensor, say, its .item())", entry)
    elif isinstance(entry, float) and not math.isfinite(entry):
        raise ConfigError(f"The hook 'account' of part {part.name!r} must return {_ENTRY}, and {path!r} is {entry}, which a record cannot "
                          "hold. Return None where there is no number.")


def planned(part: Part, given: Any, steps: int) -> Tree:
    """Draws for every step."""
    for path, t in tree.paths(tensors(part, "plan", given, "draws")):
        if t.dim() < 1 or len(t) != steps:
            raise refuse(part.name, "plan", f"a row of draws for each of the {steps} steps in {path!r}", t)
    return dict(given)


def gradient(part: Part, given: Any, params: Flat, asked: bool) -> tuple[Flat, Tree | None]:
    """A gradient for these parameters, and scratch where it came with any."""
    g, scratch = two(part, "gradient", given, "the gradient", "its scratch") if isinstance(given, tuple) else (given, None)
    check_form(part.name, "gradient", g, params, "a gradient for every parameter that the phase trains")
    if not asked:
        raise ConfigError(f"The hook 'gradient' of part {part.name!r} never called grad_at, which makes the pass over the batch that the "
                          "step's loss, statistics and other parts come from. Call grad_at(v.params) once, at least.")
    return g, scratch


def batch(part: Part, given: Any) -> Batch:
    if not isinstance(given, Batch):
        raise refuse(part.name, "batch", "a batch, such as v.batch._replace(x=…)", given)
    for tensor in (given.x, given.target):
        if not torch.is_tensor(tensor):
            raise refuse(part.name, "batch", "a batch with tensors for x and target", tensor, " in it")
    if len(given.x) != len(given.target):
        raise ConfigError(f"The hook 'batch' of part {part.name!r} must return as many samples as targets. Got {len(given.x)} samples (x) "
                          f"and {len(given.target)} targets instead.")
    return given


def beside(part: Part, given: Any) -> Tensor | None:
    if given is not None and not torch.is_tensor(given):
        raise refuse(part.name, "beside", "samples as a tensor, or None", given)
    return given


def tapped(part: Part, given: Any) -> tuple[Tensor, Any]:
    """The value at a point, and a note or None."""
    value, note = two(part, "tap", given, "the value at the point", "a note") if isinstance(given, tuple) else (given, None)
    if not torch.is_tensor(value):
        raise refuse(part.name, "tap", "the value at the point as a tensor, or that and a note", value)
    return value, note


def target(part: Part, given: Any, samples: int) -> Tensor:
    """What the loss compares with."""
    if not torch.is_tensor(given) or given.dim() < 1 or len(given) != samples:
        raise refuse(part.name, "relabel", f"the targets of the batch's {samples} samples as a tensor", given)
    return given


def term(part: Part, hook: str, given: Any, a_float: bool = True) -> Any:
    """A number, such as a term of the loss. Anything else would fail later, far from the part that gave it."""
    if (a_float and isinstance(given, (int, float))) or (isinstance(given, Tensor) and given.ndim == 0):
        return given
    raise refuse(part.name, hook, "one number: a tensor without dimensions" + (", or a float" if a_float else ""), given)


def module(part: Part, given: Any) -> nn.Module:
    if not isinstance(given, nn.Module):
        raise refuse(part.name, "build", "the module, changed or not", given)
    return given


_TAKEN = ("plain", "apart")      # names of plain training, and of the optimisers of parts that make steps of their own


def phases(part: Part, given: Any, keys: Flat, before: list[Phase]) -> list[Phase]:
    """Phases with names of their own, that train parameters which are there; those of a second model are its part's own affair."""
    if not isinstance(given, list) or not all(isinstance(phase, Phase) for phase in given):
        raise refuse(part.name, "phases", "a list of phases", given)
    if all(phase.epochs == 0 for phase in given):
        raise ConfigError(f"The hook 'phases' of part {part.name!r} leaves no phase{' with an epoch' if given else ''}, so that nothing "
                          "would train.")
    declares = type(part).init_personal is not Part.init_personal
    models = {"model", *(phase.model for phase in before), *([part.name] if declares else [])}
    names = Counter(phase.name for phase in given)
    for phase in given:
        if wrong := _wrong_with(phase, keys, models, names[phase.name]):
            raise ConfigError(f"The hook 'phases' of part {part.name!r} {wrong}")
    return given


def _wrong_with(phase: Phase, keys: Flat, models: Set[str], times: int) -> str | None:
    """What it does that a phase cannot, or None."""
    where = f"in the phase {phase.name!r}"
    if times > 1 or phase.name in _TAKEN:                # what trains, hooks, draws and optimisers go by the names of phases
        why = "is there more than once" if times > 1 else "stands for something else already"
        return f"returns a phase {phase.name!r}, a name that {why}. Give every phase a name of its own."
    if not isinstance(phase.keys, (tuple, list)):        # norms are summed in the order of keys, and a set's differs between processes
        return f"names the keys {where} as a {type(phase.keys).__name__}. They must be a tuple, which has an order."
    if unknown := [k for k in phase.keys if phase.model == "model" and k not in keys]:
        return f"names {unknown[0]!r} {where}, which is no parameter of the model. Its parameters: {', '.join(keys)}."
    if twice := [k for k, n in Counter(phase.keys).items() if n > 1]:
        return f"names {twice[0]!r} {where} more than once."
    if phase.model not in models:
        return (f"names the model {phase.model!r} {where}, which is none: 'model' is the one that travels, and a second one has the name "
                "of its part, whose 'init_personal' declares it.")
    if phase.epochs is not None and (type(phase.epochs) is not int or phase.epochs < 0):
        return f"names {phase.epochs!r} epochs {where}: it must be a whole number from 0 up, or None for the run's own amount."
    return None
