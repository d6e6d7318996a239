"""Two and more methods at once in plain loops (METHODS 10.1, 10.3, 10.6): corrections and pulls over what travels, the shift apart."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import (
    CLASSES,
    COHORTS,
    LR,
    RHO,
    SIZES,
    average,
    batches,
    federation,
    frozen,
    net,
    recorded,
    same_model,
    same_numbers,
    samples,
    sgd,
    shares,
    weights_of,
)

from consilience.core.part import Phase
from consilience.parts.mixup import Mixup


def agreed_mean(fed, epochs: int = 1) -> torch.Tensor:
    """DBE's first epoch: all clients, no extras of any method."""
    g = torch.zeros(7)
    for i in range(len(SIZES)):
        local = net()
        optimiser = sgd(local.parameters())
        for x, y in batches(fed, i, 0, [Phase(fed.plain_phase.name, (), epochs=epochs)]):
            optimiser.zero_grad()
            F.cross_entropy(local(x), y).backward()
            optimiser.step()
        g = g + SIZES[i] / sum(SIZES) * frozen(local).features(samples(fed, i)[0]).mean(0)
    return g


def test_scaffold_with_dbe() -> None:
    kappa, momentum = 3.0, 0.4
    fed = federation(f"scaffold+dbe(kappa={kappa}, momentum={momentum})")
    server, g = net(), agreed_mean(fed)
    zero = {k: torch.zeros_like(p) for k, p in server.named_parameters()}
    c, own = dict(zero), {i: dict(zero) for i in range(len(SIZES))}
    shift = {i: torch.zeros(7, requires_grad=True) for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        start, trained, change = weights_of(server), {}, dict(zero)
        for i in cohort:
            local, r, velocity, length = copy.deepcopy(server), torch.zeros(7), 0.0, 0.0
            optimiser, personal = sgd(local.parameters()), torch.optim.SGD([shift[i]], LR)
            for x, y in batches(fed, i, t):
                z = local.features(x)
                r = (1 - momentum) * r.detach() + momentum * z.mean(0)
                loss = F.cross_entropy(local.head(z + shift[i]), y) + kappa / 2 * (r - g).square().mean()
                optimiser.zero_grad()
                personal.zero_grad()
                loss.backward()
                for k, p in local.named_parameters():
                    p.grad += c[k] - own[i][k]
                optimiser.step()
                personal.step()                                                      # its own, uncorrected step
                velocity = RHO * velocity + 1
                length += LR * velocity
            new = {k: own[i][k] - c[k] + (start[k] - w) / length for k, w in weights_of(local).items()}
            change = {k: change[k] + new[k] - own[i][k] for k in c}
            own[i], trained[i] = new, local.state_dict()
        c = {k: c[k] + change[k] / len(SIZES) for k in c}
        server.load_state_dict(average(trained, shares(cohort, uniform=True)))
        fed.round(cohort)
        same_model(fed.model, server)
        same_numbers(fed.shared["scaffold"]["c"], c)
        for i in range(len(SIZES)):
            same_numbers(fed.client(i).tensors["personal"]["prbm"], {"shift": shift[i].detach()})


@pytest.mark.parametrize("host", ["fedprox(mu=0.6)", "moon(mu=0.8)", "fedprox(mu=0.6)+moon(mu=0.8)"])
def test_fedfm_on_hosts(host: str) -> None:
    weight = 4.0
    fed = federation(f"{host}+fedfm(weight={weight}, start=1)")
    server, anchors, previous = net(), torch.zeros(CLASSES, 7), {}
    for t, cohort in enumerate(COHORTS, start=1):
        look, start, trained = frozen(server), weights_of(server), {}
        x, y = (torch.cat(some) for some in zip(*(samples(fed, i) for i in cohort)))
        for c in y.unique().tolist():
            anchors[c] = look.features(x[y == c]).mean(0)                            # Σ n_kc a_kc / Σ n_kc is the mean over all samples
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                z = local.features(x)
                loss = F.cross_entropy(local.head(z), y)
                if t > 1:
                    loss = loss + weight * F.cross_entropy(F.normalize(z) @ F.normalize(anchors).T / 0.1, y)
                if "fedprox" in host:
                    loss = loss + 0.3 * sum((p - start[k]).square().sum() for k, p in local.named_parameters())
                if "moon" in host and i in previous:
                    near, far = (F.cosine_similarity(z, m.features(x)) / 0.5 for m in (look, previous[i]))
                    loss = loss + 0.8 * F.softplus(far - near).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i], previous[i] = local.state_dict(), frozen(local)
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
        same_numbers(fed.shared["anchors"], {"anchor": anchors})


@pytest.mark.parametrize("personal", ["ditto", "fedrep", "fedper", "fedbabu"])
def test_mean_regularisation_on_personal_methods(personal: str) -> None:
    """Table 6: MR acts where what is uploaded trains, and nowhere else."""
    kappa = 5.0
    fed = federation(f"{personal}+mr(kappa={kappa})")
    server, g = net(), None
    own = {i: net() for i in range(len(SIZES))}
    stays = ("head.",) if personal in ("fedrep", "fedper") else ("none",)
    for t, cohort in enumerate(COHORTS, start=1):
        start, trained = weights_of(server), {}
        fed.round(cohort)
        g = fed.shared["mr"]["mean"] if g is None else g
        for i in cohort:
            local = copy.deepcopy(server)
            local.load_state_dict({k: own[i].state_dict()[k] if k.startswith(stays) else v for k, v in server.state_dict().items()})
            for phase in fed.phases:
                v = own[i] if phase.name == "ditto" else local
                chosen = [p for k, p in v.named_parameters() if
                          {"head": k.startswith("head."), "base": not k.startswith("head."), "ditto": True,
                           "main": personal != "fedbabu" or not k.startswith("head.")}[phase.name]]
                optimiser = sgd(chosen)
                for x, y in batches(fed, i, t, [phase]):
                    z = v.features(x)
                    loss = F.cross_entropy(v.head(z), y)
                    if phase.name in ("main", "base"):
                        loss = loss + kappa / 2 * (z.mean(0) - g).square().mean()
                    if phase.name == "ditto":
                        loss = loss + 0.05 * sum((p - start[k]).square().sum() for k, p in v.named_parameters())
                    v.zero_grad()
                    loss.backward()
                    optimiser.step()
            trained[i] = local.state_dict()
            if personal != "ditto":
                own[i].load_state_dict(trained[i])
        mean = average(trained, shares(cohort))
        server.load_state_dict({k: v if k.startswith(stays) else mean[k] for k, v in server.state_dict().items()})
        same_model(fed.model, server)
        if personal == "ditto":
            for i in cohort:
                same_model(fed.personal_model(i)[0], own[i])


def test_mixup_with_fedbr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed labels in the task's loss; pseudo-data as they are."""
    fed = federation("mixup(alpha=0.8)+fedbr(projection=none, lam=0.4)", norm=False)
    plans = recorded(monkeypatch, Mixup, "plan")
    server = net(norm=False)
    for t, cohort in enumerate(COHORTS, start=1):
        plans.clear()
        fed.round(cohort)
        pseudo, look, trained = fed.shared["debias"]["pseudo"], frozen(server), {}
        for i, plan in zip(cohort, plans, strict=True):
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for (x, y), lam, order in zip(batches(fed, i, t), plan["weight"].tolist(), plan["order"], strict=True):
                n, partner = len(x), order[: len(x)]
                z, zp, zg = local.features(lam * x + (1 - lam) * x[partner]), local.features(pseudo), look.features(pseudo)
                logits = local.head(z)
                loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[partner])
                loss = loss - 0.4 * F.log_softmax(local.head(zp), 1).mean()
                near, far = F.cosine_similarity(zp[:n], zg[:n]), F.cosine_similarity(zp[:n], z)
                loss = loss + 0.5 * F.softplus(2 * (far - near)).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort, uniform=True)))
        same_model(fed.model, server, 1e-6)
