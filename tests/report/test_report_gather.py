"""Which folders are runs, which runs belong together, and what they are called."""

from __future__ import annotations

import json

import pytest
from stored_runs import write_run

import consilience
from consilience.errors import ConfigError
from consilience.report.gather import find_runs, gather
from consilience.runs.tune import tuning_seed


def test_stand_ins_have_the_form_of_real_runs(tmp_path):
    """The made-up records of these tests carry exactly the keys a run writes."""
    consilience.run("fedavg", "digits", clients=3, split="iid", rounds=1, out=tmp_path / "real")
    fake = write_run(tmp_path, rounds=1, clients=3, folder="fake")
    real, made = (json.loads((p / "records.jsonl").read_text().splitlines()[0]) for p in (tmp_path / "real", fake))
    assert made.keys() <= real.keys()
    assert made["personalised"].keys() <= real["personalised"].keys()
    real, made = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "real", fake))
    assert made.keys() == real.keys()
    assert made["config"].keys() == real["config"].keys()
    assert made["data"].keys() == real["data"].keys()
    assert len(gather([tmp_path]).groups) == 1                      # same settings and seed: one of them is left out


def test_runs_are_found_below_a_folder_and_once(tmp_path):
    a, b = write_run(tmp_path / "x", seed=0), write_run(tmp_path / "x" / "y", seed=1)
    (tmp_path / "x" / "other").mkdir()
    (tmp_path / "x" / "other" / "config.json").write_text('{"something": "else"}')
    assert find_runs([tmp_path, a]) == [a, b]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_folders_without_runs_are_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=name):
        find_runs([tmp_path / name])


def test_seeds_form_a_group_and_settings_part_them(tmp_path):
    for seed in (1, 0):
        write_run(tmp_path, "scaffold", seed)
        write_run(tmp_path, "fedavg", seed)
        write_run(tmp_path, "fedavg", seed, lr=0.5)
        write_run(tmp_path, "local", seed)
    groups = gather([tmp_path]).groups
    assert {g.label for g in groups} == {"local", "fedavg (lr=0.05)", "fedavg (lr=0.5)", "scaffold"}
    assert groups[0].label == "local"
    assert all([r.seed for r in g.runs] == [0, 1] for g in groups)


def test_seeds_of_several_machines_form_one_group(tmp_path):
    """With layout=auto a GPU may choose one that a CPU does not."""
    write_run(tmp_path, seed=0, layout="contiguous", device="cpu")
    on_gpu = write_run(tmp_path, seed=1) / "config.json"
    stored = json.loads(on_gpu.read_text())
    stored["config"]["layout"] = "channels_last"
    on_gpu.write_text(json.dumps(stored))
    gathered = gather([tmp_path])
    assert [(g.label, [r.config["layout"] for r in g.runs]) for g in gathered.groups] == [("fedavg", ["contiguous", "channels_last"])]
    assert not gathered.notes


def test_the_search_of_a_comparison_is_no_seed_of_its_results(tmp_path):
    """`compare --tune` keeps its search beside the compared runs; the chosen settings used to count with the seed they were chosen on."""
    compared = [write_run(tmp_path, seed=seed) for seed in (3, 4)]
    chosen, other = write_run(tmp_path, seed=1_000_003), write_run(tmp_path, seed=1_000_003, lr=0.5)
    gathered = gather([tmp_path])
    assert [(g.label, [r.path for r in g.runs]) for g in gathered.groups] == [("fedavg", compared)]
    assert any("2 runs are left out as a comparison's search (seed 1000003)" in note for note in gathered.notes)
    assert {r.path for r in gather([tmp_path, other]).runs} == {*compared, other}
    assert {r.path for r in gather([chosen, other]).runs} == {chosen, other}


def test_points_of_a_search_that_failed_are_named_with_the_search(tmp_path):
    """They have no scored round, and will not have one."""
    write_run(tmp_path, seed=3)
    (write_run(tmp_path, seed=1_000_003, folder="failed") / "records.jsonl").write_text("")
    write_run(tmp_path, seed=1_000_003, lr=0.2, folder="tried")
    notes = gather([tmp_path]).notes
    assert not any("no round was scored yet" in note for note in notes)
    assert any(note.startswith("2 runs are left out as a comparison's search") for note in notes)


def test_a_comparison_says_itself_which_seed_it_searched_with(tmp_path):
    """Seeds alone mislead where those compared lie as far apart as a search's: a result was left out, and the search shown in its place."""
    compared = [write_run(tmp_path, seed=seed) for seed in (0, 1_000_000)]
    search = write_run(tmp_path, seed=tuning_seed([0, 1_000_000]))
    document = {"seeds": [0, 1_000_000], "tuning": {"seed": tuning_seed([0, 1_000_000])}}
    (tmp_path / "comparison.json").write_text(json.dumps(document))
    gathered = gather([tmp_path])
    assert [r.path for r in gathered.runs] == compared
    assert [n for n in gathered.notes if n.startswith("1 run is left out as a comparison's search (seed 1000001)")]
    assert search in {r.path for r in gather([tmp_path, search]).runs}

    (tmp_path / "comparison.json").write_text(json.dumps(document | {"tuning": None}))
    assert [r.path for r in gather([tmp_path]).runs] == [*compared, search]


@pytest.mark.parametrize("other", ["[]", "{", '{"seeds": 3, "tuning": null}', '{"seeds": [5], "tuning": null}'])
def test_where_no_comparison_says_so_the_seeds_tell_a_search(tmp_path, other):
    """The file is another program's, damaged, or of a later comparison in the same folder."""
    compared, _ = write_run(tmp_path, seed=0), write_run(tmp_path, seed=1_000_000)
    (tmp_path / "comparison.json").write_text(other)
    assert [r.path for r in gather([tmp_path]).runs] == [compared]


def test_a_method_counts_not_the_way_it_was_typed(tmp_path):
    write_run(tmp_path, "fedprox", 0, settings={"prox.mu": 0.1})
    write_run(tmp_path, "fedprox(mu=0.1)", 1)
    write_run(tmp_path, "fedprox(mu=0.2)", 1)
    assert sorted(len(g.runs) for g in gather([tmp_path]).groups) == [1, 2]


def test_unfinished_damaged_and_unscored_runs_are_named(tmp_path):
    write_run(tmp_path, seed=0)
    write_run(tmp_path, seed=1, done=False, folder="running")
    damaged = write_run(tmp_path, seed=2, folder="damaged")
    lines = (damaged / "records.jsonl").read_text().splitlines()
    (damaged / "records.jsonl").write_text("\n".join([lines[0], "{broken", *lines[2:]]))
    (write_run(tmp_path, seed=3, folder="young") / "records.jsonl").write_text("")
    found = gather([tmp_path])
    assert [r.seed for r in found.runs] == [0, 1]
    assert any(n.startswith("damaged is left out") and "line 2" in n for n in found.notes)
    assert "young is left out: no round was scored yet." in found.notes
    assert "running is not finished: round 5 of 5." in found.notes


def test_a_torn_last_line_is_no_damage(tmp_path):
    path = write_run(tmp_path)
    with open(path / "records.jsonl", "a") as file:
        file.write('{"round": 6, "coh')
    assert gather([tmp_path]).runs[0].records[-1]["round"] == 5


def test_nothing_to_show_is_an_error(tmp_path):
    (write_run(tmp_path) / "records.jsonl").write_text("")
    with pytest.raises(ConfigError, match="None of the runs can be shown"):
        gather([tmp_path])
