"""A client that comes after training: its personal model by the method's own rule (DBE, App. D.4), without touching the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import rng, tree
from ..core.client import ClientState, LocalWork
from ..core.diagnose import refuse_nonfinite
from ..core.federation import Federation
from ..core.part import Model
from ..core.population import Population, RowTable
from ..core.task import task_named
from ..data.load import cut
from ..engines import Sequential
from ..engines.workers import one_thread
from ..errors import ConfigError, DataError
from ..metrics.accuracy import per_sample
from ..metrics.gather import Answers
from ..metrics.measures.scores import Answered, class_names
from ..metrics.registry import make_measures
from .export import write_model
from .reload import OpenedRun
from .run import build_model
from .use import Served, fed_name, open_finished, samples_for

NEW = "new client"


@dataclass(frozen=True)
class Onboarded:
    run: OpenedRun
    model: Served
    report: dict[str, Any]

    def write(self, to: str | Path) -> dict[str, Any]:
        """The personal model as `consilience export` writes one."""
        return write_model(self.run, self.model, Path(to), which=self.report["which"])


def onboard(path: str | Path, source: str, *, epochs: int = 10, lr: float | None = None, train: float = 0.75, which: str = "final",
            data_dir: str | None = None) -> Onboarded:
    """Train a new client on part of its samples from what the run gives it, and score it on the rest before and after."""
    run = open_finished(path, which, data_dir)
    if epochs < 1:
        raise ConfigError(f"--epochs must be at least 1. Got {epochs} instead.")
    if not 0 < train <= 1:
        raise ConfigError(f"--train must be above 0 and at most 1. Got {train} instead.")
    dataset, labels = samples_for(run, source, data_dir)
    if bool((labels < 0).any()):
        strange = sorted({dataset.class_names[i] if dataset.class_names else str(i) for i in dataset.y[labels < 0].flatten().tolist()})
        raise DataError(f"The samples of {source!r} have classes that the run does not know: {', '.join(strange[:5])}.")
    seed = run.config.policy.seed
    order = rng.permutation(rng.key(seed, "onboard", "parts"), len(labels))
    mine, _, held = cut(order, train, 0.0)
    _refuse_too_few(run.federation, len(mine))
    with one_thread():                               # as in a run, so that sums are added in the same order on any number of cores
        fed, number = _federation(run, dataset.x, labels, mine, epochs, lr)
        state, start, said = _beginning(run, fed, number)
        before = Served(fed, number, state, start, fed.personal, NEW)
        after, rule = _train(fed, number, state, start, epochs)
        scores = {moment: _score(run, model, held) for moment, model in (("before", before), ("after", after))}
    report = {"method": fed_name(run), "which": which, "round": run.federation.round_number, "source": source, "epochs": epochs,
              "lr": fed.policy.lr, "samples": {"train": len(mine), "held_out": len(held)}, "start": said, "rule": rule, **scores,
              "criterion": run.config.run.criterion, "measured": {"folder": str(path)}}
    return Onboarded(run, after, report)


def _refuse_too_few(fed: Federation, samples: int) -> None:
    """A federation of this client alone would speak of the run's batch and split, which are settled."""
    samples = fed.samples.rows.left(samples)
    if not fed.samples.steps_for(samples, fed.phases):
        few, _ = fed.samples.too_few
        raise DataError(f"The new client has {samples} sample{'s' if samples != 1 else ''} to train on, fewer than {few}: it can make no "
                        "step. Give it more samples, or a larger --train.")


def _federation(run: OpenedRun, x: Tensor, y: Tensor, rows: Tensor, epochs: int, lr: float | None) -> tuple[Federation, int]:
    """The run's federation with one client more, the only one with samples. State that has a place per client grows by one."""
    old, data = run.federation, run.data
    policy = replace(old.policy, epochs=epochs, steps=None, schedule="constant",
                     lr=lr if lr is not None else old.policy.lr_at(max(old.round_number, 1)))
    starts = torch.zeros(data.population + 2, dtype=torch.int64)
    starts[-1] = len(rows)
    population = Population(x, y, RowTable(rows, starts), data.classes, data.transform, (*data.table.names, NEW), old.population.proxy,
                            task_named(data.task))
    built = build_model(run.config, data)
    fed = Federation(built.module, built.layout, run.config.stack().method(), population, policy, Sequential, old.device)
    fed.round_number, fed.last_exchange, fed.clock, fed.prepared = old.round_number + 1, old.round_number + 1, old.clock, True
    for home in ("model", "shared", "server"):
        setattr(fed, home, tree.map(_grown, getattr(fed, home), getattr(old, home)))
    fed.phases = [replace(p, epochs=epochs) for p in fed.phases]
    return fed, 0 if fed.pooled else len(data.clients)


def _grown(new: Tensor, old: Tensor) -> Tensor:
    """The old values, where a place per client was added with the new one's initial values in it."""
    if new.shape == old.shape:
        return old.clone()
    out = new.clone()
    out[tuple(slice(0, n) for n in old.shape)] = old
    return out


def _beginning(run: OpenedRun, fed: Federation, number: int) -> tuple[ClientState, Model, str]:
    """What the new client starts with: the global model, and fresh values for what never travels."""
    state, old = fed.client(number), run.federation
    local = dict(state.tensors["local"])
    norm = [k for k in local if k in fed.spec.norm and fed.spec.trained]
    if norm:                                         # someone new has no statistics: those of the others, averaged
        sums, veterans = {k: torch.zeros_like(local[k], dtype=torch.float64) for k in norm}, 0
        for _, veteran in old.clients.visited():     # one at a time, for they may be many
            sums, veterans = {k: total + veteran.tensors["local"][k] for k, total in sums.items()}, veterans + 1
        for k, total in sums.items() if veterans else ():
            mean = total / veterans
            local[k] = (mean if local[k].is_floating_point() else mean.round()).to(local[k].dtype)
    personal = dict(state.tensors["personal"])
    for phase in fed.phases:
        if phase.model in personal:                  # a second model of its own begins where the global one stands
            personal[phase.model] = {**personal[phase.model], "model": tree.clone(fed.model)}
    whole = lambda t: isinstance(t, dict) and t.keys() == fed.model.keys()          # a model that a part keeps: so does APFL's
    kept = {name: {k: tree.clone(fed.model) if whole(t) else t for k, t in held.items()} for name, held in state.tensors["kept"].items()}
    state = replace(state, tensors={**state.tensors, "local": local, "personal": personal, "kept": kept})
    said = ["the initial model, since there is no global one" if not fed.spec.trained else "the global model"]
    if norm:
        said.append("normalisation layers averaged over the run's clients")
    if any(k not in norm for k in local) and fed.spec.trained:
        said.append("initial values for the part that never leaves a client")
    if tree.leaves(personal) and not any(p.model in personal for p in fed.phases):
        said.append(f"initial personal tensors ({', '.join(k for k, v in personal.items() if tree.leaves(v))})")
    return state, fed.received(state), "; ".join(said)


class _Visit(LocalWork):
    """A round's training whose uploads nobody reads; parts may ask for paths of parameters that did not move."""

    def path(self) -> dict[str, float]:
        return {**dict.fromkeys(self.fed.spec.trained, 1.0), **super().path()}


def _train(fed: Federation, number: int, state: ClientState, start: Model, epochs: int) -> tuple[Served, str]:
    """By the method's own local training, with its stored shared state; nothing is aggregated."""
    personalise = fed.method.using("personalise")
    held = {"personal": state.tensors["personal"], **{p.name: state.tensors["kept"].get(p.name, {}) for p in personalise}}
    if personalise and not tree.leaves(held) and not state.tensors["local"]:
        model, _ = fed.train_plainly(number, state, start, epochs)
        return Served(fed, number, state, model, True, NEW), f"the whole model was fine-tuned, as {personalise[0].name} does before use"
    heads = any("local head" in p.traits for p in fed.method.parts) and bool(fed.spec.trained)
    if heads:
        fed.phases = [q for q in (replace(p, keys=tuple(k for k in p.keys if k not in fed.spec.shared)) for p in fed.phases) if q.keys]
        fed.program.trains.update({p.name: frozenset(p.keys) for p in fed.phases})
        fed.program.travelling.update({p.name: () for p in fed.phases})
    fed.clients.put(number, state)
    ids, down = [number], fed.downloads(number)
    with torch.enable_grad():
        outcome = next(iter(fed.engine.run([_Visit(fed, number, state, ids, down)])))
    refuse_nonfinite(fed, ids, {number: outcome}, {number: down})
    rule = "only what stays on a client was trained; the shared part is as received" if heads else \
        "local training as in a round" + (", with the shared state of the run" if tree.leaves(fed.shared) else "")
    if any(tree.leaves(d) for d in down.values()):
        rule += ", from a mixture of the clients' models that the server sent"
    model, taps = fed.served(number, outcome.state, outcome.model)
    return Served(fed, number, outcome.state, model, taps and fed.personal, NEW), rule


@torch.no_grad()
def _score(run: OpenedRun, model: Served, rows: Tensor) -> dict[str, float | None] | None:
    """Means over the rows held out, and the run's criterion of all of them; None when there are none."""
    if not len(rows):
        return None
    fed = model.federation
    answers = [(model.logits(x), y) for x, y in fed.samples.batches(rows)]
    sums: dict[str, float] = {}
    for logits, y in answers:
        for measure, values in per_sample(fed.population.task, logits, y).items():
            sums[measure] = sums.get(measure, 0.0) + float(values.double().sum())
    (judge,) = make_measures([run.config.run.criterion])
    judged: dict[str, float | None] = {}
    if isinstance(judge, Answered):
        logits, y = (torch.cat(of).cpu() for of in zip(*answers))
        value, _ = judge.scorer(class_names(run.data))
        judged["criterion"] = value(Answers(logits, logits, y, torch.zeros_like(y)))
    return {**{measure: total / len(rows) for measure, total in sums.items()}, **judged}
