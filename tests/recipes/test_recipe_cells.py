"""Every cell that can be had is a valid run that can be scored as it says."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest

from consilience.data import sources
from consilience.metrics.registry import make_measures
from consilience.models.registry import settings_of
from consilience.recipes.folders import cell_values, essence, run_folder
from consilience.recipes.load import load_recipe, recipe_names
from consilience.recipes.orders import Order
from consilience.runs.config import RunConfig

ALL = recipe_names()


@lru_cache(maxsize=4096)
def config_of(values: str) -> RunConfig:
    return RunConfig.make(json.loads(values))


@pytest.mark.parametrize("name", ALL)
def test_every_cell_builds_a_run_and_can_be_scored_as_it_says(name, tmp_path):
    recipe = load_recipe(name)
    for cell in recipe.available():
        where = f"{cell.row.name}, {cell.column.name}"
        assert cell.unit in ("%", ""), where
        if cell.values is None:
            assert cell.column.mean_of, where
            continue
        values = cell_values(cell, recipe.seeds[0], scaled=recipe.scaled)
        config = config_of(json.dumps(values, sort_keys=True))
        run = config.run
        source = sources.make(run.data)
        assert run.rounds >= 1, where
        if run.model:
            settings_of(run.model)
        # the samples a score reads are there
        score, published = cell.score, run.test == "published" or (run.test is None and source.default_test == "published")
        if score.measure:
            assert make_measures([score.measure]), where
            continue
        if score.samples == "test":
            assert run.test in ("global", "both"), f"{where}: no global test set"
            assert score.model != "personalised", where
        if score.samples == "clients" and not published:
            assert run.test in ("clients", "both", None), f"{where}: clients have no test samples"
        if score.samples == "held_out":
            assert run.hold_out, f"{where}: nobody is held out"
            assert score.client is None or score.client in run.hold_out, where
        elif score.client is not None:
            assert score.client not in run.hold_out, where
        if score.select == "validation" or score.samples == "validation":
            assert run.validation or published, f"{where}: no validation samples"
        if isinstance(score.select, int):
            assert score.select <= run.rounds, where
        if score.what.startswith("dice"):
            assert run.data.startswith("prostate_mri"), where
        if cell.printed is not None and cell.printed.value is not None and cell.unit == "%":
            assert -100 <= cell.printed.value <= 100, where
        assert essence(values)["data"] == run.data, where
        assert run_folder(tmp_path, values).name.endswith(f"-seed{recipe.seeds[0]}"), where


@pytest.mark.parametrize("name", ALL)
def test_what_cannot_be_had_says_why(name):
    recipe = load_recipe(name)
    for cell in recipe.cells:
        if cell.unavailable is not None:
            assert len(cell.unavailable) > 10, (cell.row.name, cell.column.name)
    assert recipe.readings or recipe.unavailable


# what issue 8 orders, as it is typed: recipe, rows, columns
ORDERED = [
    ("dbe/table5", "fedavg,dbe,local,fedper,fedrep,ditto,fedbabu,fedfomo,dbe_kappa5,dbe_kappa1,dbe_running", "fmnist,fmnist_pathological"),
    ("dbe/table5", "fedavg_lr0p01,dbe_lr0p01,dbe_lr0p05,fedavg_800,dbe_800", "fmnist"),
    ("dbe/table5", "fedavg,dbe,local,fedper,fedrep,ditto,fedbabu,fedfomo", "cifar100"),
    ("lfd/table1", "none,all,extractor,header,classifier", "feature,parameter"),
    ("lfd/table2", "fedavg,fedavgm,fedprox,moon,lfd,lfd_plain,lfd_fedml,lfd_crop,lfd_uniform,lfd_margin_ce,lfd_drift_tau,lfd_uncapped,"
     "fedavg_batch64,lfd_batch64,lfd_linear_init,cosine_linear_init",
     "cifar10"),
    ("lfd/table3", "fedavg,fedavgm,fedprox,moon,lfd", "beta0p5,beta0p1,beta0p05"),
    ("lfd/table4", "fedavg,fedavgm,fedprox,moon,lfd", "k50_r25,k50_r50,k100_r25,k100_r50"),
    ("lfd/table4", "fedavg_keep,lfd_keep", "k50_r25,k50_r50,k100_r25,k100_r50"),
    ("lfd/table5", "fedavg,fedavgm,fedprox,moon,lfd", "existing,absent,received,existing_half,absent_half,received_0p1"),
    ("fedbr/table1", "fedavg,fedprox,moon,dann,groupdro,fedbr,mixup,fedbr_mixup,fedavg_momentum,fedbr_momentum,fedbr_divide",
     "mnist,mnist_rounds"),
    ("fedbr/table1", "local_own", "mnist,cifar10"),
    ("fedbr/table1", "fedbr_lambda1,fedbr_projection,fedbr_once,fedbr_released,fedavg_angles,fedbr_angles",
     "cifar10,cifar10_rounds,cifar10_rotated"),
    ("fedbr/table1", "fedavg,fedbr,fedavg_momentum,fedbr_momentum,fedbr_divide", "mnist_rotated,cifar10,cifar10_rotated"),
    ("fedbr/table4", "fedavg,component1,min_step,component2,no_max_step,fedbr", "mnist,mnist_rounds,mnist_rotated"),
    ("fedbr/table13", "fedavg,fedprox,scaffold,moon,dann,mixup,groupdro,fedbr,fedavg_momentum,fedbr_momentum", "pacs,pacs_rounds"),
    ("fedbr/table13", "local,local_own", "pacs"),
    ("fedfm/table2", "fedavg,fedavgm,fedprox,scaffold,feddyn,fednova,moon,fedfm", "cifar10_niid1,cifar10_niid2"),
    ("fedfm/table3", "fedavg,fedavgm,fedprox,scaffold,feddyn,fednova,moon,fedfm", "missing1,missing2,missing3,missing5,missing7"),
    ("fedfm/table4", "fedavg,fedfm", "nmi,silhouette"),
    ("fedfm/table6", "fedavg,weighted,uniform", "cifar10_niid1"),
    ("fedfm/figure6", "fedavg,fedfm", "cifar10_niid1"),
    ("fedfm/figure7", "fedavg,fedfm,lite1,lite2,lite5,lite10", "cifar10_niid1"),
    ("dbe/table2", "fedavg,mr,prbm,dbe", "fmnist_mdl,fmnist_accuracy"),
    ("dbe/table1", "fedavg,dbe_conv1,dbe_conv2,dbe_fc1", "fm_conv1,fm_conv2,fm_fc1,fm_logits,fm_accuracy"),
    ("fedfm/table2", "local,local_own", "cifar10_niid1,cifar10_niid2"),
    ("fedfa/table3", "fedavg,fedfa,fedfa_scalar,fedfa_corrected,fedavg_batch10,fedfa_batch10,local", "cifar10_0p6,cifar10_0p3"),
    ("fedfa/table1", "fedavg,fedprox,fedsam,fedavgm,fedbn,fedfa,fedfa_scalar,fedfa_corrected,fedfa_released,local", "office"),
    ("fedfa/table5", "fedavg,fedfa_r,fedfa_c,fedfa,fedfa_scalar,fedfa_corrected", "office,cifar10_0p6"),
    ("fedfa/table7", "direct,adaptive,fedfa_scalar,fedfa_corrected", "office,cifar10_0p6"),
]


@pytest.mark.parametrize(("name", "rows", "columns"), ORDERED)
def test_what_was_ordered_can_be_asked_for(name, rows, columns):
    """Every row has every column, and none is unavailable by the recipe."""
    recipe, asked = load_recipe(name), Order(tuple(rows.split(",")), tuple(columns.split(",")))
    cells = asked.cells_of(recipe)
    assert [c.unavailable for c in cells if c.unavailable] == []
    assert len(cells) == len(rows.split(",")) * len(columns.split(","))
