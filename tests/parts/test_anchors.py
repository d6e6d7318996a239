"""FedFM's anchors, guiding and matching losses, launch round, and FedFM-Lite."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience import rng, tree
from consilience.core.client import consult
from consilience.core.population import Population
from consilience.core.snapshot import restore, snapshot
from consilience.data.federated import as_float
from consilience.errors import ConfigError
from consilience.parts.anchors import Anchors
from consilience.testing import differences, in_model, run_tiny, tiny_federation, tiny_population

VARIANTS: list[dict[str, Any]] = [
    {"mode": "guide"}, {"mode": "l2"}, {"mode": "l2", "normalise": False}, {"mode": "l2", "l2_reduction": "sum"},
    {"mode": "l2", "normalise": False, "l2_reduction": "sum", "weight": 0.1}, {"aggregation": "uniform"}, {"tau": 0.5}, {"start": 1},
    {"augmented": True}, {"lite": True}, {"lite": True, "every": 2}, {"lite": True, "every": 2, "start": 1, "warm_exchange": False}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains_and_can_be_captured(trains_and_replays: Any, settings: dict[str, Any]) -> None:
    trains_and_replays(Anchors(**({"start": 0, "weight": 2.0} | settings)))


def view(features: Any, target: Any, anchor: Any, seen: Any = None, round_number: int = 1) -> Any:
    anchor = torch.tensor(anchor)
    seen = torch.ones(len(anchor), dtype=torch.bool) if seen is None else torch.tensor(seen)
    return SimpleNamespace(shared={"anchor": anchor, "seen": seen}, features=torch.tensor(features), round=torch.tensor(round_number),
                           batch=SimpleNamespace(target=torch.tensor(target)), spec=SimpleNamespace(classes=len(anchor)))


def loss_of(part: Anchors, v: Any) -> Any:
    """The loss of a step, after what a client makes of the anchors when its round begins."""
    v.scratch = part.init_scratch(SimpleNamespace(shared=v.shared, round=int(v.round)))      # type: ignore[arg-type]
    return part.loss(v)


# ---- losses --------------------------------------------------------------------------------------------------------

def test_guiding_loss_by_hand() -> None:
    """Feature (3, 4) → ĥ = (0.6, 0.8); anchors (2, 0) → (1, 0) and (0, 5) → (0, 1). Similarities 0.6 and 0.8, over τ = 0.1: 6 and 8.

    Label 0: −log(e⁶/(e⁶ + e⁸)) = log(1 + e²) = 2.126928. Label 1: log(1 + e⁻²) = 0.126928. Mean 1.126928, times λ = 50: 56.3464.
    """
    loss = loss_of(Anchors(start=0, weight=50.0), view([[3.0, 4.0], [3.0, 4.0]], [0, 1], [[2.0, 0.0], [0.0, 5.0]]))
    assert float(loss) == pytest.approx(50 * (math.log1p(math.e**2) + math.log1p(math.e**-2)) / 2, rel=1e-5)
    assert float(loss) == pytest.approx(56.3464, rel=1e-4)


def test_matching_loss_by_hand() -> None:
    """h = (3, 4), a = (0, 2). Raw: ‖h − a‖² = 9 + 4 = 13. Normalised: (0.6, 0.8) − (0, 1) = (0.6, −0.2), squares 0.36 + 0.04 = 0.4.

    Sum over d: 13 and 0.4. Mean over d = 2: 6.5 and 0.2. Times λ = 3.
    """
    v = view([[3.0, 4.0]], [1], [[9.0, 9.0], [0.0, 2.0]])
    for normalise, reduction, want in [(False, "sum", 13.0), (False, "mean", 6.5), (True, "sum", 0.4), (True, "mean", 0.2)]:
        loss = loss_of(Anchors(start=0, weight=3.0, mode="l2", normalise=normalise, l2_reduction=reduction), v)
        assert float(loss) == pytest.approx(3 * want, rel=1e-5)


def test_soft_labels_weigh_the_term() -> None:
    """A label of 0.75·class 0 + 0.25·class 1 costs 0.75 of the one and 0.25 of the other."""
    for mode in ("guide", "l2"):
        part = Anchors(start=0, weight=1.0, mode=mode)
        one, other, both = (float(loss_of(part, view([[3.0, 4.0]], t, [[2.0, 0.0], [0.0, 5.0]]))) for t in ([0], [1], [[0.75, 0.25]]))
        assert both == pytest.approx(0.75 * one + 0.25 * other, rel=1e-5)


def test_a_class_never_shown_takes_no_part() -> None:
    """With class 2 unseen the softmax runs over classes 0 and 1 only, and a sample of class 2 adds nothing."""
    features, anchors = [[3.0, 4.0], [1.0, 1.0]], [[2.0, 0.0], [0.0, 5.0], [7.0, 7.0]]
    loss = loss_of(Anchors(start=0, weight=1.0), view(features, [0, 2], anchors, [True, True, False]))
    assert float(loss) == pytest.approx(math.log1p(math.e**2) / 2, rel=1e-5)          # mean over a batch of two
    l2 = Anchors(start=0, weight=1.0, mode="l2", normalise=False, l2_reduction="sum")
    # ‖(3, 4) − (2, 0)‖² = 17 for the first sample, nothing for the second
    assert float(loss_of(l2, view(features, [0, 2], anchors, [True, True, False]))) == pytest.approx(17 / 2)


def test_loss_in_a_step_equals_the_release(open_round: Any) -> None:
    """As published: normalise features and anchors, divide by τ, cross-entropy. The gradient enters the features, not the head."""
    taken = open_round(Anchors(start=0, weight=2.0, tau=0.3)).step()
    h = taken.trace.before["head:input"].detach().numpy().astype(np.float64)
    a = taken.step.slot.shared["anchors"]["anchor"].numpy().astype(np.float64)
    logits = (h / np.linalg.norm(h, axis=1, keepdims=True)) @ (a / np.linalg.norm(a, axis=1, keepdims=True)).T / 0.3
    y = taken.batch.y.numpy()
    want = 2.0 * np.mean([np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, y)])
    assert float(taken.terms["anchors"]) == pytest.approx(want, rel=1e-5)
    plain = open_round().step()
    torch.testing.assert_close(taken.grads["head.weight"], plain.grads["head.weight"])
    assert not torch.allclose(taken.grads["header.weight"], plain.grads["header.weight"])


# ---- anchors -------------------------------------------------------------------------------------------------------

def eval_features(fed: Any, model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Features of the model in evaluation mode, by an ordinary module."""
    from consilience.testing import tiny_net
    net = tiny_net().eval()
    net.load_state_dict({**model["params"], **model["buffers"]})
    with torch.no_grad():
        return net.header(net.neck(net.stage1(fed.samples.x[rows])))  # type: ignore[operator, union-attr]


def hand_anchors(fed: Any, models: dict[int, Any], aggregation: str, old: torch.Tensor) -> torch.Tensor:
    """Class means over clients, counted sample by sample: a_c = Σ n_kc a_kc / Σ n_kc, or the plain mean of clients."""
    y, out = fed.samples.y, old.clone()
    for c in range(3):
        means, counts = [], []
        for number, model in models.items():
            rows = fed.samples.rows[number].train
            mine = rows[y[rows] == c]
            counts.append(len(mine))
            means.append(eval_features(fed, model, mine).mean(0) if len(mine) else old[c])
        if sum(counts):
            weights = np.array(counts) / sum(counts) if aggregation == "weighted" else np.full(len(counts), 1 / len(counts))
            out[c] = sum(float(w) * m for w, m in zip(weights, means))
    return out


@pytest.mark.parametrize("aggregation", ["weighted", "uniform"])
def test_anchors_are_class_means_of_the_received_model(open_round: Any, aggregation: str) -> None:
    opened = open_round(Anchors(start=0, aggregation=aggregation, weight=1.0), rounds_before=1)
    fed = opened.fed
    old = run_tiny([Anchors(start=0, aggregation=aggregation, weight=1.0)], rounds=1, momentum=0.0, weight_decay=0.0, lr=0.1)
    want = hand_anchors(fed, dict.fromkeys((0, 1, 3), fed.model), aggregation, old.shared["anchors"]["anchor"])
    torch.testing.assert_close(fed.shared["anchors"]["anchor"], want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(want, old.shared["anchors"]["anchor"], atol=1e-3)          # made anew with the new model


def test_weighted_and_uniform_by_hand() -> None:
    """Class 0: client A has 1 sample with feature 2, client B has 3 with mean 6. Weighted (1·2 + 3·6)/4 = 5, uniform (2 + 6)/2 = 4.

    Class 1: only B, 2 samples of mean 8. Weighted 8. Uniform: A adopts the old anchor 3, so (3 + 8)/2 = 5.5.
    Class 2: nobody. Both keep the old anchor 7.
    """
    old, count = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([4.0, 2.0, 0.0])
    shared = {"anchor": old, "seen": torch.tensor([True, True, True])}
    sums = torch.tensor([[2.0 + 18.0], [16.0], [0.0]])
    weighted, _ = Anchors().server(SimpleNamespace(shared=shared, reduced={"sum": sums, "count": count}))  # type: ignore[arg-type]
    assert weighted["anchor"].flatten().tolist() == [5.0, 8.0, 7.0]
    means = torch.tensor([[[2.0], [3.0], [7.0]], [[6.0], [8.0], [7.0]]])
    uniform, _ = Anchors(aggregation="uniform").server(
        SimpleNamespace(shared=shared, reduced={"mean": means, "count": count}))  # type: ignore[arg-type]
    assert uniform["anchor"].flatten().tolist() == [4.0, 5.5, 7.0]




def test_a_class_absent_everywhere_never_becomes_nan(open_round: Any) -> None:
    """Labels 0 … 2 of a model with three outputs, where class 2 is relabelled away: its anchor stays 0 and unseen."""
    p = tiny_population()
    merged = Population(p.x, p.y.clamp(max=1), p.rows, 3, as_float, p.names)
    for mode in ("guide", "l2"):
        fed = run_tiny([Anchors(start=0, weight=2.0, mode=mode)], population=merged)
        shared = fed.shared["anchors"]
        assert shared["seen"].tolist() == [True, True, False]
        assert torch.equal(shared["anchor"][2], torch.zeros(12))
        assert bool(tree.all_finite(fed.model))


def test_a_class_that_leaves_keeps_its_last_anchor() -> None:
    """Only client 0 shows class 2. In a round without it the anchor of class 2 stays, the others are made anew."""
    p = tiny_population()
    y = p.y.clone()
    y[p.rows[0][:8]] = 2
    for rows in p.rows[1:]:
        y[rows] = y[rows].clamp(max=1)
    fed = tiny_federation([Anchors(start=0, weight=2.0)], population=Population(p.x, y, p.rows, 3, as_float, p.names))
    fed.round([0, 1, 3])
    first = fed.shared["anchors"]["anchor"].clone()
    fed.round([1, 3])
    second = fed.shared["anchors"]["anchor"]
    assert torch.equal(first[2], second[2])
    assert not torch.equal(first[0], second[0])
    assert fed.shared["anchors"]["seen"].all()


def test_features_of_the_anchors_are_class_sums_in_any_batching() -> None:
    """Surveying in batches of 5 or of 256 gives the same sums up to rounding."""
    one, other = (run_tiny([Anchors(start=0, weight=2.0)], rounds=1, eval_batch=n) for n in (5, 256))
    torch.testing.assert_close(one.shared["anchors"]["anchor"], other.shared["anchors"]["anchor"])


# ---- the theory ----------------------------------------------------------------------------------------------------

@given(st.integers(0, 10_000))
def test_lemma_2_new_anchors_never_raise_the_raw_objective(seed: int) -> None:
    """Φ(w; A) = Σ_k p_k mean_{x∈k} ‖h(x) − a_y‖² with p_k ∝ n_k is Σ over all samples / n: a sum of squares around a_c for each class,
    least at the class mean, which is what weighted anchors of all clients are. So Φ(w; A⁺) ≤ Φ(w; A) for any A.
    """
    part = Anchors(start=0, weight=1.0, mode="l2", normalise=False, l2_reduction="sum")
    key = rng.key(seed, "lemma")
    sizes = [3, 5, 9]
    h = [rng.normal(rng.key(key, "h", k), (n, 4)) for k, n in enumerate(sizes)]
    y = [rng.integers(rng.key(key, "y", k), 3, (n,)) for k, n in enumerate(sizes)]
    everyone = torch.ones(3, dtype=torch.bool)

    def objective(anchor: torch.Tensor) -> float:
        total = 0.0
        for features, labels in zip(h, y):
            v: Any = SimpleNamespace(shared={"anchor": anchor, "seen": everyone}, features=features, round=torch.tensor(1),
                                     batch=SimpleNamespace(target=labels), spec=SimpleNamespace(classes=3))
            total += len(labels) / sum(sizes) * float(loss_of(part, v))
        return total
    old = rng.normal(rng.key(key, "old"), (3, 4))
    hot = [torch.stack([(labels == c).float() for c in range(3)]) for labels in y]
    reduced = {"sum": sum(a @ b for a, b in zip(hot, h)), "count": sum(a.sum(1) for a in hot)}
    new, _ = part.server(SimpleNamespace(shared={"anchor": old, "seen": everyone}, reduced=reduced))  # type: ignore[arg-type]
    assert objective(new["anchor"]) <= objective(old) + 1e-5
    nudged = new["anchor"] + 0.05 * rng.normal(rng.key(key, "nudge"), (3, 4))
    assert objective(new["anchor"]) <= objective(nudged) + 1e-5


def test_lemma_2_in_a_run() -> None:
    """The same in a federation: for the model of each round, this round's anchors are no worse than the last round's."""
    part = Anchors(start=0, weight=0.05, mode="l2", normalise=False, l2_reduction="sum")
    fed = tiny_federation([part], lr=0.02, momentum=0.0, weights="samples")
    fed.round()
    gains = []
    for _ in range(3):
        model, old = tree.clone(fed.model), fed.shared["anchors"]["anchor"].clone()
        fed.round()
        new = fed.shared["anchors"]["anchor"]
        rows = torch.cat([fed.samples.rows[i].train for i in (0, 1, 3)])
        h, y = eval_features(fed, model, rows), fed.samples.y[rows]
        before, after = (float((h - a[y]).square().sum(1).mean()) for a in (old, new))
        gains.append(before - after)
    assert min(gains) >= -1e-6
    assert max(gains) > 1e-4


# ---- the launch round ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("start", [0, 1, 2])
def test_exactly_t_s_rounds_are_plain(start: int) -> None:
    part = Anchors(start=start, weight=5.0)
    plain, matched = tiny_federation(), tiny_federation([part])
    for number in range(1, 4):
        plain.round()
        matched.round()
        assert bool(differences(plain, matched, only=in_model)) == (number > start)


def test_anchors_are_made_before_the_launch_too() -> None:
    fed = run_tiny([Anchors(start=9)], rounds=1)
    assert fed.shared["anchors"]["seen"].all()


# ---- FedFM-Lite ----------------------------------------------------------------------------------------------------

def test_lite_anchors_come_from_the_trained_models(open_round: Any) -> None:
    """One handshake: after round one the anchors are the class means of the clients' own trained models."""
    fed = tiny_federation([Anchors(start=0, lite=True, weight=2.0)])
    trained = {}
    for number in (0, 1, 3):
        probe = open_round(Anchors(start=0, lite=True, weight=2.0), number=number, momentum=0.9, weight_decay=1e-3, lr=0.05)
        probe.rest()
        trained[number] = probe.finish().model
    old = fed.shared["anchors"]["anchor"].clone()
    fed.round()
    want = hand_anchors(fed, trained, "weighted", old)
    torch.testing.assert_close(fed.shared["anchors"]["anchor"], want, rtol=1e-4, atol=1e-5)


def test_lite_first_round_is_plain_because_there_are_no_anchors_yet() -> None:
    assert not differences(run_tiny(rounds=1), run_tiny([Anchors(start=0, lite=True)], rounds=1), only=in_model)
    assert differences(run_tiny(rounds=2), run_tiny([Anchors(start=0, lite=True)], rounds=2), only=in_model)


@pytest.mark.parametrize(("settings", "travels"), [
    ({"every": 1}, [1, 2, 3, 4, 5, 6, 7]), ({"every": 3}, [3, 6]),
    ({"every": 3, "start": 2}, [1, 2, 5]), ({"every": 3, "start": 2, "warm_exchange": False}, [3, 6])])
def test_lite_models_travel_every_a_rounds(settings: dict[str, Any], travels: list[int]) -> None:
    fed = tiny_federation([Anchors(lite=True, **({"start": 0} | settings))])
    seen = []
    for number in range(1, 8):
        model, anchor = tree.clone(fed.model), fed.shared["anchors"]["anchor"].clone()
        report = fed.round()
        moved = any(not torch.equal(a, b) for a, b in zip(tree.leaves(model), tree.leaves(fed.model)))
        assert moved == report.exchanged
        assert not torch.equal(anchor, fed.shared["anchors"]["anchor"])               # anchors travel always
        if moved:
            seen.append(number)
    assert seen == travels


@pytest.mark.parametrize(("settings", "said"), [
    ({"every": 5}, "every and warm_exchange say nothing"), ({"warm_exchange": False}, "every and warm_exchange say nothing"),
    ({"lite": True, "clients": "previous"}, "clients=previous says nothing")])
def test_settings_that_would_do_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    """Without lite models travelled in all rounds, every=5 or not; with it nobody is surveyed, so that no clients' samples are chosen."""
    with pytest.raises(ConfigError, match=said):
        tiny_federation([Anchors(**settings)])


def test_lite_clients_go_on_from_their_own_models(open_round: Any) -> None:
    """every=2: round 2 starts from the client's own model of round 1, round 3 from the server's; a client new in round 2 too."""
    fed = tiny_federation([Anchors(start=0, lite=True, every=2)])
    initial = tree.clone(fed.model)
    fed.round([0, 1])
    own = fed.client(0).tensors["own"]
    assert not torch.equal(own["params"]["head.weight"], initial["params"]["head.weight"])
    received = fed.received(fed.client(0))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(received), tree.leaves(own)))
    fresh = fed.received(fed.client(3))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(fresh), tree.leaves(initial)))
    fed.round([0, 3])
    for number in (0, 1, 3):
        again = fed.received(fed.client(number))
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(fed.model)))


def test_lite_round_without_exchange_sends_anchors_only() -> None:
    """Up in round 1: 3 clients × (3·12 sums + 3 counts) floats and no model; in round 2 the moving model besides."""
    fed = tiny_federation([Anchors(start=0, lite=True, every=2)])
    first, second = fed.round(), fed.round()
    anchors = 3 * (3 * 12 + 3) * 4
    assert first.bytes_up == anchors
    model = tree.count_bytes(fed.model)
    assert second.bytes_up == anchors + 3 * model


# ---- whose samples make the anchors --------------------------------------------------------------------------------

def _class_means(fed: Any, ids: list[int]) -> torch.Tensor:
    """Mean feature of every class over the training samples of some clients, with the global model as it stands."""
    rows = torch.cat([fed.samples.rows[i].train for i in ids])
    x, y = fed.samples.inputs(rows)
    features = fed.look(0, fed.client(0), fed.model, x, False, False).before[fed.spec.features]
    return torch.stack([features[y == c].mean(0) if bool((y == c).any()) else torch.full((features.shape[1],), math.nan)
                        for c in range(fed.spec.classes)])


def test_anchors_of_the_clients_of_the_round_before() -> None:
    """The release: after a round its own clients make the anchors of the next one, with the model that round gave."""
    fed = tiny_federation([Anchors(start=0, weight=2.0, clients="previous")], participation=0.5, seed=5)
    fed.round()
    assert not bool(fed.shared["anchors"]["seen"].any())                        # before the first round nobody had trained
    for _ in range(3):
        asked = [i for i in fed.cohort(fed.round_number) if fed.samples.schedule(i, fed.phases)]
        means = _class_means(fed, asked)
        fed.round()
        known = ~means.isnan().any(1)
        torch.testing.assert_close(fed.shared["anchors"]["anchor"][known], means[known])
    assert any(set(fed.cohort(n)) != set(fed.cohort(n + 1)) for n in (1, 2, 3))


def test_they_are_those_that_trained_whoever_was_drawn() -> None:
    """A round with clients that were named, as in a federation whose sites come and go; also after a restart."""
    part = Anchors(start=0, weight=2.0, clients="previous")
    fed, again = (tiny_federation([part], participation=0.5, seed=5) for _ in range(2))
    drawn = fed.cohort(1)
    named = [i for i in range(len(fed.samples)) if i not in drawn and fed.samples.schedule(i, fed.phases)]
    assert named
    fed.round(named)
    assert fed.took_part == named
    restore(again, *snapshot(fed))
    means = _class_means(fed, named)
    known = ~means.isnan().any(1)
    for f in (fed, again):
        f.round()
        torch.testing.assert_close(f.shared["anchors"]["anchor"][known], means[known])


def test_with_all_clients_in_every_round_both_readings_are_one_from_the_second_round_on() -> None:
    current, previous = (run_tiny([Anchors(start=1, weight=2.0, clients=c)], rounds=3) for c in ("current", "previous"))
    assert differences(current, previous, in_model) == []


def test_a_survey_in_joined_batches_counts_the_same_and_leaves_the_model_alone():
    fed = tiny_federation([Anchors(start=0)], eval_batch=3)
    ask = lambda: consult(fed, 0, ("anchors", "survey", [0]), None)
    before = tree.clone(fed.model)
    one_by_one = ask()
    fed.samples.several = 4
    joined = ask()
    assert torch.equal(joined["count"], one_by_one["count"])
    assert float(joined["count"].sum()) == fed.samples.size_of(0)
    torch.testing.assert_close(joined["sum"], one_by_one["sum"], rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(fed.model)))


def doubled(x: torch.Tensor, y: torch.Tensor, key: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Training shows every sample twice as bright, give or take a draw; evaluation shows it as it is."""
    return (x.float() if key is None else x.float() * 2 + 0.1 * rng.normal(key, x.shape)), y


def test_anchors_can_be_of_augmented_samples() -> None:
    """augmented=true is the release: the sums are those of the received model's features of what the training transform makes of them."""
    plain = tiny_population((9,))
    population = Population(plain.x, plain.y, plain.rows, plain.classes, doubled)
    seen = {}
    for augmented in (False, True):
        fed = tiny_federation([Anchors(start=0, augmented=augmented)], population=population, eval_batch=4)
        seen[augmented] = consult(fed, 0, ("anchors", "survey", [0]), None)["sum"]
        assert torch.equal(consult(fed, 0, ("anchors", "survey", [0]), None)["sum"], seen[augmented])        # keyed
        key = rng.key(rng.key(rng.key(fed.policy.seed, "anchors", "survey", fed.round_number), 0), "augment")
        want = torch.zeros_like(seen[augmented])
        for start in (0, 4, 8):                     # the batches of evaluation, each by a key of its own
            rows = slice(start, start + 4)
            x, y = doubled(plain.x[rows], plain.y[rows], rng.fold(key, start) if augmented else None)
            want.index_add_(0, y, fed.program.network.forward(fed.model, x).before[fed.spec.features])
        torch.testing.assert_close(seen[augmented], want, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(seen[False], seen[True], rtol=0.01)
