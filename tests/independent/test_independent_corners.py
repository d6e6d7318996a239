"""Combinations whose rules are easily got wrong, in plain loops: DBE's shift beside references and generated features, soft labels beside
anchors and margins, corrections outside SAM's two passes, variates of two phases, weights before the server's momentum."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from plain import (
    CLASSES,
    COHORTS,
    LR,
    RHO,
    SIZES,
    attached,
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
from torch import nn

from consilience.parts.mixup import Mixup


def test_moon_sees_features_without_the_shift() -> None:
    kappa, mu = 2.0, 1.5
    fed = federation(f"moon(mu={mu})+dbe(kappa={kappa})")
    server, previous, g = net(), {}, None
    shift = {i: torch.zeros(7, requires_grad=True) for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        fed.round(cohort)
        g, look, trained = fed.shared["mr"]["mean"] if g is None else g, frozen(server), {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser, own = sgd(local.parameters()), torch.optim.SGD([shift[i]], LR)
            for x, y in batches(fed, i, t):
                z = local.features(x)
                loss = F.cross_entropy(local.head(z + shift[i]), y) + kappa / 2 * (z.mean(0) - g).square().mean()
                if i in previous:
                    near, far = (F.cosine_similarity(z, m.features(x)) / 0.5 for m in (look, previous[i]))
                    loss = loss + mu * F.softplus(far - near).mean()
                optimiser.zero_grad()
                own.zero_grad()
                loss.backward()
                optimiser.step()
                own.step()
            trained[i], previous[i] = local.state_dict(), frozen(local)
        server.load_state_dict(average(trained, shares(cohort)))
        same_model(fed.model, server)
        for i in range(len(SIZES)):                                                  # who serves itself adds its shift
            same_numbers(fed.client(i).tensors["personal"]["prbm"], {"shift": shift[i].detach()})
            x = fed.samples.x[:5]
            model, taps = fed.personal_model(i)
            served = fed.look(i, fed.client(i), model, x, False, taps).logits
            torch.testing.assert_close(served, server.head(frozen(server).features(x) + shift[i]).detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["fedfm", "lfd"])
def test_soft_labels(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """METHODS 10.6: the matching term by λ over the two labels; the margin per label weight."""
    fed = federation("mixup(alpha=0.8)+" + {"fedfm": "fedfm(start=0, weight=3)", "lfd": "drift(tau=1.0, margin=0.4)"}[method])
    plans = recorded(monkeypatch, Mixup, "plan")
    server, anchors, previous = net(), torch.zeros(CLASSES, 7), {}
    for t, cohort in enumerate(COHORTS, start=1):
        plans.clear()
        fed.round(cohort)
        look, trained = frozen(server), {}
        x, y = (torch.cat(some) for some in zip(*(samples(fed, i) for i in cohort)))
        for c in y.unique().tolist():
            anchors[c] = look.features(x[y == c]).mean(0)
        for i, plan in zip(cohort, plans, strict=True):
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for (x, y), lam, order in zip(batches(fed, i, t), plan["weight"].tolist(), plan["order"], strict=True):
                other = y[order[: len(x)]]
                mixed = lam * x + (1 - lam) * x[order[: len(x)]]
                z = local.features(mixed)
                both = lambda logits, y=y, other=other, lam=lam: (
                    lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, other))
                if method == "fedfm":
                    loss = both(local.head(z)) + 3 * both(F.normalize(z) @ F.normalize(anchors).T / 0.1)
                else:
                    soft = lam * F.one_hot(y, CLASSES) + (1 - lam) * F.one_hot(other, CLASSES)
                    logits = local.head(z) - 0.4 * soft                              # τ = 1
                    loss = both(logits)
                    if i in previous:
                        label = F.softmax(look(mixed) - previous[i](mixed), 1)
                        loss = loss - (label * F.log_softmax(logits, 1)).sum(1).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i], previous[i] = local.state_dict(), frozen(local)
        server.load_state_dict(average(trained, shares(cohort)))
        same_model(fed.model, server, 1e-6)


def test_sam_wraps_added_terms_and_leaves_corrections_outside() -> None:
    rho, mu = 0.2, 0.5
    fed = federation(f"fedsam(rho={rho})+fedprox(mu={mu})+scaffold")
    server = net()
    zero = {k: torch.zeros_like(p) for k, p in server.named_parameters()}
    c, own = dict(zero), {i: dict(zero) for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        start, trained, change = weights_of(server), {}, dict(zero)
        for i in cohort:
            local, velocity, length = copy.deepcopy(server), 0.0, 0.0
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                def gradient(m, x=x, y=y, start=start):
                    loss = F.cross_entropy(m(x), y) + mu / 2 * sum((p - start[k]).square().sum() for k, p in m.named_parameters())
                    return torch.autograd.grad(loss, list(m.parameters()))
                g1, worst = gradient(local), copy.deepcopy(local)
                size = torch.sqrt(sum(g.square().sum() for g in g1)) + 1e-12
                with torch.no_grad():
                    for p, g in zip(worst.parameters(), g1):
                        p += rho * g / size
                for (k, p), g in zip(local.named_parameters(), gradient(worst)):
                    p.grad = g + c[k] - own[i][k]
                optimiser.step()
                velocity = RHO * velocity + 1
                length += LR * velocity
            new = {k: own[i][k] - c[k] + (start[k] - w) / length for k, w in weights_of(local).items()}
            change = {k: change[k] + new[k] - own[i][k] for k in c}
            own[i], trained[i] = new, local.state_dict()
        c = {k: c[k] + change[k] / len(SIZES) for k in c}
        server.load_state_dict(average(trained, shares(cohort, uniform=True)))
        fed.round(cohort)
        same_model(fed.model, server)


def test_sam_takes_the_steps_of_adversaries_once() -> None:
    """FedBR's projection and DANN's discriminator step before both passes, and are constants in them."""
    fed = federation("fedsam(rho=0.2)+fedbr(projection=released)+dann(weight=0.3, hidden=6)", norm=False)
    server = net(norm=False)
    first_p = attached(fed, "debias", nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 14), nn.ReLU(), nn.Linear(14, 7)))
    first_d = attached(fed, "dann", nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, len(SIZES))))

    def contrast(p, zp, zg, z):
        return F.softplus(2 * F.cosine_similarity(p(zp), p(z)) - 2 * F.cosine_similarity(p(zp), p(zg))).mean()

    for t, cohort in enumerate(COHORTS, start=1):
        fed.round(cohort)
        pseudo, models, ps, ds = fed.shared["debias"]["pseudo"], {}, {}, {}
        zg = frozen(server).features(pseudo)
        for i in cohort:
            local, p, d = copy.deepcopy(server), copy.deepcopy(first_p), copy.deepcopy(first_d)
            optimiser, of_p, of_d = sgd(local.parameters()), sgd(p.parameters(), decay=0.0), sgd(d.parameters(), decay=0.0)
            for x, y in batches(fed, i, t):
                n, me = len(x), torch.full_like(y, i)
                z, zp = local.features(x).detach(), local.features(pseudo).detach()
                of_p.zero_grad()
                (-contrast(p, zp[:n], zg[:n], z)).backward()
                of_p.step()
                of_d.zero_grad()
                F.cross_entropy(d(z), me).backward()
                of_d.step()

                def gradient(m, x=x, y=y, n=n, me=me, p=p, d=d, zg=zg, pseudo=pseudo):
                    z, zp = m.features(x), m.features(pseudo)
                    loss = F.cross_entropy(m.head(z), y) - F.log_softmax(m.head(zp), 1).mean()
                    loss = loss + 0.5 * contrast(p, zp[:n], zg[:n], z) - 0.3 * F.cross_entropy(d(z), me)
                    return torch.autograd.grad(loss, list(m.parameters()))
                g1, worst = gradient(local), copy.deepcopy(local)
                size = torch.sqrt(sum(g.square().sum() for g in g1)) + 1e-12
                with torch.no_grad():
                    for w, g in zip(worst.parameters(), g1):
                        w += 0.2 * g / size
                for w, g in zip(local.parameters(), gradient(worst)):
                    w.grad = g
                optimiser.step()
            models[i], ps[i], ds[i] = local.state_dict(), p.state_dict(), d.state_dict()
        each = shares(cohort, uniform=True)
        for module, states in ((server, models), (first_p, ps), (first_d, ds)):
            module.load_state_dict(average(states, each))
        same_model(fed.model, server)
        for name, module in (("debias.", first_p), ("dann.", first_d)):
            ours = [v for k, v in fed.model["params"].items() if k.startswith(name)]
            for a, b in zip(ours, module.parameters(), strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-9)


def test_weights_of_losses_then_momentum_of_the_server() -> None:
    eta, beta = 0.5, 0.7
    fed = federation(f"groupdro(eta={eta})+fedavgm(beta={beta})")
    server, q = net(), torch.ones(len(SIZES))
    v = {k: torch.zeros_like(p) for k, p in server.named_parameters()}
    for t, cohort in enumerate(COHORTS, start=1):
        start, trained = weights_of(server), {}
        for i in cohort:
            local, losses = copy.deepcopy(server), []
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                loss = F.cross_entropy(local(x), y)
                loss.backward()
                optimiser.step()
                losses.append(loss.detach())
            q[i] *= (eta * torch.stack(losses).mean()).exp()
            trained[i] = local.state_dict()
        mean = average(trained, {i: (q[i] / q[cohort].sum()).item() for i in cohort})
        v = {k: beta * v[k] + start[k] - mean[k] for k in v}
        statistics = average(trained, shares(cohort, uniform=True))
        server.load_state_dict({**statistics, **{k: start[k] - v[k] for k in v}})
        fed.round(cohort)
        same_model(fed.model, server)


def test_a_lost_clients_state_stays_as_it_was() -> None:
    """SCAFFOLD with clients that fail after they were chosen: no variate of theirs moves, and |S| counts those who answered."""
    fed = federation("scaffold", dropout=0.4)
    server, lost = net(), []
    zero = {k: torch.zeros_like(p) for k, p in server.named_parameters()}
    c, own = dict(zero), {i: dict(zero) for i in range(len(SIZES))}
    for t, cohort in enumerate(itertools.chain(COHORTS, COHORTS), start=1):
        report = fed.round(cohort)
        lost += report.lost
        start, trained, change = weights_of(server), {}, dict(zero)
        for i in (k for k in cohort if k not in report.lost):
            local, velocity, length = copy.deepcopy(server), 0.0, 0.0
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                for k, p in local.named_parameters():
                    p.grad += c[k] - own[i][k]
                optimiser.step()
                velocity = RHO * velocity + 1
                length += LR * velocity
            new = {k: own[i][k] - c[k] + (start[k] - w) / length for k, w in weights_of(local).items()}
            change = {k: change[k] + new[k] - own[i][k] for k in c}
            own[i], trained[i] = new, local.state_dict()
        if trained:
            c = {k: c[k] + change[k] / len(SIZES) for k in c}
            server.load_state_dict(average(trained, shares(trained, uniform=True)))
        same_model(fed.model, server)
        same_numbers(fed.shared["scaffold"]["c"], c)
        for i in range(len(SIZES)):
            same_numbers(fed.client(i).tensors["kept"]["scaffold"]["c"], own[i])
    assert lost
