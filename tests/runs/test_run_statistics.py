"""Summaries over seeds, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from consilience.report.tables import FORMATS, Table
from consilience.runs.statistics import paired, spread

A, B = [0.81, 0.84, 0.79, 0.90, 0.86], [0.80, 0.79, 0.78, 0.83, 0.87]


def test_spread_is_mean_and_sample_deviation():
    got = spread(A)
    assert got.mean == pytest.approx(np.mean(A))
    assert got.std == pytest.approx(stats.tstd(A))
    assert spread([0.5]).std is None
    assert spread([None, 0.25, None, 0.75]).mean == 0.5
    assert spread([None]) is None


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_paired_difference_is_the_paired_t_test(level):
    got, theirs = paired(A, B, level), stats.ttest_rel(A, B)
    interval = theirs.confidence_interval(level)
    assert got.difference == pytest.approx(np.mean(np.subtract(A, B)))
    assert got.p_value == pytest.approx(theirs.pvalue)
    assert (got.low, got.high) == pytest.approx((interval.low, interval.high))
    assert got.n == 5


def test_paired_leaves_out_seeds_that_one_side_lacks():
    got, theirs = paired([*A, None, 0.3], [*B, 0.4, None]), stats.ttest_rel(A, B)
    assert got.p_value == pytest.approx(theirs.pvalue)
    assert paired([None], [0.1]) is None
    assert paired([0.5], [0.25]).difference == 0.25
    assert paired([0.5], [0.25]).p_value is None


@pytest.mark.parametrize(("values", "reference"), [
    ([0.5, 0.75], [0.25, 0.5]),                   # both differ by 1/4, exactly
    ([0.3, 0.8], [0.2, 0.7]),                     # both by 1/10, up to the last bits of a float
    ([0.9885, 0.6216], [0.9884, 0.6215]),         # both by one sample of 10,000; a last bit of 0.98, 2⁻⁵³, is more than 1e-12 of that
    ([0.5, 0.75], [0.5, 0.75])])                  # not at all
def test_differences_that_are_all_alike_cannot_be_tested(values, reference):
    got = paired(values, reference)
    assert got.difference == pytest.approx(values[0] - reference[0])
    assert (got.low, got.high, got.p_value, got.n) == (None, None, None, 2)


def test_tables_in_every_form():
    table = Table(["method", "accuracy %"], [["a_b", "0.5 ± 0.1"], ["x|y, \"z\"", "–"]], "Title", ["A note."])
    assert r"a\_b & 0.5 $\pm$ 0.1 \\" in table.render("latex")
    assert r"accuracy \%" in table.render("latex")
    assert table.render("latex").count(r"\\") == 3
    assert table.render("markdown").splitlines()[2:4] == ["| method | accuracy % |", "|---|---|"]
    assert r"x\|y" in table.render("markdown")
    import csv
    import io
    import json
    assert list(csv.reader(io.StringIO(table.render("csv")))) == [["method", "accuracy %"], ["a_b", "0.5 ± 0.1"], ["x|y, \"z\"", "–"]]
    assert json.loads(table.render("json"))[0] == {"method": "a_b", "accuracy %": "0.5 ± 0.1"}
    assert "Title" in table.render("text")
    assert set(FORMATS) == {"text", "markdown", "latex", "csv", "json"}
    from consilience.errors import ConfigError
    with pytest.raises(ConfigError, match="markdown"):
        table.render("markdwn")
