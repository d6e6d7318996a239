"""GroupDRO: clients' weights by hand."""

from __future__ import annotations

import math

import pytest
from quadratic import scalars, weight

from consilience.parts.ditto import Ditto
from consilience.parts.dro import Dro
from consilience.testing import differences, in_model, run_tiny, tiny_federation


def test_weights_by_hand():
    # a = (1, 2), one step, η = 0.1, start 0. Losses ½a²: 0.5 and 2. With η_q = 1: q = (e^0.5, e²).
    # w_i = (0.1, 0.2), w = (e^0.5·0.1 + e²·0.2)/(e^0.5 + e²).
    fed = scalars([Dro(eta=1.0)], [1.0, 2.0], [1, 1])
    fed.round()
    q = [math.exp(0.5), math.exp(2.0)]
    w = (q[0] * 0.1 + q[1] * 0.2) / sum(q)
    assert weight(fed) == pytest.approx(w, abs=1e-6)
    assert fed.server["dro"]["q"].tolist() == pytest.approx(q, rel=1e-5)


def test_weights_stay_with_the_clients_number():
    fed = scalars([Dro(eta=0.5)], [1.0, 2.0, 4.0], [1, 1, 1])
    q, w = [1.0, 1.0, 1.0], 0.0
    for cohort in ([0, 2], [1], [1, 2]):
        for i in cohort:
            q[i] *= math.exp(0.5 * 0.5 * (w - (1.0, 2.0, 4.0)[i]) ** 2)
        ends = {i: w + 0.1 * ((1.0, 2.0, 4.0)[i] - w) for i in cohort}
        w = sum(q[i] * ends[i] for i in cohort) / sum(q[i] for i in cohort)
        fed.round(cohort)
        assert weight(fed) == pytest.approx(w, abs=1e-5)
        assert fed.server["dro"]["q"].tolist() == pytest.approx(q, rel=1e-4)


@pytest.mark.parametrize(("loss_of", "loss"), [("round", (0.5 + 0.405) / 2), ("first", 0.5)])
def test_which_loss(loss_of, loss):
    # two steps at a = 1: losses ½·1² and ½·0.9²
    fed = scalars([Dro(eta=1.0, loss_of=loss_of)], [1.0], [2])
    fed.round()
    assert fed.server["dro"]["q"].item() == pytest.approx(math.exp(loss), rel=1e-5)


def test_the_loss_is_that_of_the_uploaded_model():
    # Ditto trains a second model beside it, whose losses are its own affair
    alone, beside = run_tiny([Dro(eta=1.0)], rounds=1), run_tiny([Dro(eta=1.0), Ditto()], rounds=1)
    assert alone.server["dro"]["q"].equal(beside.server["dro"]["q"])


def test_statistics_keep_the_runs_weights():
    a, b = run_tiny([Dro(eta=5.0)], rounds=1), run_tiny(rounds=1)
    assert all(a.model["buffers"][k].equal(v) for k, v in b.model["buffers"].items())


def test_many_rounds_do_not_overflow():
    # a = (1, 3), η_q = 3, start 0: losses ½(w − a)², ln q grows by 3 times that. The loop keeps ln q; it passes 88, where float32 ends,
    # while the clients' difference, which alone counts, stays small.
    fed = scalars([Dro(eta=3.0)], [1.0, 3.0], [1, 1])
    w, log_q = 0.0, [0.0, 0.0]
    for _ in range(80):
        log_q = [known + 3 * 0.5 * (w - a) ** 2 for known, a in zip(log_q, (1.0, 3.0))]
        share = 1 / (1 + math.exp(log_q[0] - log_q[1]))                       # of client 1
        w = w + 0.1 * ((1 - share) * (1 - w) + share * (3 - w))
        fed.round()
        assert weight(fed) == pytest.approx(w, abs=1e-4)
        mine = fed.server["dro"]["q"].double().log()
        assert (mine[1] - mine[0]).item() == pytest.approx(log_q[1] - log_q[0], abs=1e-3)
    assert min(log_q) > 89


def test_weights_of_the_run_stay_where_losses_move_none():
    # sizes differ, so that weights by samples are not uniform ones
    still, plain = (run_tiny(parts, weights="samples") for parts in ([Dro(eta=0.0)], []))
    assert not differences(still, plain, only=in_model)
    assert not Dro(eta=0.0).uploads
    assert tiny_federation([Dro(eta=0.0)], weights="auto").policy.weights == "samples"
    assert tiny_federation([Dro()], weights="auto").policy.weights == "uniform"
