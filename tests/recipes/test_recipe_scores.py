"""Scoring protocols on records made by hand."""

from __future__ import annotations

import pytest

from consilience.errors import ConfigError
from consilience.recipes.format import Score
from consilience.recipes.score import value_in, value_of


def record(number, pooled, mean, worst=0.0, own=None, test=None, validation=None, loss=1.0):
    """`pooled`, `mean` of the global model; `own` the pooled accuracy of the clients' models where they are others."""
    whole = {"accuracy": pooled, "mean": mean, "worst": worst, "loss": loss, "test": test}
    mine = whole if own is None else {"accuracy": own, "mean": own - 0.01, "worst": 0.05, "loss": loss, "test": None}
    judged = None if validation is None else {"accuracy": validation[0], "mean": validation[1], "worst": 0.0, "loss": 1.0}
    return {"round": number, "global": whole, "personalised": mine, "validation": judged, "measured": {"seconds": 2.0}}


PREPARATION = {"round": 0, "global": None, "personalised": None, "validation": None, "measured": {"seconds": 10.0}}
UNSCORED = {"round": 4, "global": None, "personalised": None, "validation": None, "measured": {"seconds": 2.0}}
RECORDS = [PREPARATION, record(1, 0.50, 0.40, test=0.45, validation=(0.60, 0.52), loss=0.9),
           record(2, 0.80, 0.60, test=0.70, validation=(0.55, 0.54), loss=0.5),
           record(3, 0.80, 0.70, test=0.66, validation=(0.50, 0.50), loss=0.6), UNSCORED,
           record(5, 0.60, 0.65, worst=0.1, test=0.68, validation=(0.40, 0.40), loss=0.7)]


def test_dbe_personalised_pooled_best_round():
    records = [PREPARATION, record(1, 0.5, 0.4, own=0.90), record(2, 0.9, 0.9, own=0.97), record(3, 0.6, 0.6, own=0.95)]
    assert value_of(Score(model="own", samples="clients", average="pooled", select="best"), records) == 0.97


def test_dbe_fedavg_family_global_model_on_clients_rows():
    assert value_of(Score(model="own", samples="clients", average="pooled", select="best"), RECORDS) == 0.80
    assert value_of(Score(model="global", samples="clients", average="pooled", select="best"), RECORDS) == 0.80


def test_a_method_without_global_model_has_only_its_own():
    alone = [{**record(1, 0.5, 0.4, own=0.9), "global": None}]
    assert value_of(Score(model="own"), alone) == 0.9
    assert value_of(Score(model="global"), alone) is None


def test_fedfm_global_test_at_the_best_validation_round():
    # mean over clients is best in round 2 (0.54), pooled in round 1 (0.60); test accuracies there are 0.70 and 0.45
    assert value_of(Score(model="global", samples="test", select="validation"), RECORDS) == 0.70
    assert value_of(Score(model="global", samples="test", select="validation", judge="pooled"), RECORDS) == 0.45


def test_fedfa_mean_over_sites_at_the_best_validation_round():
    assert value_of(Score(model="global", average="clients", select="validation"), RECORDS) == 0.60


def test_fedbr_mean_over_clients_mean_of_best_five():
    means = [0.1, 0.7, 0.3, 0.5, 0.6, 0.4, 0.2]
    records = [record(2 * i, 0.9, m) for i, m in enumerate(means, 1)]
    # the five highest of the client means: 0.7 + 0.6 + 0.5 + 0.4 + 0.3 = 2.5, over five
    assert value_of(Score(model="global", average="clients", select="best5"), records) == pytest.approx(0.5)
    # with fewer than five rounds, all of them: (0.1 + 0.7 + 0.3) / 3
    assert value_of(Score(model="global", average="clients", select="best5"), records[:3]) == pytest.approx(1.1 / 3)


def test_fedbr_rounds_to_a_threshold():
    records = [record(2 * i, 0.9, m) for i, m in enumerate([0.5, 0.79, 0.80, 0.7], 1)]
    assert value_of(Score(model="global", average="clients", reach=0.8), records) == 6
    assert value_of(Score(model="global", average="clients", reach=0.81), records) is None


def test_lfd_global_test_last_round_and_best():
    assert value_of(Score(model="global", samples="test", select="last"), RECORDS) == 0.68
    assert value_of(Score(model="global", samples="test", select="best"), RECORDS) == 0.70


def test_a_numbered_round_worst_client_and_lowest_loss():
    assert value_of(Score(model="global", samples="test", select=3), RECORDS) == 0.66
    assert value_of(Score(model="global", select=4), RECORDS) is None                       # not scored
    assert value_of(Score(model="global", average="worst"), RECORDS) == 0.1
    assert value_of(Score(model="global", what="loss", select="best"), RECORDS) == 0.5      # lowest, not highest


@pytest.mark.parametrize("how", [{"average": "clients"}, {"average": "worst"}, {"client": "a"}])
def test_losses_are_recorded_pooled_alone(how):
    """A pooled loss used to be given out as the mean over clients."""
    with pytest.raises(ConfigError, match="losses pooled over samples alone"):
        Score(what="loss", **how)


def test_rounds_and_seconds():
    # the best pooled accuracy, 0.80, stands in rounds 2 and 3: the earlier counts
    assert value_of(Score(select="best", report="round"), RECORDS) == 2
    # seconds up to round 2: preparation 10, then 2 + 2
    assert value_of(Score(select="best", report="seconds"), RECORDS) == 14.0
    # minutes per round over the five rounds of training: 5 · 2 s / 5 / 60
    assert value_of(Score(select="best", report="seconds_per_round", factor=1 / 60), RECORDS) == pytest.approx(2 / 60)


def test_bytes_that_clients_sent():
    sent = [{**r, "bytes_up": b} for r, b in zip(RECORDS, (5, 100, 100, 20, 100, 100))]
    # up to round 2, the best: preparation 5, then 100 + 100
    assert value_of(Score(select="best", report="bytes_up"), sent) == 205
    # of the whole run, rounds without a score among them, in 32-bit numbers: (5 + 100 + 100 + 20 + 100 + 100) / 4
    assert value_of(Score(select="last", report="bytes_up", factor=0.25), sent) == 425 / 4


def test_no_records_no_value():
    assert value_of(Score(), []) is None
    assert value_of(Score(select="validation"), [record(1, 0.5, 0.5)]) is None


def test_value_in_a_measure():
    result = {"right_endpoint": {"bits": 12.5}, "absent": {"lp": None}, "scored": "text"}
    assert value_in(result, "right_endpoint.bits", "mdl") == 12.5
    assert value_in(result, "absent.lp", "forgetting") is None
    with pytest.raises(ConfigError, match="'nats' is not in its result"):
        value_in(result, "right_endpoint.nats", "mdl")
    with pytest.raises(ConfigError, match="not a number"):
        value_in(result, "scored", "mdl")


def test_protocols_in_words():
    assert "global test set" in Score(model="global", samples="test", select="validation").sentence()
    assert "mean over clients" in Score(average="clients", select="best5").sentence()
    assert "five best rounds" in Score(average="clients", select="best5").sentence()
    assert "at or above 0.8" in Score(reach=0.8).sentence()


def site_record(number, scores, dice, held_out=None):
    """Sites a and b by accuracy and by Dice."""
    part = {"accuracy": 0.5, "mean": sum(scores) / 2, "worst": min(scores), "loss": 1.0, "test": None, "dice": 0.123,
            "per_client": dict(zip("ab", scores)), "by_client": {"dice": dict(zip("ab", dice))}}
    return {"round": number, "global": part, "personalised": part, "validation": {"accuracy": 0.1 * number, "mean": 0.1 * number},
            "held_out": held_out, "measured": {"seconds": 1.0}}


def test_one_client_alone():
    records = [site_record(1, (0.9, 0.2), (0.8, 0.4)), site_record(2, (0.5, 0.6), (0.7, 0.5))]
    assert value_of(Score(client="b", select="best"), records) == 0.6
    assert value_of(Score(client="a", select="validation"), records) == 0.5            # validation is best in round 2
    assert value_of(Score(client="a", what="dice", select="best"), records) == 0.8
    assert value_of(Score(client="nobody", select="best"), records) is None
    with pytest.raises(ConfigError, match="belongs to none"):
        Score(client="a", samples="test")


def test_dice_over_sites():
    records = [site_record(1, (0.9, 0.2), (0.8, 0.4))]
    assert value_of(Score(what="dice", average="pooled"), records) == 0.123
    assert value_of(Score(what="dice", average="clients"), records) == pytest.approx(0.6)         # (0.8 + 0.4) / 2
    assert value_of(Score(what="dice", average="worst"), records) == 0.4


def test_clients_that_take_no_part():
    held = {"accuracy": 0.31, "mean": 0.3, "worst": 0.1, "loss": 2.0, "per_client": {"c": 0.33}}
    records = [site_record(1, (0.9, 0.2), (0.8, 0.4), held), site_record(2, (0.5, 0.6), (0.7, 0.5))]
    assert value_of(Score(samples="held_out", average="clients", select="best"), records) == 0.3
    assert value_of(Score(samples="held_out", client="c", select="best"), records) == 0.33


def test_a_threshold_is_a_number_or_another_row_s():
    with pytest.raises(ConfigError, match="both 'reach' and 'reach_row'"):
        Score(reach=0.5, reach_row="fedavg")
    # 0.1 + 0.2 is a hair above 0.3 in binary; reached all the same
    records = [site_record(n, (0.1 * n, 0.1 * n), (0.0, 0.0)) for n in range(1, 5)]
    assert value_of(Score(client="a", reach=0.1 + 0.2), records) == 3
