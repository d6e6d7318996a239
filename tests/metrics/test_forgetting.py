"""LP over present and absent classes, with the guard for classes the global model never gets right."""

from __future__ import annotations

import pytest

from consilience.metrics.forgetting import local_preservation


def test_present_and_absent_with_a_class_of_zero_accuracy():
    # present {0, 1}: 1.0/.8 = 1.25 and .5/.5 = 1 → 1.125. Absent {2, 3, 4}: .1/.4 = .25; class 3 has no ratio (x/0); class 4 untested
    before, after = [0.8, 0.5, 0.4, 0.0, None], [1.0, 0.5, 0.1, 0.3, None]
    got = local_preservation(before, after, {0, 1})
    assert got["present"] == {"lp": pytest.approx(1.125), "classes": 2, "skipped_zero": 0, "untested": 0}
    assert got["absent"] == {"lp": pytest.approx(0.25), "classes": 1, "skipped_zero": 1, "untested": 1}


def test_nothing_forgotten_is_one_and_nothing_known_is_none():
    same = [0.3, 0.9]
    assert local_preservation(same, same, {0})["present"]["lp"] == pytest.approx(1.0)
    assert local_preservation(same, same, {0, 1})["absent"] == {"lp": None, "classes": 0, "skipped_zero": 0, "untested": 0}
    assert local_preservation([0.0, 0.0], [1.0, 1.0], {0})["present"] == {"lp": None, "classes": 0, "skipped_zero": 1, "untested": 0}
