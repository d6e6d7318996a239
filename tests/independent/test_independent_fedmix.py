"""FedMix and NaiveMix in plain loops (METHODS 7.8): a pool of averages of clients' samples, each sample's own slope along an average."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import CLASSES, COHORTS, average, batches, federation, net, recorded, same_model, same_numbers, samples, sgd, shares
from torch import Tensor

from consilience import rng
from consilience.core.federation import Federation

LAM, POOL, GROUP = 0.2, 9, 3
ROWS = {"FedMix": "", "one for each row": "partner=row", "released slope": "taylor=released", "with BatchNorm": "partner=row",
        "NaiveMix": "form=naive", "NaiveMix by rows": "form=naive, partner=row, refresh=round", "a pool a round": "refresh=round"}


def pool_of(fed: Federation, clients: list[int], stage: str, t: int) -> dict[str, Tensor]:
    """Every row's client is drawn with a key that all share, its samples with the client's own; rows stand in the order of clients."""
    common = rng.key(fed.policy.seed, "mix", stage, t)
    source = rng.integers(common, len(clients), (POOL,)).tolist()
    xs, ys = [], []
    for place, i in enumerate(clients):
        x, y = samples(fed, i)
        for some in rng.integers(rng.key(common, i), len(x), (source.count(place), GROUP)):
            xs.append(sum(x[int(n)] for n in some) / GROUP)
            ys.append(sum(F.one_hot(y[int(n)], CLASSES) for n in some) / GROUP)
    return {"x": torch.stack(xs), "y": torch.stack(ys).to(xs[0].dtype)}


@pytest.mark.parametrize("row", ROWS)
def test_fedmix(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = row in ("with BatchNorm", "NaiveMix")
    fed = federation(f"fedmix(lam={LAM}, pool={POOL}, group={GROUP}{', ' if ROWS[row] else ''}{ROWS[row]})", norm)
    plans = recorded(monkeypatch, Federation, "plans")
    server, pool = net(norm), {}
    for t, cohort in enumerate(COHORTS, start=1):
        plans.clear()
        fed.round(cohort)
        if "refresh=round" in ROWS[row]:
            pool = pool_of(fed, cohort, "survey", t)
        elif t == 1:
            pool = pool_of(fed, [0, 1, 2, 3], "prepare", 0)
        same_numbers(fed.shared["mix"], pool)
        trained = {}
        for i, plan in zip(cohort, plans, strict=True):
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for (x, y), drawn in zip(batches(fed, i, t), plan["mix"]["row"], strict=True):
                rows = drawn[: len(x)] if "partner=row" in ROWS[row] else drawn.expand(len(x))
                mean, soft = pool["x"][rows], pool["y"][rows]
                if "naive" in ROWS[row]:
                    target = (1 - LAM) * F.one_hot(y, CLASSES) + LAM * soft
                    loss = -(target * F.log_softmax(local((1 - LAM) * x + LAM * mean), 1)).sum(1).mean()
                else:
                    inputs = ((1 - LAM) * x).requires_grad_()
                    logits = local(inputs)
                    losses = F.cross_entropy(logits, y, reduction="none")
                    if norm:                                                         # samples of a batch see each other
                        (g,) = torch.autograd.grad((1 - LAM) * losses.sum(), inputs, create_graph=True)
                        slopes = (g * mean).flatten(1).sum(1)
                    else:                                                            # one by one
                        g = [torch.autograd.grad((1 - LAM) * one, inputs, create_graph=True)[0][b] for b, one in enumerate(losses)]
                        slopes = torch.stack([(a * b).sum() for a, b in zip(g, mean)])
                    slope = slopes.mean() / (len(x) if "released" in ROWS[row] else 1)
                    other = -(soft * F.log_softmax(logits, 1)).sum(1).mean()
                    loss = (1 - LAM) * losses.mean() + LAM * other + LAM * slope
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        same_model(fed.model, server)
