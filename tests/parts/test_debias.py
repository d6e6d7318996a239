"""FedBR: the contrast, what its two steps move, and where pseudo-data come from."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience import rng
from consilience.core.client import LocalWork, Outcome
from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.core.slot import Slot
from consilience.data.federated import as_float
from consilience.engines import Sequential
from consilience.errors import ConfigError
from consilience.parts import _pseudo_data
from consilience.parts.debias import Debias
from consilience.parts.mixup import Mixup
from consilience.parts.rep import Rep
from consilience.testing import differences, largest_difference, run_tiny, tiny_federation, tiny_net, tiny_population

SMALL = {"projection": "released"}
VARIANTS: list[dict[str, Any]] = [
    {"mu": 0.0}, {"lam": 0.0}, {"max_step": False}, {"lam": 0.0, "max_step": False}, {"projection": "paper"}, {"projection": "none"},
    {"temperature": "divide"}, {"tau2": 0.0}, {"pseudo": "mixture", "mix": 0}, {"pseudo": "mixture"}, {"pseudo": "mixture", "mix": 3},
    {"refresh": "once"}, {"sources": "balanced"}, {"group": 1}, {"received": "step"}, {"pseudo": "mixture", "received": "once"}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains_and_can_be_captured(trains_and_replays: Any, settings: dict[str, Any]) -> None:
    trains_and_replays(Debias(**(SMALL | settings)))


# ---- the contrast --------------------------------------------------------------------------------------------------

def contrast(z: Any, pseudo: Any, fixed: Any, **settings: Any) -> float:
    part = Debias(**({"projection": "none"} | settings))
    projected = part._projected(None, _pseudo_data.paired(*(torch.tensor(t) for t in (pseudo, fixed, z))))  # type: ignore[arg-type]
    return float(part._terms(projected, 1.0))


def test_contrast_by_hand() -> None:
    """z_p = (1, 0), z_g = (3, 4), z = (0, 2): s₁ = 0.6, s₂ = 0. −log(e^{a s₁}/(e^{a s₁} + e^{a s₂})) = log(1 + e^{−0.6a}).

    Multiply by τ = 2: log(1 + e^{−1.2}) = 0.263282. Divide: log(1 + e^{−0.3}) = 0.554355.
    """
    rows = ([[0.0, 2.0]], [[1.0, 0.0]], [[3.0, 4.0]])
    assert contrast(*rows) == pytest.approx(math.log1p(math.exp(-1.2)), rel=1e-5)
    assert contrast(*rows) == pytest.approx(0.263282, rel=1e-5)
    assert contrast(*rows, temperature="divide") == pytest.approx(0.554355, rel=1e-5)
    # different temperatures: a₂ s₂ − a₁ s₁ with z = (5, 0), s₂ = 1: 0.5·1 − 3·0.6 = −1.3
    assert contrast([[5.0, 0.0]], *rows[1:], tau1=3.0, tau2=0.5) == pytest.approx(math.log1p(math.exp(-1.3)), rel=1e-5)
    # rows are paired one by one and averaged
    both = contrast([[0.0, 2.0], [1.0, 0.0]], [[1.0, 0.0]] * 2, [[3.0, 4.0]] * 2)
    assert both == pytest.approx((math.log1p(math.exp(-1.2)) + math.log1p(math.exp(2 - 1.2))) / 2, rel=1e-5)


def test_range_of_the_contrast() -> None:
    """Cosines lie in [−1, 1], so τ = 2 gives softplus(∓4) = [0.018, 4.02] when multiplied, softplus(∓1) = [0.31, 1.31] when divided."""
    up, down = [[1.0, 0.0]], [[-1.0, 0.0]]
    for mode, low, high in (("multiply", 0.018, 4.018), ("divide", 0.313, 1.313)):
        assert contrast(down, up, up, temperature=mode) == pytest.approx(low, abs=5e-4)       # far away from z, on z_g
        assert contrast(up, up, down, temperature=mode) == pytest.approx(high, abs=5e-4)


def test_smaller_last_batch_pairs_the_first_rows() -> None:
    pseudo, fixed = [[1.0, 0.0], [9.0, 9.0]], [[3.0, 4.0], [1.0, -7.0]]
    assert contrast([[0.0, 2.0]], pseudo, fixed) == pytest.approx(math.log1p(math.exp(-1.2)), rel=1e-5)


# ---- the two steps -------------------------------------------------------------------------------------------------

class Reference:
    """The same step with an ordinary module, autograd and a projection of its own."""

    def __init__(self, taken: Any, settings: dict[str, Any]) -> None:
        self.mu, self.lam, self.tau = settings.get("mu", 0.5), settings.get("lam", 1.0), 2.0
        params = taken.before["model"]["params"]
        self.net, fixed = tiny_net().train(), tiny_net().eval()
        own = {k: v for k, v in params.items() if not k.startswith("debias.")}
        self.net.load_state_dict({**own, **taken.before["model"]["buffers"]})
        received = taken.step.slot.received
        fixed.load_state_dict({k: v for half in received.values() for k, v in half.items() if not k.startswith("debias.")})
        self.projection: nn.Module = nn.Identity()
        if settings.get("projection") != "none":
            sizes = (12, 24, 24, 12) if settings.get("projection") == "released" else (12, 256, 256, 128)
            layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
            self.projection = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
            self.projection.load_state_dict({k.removeprefix("debias."): v for k, v in params.items() if k.startswith("debias.")})
        pseudo = taken.step.slot.shared["debias"]["pseudo"]
        self.z, self.z_p = self.features(self.net, taken.batch.x), self.features(self.net, pseudo)
        with torch.no_grad():
            self.z_g = self.features(fixed, pseudo)
        self.logits, self.logits_p, self.y = self.net.head(self.z), self.net.head(self.z_p), taken.batch.y  # type: ignore[operator]

    @staticmethod
    def features(net: Any, x: Tensor) -> Tensor:
        return net.header(net.neck(net.stage1(x)))

    def contrast(self, z: Tensor, z_p: Tensor) -> Tensor:
        p = self.projection
        s1, s2 = F.cosine_similarity(p(z_p), p(self.z_g)), F.cosine_similarity(p(z_p), p(z))
        pairs = torch.stack([self.tau * s1, self.tau * s2], 1)
        return -pairs.log_softmax(1)[:, 0].mean()

    def ascend(self, lr: float) -> dict[str, Tensor]:
        """One step of the projection up the contrast, features held fixed. Returns how far each parameter moves."""
        own = dict(self.projection.named_parameters())
        grads = torch.autograd.grad(self.contrast(self.z.detach(), self.z_p.detach()), [*own.values()])
        with torch.no_grad():
            for p, g in zip(own.values(), grads):
                p.add_(lr * g)
        return {k: lr * g for k, g in zip(own, grads)}

    def descend(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The min step's objective and its gradient for the model's own parameters."""
        uniform = torch.full((len(self.z_p), 3), 1 / 3)
        loss = F.cross_entropy(self.logits, self.y) + self.lam * F.cross_entropy(self.logits_p, uniform)
        if self.mu:
            loss = loss + self.mu * self.contrast(self.z, self.z_p)
        own = dict(self.net.named_parameters())
        return loss.detach(), dict(zip(own, torch.autograd.grad(loss, [*own.values()])))


def second_step(open_round: Any, settings: dict[str, Any], **how: Any) -> Any:
    """The second step of round two, where model, received model and projection all differ from their starts."""
    opened = open_round(Debias(**settings), rounds_before=1, **how)
    opened.step()
    return opened.step()


ROWS_OF_TABLE_4: dict[str, dict[str, Any]] = {
    "FedBR": {}, "component 1": {"mu": 0.0}, "component 1 + min step": {"max_step": False}, "component 2": {"lam": 0.0},
    "component 2 w/o max step": {"lam": 0.0, "max_step": False}, "component 2 w/o projection": {"lam": 0.0, "projection": "none"},
    "paper's projection": {"projection": "paper"}}


@pytest.mark.parametrize("row", ROWS_OF_TABLE_4)
def test_both_steps_equal_the_reference(open_round: Any, row: str) -> None:
    """Max step: the projection, and only it, moves up the contrast by plain SGD. Min step: everything else moves down the sum,
    with the projection already moved and then held.
    """
    settings = SMALL | ROWS_OF_TABLE_4[row]
    taken = second_step(open_round, settings, momentum=0.0)
    reference = Reference(taken, settings)
    steps_up = bool(settings.get("mu", 0.5)) and settings.get("max_step", True) and settings["projection"] != "none"
    moved = reference.ascend(0.1) if steps_up else {k: torch.zeros_like(p) for k, p in reference.projection.named_parameters()}
    for k, far in moved.items():
        torch.testing.assert_close(taken.moved(f"debias.{k}"), far, rtol=1e-3, atol=1e-6)
    assert any(float(far.abs().max()) > 1e-6 for far in moved.values()) == steps_up
    loss, grads = reference.descend()
    assert float(taken.loss) == pytest.approx(float(loss), rel=1e-4)
    assert set(taken.grads) == set(grads), "the projection must be absent from the main gradient"
    for k, g in grads.items():
        torch.testing.assert_close(taken.grads[k], g, rtol=2e-3, atol=2e-5)
        torch.testing.assert_close(taken.moved(k), -0.1 * taken.grads[k], rtol=1e-3, atol=1e-6)


def test_max_step_goes_uphill(open_round: Any) -> None:
    taken = second_step(open_round, SMALL)
    reference = Reference(taken, SMALL)
    with torch.no_grad():
        before = float(reference.contrast(reference.z, reference.z_p))
    reference.ascend(0.1)
    with torch.no_grad():
        after = float(reference.contrast(reference.z, reference.z_p))
    assert after > before
    # the min step's term is that of the raised projection: task + λ·pseudo + μ·after
    uniform = torch.full((8, 3), 1 / 3)
    want = F.cross_entropy(reference.logits_p, uniform).detach() + 0.5 * after
    assert float(taken.terms["debias"]) == pytest.approx(float(want), rel=1e-4)


def test_max_step_has_the_runs_momentum_and_no_decay(open_round: Any) -> None:
    """Both optimisers have the same settings. v₁ = g₁, v₂ = 0.9·v₁ + g₂, with g the contrast's gradient where P stands; P moves by +ηv. The
    release's weight decay is 0, so P has none.
    """
    opened = open_round(Debias(**SMALL), rounds_before=1, momentum=0.9, weight_decay=0.1)
    velocity: dict[str, Any] = {}
    for _ in range(3):
        taken = opened.step()
        slopes = {k: far / 0.1 for k, far in Reference(taken, SMALL).ascend(0.1).items()}
        velocity = {k: 0.9 * velocity[k] + g if velocity else g for k, g in slopes.items()}
        for k, v in velocity.items():
            torch.testing.assert_close(taken.moved(f"debias.{k}"), 0.1 * v, rtol=1e-3, atol=1e-6)


def test_component_1_leaves_the_projection_where_it_is(open_round: Any) -> None:
    still = second_step(open_round, SMALL | {"mu": 0.0}, momentum=0.9, weight_decay=0.1)
    assert all(float(still.moved(k).abs().max()) == 0 for k in still.before["model"]["params"] if k.startswith("debias."))


def test_projection_is_averaged_like_the_model_and_never_used_for_scores() -> None:
    fed = run_tiny([Debias(**SMALL)], rounds=1)
    fresh = tiny_federation([Debias(**SMALL)])
    assert not torch.equal(fed.model["params"]["debias.0.weight"], fresh.model["params"]["debias.0.weight"])
    x = fed.samples.x[:4]
    other = {**fed.model, "params": {k: (p + 1 if k.startswith("debias.") else p) for k, p in fed.model["params"].items()}}
    one, two = (fed.look(0, fed.client(0), m, x, False, True).logits for m in (fed.model, other))
    assert torch.equal(one, two)


@pytest.mark.parametrize(("projection", "shapes"), [("paper", [(256, 12), (256, 256), (128, 256)]),
                                                    ("released", [(24, 12), (24, 24), (12, 24)]), ("none", [])])
def test_sizes_of_the_projection(projection: str, shapes: list[tuple[int, int]]) -> None:
    params = tiny_federation([Debias(projection=projection)]).model["params"]
    assert [tuple(p.shape) for k, p in params.items() if k.startswith("debias.") and k.endswith("weight")] == shapes


# ---- pseudo-data ---------------------------------------------------------------------------------------------------

def numbered_population() -> Population:
    """Sample j of client i is an image full of 100·i + j: a mean tells whose samples it is made of."""
    p = tiny_population()
    values = torch.cat([100.0 * i + torch.arange(len(rows)) for i, rows in enumerate(p.rows)])
    return Population(values[:, None, None, None].expand(-1, 1, 8, 8).clone(), p.y, p.rows, 3, as_float, p.names, p.proxy)


def pseudo_values(batch: int = 8, rounds: int = 1, **settings: Any) -> Tensor:
    """One number per pseudo sample, at the start of the round."""
    fed = tiny_federation([Debias(**(SMALL | settings))], population=numbered_population(), batch=batch, lr=1e-6)
    for _ in range(rounds):
        fed.round()
    pseudo = fed.shared["debias"]["pseudo"]
    assert pseudo.shape == (batch, 1, 8, 8)
    torch.testing.assert_close(pseudo, pseudo[:, :1, :1, :1].expand_as(pseudo))
    return pseudo[:, 0, 0, 0]


def owner(value: float) -> int:
    return round((value - 19.5) / 100)                # samples of client i lie in 100·i … 100·i + 39


def test_rows_are_means_of_samples_of_one_client() -> None:
    """M = 1: whole numbers, each one sample. M = 4: quarters, inside one client's range, and not all whole."""
    sizes = {0: 24, 1: 17, 3: 40}                     # client 2 makes no step, so it is not of the round
    single = pseudo_values(group=1, batch=16)
    means = pseudo_values(group=4, batch=16)
    for values, group in ((single, 1), (means, 4)):
        for value in values.tolist():
            who = owner(value)
            assert who in sizes
            assert 0 <= value - 100 * who <= sizes[who] - 1
            assert value * group == pytest.approx(round(value * group), abs=1e-2)
    assert any(v != round(v) for v in means.tolist())


def test_many_samples_average_out() -> None:
    """M = 400 draws with replacement: client i's rows lie at 100·i + (n_i − 1)/2 up to about n_i/√(12·400) = 0.6."""
    middle = {0: 11.5, 1: 108.0, 3: 319.5}
    for value in pseudo_values(group=400, batch=16).tolist():
        assert value == pytest.approx(middle[owner(value)], abs=2.5)


def counts(values: Tensor) -> list[int]:
    who = [owner(v) for v in values.tolist()]
    return sorted(who.count(i) for i in (0, 1, 3))


def test_balanced_sources_are_equal_and_random_ones_are_not() -> None:
    """16 rows over three clients: 5, 5 and 6 in every round when balanced; drawn at random they vary."""
    balanced = [counts(pseudo_values(batch=16, rounds=n, sources="balanced")) for n in (1, 2, 3)]
    assert balanced == [[5, 5, 6]] * 3
    drawn = [counts(pseudo_values(batch=16, rounds=n, sources="random")) for n in range(1, 6)]
    assert all(sum(c) == 16 for c in drawn)
    assert any(c != [5, 5, 6] for c in drawn)


def test_refreshed_each_round_or_sent_once() -> None:
    for refresh, same in (("round", False), ("once", True)):
        fed = tiny_federation([Debias(**SMALL, refresh=refresh)])
        fed.round()
        first, up = fed.shared["debias"]["pseudo"].clone(), fed.round().bytes_up
        assert torch.equal(first, fed.shared["debias"]["pseudo"]) == same
        plain = 3 * sum(t.numel() * t.element_size() for half in fed.model.values() for t in half.values())
        assert up - plain == (0 if same else 8 * 64 * 4)      # eight pseudo images of 8×8 floats go up, from all clients together


def test_once_draws_from_all_clients_even_those_too_small_to_train() -> None:
    fed = tiny_federation([Debias(**SMALL, refresh="once", sources="balanced")], population=numbered_population(), batch=16, lr=1e-6)
    fed.prepare()
    who = [round((float(v) - 19.5) / 100) for v in fed.shared["debias"]["pseudo"][:, 0, 0, 0]]
    assert sorted(who) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def mixture_view(target: Any, mix: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two pseudo rows full of 10 and 20, a batch of three samples full of 1, 2, 3."""
    key = rng.key(4, "step")
    v: Any = SimpleNamespace(shared={"pseudo": torch.tensor([[10.0], [20.0]])}, spec=SimpleNamespace(classes=4),
                             batch=SimpleNamespace(x=torch.tensor([[1.0], [2.0], [3.0]]), target=torch.tensor(target)),
                             key=lambda *words: rng.key(key, *words))
    x, q = _pseudo_data.mixture(v, v.shared["pseudo"], mix)
    return x, q, rng.integers(rng.key(key, "mix"), 3, (2, max(mix, 1)))


def test_mixture_by_hand() -> None:
    """K = 0: the proxy means with labels ¼. K = 1: x̃ = (x_p + x_j)/2, q = (¼ + y_j)/2: 0.625 on the class of x_j, 0.125 elsewhere."""
    x, q, _ = mixture_view([0, 1, 3], 0)
    assert x.flatten().tolist() == [10.0, 20.0]
    assert torch.equal(q, torch.full((2, 4), 0.25))
    x, q, drawn = mixture_view([0, 1, 3], 1)
    labels = [0, 1, 3]
    for row, base in enumerate((10.0, 20.0)):
        j = int(drawn[row, 0])
        assert float(x[row]) == (base + j + 1) / 2
        assert q[row].tolist() == [0.625 if c == labels[j] else 0.125 for c in range(4)]
    x, q, drawn = mixture_view([0, 1, 3], 3)
    assert float(x[0]) == pytest.approx((10.0 + sum(int(j) + 1 for j in drawn[0])) / 4)
    torch.testing.assert_close(q.sum(1), torch.ones(2))
    # soft labels (Mixup) enter as they are
    soft = [[0.7, 0.3, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    _, q, drawn = mixture_view(soft, 1)
    torch.testing.assert_close(q[0], (0.25 + torch.tensor(soft[int(drawn[0, 0])])) / 2)


def test_mixture_compares_one_mixture_with_itself(open_round: Any) -> None:
    """z_g is the received model's feature of this step's own mixture, recomputed in every step."""
    opened = open_round(Debias(pseudo="mixture", lam=0.0, max_step=False, projection="none"), Mixup(alpha=1.0), rounds_before=1)
    opened.step()
    taken = opened.step()
    assert float(taken.terms["debias"]) == pytest.approx(contrast_of_mixtures(taken, mixed_in(taken)), rel=1e-4)


def mixed_in(taken: Any) -> Tensor:
    """A step's pseudo-data: each mean of public samples mixed with the sample of the batch that the step's key draws."""
    drawn = rng.integers(rng.key(taken.step.key, "batch", "debias", "mix"), 8, (8, 1))
    return (taken.step.slot.shared["debias"]["pseudo"] + taken.step.batch.x[drawn[:, 0]]) / 2


def contrast_of_mixtures(taken: Any, looked_at: Tensor) -> float:
    """0.5·softplus(2 s₂ − 2 s₁), where the received model looked at these pseudo-data."""
    now, fixed = tiny_net().train(), tiny_net().eval()
    now.load_state_dict({**taken.before["model"]["params"], **taken.before["model"]["buffers"]})
    received = taken.step.slot.received
    fixed.load_state_dict({**received["params"], **received["buffers"]})
    with torch.no_grad():
        z, z_p = Reference.features(now, taken.step.batch.x), Reference.features(now, mixed_in(taken))
        s1, s2 = F.cosine_similarity(z_p, Reference.features(fixed, looked_at)), F.cosine_similarity(z_p, z)
        return float(0.5 * F.softplus(2 * s2 - 2 * s1).mean())


def test_mixture_can_keep_what_the_first_step_showed(open_round: Any) -> None:
    """received=once, as released: from the second step on the positive pair are features of two different mixtures."""
    opened = open_round(Debias(pseudo="mixture", received="once", lam=0.0, max_step=False, projection="none"), rounds_before=1)
    first, second = opened.step(), opened.step()
    assert float(first.terms["debias"]) == pytest.approx(contrast_of_mixtures(first, mixed_in(first)), rel=1e-4)
    kept = contrast_of_mixtures(second, mixed_in(first))
    assert float(second.terms["debias"]) == pytest.approx(kept, rel=1e-4)
    assert abs(kept - contrast_of_mixtures(second, mixed_in(second))) > 1e-3 * kept


def test_what_the_first_step_showed_is_there_where_a_round_begins_with_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedRep's first steps train what does not travel, and nothing is tracked in them."""
    kept: list[Tensor] = []
    real = LocalWork.finish

    def noted(work: LocalWork, slot: Slot) -> Outcome:
        kept.append(slot.scratch["debias"]["global"].clone())
        return real(work, slot)
    monkeypatch.setattr(LocalWork, "finish", noted)
    run_tiny([Debias(**SMALL, pseudo="mixture", received="once"), Rep()], rounds=1)
    assert kept
    assert all(bool(z.any()) for z in kept)


def test_rsm_gives_the_same_once_and_in_every_step() -> None:
    """Its pseudo-data do not change in a round."""
    once, every = (run_tiny([Debias(**SMALL, received=when)]) for when in ("once", "step"))
    assert largest_difference(once, every) < 1e-5
    assert not differences(once, run_tiny([Debias(**SMALL)]))


def test_mixture_draws_means_of_proxy_samples_once() -> None:
    fed = tiny_federation([Debias(**SMALL, pseudo="mixture", group=2)])
    first = fed.shared["debias"]["pseudo"].clone()
    proxy = tiny_population().proxy
    assert proxy is not None
    pairs = (proxy[:, None] + proxy[None]).flatten(0, 1) / 2
    for row in first:
        assert float((pairs - row).abs().amax((1, 2, 3)).min()) < 1e-6           # every row is the mean of two proxy samples
    up = fed.round().bytes_up
    assert torch.equal(first, fed.shared["debias"]["pseudo"])
    assert up == 3 * sum(t.numel() * t.element_size() for half in fed.model.values() for t in half.values())   # no data go up


def test_mixup_leaves_pseudo_data_alone() -> None:
    one, other = run_tiny([Debias(**SMALL)], rounds=1), run_tiny([Debias(**SMALL), Mixup()], rounds=1)
    assert torch.equal(one.shared["debias"]["pseudo"], other.shared["debias"]["pseudo"])
    assert not torch.equal(one.model["params"]["debias.0.weight"], other.model["params"]["debias.0.weight"])


# ---- what it asks for ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("settings", "message"), [
    ({"temperature": "divide", "tau1": 0.0}, "cannot divide by a temperature of 0"),
    ({"temperature": "divide", "tau2": 0.0}, "cannot divide by a temperature of 0"),
    ({"pseudo": "mixture", "sources": "balanced"}, "takes nothing from clients for pseudo=mixture, so sources=balanced says nothing"),
    ({"mix": 3}, "mixes nothing into pseudo-data for pseudo=rsm, so mix=3 says nothing"),
    ({"mix": 0}, "so mix=0 says nothing. Leave it out, or use pseudo=mixture")])
def test_refuses_what_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"debias .*{message}|debias {message}"):
        tiny_federation([Debias(**settings)])


def test_mixture_needs_public_samples() -> None:
    p = tiny_population()
    bare = Population(p.x, p.y, p.rows, 3, as_float, p.names)
    with pytest.raises(ConfigError, match=r"debias needs public samples for pseudo=mixture\. Name a proxy data set"):
        tiny_federation([Debias(pseudo="mixture")], population=bare)


@pytest.mark.parametrize("pseudo", ["rsm", "mixture"])
def test_words_have_no_average(pseudo: str) -> None:
    """A text's samples are whole numbers; the embedding takes them as they are."""
    net = nn.Sequential(OrderedDict(words=nn.Embedding(20, 6), join=nn.Flatten(), head=nn.Linear(24, 3)))
    x = torch.arange(80).reshape(20, 4) % 20
    texts = Population(x, torch.arange(20) % 3, tuple(torch.arange(20).split(10)), 3, lambda x, y, key: (x, y), ("a", "b"), x[:5])
    for parts, message in (((Debias(pseudo=pseudo),), "debias averages inputs, and whole numbers"),
                           ((Mixup(),), "mixup mixes inputs, and whole numbers")):
        with pytest.raises(ConfigError, match=message):
            Federation(net, Layout(head="head"), Method(parts), texts, Policy(batch=5), Sequential)
    Federation(net, Layout(head="head"), Method([]), texts, Policy(batch=5), Sequential).round()


def test_prefers_uniform_weights() -> None:
    fed = tiny_federation([Debias(**SMALL)], weights="auto")
    assert fed.policy.weights == "uniform"
    assert tiny_federation(weights="auto").policy.weights == "samples"
    assert Policy().weights == "auto"


def test_says_that_averages_of_raw_samples_leave_the_client() -> None:
    assert "averages of raw samples" in Debias().traits
    assert Debias().raw_averages == "means of 10 training inputs of one client, sent in every round; all clients get them"
    assert Debias(group=1, refresh="once").raw_averages.startswith("single training inputs, as they are, sent before the first round")
    assert not Debias(pseudo="mixture").raw_averages
    assert not Debias(pseudo="mixture").traits
