"""What happens in a round, written once. Knows no part by name.

The federation calls this so that nothing of a round that breaks stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .. import tree
from ..tree import Flat, Tree
from . import returned
from .aggregate import new_model
from .client import LocalWork, Outcome
from .diagnose import refuse_nonfinite
from .engine import RoundReport

if TYPE_CHECKING:
    from .federation import Federation


def prepare(fed: Federation, silent: frozenset[int]) -> RoundReport:
    """Before round one: what parts must know of all clients. The silent ones were asked already and did not answer."""
    every = [i for i in range(fed.size) if fed.samples.size_of(i)]
    report = RoundReport(0, every, exchanged=False, lost=[i for i in every if i in silent])
    ids = [i for i in every if i not in silent]
    for i in ids:
        report.bytes_down += _download_bytes(fed, i)
        fed.clients.put(i, replace(fed.client(i), seen=fed.clock))
    if ids:
        fed.ask_clients("prepare", ids, report)
    fed.prepared = True
    return _accounted(fed, report)


def play(fed: Federation, cohort: list[int], silent: frozenset[int] = frozenset()) -> RoundReport:
    """Survey, deliver, train, settle, aggregate. Clients train in the order given; everything is summed in that of their numbers."""
    report = RoundReport(fed.round_number, sorted(cohort), exchanged=fed.method.exchanges(fed.round_number))
    idle = {i for i in cohort if not fed.trains(i)}
    lost = {i for i in cohort if i not in idle and (i in silent or (fed.policy.dropout and fed.fails(i)))}
    active = [i for i in cohort if i not in idle and i not in lost]
    ids = sorted(active)
    report.idle, report.lost = sorted(idle), sorted(lost)
    if ids:
        fed.ask_clients("survey", ids, report, silent)
    delivering = [(p, fed.serve(p, "deliver", ids)) for p in fed.method.using("deliver")] if ids else []
    down = {i: {p.name: returned.tensors(p, "deliver", p.deliver(view, i)) for p, view in delivering} for i in active}
    report.bytes_down = sum(_download_bytes(fed, i) for i in (*active, *report.lost)) + tree.count_bytes(down)
    heard = fed.clock
    done = _train(fed, [LocalWork(fed, i, fed.client(i), ids, down[i]) for i in active]) if active else {}
    report.lost = sorted([*report.lost, *(i for i in ids if i not in done)])
    if done:
        refuse_nonfinite(fed, sorted(done), done, down)
        _put_together(fed, report, {i: done[i] for i in sorted(done)})
    else:
        report.exchanged = False
    fed.took_part = sorted(done)
    for i, outcome in done.items():
        fed.clients.put(i, replace(outcome.state, seen=heard))
    for i in report.lost:                                   # it had received the model before it failed
        fed.clients.put(i, replace(fed.client(i), seen=heard))
    return _accounted(fed, report)


def _train(fed: Federation, works: Sequence[LocalWork]) -> dict[int, Outcome]:
    """What the clients that answered have trained."""
    done: dict[int, Outcome] = {}
    with torch.enable_grad():
        for number, (work, outcome) in enumerate(zip(works, fed.engine.run(works)), start=1):
            if outcome is not None:
                done[work.number] = outcome
            fed.on_client(number, len(works))
    return done


def _put_together(fed: Federation, report: RoundReport, done: dict[int, Outcome]) -> None:
    """Uploads are settled part by part, then the models are averaged; `done` stands in the order of the clients' numbers."""
    ids = list(done)
    if not fed.secret:                                      # sites whose uploads are guarded tell no losses
        report.losses = dict(zip(ids, torch.stack([o.losses.mean() for o in done.values()]).tolist()))
    models = [{k: w for k, w in o.model["params"].items() if k in fed.spec.shared} for o in done.values()]
    reduced: dict[str, Tree] = {}
    for part in fed.method.parts:
        uploads = [o.uploads.get(part.name, {}) for o in done.values()]
        if any(uploads) or part.reads_models:
            report.bytes_up += sum(tree.count_bytes(u) for u in uploads)
            reduced[part.name] = fed.settle(part, "finish", ids, uploads, models if part.reads_models else [])
    if any(any(o.uploads.values()) for o in done.values()) or (fed.models_travel and fed.moving):
        report.releases["finish"] = ids
    if report.exchanged:
        report.bytes_up += len(ids) * tree.count_bytes(tree.pick(_flat(fed), fed.moving))
        fed.model = new_model(fed, ids, models, [o.model["buffers"] for o in done.values()], reduced)
        fed.last_exchange = fed.round_number


def _accounted(fed: Federation, report: RoundReport) -> RoundReport:
    """The report with what parts say that all uploads so far may have told."""
    idle = set(report.idle)
    asked = sorted({*(i for i in report.cohort if i not in idle), *fed.asked_before})     # also those whose answers were not used
    by_release = {name: report.asked.get(name, asked) for name in report.releases}
    for part in fed.method.using("account"):
        said = part.account(fed.serve(part, "account", asked, asked=by_release), report.releases)
        report.privacy, server = returned.accounted(part, said, report.privacy)
        fed.keep("server", part, "account", server)
    return report


def _flat(fed: Federation) -> Flat:
    return {**fed.model["params"], **fed.model["buffers"]}


def _download_bytes(fed: Federation, number: int) -> int:
    """Bytes to bring a client up to date: what moves, what changed since it last listened, on first contact the rest."""
    state, flat = fed.client(number), _flat(fed)
    keys = fed.moving if state.seen >= 0 else [k for k in flat if k in fed.spec.shared]
    if fed.goes_on_alone(state):
        keys = []
    fresh = [t for path, t in tree.paths(fed.shared) if fed.versions[path] > state.seen]
    return tree.count_bytes(tree.pick(flat, keys)) + sum(t.numel() * t.element_size() for t in fresh)
