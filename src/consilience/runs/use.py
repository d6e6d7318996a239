"""Use what a run trained: its global model or a client's, as it stood at the end or at the best validation score; predictions."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import tree
from ..core.client import ClientState
from ..core.federation import Federation
from ..core.part import Model
from ..data import sources
from ..data.dataset import Dataset, in_columns
from ..data.sources.table import Table
from ..data.text import UNKNOWN, TextDataset, training_vocabulary
from ..errors import ConfigError, ConsilienceError, DataError, some, unknown
from ..metrics.criterion import validation_score
from .files import read_tensors
from .folder import safe_name
from .reload import OpenedRun, open_run
from .states import MOST_FILES, own_tensors, return_to_best, with_own

WHICH = ("final", "best")


@dataclass(frozen=True)
class Served:
    """A model ready to be asked: the global one, or the one a client is served by."""

    federation: Federation
    number: int                       # whose personal state the taps read
    state: ClientState
    model: Model
    taps: bool                        # whether they act
    client: str | None = None         # None: the global model

    def logits(self, x: Tensor) -> Tensor:
        """Outputs for inputs that are transformed already."""
        return self.federation.look(self.number, self.state, self.model, x, False, self.taps).logits


class ServedModule(nn.Module):
    """A served model as a module: transformed inputs in, logits out, the client's personal tensors included."""

    def __init__(self, served: Served, transform: Any = None) -> None:
        super().__init__()
        self.served, self._transform = served, transform

    def forward(self, x: Tensor) -> Tensor:
        return self.served.logits(x)

    def prepare(self, x: Tensor) -> Tensor:
        """Raw samples transformed as in evaluation."""
        return self._transform(x, torch.zeros(len(x), dtype=torch.int64), None)[0]


def open_finished(path: str | Path, which: str = "final", data_dir: str | None = None) -> OpenedRun:
    """A finished run, its federation as it stood at the end or at the best validation score."""
    if which not in WHICH:
        raise unknown("choice for --which", which, WHICH)
    run = open_run(path, data_dir)
    last = max((r["round"] for r in run.records), default=0)
    if not run.done or run.federation.round_number < last:
        why = "is not finished" if not run.done else "has lost its newest checkpoint"
        raise ConfigError(f"The run in {str(path)!r} {why}. Resume it with: consilience resume {shlex.quote(str(path))}")
    if which == "best":
        _return_to_best(run)
    return run


def _return_to_best(run: OpenedRun) -> None:
    """Put the models of best/ into the federation."""
    fed, folder = run.federation, run.path / "best"
    scored = [r for r in run.records if validation_score(r) is not None]
    if not folder.is_dir() or not scored:
        raise ConfigError(f"The run in {str(run.path)!r} kept no best model, because it had no validation samples. Use --which final, "
                          "or run it with -o validation=0.1.")
    flat = _read_like(folder / "global.safetensors", {k: t for half in fed.model.values() for k, t in half.items()})
    fed.model = {half: {k: flat[k].to(fed.device) for k in keys} for half, keys in fed.model.items()}
    fed.round_number = max(scored, key=lambda r: (validation_score(r), -r["round"]))["round"]
    fed.last_exchange = fed.round_number
    if fed.personal and not fed.pooled and fed.size > MOST_FILES:
        return_to_best(fed, run.path)
    elif fed.personal and not fed.pooled:
        for number, client in enumerate(run.data.clients):
            state = fed.client(number)
            own = _read_like(folder / "clients" / f"{safe_name(client.name)}.safetensors", own_tensors(fed, state))
            fed.clients.put(number, with_own(fed, state, own))


def _read_like(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file of tensors with the names, shapes and types of others, none of them infinite. What parts keep may be in one of both alone:
    a client has it once it took part."""
    read = read_tensors(path)
    lasting = {name for name in like.keys() ^ read.keys() if not name.startswith("kept/")}
    wrong = sorted(lasting | {name for name, t in read.items() if not bool(torch.isfinite(t).all())
                              or (name in like and (t.shape, t.dtype) != (like[name].shape, like[name].dtype))})
    if wrong:
        raise DataError(f"The file {str(path)!r} is damaged, or of another run: {wrong[0]!r} is missing, or not as the run has it. Use "
                        "--which final, or run it anew with --again.")
    return read


def served(run: OpenedRun, client: str | None = None) -> Served:
    """The global model, or the model that serves a client: its own where the method gives it one."""
    fed = run.federation
    names = run.data.table.names
    if client is None:
        if fed.no_global_model:
            raise ConfigError(f"{fed_name(run)} leaves no global model to use: {fed.no_global_model}. Name a client with --client: "
                              f"{some(names)}.")
        return Served(fed, 0, fed.client(0), fed.model, False)
    if client not in names:
        raise unknown("client", client, names)
    number = 0 if fed.pooled else names.index(client)
    if not fed.personal:
        return Served(fed, number, fed.client(number), fed.model, False, client)
    model, taps = fed.personal_model(number)
    return Served(fed, number, fed.client(number), model, taps, client)


def fed_name(run: OpenedRun) -> str:
    return run.config.stack().canonical


# ---- samples from outside ------------------------------------------------------------------------------------------

def samples_for(run: OpenedRun, source: str, data_dir: str | None = None, labelled: bool = True) -> tuple[Dataset, Tensor]:
    """Samples of any source in the form the run's model takes, and labels in the run's numbering (−1: none of its classes).

    Where they need not be `labelled`, samples may come without.
    """
    own = sources.make(source)
    wanted = _read_columns(run) if own.named_features else ()
    dataset = in_columns(own.read_for(wanted, data_dir, labelled), wanted, f"Samples of {source!r}", "the run was trained on")
    if dataset.task != run.data.task:
        raise DataError(f"The samples of {source!r} are for {dataset.task}, the run was trained for {run.data.task}.")
    if isinstance(dataset, TextDataset):
        dataset = replace(dataset, x=_in_vocabulary(run, dataset))
    want, got = run.data.x, dataset.x
    if got.shape[1:] != want.shape[1:] or got.dtype != want.dtype:
        raise DataError(f"Samples of {source!r} have the shape {tuple(got.shape[1:])} and the type {_kind(got)}; the run was trained on "
                        f"{tuple(want.shape[1:])} and {_kind(want)}.")
    return dataset, _labels(run, dataset)


def _read_columns(run: OpenedRun) -> tuple[str, ...]:
    return sources.make(run.config.run.data).read(run.config.run.data_dir).feature_names


def column_names(run: OpenedRun) -> tuple[str, ...]:
    """What the numbers of a sample mean, where the run was trained on a table."""
    try:
        return _read_columns(run) if isinstance(sources.make(run.config.run.data), Table) else ()
    except ConsilienceError:                # samples that were handed over in memory have no source
        return ()


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _labels(run: OpenedRun, dataset: Dataset) -> Tensor:
    """By name where both sides have names, else by number."""
    ours = {name: i for i, name in enumerate(run.about.get("class_names") or [])}
    if not ours or not dataset.class_names or dataset.y.dim() > 1:
        return torch.where(dataset.y < run.data.classes, dataset.y, -1)
    return torch.tensor([ours.get(name, -1) for name in dataset.class_names])[dataset.y]


def _in_vocabulary(run: OpenedRun, dataset: TextDataset) -> Tensor:
    """Word numbers of the run's vocabulary; words it never saw are unknown."""
    trained = sources.make(run.config.run.data).read(run.config.run.data_dir)
    if not isinstance(trained, TextDataset):
        raise DataError(f"The samples of {dataset.name!r} are text, but the run was not trained on text.")
    order = training_vocabulary(trained, run.data.table.train.rows)
    number = {trained.words[n - 1]: 2 + i for i, n in enumerate(order)}
    return torch.tensor([0, *(number.get(word, UNKNOWN) for word in dataset.words)])[dataset.x]


def batches(run: OpenedRun, x: Tensor) -> Iterator[Tensor]:
    """Inputs in batches, transformed as in evaluation."""
    size, device = run.config.policy.eval_batch, run.federation.device
    for start in range(0, len(x), size):
        part = x[start: start + size].to(device)
        yield run.data.transform(part, torch.zeros(len(part), dtype=torch.int64, device=device), None)[0]


# ---- predictions ---------------------------------------------------------------------------------------------------

def predict(path: str | Path, source: str, *, client: str | None = None, which: str = "final",
            data_dir: str | None = None) -> dict[str, Any]:
    """Class and probabilities of every sample of a source, and the accuracy where its labels are known."""
    run = open_finished(path, which, data_dir)
    if run.data.task != "classification":
        raise ConfigError(f"predict gives one class per sample; the run in {str(path)!r} was trained for {run.data.task}. "
                          "Use consilience export.")
    model = served(run, client)
    dataset, labels = samples_for(run, source, data_dir, labelled=False)
    probabilities = torch.cat([model.logits(x).softmax(1).cpu() for x in batches(run, dataset.x)])
    chosen = probabilities.argmax(1)
    known = labels >= 0
    names = run.about.get("class_names") or [str(i) for i in range(run.data.classes)]
    name = lambda i: names[i] if i >= 0 else None
    rows = [{"row": row, "label": name(label), "class": name(best), "probabilities": dict(zip(names, p))}
            for row, (label, best, p) in enumerate(zip(labels.tolist(), chosen.tolist(), probabilities.tolist()))]
    if dataset.sample_names:
        rows = [{"sample": sample, **row} for sample, row in zip(dataset.sample_names, rows)]
    accuracy = float((chosen[known] == labels[known]).double().mean()) if bool(known.any()) else None
    return {"method": fed_name(run), "client": client, "which": which, "round": run.federation.round_number, "source": source,
            "samples": len(rows), "accuracy": accuracy, "classes": names, "predictions": rows, "measured": {"folder": str(path)}}


def predictions_csv(document: dict[str, Any]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    first = [*(["sample"] if any("sample" in r for r in document["predictions"]) else []), "row", "label", "class"]
    writer.writerow([*first, *(f"p_{name}" for name in document["classes"])])
    for r in document["predictions"]:
        numbers = (f"{p:.6g}" for p in r["probabilities"].values())
        writer.writerow([*("" if r[name] is None else r[name] for name in first), *numbers])
    return out.getvalue()


def personal_tensors(model: Served) -> dict[str, Tensor]:
    """What taps add to a client's model, as DBE's shift; nothing where taps do not act."""
    return dict(tree.paths(model.state.tensors["personal"])) if model.taps else {}


def shared_tensors(fed: Federation) -> dict[str, Tensor]:
    """What taps that belong to the model read, as HarmoFL's amplitudes: without it the model is another one."""
    return dict(tree.paths({p.name: fed.shared.get(p.name, {}) for p in fed.method.parts if p.in_every_pass}))
