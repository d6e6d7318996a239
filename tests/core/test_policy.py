"""A run's choices: their ranges, schedules by hand, and the length of a path with momentum."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.policy import Policy, Schedule
from consilience.errors import ConfigError
from consilience.options import build


@pytest.mark.parametrize(("values", "message"), [
    ({"lr": 0.0}, "'lr' option of the run must be above 0"),
    ({"lr": -1.0}, "'lr'"),
    ({"lr": math.inf}, "'lr'"),
    ({"lr": math.nan}, "'lr'"),
    ({"lr": "fast"}, "'lr' option of the run must be a number"),
    ({"momentum": 1.0}, "'momentum' .*at least 0.0 and below 1.0"),
    ({"momentum": -0.1}, "'momentum'"),
    ({"weight_decay": -1e-3}, "'weight_decay'"),
    ({"batch": 0}, "'batch' .*at least 1"),
    ({"batch": 2.5}, "'batch' .*whole number"),
    ({"batch": True}, "'batch' .*whole number"),
    ({"epochs": 0}, "'epochs'"),
    ({"steps": 0}, "'steps'"),
    ({"participation": 0}, "'participation' .*above 0"),
    ({"participation": 2.5}, "a fraction up to 1, or a whole number"),
    ({"dropout": 1.0}, "'dropout' .*below 1"),
    ({"seed": -1}, "'seed'"),
    ({"seed": 2**63}, "'seed'"),
    ({"optimiser": "sdg"}, "Did you mean 'sgd'"),
    ({"optimiser": "adam", "momentum": 0.9}, "belongs to SGD"),
    ({"batchnorm": "none"}, "one of all, params, local"),
    ({"sampling": "random"}, "shuffle, replacement"),
    ({"last_batch": "kept"}, "Did you mean 'keep'"),
    ({"weights": "equal"}, "auto, samples, uniform"),
    ({"optimiser_state": "keep"}, "reset, kept"),
    ({"schedule": "cosine"}, "one of the forms"),
    ({"schedule": "cosine(rounds=0)"}, "above 0"),
    ({"schedule": "step(every=2)"}, "one of the forms"),
    ({"schedule": "exponential(gamma=a)"}, "'gamma' must be a number"),
    ({"schedule": "exponential(gamma=nan)"}, "above 0"),
    ({"schedule": "exponential(gamma=inf)"}, "above 0"),
    ({"schedule": "step(every=2.7, gamma=0.1)"}, "'every' must be a whole number"),
    ({"schedule": "cosine(rounds=10.9)"}, "'rounds' must be a whole number"),
    ({"schedule": "step(every=true, gamma=0.1)"}, "'every' must be a whole number"),
    ({"schedule": "linear(rounds=3)"}, "one of the forms"),
    ({"schedule": "exponential(0.9)"}, "need names"),
    ({"schedule": "("}, "must be written name or name"),
])
def test_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Policy(**values)


def test_unknown_option():
    with pytest.raises(ConfigError, match=r"the run has no option 'learning_rate'"):
        build(Policy, {"learning_rate": 0.1}, "the run")
    with pytest.raises(ConfigError, match="Did you mean 'epochs'"):
        build(Policy, {"epoch": 1}, "the run")


def test_text_is_read_as_the_type_asks():
    policy = build(Policy, {"lr": "0.1", "batch": "32", "steps": "none", "participation": "0.5"}, "the run")
    assert (policy.lr, policy.batch, policy.steps, policy.participation) == (0.1, 32, None, 0.5)
    assert build(Policy, {"steps": "12"}, "the run").steps == 12


@pytest.mark.parametrize(("text", "factors"), [
    ("constant", {1: 1, 5: 1}),
    ("exponential(gamma=0.5)", {1: 1, 2: 0.5, 4: 0.125}),
    ("step(every=2, gamma=0.1)", {1: 1, 2: 1, 3: 0.1, 4: 0.1, 5: 0.01}),
    # cos 0, π/4, π/2, 3π/4: ½(1 + 1), ½(1 + √½), ½, ½(1 − √½); there it stays, for a rate of 0 divides SCAFFOLD by 0
    ("cosine(rounds=4)", {1: 1, 2: 0.5 * (1 + math.sqrt(0.5)), 3: 0.5, 4: 0.5 * (1 - math.sqrt(0.5)), 9: 0.5 * (1 - math.sqrt(0.5))}),
])
def test_schedules_by_hand(text, factors):
    policy = Policy(lr=0.2, schedule=text)
    for round_number, factor in factors.items():
        assert policy.lr_at(round_number) == pytest.approx(0.2 * factor, abs=1e-12)
    assert dataclasses.replace(policy, lr=0.4).lr_at(2) == pytest.approx(2 * policy.lr_at(2))


@given(st.integers(1, 500), st.sampled_from(["exponential(gamma=0.99)", "step(every=7, gamma=0.5)", "cosine(rounds=100)"]))
def test_schedules_never_rise(round_number, text):
    schedule = Schedule.parse(text)
    assert 0 <= schedule.factor(round_number + 1) <= schedule.factor(round_number) <= 1


def test_path_length_by_hand():
    # ρ = 0.9, K = 3: the buffers under a unit gradient are 1, 1.9, 2.71; sum 5.61. η = 0.5 halves it.
    assert Policy(momentum=0.9).path_length(3, 1.0) == pytest.approx(5.61)
    assert Policy(momentum=0.9).path_length(3, 0.5) == pytest.approx(2.805)
    assert Policy().path_length(7, 0.1) == pytest.approx(0.7)
    assert Policy(momentum=0.5).path_length(1, 1.0) == pytest.approx(1.0)


@given(st.floats(0, 0.99), st.integers(1, 60))
def test_path_length_is_the_sum_of_the_buffers(momentum, steps):
    buffer = total = 0.0
    for _ in range(steps):
        buffer = momentum * buffer + 1
        total += buffer
    assert Policy(momentum=momentum).path_length(steps, 1.0) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize(("participation", "population", "size"), [(1, 7, 7), (0.5, 7, 4), (0.1, 3, 1), (0.4, 5, 2), (2, 7, 2), (7, 7, 7)])
def test_cohort_size(participation, population, size):
    assert Policy(participation=participation).cohort_size(population) == size
