"""Several recipes in one command, cut off by the clock, brought together from archives, and kept as CSV."""

from __future__ import annotations

import errno
import importlib
import shutil
import tarfile
import time
from pathlib import Path

import pytest
from tiny_recipe import TINY, entry, load_tiny

from consilience.errors import ConfigError
from consilience.recipes.collect import collect
from consilience.recipes.folders import cell_values, run_folder, settle_machine, stored_run
from consilience.recipes.load import load_recipe
from consilience.recipes.merge import merge_runs
from consilience.recipes.orders import Order, Piece, parse_asked
from consilience.recipes.results import NOTHING_YET, WORDS, write_results
from consilience.recipes.run import reproduce, reproduce_all
from consilience.runs.files import DiskError, read_json, write_json
from consilience.runs.folder import read_records

run_module = importlib.import_module("consilience.runs.run")
HALF = Order((), ("accuracy",), 1, 0.5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Both rows with one seed and half of the rounds, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = load_tiny(folder)
    return recipe, reproduce(recipe, folder / "out", HALF, jobs=1), folder / "out"


def test_rows_and_columns_behind_the_name():
    assert parse_asked("dbe/table5") == ("dbe/table5", (), ())
    assert parse_asked("dbe/table5:local,fedavg") == ("dbe/table5", ("local", "fedavg"), ())
    assert parse_asked("dbe/table5::fmnist") == ("dbe/table5", (), ("fmnist",))
    assert parse_asked("my:place/mine.toml:a:b,c") == ("my:place/mine.toml", ("a",), ("b", "c"))
    with pytest.raises(ConfigError, match="NAME:rows:columns"):
        parse_asked("a:b:c:d")


def test_cells_come_in_the_order_they_are_asked_for(whole):
    recipe = whole[0]
    named = lambda order: [(c.row.name, c.column.name) for c in order.cells_of(recipe)]
    assert named(Order(("dbe", "fedavg"), ("kept", "accuracy"))) == [("dbe", "kept"), ("fedavg", "kept"), ("dbe", "accuracy"),
                                                                    ("fedavg", "accuracy")]
    assert named(Order(("dbe",))) == [("dbe", "accuracy"), ("dbe", "kept")]


def test_a_recipe_named_twice_is_one_order_with_the_cells_of_both(whole):
    recipe = whole[0]
    order = Order(("dbe",), ("kept",), 1, 0.5, beside=((("fedavg",), ("accuracy",)), (("dbe",), ())))
    assert [(c.row.name, c.column.name) for c in order.cells_of(recipe)] == [("dbe", "kept"), ("fedavg", "accuracy"), ("dbe", "accuracy")]
    words = order.command(recipe).split()
    assert words[2:5] == [f"{recipe.name}:dbe:kept", f"{recipe.name}:fedavg:accuracy", f"{recipe.name}:dbe"]
    assert [parse_asked(w) for w in words[2:5]] == [(recipe.name, *s) for s in ((order.rows, order.columns), *order.beside)]


def test_several_recipes_share_runs_and_one_seed_of_all_comes_first(tiny, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text(TINY.replace('title = "Two methods', 'title = "The same two methods'), encoding="utf-8")
    pieces = [Piece(load_recipe(path), Order(rows, ("accuracy",), 2, 0.25), tmp_path / path.stem, tmp_path / "runs")
              for path, rows in ((tiny, ("dbe",)), (other, ("fedavg", "dbe")))]
    told: list[str] = []
    heard: list[tuple[str, int]] = []
    outcomes = reproduce_all(pieces, jobs=1, tell=told.append,
                             finished=lambda piece, outcome: heard.append((piece.out.name, sum(len(e.values) for e in outcome.entries))))
    assert len(list((tmp_path / "runs").iterdir())) == 4                       # two methods, two seeds, shared by both recipes
    assert [line.partition(": ")[0] for line in told] == [
        f"{row}, accuracy, seed {seed}" for seed in (0, 1)
        for row in ("tiny.toml, FedAvg+DBE", "other.toml, FedAvg+DBE", "other.toml, FedAvg")]
    assert all("paper" in line and " s" in line for line in told)
    # a run that two recipes share is told to both, and each hears what it has by then
    assert heard[:3] == [("tiny", 1), ("other", 1), ("other", 2)]
    assert entry(outcomes[0], "dbe", "accuracy").values == entry(outcomes[1], "dbe", "accuracy").values


def test_every_cell_of_a_run_is_told_by_its_own_name(tiny, tmp_path):
    told: list[str] = []
    outcome = reproduce(load_recipe(tiny), tmp_path, Order(("dbe",), (), 1, 0.5), jobs=1, tell=told.append)
    assert told == [f"FedAvg+DBE, {title}, seed 0: {entry(outcome, 'dbe', column).line(0)} [scaled x0.5]"
                    for column, title in (("accuracy", "accuracy"), ("kept", "what is kept"))]
    assert len({line.partition(": ")[2] for line in told}) == 2


def test_a_cut_off_run_is_told_as_such_and_goes_on_to_the_same_end(whole, tmp_path, monkeypatch):
    """The clock jumps past the end after the first round."""
    recipe, undisturbed, _ = whole
    limit, made = time.time() + 3600, []

    class Clock:
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def time():
            return limit + 1 if made else time.time()

    kept = run_module._keep
    monkeypatch.setattr(run_module, "time", Clock)
    monkeypatch.setattr(run_module, "_keep", lambda result, folder, listener, record: (kept(result, folder, listener, record),
                                                                                      made.append(1) if record["round"] else None))
    cut = reproduce(recipe, tmp_path, Order(("dbe",), ("accuracy",), 1, 0.5), jobs=1, until=limit)
    monkeypatch.undo()
    e = entry(cut, "dbe", "accuracy")
    assert (e.state, e.values, e.difference) == ("round 1 of 2", {}, None)
    assert e.partial[0] > 0
    assert "at round 1 of 2" in cut.table().plain()
    assert cut.record(e)["cut_off"] == {"0": e.partial[0]}
    folder = e.runs[0].path
    assert [p.name for p in (folder / "checkpoints").iterdir()][-1] == "round-000001"
    assert not (folder / "done").exists()
    late = reproduce(recipe, tmp_path, HALF, jobs=1, until=time.time() - 1)
    assert entry(late, "fedavg", "accuracy").state == "not run"                            # nothing is begun after the end
    after = reproduce(recipe, tmp_path, Order(("dbe",), ("accuracy",), 1, 0.5), jobs=1)
    assert entry(after, "dbe", "accuracy").values == entry(undisturbed, "dbe", "accuracy").values


def test_what_later_rounds_cannot_change_counts_although_the_run_was_cut_off(whole, tmp_path):
    """The first round at a threshold and the score of a named round are final; a best or last round is not, nor a threshold not met."""
    folder = shutil.copytree(whole[2], tmp_path / "out")
    for done in (folder / "runs").glob("*/done"):
        done.unlink()
    recipe = load_tiny(tmp_path, TINY.replace("[rows.fedavg]", """
[columns.soon]
unit = ""
score = { reach = 0.01 }
[columns.never]
unit = ""
score = { reach = 1.0 }
[columns.first]
score = { select = 2 }
[rows.fedavg]"""))
    cut = collect(recipe, folder / "runs", Order((), (), 1, 0.5))
    soon, never, first, best = (entry(cut, "dbe", column) for column in ("soon", "never", "first", "accuracy"))
    assert (soon.values, soon.state, soon.partial) == ({0: 1.0}, "", {})
    assert (never.values, never.state, never.partial) == ({}, "round 2 of 2", {})
    assert first.values == {0: pytest.approx(100 * first.runs[0].records[-2]["personalised"]["accuracy"])}      # half of round 2
    assert (best.values, best.state) == ({}, "round 2 of 2")
    assert best.partial[0] > 0


def test_a_finished_run_that_stayed_below_its_threshold_says_so(whole, tmp_path):
    """That a threshold is never met is a result: it stands in the table and on the page, and the run is not called one that is missing."""
    recipe = load_tiny(tmp_path, TINY.replace("[rows.fedavg]", """
[columns.never]
unit = ""
score = { reach = 1.0 }
[rows.fedavg]"""))
    for_both = Order((), ("never",), 1, 0.5)
    found = collect(recipe, whole[2] / "runs", for_both)
    never = entry(found, "dbe", "never")
    assert (never.state, never.values, never.partial) == ("not reached in 2 rounds", {}, {})
    assert never.line(0).startswith("not reached in 2 rounds")
    assert found.table(["dbe"], ["never"]).rows[0][3] == "not reached in 2 rounds"
    page = write_results(found, for_both, tmp_path / "results").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| never | {never.cell.row.title} |"))
    assert "| not reached in 2 rounds |" in row
    assert "never: not run" not in page


def test_what_is_there_is_written_down_before_the_next_run_ends(whole, tmp_path):
    """Whatever stops the second run finds the first in the table."""
    recipe, _, _ = whole

    class Killed(BaseException):
        pass

    seen = []

    def finished(piece, outcome):
        seen.append(entry(outcome, "fedavg", "accuracy").values)
        raise Killed
    with pytest.raises(Killed):
        reproduce(recipe, tmp_path, HALF, jobs=1, finished=finished)
    assert len(seen) == 1
    assert seen[0]
    assert entry(collect(recipe, tmp_path / "runs", HALF), "dbe", "accuracy").state == "not run"


def test_runs_come_together_from_an_archive_and_go_on(whole, tmp_path):
    """One run is set back as if the machine had gone; the archive holds it and a finished one."""
    recipe, undisturbed, out = whole
    shutil.copytree(out, tmp_path / "gone")
    cut = next(p for p in (tmp_path / "gone" / "runs").iterdir() if p.name.startswith("dbe-"))
    (cut / "done").unlink()
    shutil.rmtree(sorted((cut / "checkpoints").iterdir())[-1])
    lines = (cut / "records.jsonl").read_text().splitlines(keepends=True)
    (cut / "records.jsonl").write_text("".join(lines[:-1]))
    with tarfile.open(tmp_path / "back.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "gone" / "runs", "runs")
    here = tmp_path / "here"
    assert len(merge_runs([tmp_path / "back.tar.gz"], here / "runs")) == 2
    half = reproduce(recipe, here, HALF, train=False)
    assert entry(half, "fedavg", "accuracy").values == entry(undisturbed, "fedavg", "accuracy").values
    assert entry(half, "dbe", "accuracy").state == "round 1 of 2"
    after = reproduce(recipe, here, HALF, jobs=1)
    assert after.document()["cells"] == undisturbed.document()["cells"]
    assert merge_runs([tmp_path / "back.tar.gz"], here / "runs") == []         # what has come further stays
    assert len(merge_runs([out / "runs"], tmp_path / "third")) == 2            # folders as well as archives
    with pytest.raises(ConfigError, match="no folder or archive"):
        merge_runs([tmp_path / "nothing.tar"], here / "runs")
    (tmp_path / "broken.tar").write_text("no archive")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        merge_runs([tmp_path / "broken.tar"], here / "runs")


def spoil(path: Path, *, every: int, at: int) -> None:
    content = bytearray(path.read_bytes())
    for i in range(at, len(content) - 2000, every):
        content[i] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("form", ["zip", "gztar", "xztar", "locked"])
def test_a_damaged_archive_brings_nothing_and_says_so(form, whole, tmp_path):
    """Each packer has errors of its own, which ended the command in a traceback; and a .tar.gz was taken to end where it was damaged."""
    archive = Path(shutil.make_archive(str(tmp_path / "back"), "zip" if form == "locked" else form, whole[2] / "runs"))
    if form == "locked":                                                        # the sign of a password in both headers of a file
        content = archive.read_bytes()
        for sign, place in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
            parts = content.split(sign)
            content = sign.join([parts[0], *(p[:place - 4] + bytes([p[place - 4] | 1]) + p[place - 3:] for p in parts[1:])])
        archive.write_bytes(content)
    else:
        spoil(archive, every=3000, at=2500)
    with pytest.raises(ConfigError, match=r"'.*back.* cannot be unpacked"):
        merge_runs([archive], tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_tar_that_is_damaged_between_two_files(whole, tmp_path):
    """Python takes what it cannot read there for the end: the runs behind it would be missing without a word."""
    archive = Path(shutil.make_archive(str(tmp_path / "back"), "tar", whole[2] / "runs"))
    with tarfile.open(archive) as tar:
        place = tar.getmembers()[-1].offset
    content = bytearray(archive.read_bytes())
    content[place: place + 100] = b"x" * 100
    archive.write_bytes(content)
    with pytest.raises(ConfigError, match="what follows its first files is damaged"):
        merge_runs([archive], tmp_path / "runs")
    archive.write_bytes(content[:place])
    with pytest.raises(ConfigError, match="it is cut off behind its first files"):
        merge_runs([archive], tmp_path / "runs")


def test_an_archive_without_runs_or_on_a_full_disk(whole, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"back\.zip' holds no run"):          # and not a folder whose name nobody knows
        merge_runs([shutil.make_archive(str(tmp_path / "back"), "zip", tmp_path / "in")], tmp_path / "runs")

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(DiskError, match=r"No space left.*TMPDIR"):
        merge_runs([shutil.make_archive(str(tmp_path / "back"), "tar", whole[2] / "runs")], tmp_path / "runs")


def test_a_copy_that_is_cut_off_leaves_what_was_there(whole, tmp_path, monkeypatch):
    """The run here has come less far than the one that is brought, whose copying ends after some files."""
    here = tmp_path / "runs"
    shutil.copytree(whole[2] / "runs", here)
    name = next(p.name for p in here.iterdir() if p.name.startswith("dbe-"))
    (here / name / "done").unlink()
    before = sorted(p.relative_to(here) for p in here.rglob("*"))

    def full(source, target):
        Path(target).mkdir(parents=True)
        (Path(target) / "config.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", full)
        with pytest.raises(DiskError, match="No space left"):
            merge_runs([whole[2] / "runs"], here)
    assert sorted(p.relative_to(here) for p in here.rglob("*")) == before
    assert merge_runs([whole[2] / "runs"], here) == [name]
    assert (here / name / "done").is_file()


def test_a_run_begun_on_a_gpu_goes_on_without_one(whole, tmp_path):
    recipe, undisturbed, out = whole
    cell = recipe.select(["fedavg"], ["accuracy"])[0]
    values = cell_values(cell, 0, scale=0.5)
    shutil.copytree(out / "runs", tmp_path / "runs")
    folder = run_folder(tmp_path / "runs", values)
    assert settle_machine(folder, {**values, "engine": "workers"})["engine"] == "auto"      # as it was begun
    stored = read_json(folder / "config.json")
    write_json(folder / "config.json", {**stored, "config": {**stored["config"], "device": "cuda:99", "engine": "slots"}})
    (folder / "done").unlink()
    for checkpoint in (folder / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    after = reproduce(recipe, tmp_path, Order(("fedavg",), ("accuracy",), 1, 0.5), jobs=1)
    assert entry(after, "fedavg", "accuracy").values == entry(undisturbed, "fedavg", "accuracy").values


def test_records_as_csv_give_the_same_table(whole, tmp_path):
    recipe, undisturbed, out = whole
    page = write_results(undisturbed, HALF, tmp_path)
    again = collect(recipe, tmp_path / "records", HALF)
    for row in ("fedavg", "dbe"):
        kept, made = entry(again, row, "accuracy"), entry(undisturbed, row, "accuracy")
        assert kept.values[0] == pytest.approx(made.values[0], abs=1e-3)                        # six digits are kept
        assert kept.also == {"last round": {0: pytest.approx(made.also["last round"][0], abs=1e-3)}}
    folder = entry(undisturbed, "dbe", "accuracy").runs[0].path
    kept = stored_run(tmp_path / "records" / folder.name, cell_values(recipe.select(["dbe"], ["accuracy"])[0], 0, scale=0.5))
    records = read_records(folder / "records.jsonl")
    assert [r["round"] for r in kept.records] == [r["round"] for r in records]
    assert kept.records[-1]["global"]["accuracy"] == pytest.approx(records[-1]["global"]["accuracy"], rel=1e-5)
    assert kept.records[-1]["personalised"]["per_client"] == pytest.approx(records[-1]["personalised"]["per_client"], rel=1e-5)
    text = page.read_text(encoding="utf-8")
    assert page.name == "tiny-rounds-x0.5.md"
    assert "SCALED DOWN" in text
    assert "consilience run dbe --data digits" in text
    assert "cannot be had: the method nothing_of_this_name" in text
    assert f"{folder.name}.csv" in text
    assert str(out.parent) not in text


def test_words_written_by_hand_stay_on_the_page(whole, tmp_path):
    recipe, undisturbed, _ = whole
    page = write_results(undisturbed, HALF, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert NOTHING_YET in text
    page.write_text(text.replace(NOTHING_YET, "DBE is ahead.\n\nBecause."), encoding="utf-8")
    (tmp_path / "README.md").write_text((tmp_path / "README.md").read_text() + "\nMine.\n", encoding="utf-8")
    write_results(collect(recipe, tmp_path / "records", HALF), HALF, tmp_path)         # from the records alone
    text = page.read_text(encoding="utf-8")
    assert f"{WORDS[0]}\n\nDBE is ahead.\n\nBecause.\n\n{WORDS[1]}" in text
    index = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert index.count("(tiny-rounds-x0.5.md)") == 1
    assert "Mine." in index


def test_records_that_went_further_are_not_replaced(whole, tmp_path):
    recipe, undisturbed, out = whole
    write_results(undisturbed, HALF, tmp_path / "results")
    shutil.copytree(out / "runs", tmp_path / "runs")
    cut = next(p for p in (tmp_path / "runs").iterdir() if p.name.startswith("dbe-"))
    (cut / "done").unlink()
    (cut / "records.jsonl").write_text((cut / "records.jsonl").read_text().splitlines(keepends=True)[0])
    write_results(collect(recipe, tmp_path / "runs", HALF), HALF, tmp_path / "results")
    assert entry(collect(recipe, tmp_path / "results" / "records", HALF), "dbe", "accuracy").state == ""        # still the whole run


def test_runs_kept_as_records_alone_are_not_made_again(whole, tmp_path):
    """The first seed lies there as CSV: only the second is run. A measure that the records do not hold needs the run itself."""
    recipe, undisturbed, _ = whole
    write_results(undisturbed, HALF, tmp_path)
    runs, told = tmp_path / "records", list[str]()
    after = reproduce(recipe, tmp_path / "out", Order(("dbe",), ("accuracy",), 2, 0.5), runs=runs, jobs=1, tell=told.append)
    assert [p.name for p in runs.iterdir() if p.is_dir()] == [entry(after, "dbe", "accuracy").runs[1].path.name]
    assert [line.partition(":")[0] for line in told] == ["FedAvg+DBE, accuracy, seed 1"]
    assert entry(after, "dbe", "accuracy").values[0] == pytest.approx(entry(undisturbed, "dbe", "accuracy").values[0], abs=1e-3)
    assert len(entry(after, "dbe", "accuracy").values) == 2
    measured = reproduce(recipe, tmp_path / "out", Order(("dbe",), ("kept",), 1, 0.5), runs=runs, jobs=1)
    assert entry(measured, "dbe", "kept").values.keys() == {0}
    assert entry(measured, "dbe", "accuracy").values[0] == entry(undisturbed, "dbe", "accuracy").values[0]     # from the folder, all digits
