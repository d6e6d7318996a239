"""Scores of the global model and of every client's own, client by client, as sums that add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.client import ClientState
from ..core.federation import Federation
from ..core.part import Model
from ..core.task import Task, image_dice
from .clients import client_mean, worst
from .gather import Answers, Asked

_SAID = ("logits", "labels")                                    # beside the numbers of a pass, where what models answered is wanted too


@dataclass(frozen=True)
class Scores:
    """Means over samples for each client, and how many samples each was scored on."""

    names: tuple[str, ...]
    counts: tuple[int, ...]
    values: dict[str, tuple[float, ...]]                        # measure -> one number per client
    scored: str = ""
    answers: Answers | None = None                              # of the same pass, where asked for; an owner is a place in `names`

    def pooled(self, measure: str) -> float | None:
        """Mean over all samples."""
        total = sum(self.counts)
        return sum(v * n for v, n in zip(self.values[measure], self.counts) if n) / total if total else None

    def with_samples(self, measure: str) -> dict[str, float]:
        return {name: v for name, v, n in zip(self.names, self.values[measure], self.counts) if n}

    def record(self) -> dict[str, Any]:
        """As it stands in a run's record. Accuracies are fractions."""
        each = self.with_samples("accuracy")
        if not each:
            return {"accuracy": None, "mean": None, "worst": None, "worst_client": None, "loss": None, "per_client": {},
                    "scored": self.scored}
        low = worst(each)
        assert low is not None                                  # somebody has samples
        more: dict[str, Any] = {m: self.pooled(m) for m in self.values if m not in ("accuracy", "loss")}
        if more:                                                # Dice by site
            more["by_client"] = {m: self.with_samples(m) for m in more}
        return {"accuracy": self.pooled("accuracy"), "mean": client_mean(each), "worst": low[1],
                "worst_client": low[0], "loss": self.pooled("loss"), **more, "per_client": each, "scored": self.scored}


def per_sample(task: Task, logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    """One number per sample: whether it is right and its loss; for masks the share of right pixels, and Dice."""
    if task.name == "classification":
        return {"accuracy": (logits.argmax(1) == y).float(), "loss": F.cross_entropy(logits, y, reduction="none")}
    predicted = logits.argmax(1)
    dice = image_dice(predicted, y, logits.shape[1])
    return {"accuracy": (predicted == y).float().mean((1, 2)), "loss": F.cross_entropy(logits, y, reduction="none").mean((1, 2)),
            "dice": dice.mean(1), "dice_foreground": dice[:, 1:].mean(1)}


def score_sums(fed: Federation, number: int, state: ClientState, model: Model, taps: bool, rows: Tensor,
               answers: bool = False) -> dict[str, Tensor]:
    """The sum of every measure over the rows given; with `answers` also what `answers_in` takes out."""
    values = _score_rows(fed, number, state, model, taps, rows, answers)
    said = {k: values.pop(k) for k in _SAID if k in values}
    return {measure: _sum(v.double()) for measure, v in values.items()} | said


def _sum(values: Tensor) -> Tensor:
    """Of one tensor, as a tensor of one number: on a CPU added up sample by sample, as `score_model` adds up those of several owners."""
    if values.is_cuda:                                        # where adding to one place has no fixed order
        return values.sum()[None]
    return torch.zeros(1, dtype=values.dtype).index_add_(0, torch.zeros(len(values), dtype=torch.int64), values)


def _score_rows(fed: Federation, number: int, state: ClientState, model: Model, taps: bool, rows: Tensor,
                answers: bool = False) -> dict[str, Tensor]:
    """One number per sample of every measure. Nothing here waits for the device, unless the answers are wanted on the host too."""
    batches = []
    for x, y in fed.samples.batches(rows):
        logits = fed.look(number, state, model, x, False, taps).logits
        said = dict(zip(_SAID, (logits.detach().float().cpu(), y.cpu()))) if answers else {}
        batches.append(per_sample(fed.population.task, logits, y) | said)
    fed.samples.let_go()
    return _joined(batches)


def answers_in(found: dict[str, Tensor], owner: Tensor) -> Answers | None:
    """What the models answered in a pass that was asked for it, taken out of what was found; None where nobody had rows."""
    if "logits" not in found:
        return None
    logits, labels = (found.pop(k) for k in _SAID)
    return Answers(logits, logits.flatten(1), labels, owner)


def _joined(batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {m: torch.cat([b[m] for b in batches]) for m in batches[0]} if batches else {}


def _scores(totals: dict[str, Tensor], names: Sequence[str], counts: Sequence[int], scored: str, answers: Answers | None = None) -> Scores:
    values = {m: tuple((t.cpu() / torch.tensor([max(n, 1) for n in counts])).tolist()) for m, t in totals.items()}
    nothing = (0.0,) * len(counts)
    return Scores(tuple(names), tuple(counts), values or {"accuracy": nothing, "loss": nothing}, scored, answers=answers)


PIECE = 4                     # batches that one process scores at a time


def _score_piece(fed: Federation, number: int, common: tuple[Model | None, bool], rows: Tensor) -> dict[str, Tensor]:
    """One number per sample of every measure, for the model given or the global one, and what it answered where that is wanted."""
    model, answers = common
    return _score_rows(fed, number, fed.client(number), model or fed.model, False, rows, answers)


def score_model(fed: Federation, model: Model, rows: Sequence[Tensor], names: Sequence[str], scored: str,
                answers: bool = False) -> Scores:
    """One model, without any client's personal state, on rows of several owners at once."""
    counts = [len(r) for r in rows]
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
    every = torch.cat(list(rows))
    pieces = every.split(PIECE * fed.policy.eval_batch) if len(every) else ()
    scores = _joined(list(fed.each(_score_piece, [0] * len(pieces), (None if model is fed.model else model, answers), pieces)))
    said = answers_in(scores, owner)
    # added up on the host, in the order of the samples: a GPU adds to the same place in no fixed order
    totals = {m: torch.zeros(len(rows), dtype=torch.float64).index_add_(0, owner, v.cpu().double()) for m, v in scores.items()}
    return _scores(totals, names, counts, scored, said)


def score_global(fed: Federation, rows: Sequence[Tensor], names: Sequence[str], answers: bool = False) -> Scores:
    """The global model on every client's rows."""
    return score_model(fed, fed.model, rows, names, "after aggregation, before local training", answers)


def score_each(fed: Federation, asked: Iterable[Asked], names: Sequence[str], scored: str) -> Scores:
    """A model per client on rows of its own; clients that are not asked have no samples."""
    counts = [0] * len(names)
    places, sums = [], []
    for a in asked:
        counts[a.owner] = len(a.rows)
        places.append(a.owner)
        sums.append(score_sums(fed, a.number, a.state, a.model, a.taps, a.rows))
    return _scores(_placed(places, sums, len(names)), names, counts, scored)


def _placed(places: Sequence[int], sums: Sequence[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    """Each owner's sums at its place. They come from the device together, so that it is waited for once."""
    totals: dict[str, Tensor] = {}
    for measure in {m: None for own in sums for m in own}:
        there = [(place, own[measure]) for place, own in zip(places, sums) if measure in own]
        totals[measure] = torch.zeros(count, dtype=torch.float64)
        totals[measure][[place for place, _ in there]] = torch.cat([total for _, total in there]).cpu()
    return totals


def score_personal(fed: Federation, rows: Sequence[Tensor], names: Sequence[str], numbers: Sequence[int] | None = None,
                   answers: bool = False) -> Scores:
    """Every client's own model on its own rows. Where nothing is personal that is the global model.

    `numbers` says whose the rows are; without it they are those of clients 0, 1, …
    """
    if not fed.personal:
        return score_global(fed, rows, names, answers)
    places = [i for i, own in enumerate(rows) if len(own)]
    each = list(fed.each(_score_own, [i if numbers is None else numbers[i] for i in places], answers, [rows[i] for i in places]))
    said = _joined([{k: own.pop(k) for k in _SAID} for own in each]) if answers else {}
    owner = torch.cat([torch.full((len(rows[i]),), i) for i in places]) if places else torch.zeros(0, dtype=torch.int64)
    return _scores(_placed(places, each, len(rows)), names, [len(r) for r in rows], fed.personal_scoring, answers_in(said, owner))


def _score_own(fed: Federation, number: int, answers: bool, rows: Tensor) -> dict[str, Tensor]:
    """Sums of a client's own model on its own rows, and what it answered where that is wanted."""
    return score_sums(fed, number, fed.client(number), *fed.personal_model(number), rows, answers)
