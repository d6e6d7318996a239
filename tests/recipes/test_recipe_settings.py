"""What the recipes' settings must come out as: names of clients, averages, and rows that differ in one point alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from consilience.data.sources import domainnet, office_caltech10, prostate_mri
from consilience.metrics.registry import make_measures
from consilience.recipes.check import run_facts
from consilience.recipes.folders import cell_values, essence, run_folder
from consilience.recipes.load import load_recipe, recipe_names
from consilience.runs.config import RunConfig

# by_group's clients have the names of the source's groups
GROUPS = {"office_caltech10": office_caltech10._DOMAINS, "domainnet": domainnet._DOMAINS, "prostate_mri": prostate_mri._SITES}
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def cell(name: str, row: str, column: str):
    return load_recipe(name).select([row], [column])[0]


def settled(name: str, row: str, column: str) -> dict:
    """All that decides the run of a cell, options of its method by their path."""
    whole = essence(cell_values(cell(name, row, column), 0))
    options = whole.pop("settings", {})
    return {**whole, **options}


def test_clients_that_are_scored_alone_or_held_out_exist():
    asked = 0
    for name in recipe_names():
        for one in load_recipe(name).available():
            if one.values is None:
                continue
            names = [*one.values.get("hold_out", ()), *(s.client for s in (one.score, *(s for _, s in one.also)) if s.client)]
            source = one.values["data"].partition("(")[0]
            for client in names:
                assert client in GROUPS[source], f"{name}: {one.row.name}, {one.column.name}"
            asked += len(names)
    assert asked > 100


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith("fedfm/")])
def test_fedfm_averages_by_samples_and_scaffold_and_feddyn_by_clients(name):
    """METHODS 0.2: n_k/Σn in FedFM; SCAFFOLD and FedDyn are uniform by their own definition."""
    for one in load_recipe(name).available():
        if one.values is not None:
            config = RunConfig.make(cell_values(one, 0))
            method = config.stack().method()
            own = {p.name for p in method.parts} & {"scaffold", "dyn"}
            assert method.resolve(config.policy).weights == ("uniform" if own else "samples"), (one.row.name, one.column.name)


# row, the row it is a reading of, and what is different between them
ONE_POINT = [
    ("fedbr/table1", "cifar10", "fedbr_lambda1", "fedbr", {"debias.lam"}),
    ("fedbr/table1", "cifar10", "fedbr_projection", "fedbr", {"debias.projection"}),
    ("fedbr/table1", "cifar10", "fedbr_once", "fedbr", {"debias.refresh"}),
    ("fedbr/table1", "cifar10", "fedbr_released", "fedbr", {"debias.lam", "debias.projection", "debias.refresh"}),
    ("fedbr/table1", "mnist", "fedbr_released", "fedbr_once", set()),
    ("fedbr/table1", "mnist", "fedavg_momentum", "fedavg", {"momentum"}),
    ("fedbr/table13", "pacs", "fedbr_momentum", "fedbr", {"momentum"}),
    ("lfd/table2", "cifar10", "lfd_batch64", "lfd", {"batch"}),
    ("lfd/table2", "cifar10", "fedavg_batch64", "fedavg", {"batch"}),
    ("lfd/table2", "cifar10", "lfd_linear_init", "lfd", {"cosine.init"}),
    ("lfd/table2", "cifar10", "cosine_linear_init", "cosine", {"cosine.init"}),
    ("lfd/table4", "k100_r25", "lfd_keep", "lfd", {"last_batch"}),
    ("lfd/table4", "k50_r50", "fedavg_keep", "fedavg", {"last_batch"}),
    ("fedfa/table1", "office", "fedfa_corrected", "fedfa", {"ffa.bias_correct"}),
    ("fedfa/table1", "office", "fedfa_released", "fedfa", {"ffa.stats", "ffa.sharing", "transform"}),
    ("fedfa/table3", "cifar10_0p6", "fedfa_corrected", "fedfa", {"ffa.bias_correct"}),
    ("fedfa/table3", "cifar10_0p3", "fedfa_batch10", "fedfa", {"batch"}),
    ("fedfa/table3", "cifar10_0p6", "fedavg_batch10", "fedavg", {"batch"}),
    ("dbe/table5", "fmnist", "fedavg_lr0p01", "fedavg", {"lr"}),
    ("dbe/table5", "fmnist", "dbe_lr0p01", "dbe", {"lr"}),
    ("dbe/table5", "fmnist", "dbe_lr0p05", "dbe", {"lr"}),
    ("dbe/table5", "fmnist", "fedavg_800", "fedavg", {"rounds"}),
    ("dbe/table5", "fmnist", "dbe_800", "dbe", {"rounds"}),
]


@pytest.mark.parametrize(("name", "column", "row", "base", "points"), ONE_POINT)
def test_a_reading_differs_in_what_it_says_alone(name, column, row, base, points):
    ours, other = settled(name, row, column), settled(name, base, column)
    assert {k for k in ours.keys() | other.keys() if ours.get(k) != other.get(k)} == points


def test_settings_that_a_column_has_for_lfd_reach_its_head_alone():
    """CIFAR-100's τ = 0.05 is the head's: of LfD and of FedAvg with that head."""
    assert settled("lfd/table2", "cosine", "cifar100")["cosine.tau"] == 0.05
    assert settled("lfd/table2", "lfd", "cifar100")["cosine.tau"] == 0.05
    assert "cosine.tau" not in settled("lfd/table2", "cosine", "cifar10")          # 0.1 is the head's own


def test_union_keeps_its_momentum_over_epochs():
    """A round of it is an epoch, so that a reset every round would be one every epoch."""
    union = settled("lfd/table2", "union", "cifar10")
    assert (union.get("epochs", 1), union["rounds"], union["optimiser_state"]) == (1, 300, "kept")


@pytest.mark.parametrize(("name", "column"), [("fedbr/table1", "mnist"), ("fedbr/table1", "cifar10"), ("fedbr/table13", "pacs")])
def test_moon_has_the_projection_of_fedbrs_appendix(name, column):
    moon = settled(name, "moon", column)
    assert (moon["moon.hidden"], moon["moon.projection"]) == (256, 128)


@pytest.mark.parametrize(("name", "row", "column", "alpha"), [
    ("fedbr/table1", "mixup", "cifar10", 0.2), ("fedbr/table1", "fedbr_mixup", "mnist", 0.2),
    ("fedfa/table6", "mixup", "office", 1.0), ("fedfa/table6", "fedfa_mixup", "prostate", 1.0),
])
def test_mixup_has_the_alpha_of_each_paper(name, row, column, alpha):
    """FedBR prints Beta(0.2, 0.2). FedFA prints nothing: METHODS 7.9 reads 1, mixup's own where no other is named."""
    assert cell(name, row, column).values["settings"]["mixup.alpha"] == alpha


def test_what_a_run_measures_on_its_way_it_can_measure():
    """The test set in every client's shift needs a shift, a global test set and a global model, and costs ten test sets a time."""
    seen = 0
    for name in (n for n in recipe_names() if n.startswith("fedbr/")):
        for one in load_recipe(name).available():
            if one.values is None or not one.values.get("measure"):
                continue
            where = f"{name}: {one.row.name}, {one.column.name}"
            assert [m.name for m in make_measures(one.values["measure"])] == ["shifted_test"], where
            assert one.values["shift"], where
            assert one.values["test"] in ("global", "both"), where
            assert one.method != "local", where
            assert one.values["measure_every"] == 50, where
            seen += 1
    assert seen > 200
    # a client of CIFAR-10 has all angles in one mixture of its own, so that the balanced sets are by angle, not by client
    assert cell("fedbr/table1", "fedbr", "cifar10").values["measure"] == ["shifted_test(angles=10)"]


def test_rotated_test_sets_are_scored_like_the_hold_outs_beside_them():
    for name, data in (("fedbr/table1", "mnist"), ("fedbr/table4", "mnist"), ("fedbr/table1", "cifar10"), ("fedbr/table4", "cifar10")):
        rotated, plain = cell(name, "fedbr", f"{data}_rotated"), cell(name, "fedbr", data)
        assert rotated.values == plain.values                                        # one run for both
        assert rotated.score.select == plain.score.select == "best5"
        assert [title for title, _ in rotated.also] == ["last round"]                # the others say which samples
        assert "last round" in [title for title, _ in plain.also]


def test_results_that_are_kept_belong_to_a_cell():
    """A change of a recipe that alters a run's settings would lose what was computed for it."""
    kept = set(json.loads((RESULTS / "records" / "runs.json").read_text(encoding="utf-8")))
    seeds = {int(name.rpartition("seed")[2]) for name in kept}
    known, names = set(), "|".join(run_facts({}))
    for page in RESULTS.glob("*-*.md"):
        # dbe-table5-rounds-x0.6-precision-bfloat16-layout-channels_last: the names of settings say where each begins
        paper, table, scale, more = re.fullmatch(r"([a-z]+)-([a-z]+[0-9]+)(?:-rounds-x([0-9.]+))?(-.+)?", page.stem).groups()
        changed = re.findall(rf"-({names})-(.+?)(?=-(?:{names})-|$)", more or "")
        assert "".join(f"-{name}-{value}" for name, value in changed) == (more or "")
        recipe = load_recipe(f"{paper}/{table}")
        for one in recipe.available():
            if one.values is not None:
                runs = (cell_values(one, seed, scale=float(scale or 1), scaled=recipe.scaled, changed=changed) for seed in seeds)
                known |= {run_folder(Path(), values).name for values in runs}
    assert len(kept) >= 26
    assert kept <= known, sorted(kept - known)
