"""Who takes part: fractions and counts, keyed draws, lost and idle clients, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from core_parts import Highest

from consilience import tree
from consilience.core.method import Method
from consilience.core.part import Part
from consilience.core.snapshot import restore, snapshot
from consilience.errors import ConfigError, RefusedCombination
from consilience.parts.dp import Dp
from consilience.parts.dyn import Dyn
from consilience.parts.mixup import Mixup
from consilience.parts.scaffold import Scaffold
from consilience.testing import differences, run_tiny, state_of, tiny_federation

TEN = (8,) * 10


def cohorts(rounds=8, parts=(), **policy):
    fed = tiny_federation(parts, sizes=TEN, **policy)
    return [fed.cohort(r) for r in range(1, rounds + 1)]


@pytest.mark.parametrize(("participation", "size"), [(1.0, 10), (0.3, 3), (0.01, 1), (0.25, 2), (4, 4), (10, 10)])
def test_size_of_a_cohort(participation, size):
    for cohort in cohorts(participation=participation):
        assert len(cohort) == len(set(cohort)) == size
        assert cohort == sorted(cohort)
        assert set(cohort) <= set(range(10))


def test_draws_are_keyed_by_seed_and_round_alone():
    drawn = cohorts(participation=0.3)
    assert drawn == cohorts(participation=0.3)
    assert drawn == cohorts(participation=0.3, parts=[Scaffold(), Mixup()])          # the method has no say
    assert drawn == cohorts(participation=0.3, lr=0.5, epochs=1)
    assert drawn != cohorts(participation=0.3, seed=1)
    assert len({tuple(c) for c in drawn}) > 1


def test_every_client_has_the_same_chance():
    # 400 rounds of 3 in 10: each client is expected in 120, standard deviation √(400·0.3·0.7) ≈ 9.2
    counts = torch.zeros(10)
    for cohort in cohorts(400, participation=3):
        counts[cohort] += 1
    assert counts.sum() == 1200
    assert (counts - 120).abs().max() < 5 * 9.2


def test_a_round_uses_the_drawn_cohort():
    fed = tiny_federation(sizes=TEN, participation=0.3)
    assert fed.round().cohort == tiny_federation(sizes=TEN, participation=0.3).cohort(1)
    assert [i for i, _ in fed.clients.visited()] == fed.cohort(1)


def test_absent_clients_keep_their_state():
    fed = run_tiny([Scaffold()], rounds=1)
    before = fed.client(0)
    fed.round([1, 3])
    assert fed.client(0) is before


@pytest.mark.parametrize("cohort", [[0, 0, 1], [0, 4], [-1]])
def test_a_round_is_of_clients_that_exist_and_of_each_once(cohort):
    fed = tiny_federation()
    with pytest.raises(ConfigError, match="different numbers from 0 to 3"):
        fed.round(cohort)
    assert fed.round_number == 0


@dataclass(frozen=True)
class Delivers(Part):
    name = "delivers"

    def deliver(self, s, client):
        return {"n": torch.tensor(float(client))}


def test_what_a_part_sees_when_it_delivers_is_made_once_a_round():
    """It holds a weight for every client of the round: made for each of them, the work would grow with their square."""
    fed, made = tiny_federation([Delivers()]), []
    serve = fed.serve
    fed.serve = lambda part, stage, ids, **more: made.append(stage) or serve(part, stage, ids, **more)
    fed.round()
    assert made == ["deliver"]


def test_too_many_clients_are_refused_when_the_federation_is_made():
    with pytest.raises(ConfigError, match="asks for 11 clients a round, but there are 10"):
        tiny_federation(sizes=TEN, participation=11)


# ---- lost clients ----------------------------------------------------------------------------------------------------

def test_lost_clients_neither_upload_nor_change_state():
    fed = tiny_federation([Scaffold()], sizes=TEN, dropout=0.4)
    fed.round()
    before = {i: fed.client(i) for i in range(10)}
    report = fed.round()
    assert 0 < len(report.lost) < 10
    assert set(report.losses) == set(range(10)) - set(report.lost)
    for i in report.lost:
        now = fed.client(i)
        assert now.first == before[i].first
        assert now.tensors is before[i].tensors


def test_the_average_is_over_those_who_uploaded():
    fed = tiny_federation([Dyn()], sizes=TEN, dropout=0.4)
    report = fed.round()
    arrived = sorted(set(range(10)) - set(report.lost))
    same = tiny_federation([Dyn()], sizes=TEN)
    same.round(arrived)
    assert all(torch.equal(same.model["params"][k], p) for k, p in fed.model["params"].items())
    assert torch.equal(same.server["dyn"]["h"]["head.weight"], fed.server["dyn"]["h"]["head.weight"])


def test_bytes_of_lost_clients():
    # The model went down to everybody; it came up only from those who arrived.
    fed = tiny_federation(sizes=TEN, dropout=0.4)
    model = tree.count_bytes(fed.model)
    report = fed.round()
    assert report.bytes_down == 10 * model
    assert report.bytes_up == (10 - len(report.lost)) * model


def test_how_often_clients_are_lost():
    # 40 rounds × 10 clients at 0.25: 100 expected, standard deviation 8.7
    fed = tiny_federation(sizes=TEN, dropout=0.25)
    total = 0
    for fed.round_number in range(1, 41):
        total += sum(fed.fails(i) for i in range(10))
    assert abs(total - 100) < 5 * 8.7


def test_a_round_in_which_all_are_lost_changes_nothing():
    fed = tiny_federation(sizes=(8, 8), dropout=0.999)
    before = state_of(fed)
    report = fed.round()
    assert report.lost == [0, 1]
    assert not report.exchanged
    assert fed.round_number == 1
    after = state_of(fed)
    assert all(torch.equal(after[k], before[k]) for k in before)
    # they had received the model before they failed, as those have who are lost beside others
    assert report.bytes_down == 2 * tree.count_bytes(fed.model)
    assert fed.client(0).seen >= 0


@dataclass(frozen=True)
class TellsOnce(Part):
    name = "tells"
    reduce = {"told": "sum"}

    def finish(self, c):
        return c.kept, {"told": torch.ones(1)} if c.id else {}


def test_uploads_that_only_some_clients_have_are_refused():
    """They used to be passed over where the first client had none."""
    with pytest.raises(ConfigError, match="'tells' uploads nothing from one client and told from another"):
        tiny_federation([TellsOnce()]).round()


# ---- idle clients ----------------------------------------------------------------------------------------------------

def test_a_client_without_a_step_has_no_weight_and_no_state():
    fed = tiny_federation([Scaffold()])
    report = fed.round()
    assert report.idle == [2]
    assert fed.client(2).first
    assert 2 not in report.losses
    without = tiny_federation([Scaffold()])
    without.round([0, 1, 3])
    assert all(torch.equal(without.model["params"][k], p) for k, p in fed.model["params"].items())


def test_a_round_of_idle_clients_changes_nothing():
    fed = tiny_federation()
    before = fed.model
    report = fed.round([2])
    assert fed.model is before
    assert (report.idle, report.exchanged, report.bytes_up, report.bytes_down, report.losses) == ([2], False, 0, 0, {})


# ---- weights ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class LikesSamples(Part):
    name = "likes"
    prefers = {"weights": "samples"}


def test_weights_by_policy():
    assert tiny_federation(weights="samples").shares([0, 3]).tolist() == pytest.approx([24 / 64, 40 / 64])
    assert tiny_federation(weights="uniform").shares([0, 1, 3]).tolist() == pytest.approx([1 / 3] * 3)
    assert tiny_federation(weights="auto").policy.weights == "samples"
    assert tiny_federation([Scaffold()], weights="auto").policy.weights == "uniform"
    assert tiny_federation([Scaffold(), Dyn()], weights="auto").policy.weights == "uniform"


def test_parts_that_prefer_different_weights_need_a_word_from_the_run():
    with pytest.raises(ConfigError, match=r"likes.*Set weights explicitly"):
        tiny_federation([Scaffold(), LikesSamples()], weights="auto")
    assert tiny_federation([Scaffold(), LikesSamples()], weights="uniform").policy.weights == "uniform"


# ---- parts that choose -----------------------------------------------------------------------------------------------

def test_a_part_chooses_by_what_the_server_has_learnt():
    """Two a round: everyone once, by number, then those whose losses were highest. Client 2 has 5 samples and makes no batch of 8: it is
    never asked for, and the run's own draw would have left it idle.
    """
    fed = tiny_federation([Highest()], sizes=(24, 17, 5, 40, 16, 30, 24), participation=2)
    reports = [fed.round() for _ in range(3)]
    assert [r.cohort for r in reports] == [[0, 1], [3, 4], [5, 6]]
    losses = {i: loss for r in reports for i, loss in r.losses.items()}
    assert fed.round().cohort == sorted(sorted(losses, key=lambda i: -losses[i])[:2])


def test_a_part_that_takes_the_draw_changes_no_bit():
    plain, same = (run_tiny(parts, sizes=TEN, participation=0.3, rounds=3) for parts in ([], [Highest(on=False)]))
    assert not differences(plain, same, lambda path: not path.startswith("server"))
    assert plain.took_part == same.took_part


def test_where_all_take_part_nobody_is_asked():
    fed = tiny_federation([choosing(lambda s, drawn: 1 / 0)])
    assert fed.round().cohort == [0, 1, 2, 3]


def test_a_choice_is_the_same_after_a_checkpoint_and_on_a_round_made_again():
    whole = run_tiny([Highest()], sizes=TEN, participation=3, rounds=5)
    first, second = run_tiny([Highest()], sizes=TEN, participation=3, rounds=3), tiny_federation([Highest()], sizes=TEN, participation=3)
    restore(second, *snapshot(first))
    assert second.cohort(4) == second.cohort(4) == first.cohort(4)
    for _ in range(2):
        second.round()
    assert not differences(whole, second)
    assert whole.took_part == second.took_part


def choosing(choose):
    return dataclass(frozen=True)(type("Mine", (Part,), {"name": "mine", "choose": lambda self, s, drawn: choose(s, drawn)}))()


def test_what_a_part_sees_when_it_chooses():
    seen = []
    fed = tiny_federation([choosing(lambda s, drawn: seen.append(s) or drawn)], sizes=TEN, participation=3, weights="uniform")
    fed.round()
    fed.round()
    assert [s.round for s in seen] == [1, 2]
    assert [s.stage for s in seen] == ["choose", "choose"]
    assert seen[0].ids == [i for i, n in enumerate(TEN) if n >= 8]                     # enough for a batch
    assert seen[0].p.tolist() == pytest.approx([1 / len(seen[0].ids)] * len(seen[0].ids))
    assert int(seen[0].key) != int(seen[1].key)


@pytest.mark.parametrize(("choose", "said"), [
    (lambda s, drawn: None, r"'choose' of part 'mine' must return the numbers of up to 3 clients, as a list .*Got NoneType instead. Is a"),
    (lambda s, drawn: [0, 1.0], r"must return the numbers of up to 3 clients, as a list .*Got float in it instead"),
    (lambda s, drawn: [*torch.tensor([0, 1])], r"of whole numbers \(of a tensor, its .tolist\(\)\)\. Got a tensor of shape \(\) in it"),
    (lambda s, drawn: [True, False], r"Got bool in it instead"),
    (lambda s, drawn: s.p, r"must return the numbers of up to 3 clients, as a list .*Got a tensor of shape \(6,\) instead"),
    (lambda s, drawn: [], r"must return different clients of s.ids, 1 to 3 of them, as the run has .*: there are none of them\."),
    (lambda s, drawn: [0, 1, 2, 3], r"there are 4 of them"),
    (lambda s, drawn: [0, 0, 99], r"99 is none of s.ids; 0 stands there more than once\."),
])
def test_a_wrong_choice_is_refused(choose, said):
    fed = tiny_federation([choosing(choose)], sizes=(24,) * 6, participation=3)
    with pytest.raises(ConfigError, match=said):
        fed.round()
    assert fed.round_number == 0


def test_where_nobody_has_samples_enough_nobody_is_asked():
    """The sites that can be reached at the moment, say, are the small ones: they are idle, and it is not the part's fault."""
    fed = tiny_federation([choosing(lambda s, drawn: s.ids[:1])], sizes=(24, 5, 3, 4), participation=2)
    assert len(fed.cohort(1, [1, 2, 3])) == 2
    assert fed.cohort(1, [0, 1, 2]) == [0]


def test_fewer_and_a_tensor_will_do():
    fed = tiny_federation([choosing(lambda s, drawn: torch.tensor([4, 1]))], sizes=(24,) * 6, participation=3)
    assert fed.round().cohort == [1, 4]


def test_two_parts_cannot_both_choose_nor_one_beside_noise_that_counts_on_chance():
    with pytest.raises(RefusedCombination, match="both define `choose`"):
        Method([Highest(), choosing(lambda s, drawn: drawn)])
    mine = choosing(lambda s, drawn: drawn)
    with pytest.raises(RefusedCombination, match="dp with place=client counts on clients that are drawn by chance, and mine chooses them"):
        Method([Dp(), mine])
    Method([Dp(place="local"), mine])
