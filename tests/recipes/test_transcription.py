"""Numbers that the papers print twice, or that follow from each other, must agree in our copies."""

from __future__ import annotations

import pytest

from consilience.recipes.load import load_recipe


def printed(name: str) -> dict[tuple[str, str], float]:
    return {(c.row.name, c.column.name): c.printed.value for c in load_recipe(name).cells if c.printed and c.printed.value is not None}


PFL = ("perfedavg", "pfedme", "ditto", "fedper", "fedrep", "fedrod", "fedbabu", "apfl", "fedfomo", "apple", "fedavg", "dbe")


def test_dbe_table5_agrees_with_the_tables_that_repeat_it():
    five, one, two, three, eight = (printed(f"dbe/table{n}") for n in (5, 1, 2, 3, 8))
    for row in ("fedper", "fedrep", "fedrod", "fedavg"):
        assert one[row, "accuracy"] == five[row, "tiny"]
    assert one["fedbabu_tuned", "accuracy"] == five["fedbabu", "tiny"]
    assert one["dbe_fc1", "accuracy"] == five["dbe", "tiny"] == two["dbe", "cnn_accuracy"] == three["dbe", "original"]
    assert two["fedavg", "resnet_accuracy"] == five["fedavg", "tiny_resnet"]
    assert two["dbe", "resnet_accuracy"] == five["dbe", "tiny_resnet"]
    assert one["fedavg", "fc1"] == two["fedavg", "cnn_mdl"]
    assert one["dbe_fc1", "fc1"] == two["dbe", "cnn_mdl"]
    for row in PFL:
        assert eight[row, "epochs1"] == five[row, "fmnist"]


def test_dbe_table7_agrees_with_table2():
    seven, two = printed("dbe/table7"), printed("dbe/table2")
    for row, other in (("fedavg", "fedavg"), ("dbe_pool", "dbe")):
        assert seven[row, "pool"] == two[other, "resnet_mdl"]
        assert seven[row, "accuracy"] == two[other, "resnet_accuracy"]


def test_dbe_table6_follows_from_tables_5_and_8():
    five, six, eight = (printed(f"dbe/table{n}") for n in (5, 6, 8))
    gained = [row for row in PFL if (row, "mr") in six]
    assert len(gained) == 7
    for row in gained:
        assert six[row, "mr"] - five[row, "tiny"] == pytest.approx(six[row, "improvement"], abs=0.006)
    for row in PFL:                                        # total time = iterations · time per iteration, rounded to a minute
        assert six[row, "total_time"] == pytest.approx(eight[row, "iterations"] * six[row, "time_per_iteration"], abs=0.006
                                                       * eight[row, "iterations"] + 1)


def test_dbe_abstract():
    """At most +32.30 accuracy and −22.35 % MDL from adding DBE (Table 4), +47.40 and +11.36 in Table 5."""
    four, five = printed("dbe/table4"), printed("dbe/table5")
    methods, data = ("scaffold", "fedprox", "moon", "fedgen"), ("cifar100", "tiny", "tiny_resnet", "ag_news")
    assert max(four[f"{m}_dbe", d] - four[m, d] for m in methods for d in data) == pytest.approx(32.30, abs=1e-6)
    assert min(four[f"{m}_dbe", f"{d}_mdl"] / four[m, f"{d}_mdl"] - 1 for m in methods for d in data) == pytest.approx(-0.2235, abs=5e-5)
    assert five["dbe", "cifar100_pathological"] - five["fedavg", "cifar100_pathological"] == pytest.approx(47.40, abs=1e-6)
    assert five["dbe", "cifar100_100"] - max(five[m, "cifar100_100"] for m in PFL if m != "dbe" and (m, "cifar100_100") in five) \
        == pytest.approx(11.36, abs=1e-6)


def test_dbe_has_twelve_rows_and_nine_columns():
    five = printed("dbe/table5")
    assert len(five) == 12 * 9 - 1                         # APPLE has no value with 100 clients


def test_lfd_tables_that_repeat_each_other():
    one, two, three = (printed(f"lfd/table{n}") for n in (1, 2, 3))
    for row in ("fedavg", "fedavgm", "fedprox", "moon", "lfd"):
        assert two[row, "cifar10"] == three[row, "beta0p5"]
    assert one["none", "feature"] == two["fedavg", "cifar10"]
    # the arrows of Table 1 are differences to 69.1
    gains = {"all": (-1.8, -0.5), "extractor": (-0.2, 0.4), "header": (0.5, 0.2), "classifier": (1.7, 0.6)}
    for row, (feature, parameter) in gains.items():
        assert one[row, "feature"] - 69.1 == pytest.approx(feature, abs=1e-6)
        assert one[row, "parameter"] - 69.1 == pytest.approx(parameter, abs=1e-6)


def test_lfd_prints_a_spread_in_every_accuracy():
    for n in (1, 2, 3, 4):
        assert all(c.printed.spread is not None for c in load_recipe(f"lfd/table{n}").cells if c.printed)
