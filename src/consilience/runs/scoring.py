"""The scores of a round: the global model and the clients' own, on all clients or on as many as were asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import memory, rng
from ..core.diagnose import advice, without_effect
from ..core.federation import Federation
from ..core.part import Part
from ..core.population import RowTable
from ..data import FederatedData
from ..data.federated import ClientTable
from ..engines.rehearse import who_trains, work_of
from ..errors import NonFiniteError, some
from ..metrics.accuracy import Scores, score_global, score_model, score_personal
from ..metrics.subject import HELD_OUT, Subject

MOST_SCORED = 1000                # clients scored where no number is asked for
MANY_CLASSES = 50                 # with more, a class for every other sample is taken for a slip
MANY_CLIENTS = 10_000             # with more, their names are not compared
LARGE = 10.0                      # a feature so many times as large as 1, and as another, drowns it
FEW = 32                          # samples that a model is asked about before it is trained
ABOUT = 0.01                      # bfloat16 rounds by less
NOT_SCORED: dict[str, Any] = {"global": None, "personalised": None, "validation": None}


def scored_clients(fed: Federation, data: FederatedData, asked: int | None) -> list[int] | None:
    """Clients that are scored, drawn once by the seed: the same in every round and for every method. None: all of them."""
    most = MOST_SCORED if asked is None else asked
    if not most or most >= data.population:
        return None
    return rng.subset(rng.key(fed.policy.seed, "eval_clients"), data.population, most)


def only(data: FederatedData, chosen: Sequence[int] | None) -> FederatedData:
    """The data as if nobody but the chosen clients had samples; numbers and names stay."""
    if chosen is None:
        return data
    keep = torch.zeros(data.population, dtype=torch.bool)
    keep[torch.tensor(chosen)] = True

    def part(table: RowTable) -> RowTable:
        mine = keep[table.owner]
        return RowTable.grouped(table.rows[mine], table.owner[mine], len(table))
    return dataclasses.replace(data, clients=ClientTable(data.table.names, *(part(t) for t in data.table.parts)))


def drawn_words(chosen: Sequence[int] | None, data: FederatedData) -> str:
    """What is to be said of a score where not all clients were asked."""
    return "" if chosen is None else f", on {len(chosen)} of {data.population} clients drawn by the seed"


def score_round(fed: Federation, data: FederatedData, eval_clients: int | None = None, subject: Subject | None = None) -> dict[str, Any]:
    """Global and personalised scores on test rows, and the validation score that selection may use.

    A `subject` is told what the models answered, so that measures need not ask them again.
    """
    chosen = scored_clients(fed, data, eval_clients)
    numbers: Sequence[int] = range(data.population) if chosen is None else chosen
    names = [data.table.names[i] for i in numbers]
    reason, keep = fed.no_global_model, subject is not None

    def told(model: str, rows: str, scores: Scores, owners: Sequence[int]) -> None:
        if subject is not None and scores.answers is not None:
            whose = torch.tensor(owners, dtype=torch.int64)[scores.answers.owner]
            subject.know(model, rows, dataclasses.replace(scores.answers, owner=whose))

    def both(which: str, rows: list[Tensor]) -> tuple[Scores | None, Scores]:
        whole = _finite(score_global(fed, rows, names, keep), fed) if reason is None else None
        own = _finite(score_personal(fed, rows, names, numbers, keep), fed) if fed.personal or whole is None else whole
        if whole is not None:
            told("global", which, whole, numbers)
        if fed.personal:
            told("personalised", which, own, numbers)
        return whole, own

    def said(scores: Scores) -> dict[str, Any]:
        record = scores.record()
        return record | {"scored": record["scored"] + drawn_words(chosen, data)}

    whole, own = both("test", [data.table.test[i] for i in numbers])
    out: dict[str, Any] = {"global": said(whole) if whole else None, "personalised": said(own)}
    if whole is None:
        out["no_global_model"] = reason
    for scores in (out["global"], out["personalised"]):
        if scores is not None:
            scores["test"] = None
    if len(data.test) and out["global"] is not None:
        published = _finite(score_model(fed, fed.model, [data.test], ["test"], "after aggregation, before local training", keep), fed)
        told("global", "global", published, [-1])
        out["global"]["test"] = on_test = published.pooled("accuracy")
        if out["global"]["accuracy"] is None:                 # clients have no test rows of their own
            out["global"]["accuracy"] = on_test
            if not fed.personal:
                out["personalised"] = out["global"]
    if data.held_out and out["global"] is not None:
        apart = _finite(score_global(fed, data.held_out_rows, [c.name for c in data.held_out], keep), fed)
        told("global", HELD_OUT, apart, range(len(data.held_out)))
        out["held_out"] = apart.record()
    valid = [data.table.val[i] for i in numbers]
    if any(len(v) for v in valid):
        judged = both("validation", valid)[1].record()
        out["validation"] = {k: judged[k] for k in ("accuracy", "mean", "worst", "loss")}
    else:
        out["validation"] = None
    memory.let_go(t.rows for t in data.table.parts)
    if chosen is not None:
        out["eval_clients"] = {"scored": len(chosen), "of": data.population}
    return out


def _finite(scores: Scores, fed: Federation) -> Scores:
    """Finite numbers can still give outputs that are not. Such a model has no accuracy: the class of NaN is the first one."""
    bad = [repr(name) for name, loss in scores.with_samples("loss").items() if not math.isfinite(loss)]
    if bad:
        raise NonFiniteError(f"Training has diverged: after round {fed.round_number} the loss on the samples of {some(bad)} is not finite, "
                             f"scored {scores.scored}. {advice(fed, 'the data')}")
    return scores


def too_late(parts: Iterable[Part], rounds: float, cause: str = "rounds") -> list[str]:
    """Of parts that first act after the last of so many rounds: their run is that of the other parts under their name. The setting that is
    the `cause` of no more rounds is named."""
    return [f"{part.name} first acts in round {part.begins}, and the run has {rounds}: it changes nothing here. Raise {cause}, or let it "
            f"begin earlier (consilience explain {part.name})." for part in parts if part.begins > rounds]


def cautions_of(fed: Federation, rounds: int) -> list[str]:
    """What a user should know of a method before the first of so many rounds, whatever the samples are."""
    out = too_late(fed.method.parts, rounds)
    if fed.policy.cohort_size(fed.size) == fed.size:
        out += [f"{part.name} chooses the clients of a round, and all {fed.size} take part in every round: nobody asks it. Set "
                "participation." for part in fed.method.using("choose")]
    out += [f"{part.name} {said}" for part in fed.method.parts if (said := part.caution(fed.spec))]
    if not fed.spec.trained and any(fed.method.using(hook) for hook in ("loss", "correction")):      # v.travelling is empty there
        out += [f"{name} adds to the loss what depends on nothing that is trained, so that it changes nothing here: nothing of the model "
                "travels. Leave it out, or stack it with methods that average models."
                for name in without_effect(fed, work_of(fed, next(who_trains(fed))))]
    return out


def warnings_of(fed: Federation, data: FederatedData, rounds: int) -> list[str]:
    """What a user should know before the first of so many rounds."""
    out = cautions_of(fed, rounds)
    idle = _never_training(fed)
    if len(idle):
        shown = ", ".join(fed.name_of(i) for i in idle[:5].tolist()) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
        few, cure = fed.samples.too_few
        have = "has" if len(idle) == 1 else "have"
        out.append(f"{len(idle)} of {fed.size} clients {have} fewer samples than {few} and will never train: {shown}. {cure}")
    if not len(data.table.test.rows) and not data.held_out and (fed.no_global_model or not len(data.test)):
        out.append("There are no test samples that a model of this method could be scored on, so the run gives no accuracy. Leave "
                   "some: train and validation must add up to less than 1, or test=both (or published) takes the published test set.")
    out += _odd_sizes(data)
    out += _odd_shape(data)
    out += _alike(data, [fed.name_of(i) for i in range(fed.size)] if fed.size <= MANY_CLIENTS else [])
    out += _odd_outputs(fed, data)
    if data.task == "classification":
        seen = torch.zeros(data.classes, dtype=torch.int64)
        for rows in data.table.train.rows.split(2**20):
            seen += torch.bincount(data.y[rows], minlength=data.classes)
        out += _odd_classes(seen, data)
    if fed.size == 1 and not fed.pooled:
        out.append("There is only one client: this is ordinary training, without federation.")
    return out


def _odd_sizes(data: FederatedData) -> list[str]:
    """Columns of a table, taken as they are, of which one drowns the others."""
    if data.x.dim() != 2 or not data.x.is_floating_point() or data.description.get("transform") != "none":
        return []
    rows = data.table.train.rows
    size = data.x[rows[: 2**16]].double().square().mean(0).sqrt()
    known = size[size > 0]
    if len(known) < 2 or float(known.max()) < LARGE or float(known.max() / known.min()) < LARGE:
        return []
    called = lambda i: repr(data.feature_names[i]) if data.feature_names else f"number {i + 1}"
    largest, smallest = int(size.argmax()), int(torch.where(size > 0, size, torch.inf).argmin())
    return [f"The features differ in size: {called(largest)} is about {float(known.max()):.3g}, {called(smallest)} about "
            f"{float(known.min()):.3g}. Such columns train badly; -o transform=standardise scales each by its mean and deviation."]


def _odd_shape(data: FederatedData) -> list[str]:
    """Images of real numbers whose channels stand last: the model takes the height for channels. Bytes are turned when they are read."""
    shape = tuple(data.x.shape[1:])
    if len(shape) != 3 or not data.x.is_floating_point() or shape[2] not in (1, 3, 4) or shape[0] != shape[1] or shape[0] <= shape[2]:
        return []
    return [f"A sample of {shape[0]} × {shape[1]} × {shape[2]} is read as {shape[0]} channels of {shape[1]} × {shape[2]} pixels. Do the "
            "channels stand last? Then turn the samples first: x.transpose(0, 3, 1, 2)."]


def _alike(data: FederatedData, clients: Sequence[str]) -> list[str]:
    """Names that differ in capitals or blanks alone, of which each became one of its own."""
    out = []
    classes = [str(name) for name in data.description.get("class_names") or () if len(str(name)) > 1]       # letters are classes
    for what, names in (("classes", classes), ("clients", clients), ("features", data.feature_names)):
        first: dict[str, str] = {}
        twins = [(first[key], name) for name in names if first.setdefault(key := "".join(name.casefold().split()), name) != name]
        if twins:
            more = f" (and {len(twins) - 1} more such)" if len(twins) > 1 else ""
            out.append(f"The {what} {twins[0][0]!r} and {twins[0][1]!r} differ in capitals or blanks alone{more}. If they are the same, "
                       "write them alike in the data.")
    return out


def _odd_outputs(fed: Federation, data: FederatedData) -> list[str]:
    """A model whose outputs are probabilities already, found by asking it about a few samples, whatever its layers are called."""
    if data.task != "classification" or data.classes < 2 or fed.method.using("main_loss"):         # a part may want probabilities
        return []
    rows = data.table.train.rows[:FEW]
    if not len(rows):
        return []
    x, _ = data.transform(data.x[rows], data.y[rows], None)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        out = fed.program.network.forward(fed.model, x.to(fed.device)).logits
    if not (bool((out >= 0).all()) and bool(((out.sum(1) - 1).abs() < ABOUT).all())):
        return []
    return ["The model's outputs are never negative and add up to 1, as after a softmax. The loss, cross-entropy, takes a softmax "
            "itself, and of a softmax's outputs it learns slowly and badly. Let the model return what comes before it."]


def _odd_classes(seen: Tensor, data: FederatedData) -> list[str]:
    """Labels that say nothing, and classes that nobody learns. `seen` counts the training samples of each class."""
    present, missing = int((seen > 0).sum()), (seen == 0).nonzero().flatten().tolist()
    if present == 1:
        return ["All training samples have the same label, so there is nothing to tell apart. Look at the labels: is that the right "
                "column, and is every class there?"]
    out = []
    if present > MANY_CLASSES and 2 * present > int(seen.sum()):
        out.append(f"There are {data.classes} classes for {int(seen.sum())} training samples. Is the label a number to be predicted? Here "
                   "it is taken for a class: every value is one.")
    if missing:
        names = dict(enumerate(data.description.get("class_names") or ()))
        shown = ", ".join(str(names.get(c, c)) for c in missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        out.append(f"No client has training samples of class {shown}.")
    return out


def _never_training(fed: Federation) -> Tensor:
    """Clients that cannot make a batch; each different size is looked at once."""
    rows = fed.samples.rows
    sizes = rows.table.sizes
    short = [n for n in sizes.unique().tolist() if not fed.samples.steps_for(rows.left(n), fed.phases)]
    return torch.isin(sizes, torch.tensor(short, dtype=sizes.dtype)).nonzero().flatten()
