"""FedFM's numbers that the paper prints twice, or that follow from each other, must agree in our copies."""

from __future__ import annotations

from statistics import mean

import pytest

from consilience.recipes.load import load_recipe, recipe_names

METHODS = ("fedavg", "fedavgm", "fedprox", "scaffold", "feddyn", "fednova", "moon", "fedfm")


def printed(name: str) -> dict[tuple[str, str], float]:
    return {(c.row.name, c.column.name): c.printed.value for c in load_recipe(name).cells if c.printed and c.printed.value is not None}


def test_every_table_and_figure_is_there():
    names = [n for n in recipe_names() if n.startswith("fedfm/")]
    assert names == [f"fedfm/table{n}" for n in range(1, 9)] + [f"fedfm/figure{n}" for n in range(1, 10)]
    for name in ("fedfm/table7", "fedfm/table8"):
        assert "appendix" in (load_recipe(name).unavailable or "")


def test_table_2_gives_the_gains_of_the_text():
    """Over SCAFFOLD 2.98, 3.04, 3.96, 4.97, 4.16 and 4.89 (section VII-B1)."""
    two = printed("fedfm/table2")
    columns = [f"{d}_niid{n}" for d in ("cifar10", "cinic10", "cifar100") for n in (1, 2)]
    assert [round(two["fedfm", c] - two["scaffold", c], 2) for c in columns] == [2.98, 3.04, 3.96, 4.97, 4.16, 4.89]
    assert len([k for k in two if k[0] in METHODS]) == 8 * 9


def test_table_3_gives_the_gains_of_the_text():
    """5.53 over FedAvg and 2.28 over SCAFFOLD on average (section VII-B1)."""
    three = printed("fedfm/table3")
    gain = lambda host: mean(three["fedfm", f"missing{x}"] - three[host, f"missing{x}"] for x in (1, 2, 3, 5, 7))
    assert gain("fedavg") == pytest.approx(5.53, abs=0.006)
    assert gain("scaffold") == pytest.approx(2.28, abs=0.006)


def test_memory_is_whole_models():
    """Tables I to III: memory and bandwidth are the factors of Table I times the model, FedFM's the model and its anchors."""
    one, two, three = (printed(f"fedfm/table{n}") for n in (1, 2, 3))
    for method in METHODS[:-1]:
        assert two[method, "cifar10_memory"] == three[method, "memory"] == 11182 * one[method, "memory"]
        assert two[method, "cifar100_memory"] == 23705 * one[method, "memory"]
        assert three[method, "bandwidth"] == 11182 * one[method, "bandwidth"]
    assert two["fedfm", "cifar10_memory"] - 11182 == pytest.approx(10 * 512 / 1000, abs=0.5)
    assert two["fedfm", "cifar100_memory"] - 23705 == pytest.approx(100 * 2048 / 1000, abs=1)


def test_table_5_costs_are_clients_times_rounds_times_model():
    one, five = printed("fedfm/table1"), printed("fedfm/table5")
    for clients in (20, 30, 50, 100):
        for method in METHODS[:-1]:
            whole = clients * 100 * 23.705e6 / 1e8                  # 100 rounds, in 10⁸ floats
            assert five[method, f"k{clients}_bandwidth"] == pytest.approx(whole * one[method, "bandwidth"], rel=0.002)
            assert five[method, f"k{clients}_memory"] == pytest.approx(whole * one[method, "memory"], rel=0.002)
    assert five["fedfm", "k100"] - five["fedavg", "k100"] == pytest.approx(13.97, abs=1e-6)
    assert five["fedfm", "k100"] - five["scaffold", "k100"] == pytest.approx(7.68, abs=1e-6)


def test_table_4_gives_the_ratios_of_the_text():
    """FedFM has 14.8 % higher NMI and 27.2 % higher silhouette than FedDyn."""
    four = printed("fedfm/table4")
    assert four["fedfm", "nmi"] / four["feddyn", "nmi"] - 1 == pytest.approx(0.148, abs=5e-4)
    assert four["fedfm", "silhouette"] / four["feddyn", "silhouette"] - 1 == pytest.approx(0.272, abs=5e-4)


def test_tables_and_figures_that_repeat_table_2():
    two, six, fig7, fig8 = (printed(f"fedfm/{n}") for n in ("table2", "table6", "figure7", "figure8"))
    assert six["fedavg", "cifar10_niid1"] == two["fedavg", "cifar10_niid1"] == fig8["fedavg", "hosts"]
    assert six["weighted", "cifar10_niid1"] == two["fedfm", "cifar10_niid1"] == fig8["fedavg_fm", "hosts"]
    for method in ("fedprox", "fednova", "moon"):
        assert fig8[method, "hosts"] == two[method, "cifar10_niid1"]
    # section VII-C3: with a = 5 FedFM-Lite is 2.34 above FedDyn and 0.75 above SCAFFOLD
    assert fig7["lite5", "cifar10_niid1"] - two["feddyn", "cifar10_niid1"] == pytest.approx(2.34, abs=1e-6)
    assert fig7["lite5", "cifar10_niid1"] - two["scaffold", "cifar10_niid1"] == pytest.approx(0.75, abs=1e-6)


def test_protocol_and_settings():
    cells = {(c.row.name, c.column.name): c for c in load_recipe("fedfm/table2").cells}
    cell = cells["fedfm", "cifar10_niid1"]
    assert (cell.score.model, cell.score.samples, cell.score.select, cell.score.judge) == ("global", "test", "validation", "clients")
    assert cell.values is not None
    assert cell.rounds == 100
    wanted = {"clients": 10, "batch": 64, "epochs": 10, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "validation": 0.2,
              "test": "global", "model": "resnet18", "batchnorm": "all"}
    assert {k: cell.values[k] for k in wanted} == wanted
    assert cell.values["settings"] == {"anchors.weight": 50.0, "anchors.start": 20, "anchors.tau": 0.1}
    hundred = cells["fedfm", "cifar100_niid2"].values
    assert hundred is not None
    assert hundred["model"] == "resnet50(stem='3x3')"
    assert hundred["transform"] == "fedfm_cifar100"
    assert len(load_recipe("fedfm/table2").seeds) == 3
    assert load_recipe("fedfm/table2").scaled == ("anchors.start",)


def test_lite_and_sweeps_reach_the_part():
    seven = {(c.row.name, c.column.name): c for c in load_recipe("fedfm/figure7").cells}
    for a in (1, 2, 5, 10):
        values = seven[f"lite{a}", "cifar10_niid1"].values
        assert values is not None
        assert (values["settings"]["anchors.lite"], values["settings"]["anchors.every"]) == (True, a)
    eight = {(c.row.name, c.column.name): c for c in load_recipe("fedfm/figure8").cells}
    values = eight["start40", "lambda500"].values
    assert values is not None
    assert (values["settings"]["anchors.start"], values["settings"]["anchors.weight"]) == (40, 500.0)
