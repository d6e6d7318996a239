"""Maps of the features that the head receives, by t-SNE: before and after the clients' local training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..data import FederatedData
from ..engines.workers import one_thread
from ..errors import ConsilienceError
from ..metrics.gather import Asked, gather
from ..metrics.subject import TRAINING, Subject
from ..runs.reload import open_run
from .gather import Group

MOST_SAMPLES = 500
MOST_CLIENTS = 10            # more cannot be told apart
Tick = Callable[[str], None]


def map_features(groups: Sequence[Group], samples: int = MOST_SAMPLES, data_dir: str | None = None,
                 tick: Tick = lambda note: None) -> tuple[list[dict[str, Any]], list[str]]:
    """Two maps for the first seed of every group, and notes about runs that give none. `tick` is called four times a group."""
    out: list[dict[str, Any]] = []
    notes: list[str] = []
    for number, group in enumerate(groups):
        run = group.runs[0]
        try:
            tick(f"{group.label}: reading the run")
            opened = open_run(run.path, data_dir)
            if opened.data.task != "classification":
                raise ConsilienceError("its samples have no single class.")
            chosen = choose_samples(opened.data, samples, opened.config.policy.seed)
            subject, points = Subject(opened.federation, opened.data), {}
            tick(f"{group.label}: training its clients for a round")
            with one_thread():                       # as in a run
                values = {training: features_of(subject, chosen, training) for training in TRAINING}
            for training in TRAINING:
                tick(f"{group.label}: map {training} local training")
                points[training] = embed(values[training], rng.key(opened.config.policy.seed, "report", "map")).tolist()
        except ConsilienceError as error:
            notes.append(f"No feature maps of {group.label}: {error}")
            continue
        rows = torch.cat([r for _, r in chosen])
        owner = [i for i, (_, r) in enumerate(chosen) for _ in range(len(r))]
        out.append({"group": number, "seed": run.seed, "round": opened.federation.round_number, "points": points,
                    "client": owner, "clients": [opened.data.clients[n].name for n, _ in chosen],
                    "class": opened.data.y[rows].tolist(),
                    "classes": [str(c) for c in run.about.get("class_names") or range(opened.data.classes)]})
    return out, notes


def choose_samples(data: FederatedData, most: int, seed: int) -> list[tuple[int, Tensor]]:
    """(client, rows) of at most `most` samples, as many from each client as it can give: test samples, else validation samples, else
    training samples."""
    rows = [next((r for r in (c.test, c.val) if len(r)), c.train) for c in data.clients]
    able = [i for i, r in enumerate(rows) if len(r)]
    if len(able) > MOST_CLIENTS:
        order = rng.permutation(rng.key(seed, "report", "clients"), len(able))
        able = sorted(able[int(i)] for i in order[:MOST_CLIENTS])
    share = max(1, most // max(len(able), 1))
    draw = lambda i: rng.permutation(rng.key(seed, "report", "samples", i), len(rows[i]))[:share].sort().values
    chosen = [(i, rows[i][draw(i)]) for i in able]
    if sum(len(r) for _, r in chosen) < 10:
        raise ConsilienceError("there are fewer than ten samples to draw.")
    return chosen


def features_of(subject: Subject, chosen: Sequence[tuple[int, Tensor]], training: str) -> Tensor:
    """What the head receives on every client's samples, from the model the client is served by, before or after local training."""
    asked = (Asked(*subject.model_of(i, "personalised", training), rows, i) for i, rows in chosen)
    return gather(subject.fed, asked, "features").values


def embed(features: Tensor, key: Tensor) -> np.ndarray:
    """t-SNE into the unit square, three digits. Features that do not differ stay one point."""
    from sklearn.manifold import TSNE
    values = features.double().numpy()
    values = values - values.mean(0)
    if not np.isfinite(values).all():
        raise ConsilienceError("its features are not finite.")
    if float(np.abs(values).max()) == 0:
        return np.full((len(values), 2), 0.5)
    seed = int(key) % (1 << 31)
    flat = TSNE(2, perplexity=min(30.0, (len(values) - 1) / 3), init="pca", random_state=seed, n_jobs=1).fit_transform(
        (values / values.std()).astype(np.float32))
    low, high = flat.min(0), flat.max(0)
    return np.round(0.5 + (flat - (low + high) / 2) / max(float((high - low).max()), 1e-9), 3)
