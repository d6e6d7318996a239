"""From a module and a method to a program: surgery, probe, what travels, what trains when."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import rng, tree
from ..errors import ConfigError
from . import returned
from .layout import Layout
from .method import Method
from .network import Network, staged
from .part import Phase, Spec
from .policy import Policy
from .population import Population
from .step import Program


class Assembled(NamedTuple):
    program: Program
    phases: list[Phase]      # of a round
    plain: Phase             # plain training: the task alone, every parameter of the model unless a part says otherwise


def _describe(module: nn.Module, points: list[str], spec: Spec, x: Tensor, twice: bool = False) -> tuple[Network, Spec]:
    network = Network(module, points, half=spec.policy.precision == "bfloat16", twice=twice)
    model = tree.clone({"params": dict(module.named_parameters()), "buffers": dict(module.named_buffers())})
    shapes, output = network.probe(model, x)
    if output[0] != spec.classes:
        raise ConfigError(f"The model has {output[0]} outputs, but the data have {spec.classes} classes.")
    return network, replace(spec, model=model, norm=network.norm_keys(), shapes=shapes, output=output)


def _travels(key: str, spec: Spec, method: Method) -> bool:
    """The run's BatchNorm policy and every part must let a key travel."""
    policy = spec.policy.batchnorm
    if policy == "params" and key in spec.norm and key in spec.model["buffers"]:
        return False
    if policy == "local" and key in spec.norm:
        return False
    return all(returned.decision(p, "share", p.share(key, spec)) for p in method.using("share"))


def assemble(module: nn.Module, layout: Layout, method: Method, policy: Policy, population: Population, device: torch.device,
             clients: int) -> Assembled:
    """Build the program of a method on a model. `clients` is the number that train (1 when data are pooled)."""
    x = population.glimpse(device)
    proxy = None
    if population.proxy is not None:
        nobodys = population.y[:1].expand(len(population.proxy), *population.y.shape[1:])      # labels, which the transform asks for
        proxy = population.transform(population.proxy, nobodys, None)[0].to(device)
        if proxy.shape[1:] != x.shape[1:]:
            raise ConfigError(f"Samples of the proxy data set have shape {tuple(proxy.shape[1:])}, "
                              f"those of the clients {tuple(x.shape[1:])}.")
    spec = Spec(layout, policy, {"params": {}, "buffers": {}}, frozenset(), {}, tuple(x.shape[1:]), population.classes, clients,
                proxy, not x.is_floating_point())
    module = copy.deepcopy(module).to(device)
    if isinstance(module, nn.Sequential):
        module = staged(module)
    if policy.layout == "channels_last":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    frozen = {k for k, p in module.named_parameters() if not p.requires_grad}      # the user froze them: they never train
    given, spec = _describe(module, [layout.features], spec, x)
    given.close()
    for k, p in module.named_parameters():                       # the network trains none by itself; in `build` they are as they were given
        p.requires_grad_(k not in frozen)
    for part in method.parts:
        if part.needs_vectors and len(spec.shapes[spec.features]) != 1:
            raise ConfigError(f"{part.name} works on one feature vector and one label per sample, but this model's head receives maps of "
                              f"shape {spec.shapes[spec.features]}. It cannot be used for segmentation.")
    for part in method.using("build"):
        with torch.random.fork_rng(devices=[]):                  # a part's initial values depend on its name alone
            torch.default_generator.manual_seed(rng.seed_torch(rng.key(policy.seed, "build", part.name)))
            module = returned.module(part, part.build(module, spec)).to(device)
    frozen |= {k for k, p in module.named_parameters() if not p.requires_grad}      # or a part did so, as with a fixed classifier
    listening = [returned.names(p, "points", p.points(layout), "names of modules") for p in method.using("points")]
    points = sorted({layout.features, *(q for own in listening for q in own)})
    network, spec = _describe(module, points, spec, x, any(p.second_order for p in method.parts))
    keys = (*spec.model["params"], *spec.model["buffers"])
    spec = replace(spec, shared=frozenset(k for k in keys if _travels(k, spec, method)))
    main = tuple(k for k in spec.model["params"] if not method.trained_apart(k) and k not in frozen)
    phases = [Phase("main", main)]
    for part in method.using("phases"):
        phases = returned.phases(part, part.phases(list(phases), spec), spec.model["params"], phases)
    trained = {k for p in phases if p.model == "model" for k in p.keys}
    spec = replace(spec, trained=tuple(k for k in main if k in trained & spec.shared))
    for part in method.using("require"):
        reason = returned.reason(part, part.require(spec))
        if reason:
            raise ConfigError(f"{part.name} {reason}")
    plainly = main
    for part in method.using("plain_keys"):
        plainly = returned.plain_keys(part, part.plain_keys(plainly, spec), spec.model["params"])
    plain = Phase("plain", plainly, model="plain", epochs=1)
    apart_in_passes = bool(method.using("beside")) and network.keeps_samples_apart(spec.model, x)
    program = Program(network, method, [*phases, plain], spec, population.task, population.transform, apart_in_passes)
    return Assembled(program, phases, plain)
