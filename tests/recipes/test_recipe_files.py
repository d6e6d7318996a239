"""Recipes are read strictly."""

from __future__ import annotations

import re

import pytest
from tiny_recipe import TINY

from consilience.errors import ConfigError, ConsilienceError
from consilience.parts.presets import PRESETS
from consilience.recipes.load import load_recipe, recipe_names, recipes_folder

ALL = recipe_names()


def test_every_file_is_a_recipe_with_an_arabic_number():
    files = {f"{p.parent.name}/{p.stem}" for p in recipes_folder().glob("*/*.toml") if p.stem != "paper"}
    assert files == set(ALL)
    assert all(re.fullmatch(r"[a-z]+/(table|figure)[1-9][0-9]*", name) for name in ALL)


def test_the_tables_and_figures_of_the_papers_are_there():
    assert {f"dbe/table{n}" for n in range(1, 10)} | {f"dbe/figure{n}" for n in range(1, 10)} <= set(ALL)
    assert {f"lfd/table{n}" for n in range(1, 6)} | {f"lfd/figure{n}" for n in range(1, 6)} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_recipe_loads(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.title
    assert recipe.citation
    assert recipe.unavailable or recipe.cells
    for cell in recipe.cells:
        assert (cell.values is None) == (cell.unavailable is not None or bool(cell.column.mean_of))
        assert cell.score.sentence()
        assert not (cell.ours and cell.printed), f"{cell.row.name}, {cell.column.name}: ours, but with a value of the paper"
    if recipe.kind == "table" and not recipe.unavailable:
        printed = [c.printed for c in recipe.cells if c.printed]
        assert printed, "a table without a single value of the paper"


@pytest.mark.parametrize("name", ALL)
def test_no_row_waits_for_a_method_that_is_there(name):
    for row in load_recipe(name).rows:
        assert not (row.unavailable and row.method in PRESETS), f"{row.name} says it cannot be had: {row.unavailable}"


def test_names_are_in_order_and_wrong_ones_get_the_nearest():
    assert ALL.index("dbe/table9") < ALL.index("dbe/figure1") < ALL.index("lfd/table1")
    with pytest.raises(ConfigError, match="dbe/table5"):
        load_recipe("dbe/tabel5")


@pytest.mark.parametrize("paper", ["lfd", "lfd/"])
def test_a_paper_alone_gets_the_names_of_its_recipes(paper):
    with pytest.raises(ConfigError, match=f"'{paper}' is a paper, and a recipe is one of its tables or figures: lfd/table1, ") as error:
        load_recipe(paper)
    assert "dbe/" not in str(error.value)


def test_row_column_and_cell_settings_meet_in_order(tmp_path):
    """Column settings reach only the methods that have them; a row has the last word over a column, a cell over a row."""
    (tmp_path / "paper.toml").write_text(
        'citation = "A paper"\n[run]\ndata = "digits"\nlr = 0.01\n[columns.a]\ntitle = "from the paper"\nrun = { clients = 3 }\n'
        '[rows.plain]\nmethod = "fedavg"\n', encoding="utf-8")
    (tmp_path / "table1.toml").write_text(
        'title = "t"\n[run]\nbatch = 8\n[columns.a]\nrun = { settings = { "mr.kappa" = 7.0 } }\n[columns.b]\nlike = "a"\n'
        'run = { lr = 0.2 }\n'
        '[rows.plain]\n[rows.dbe]\nmethod = "fedavg+dbe"\nrun = { lr = 0.3 }\ncells = { b = { run = { lr = 0.4 }, method = "mr" } }\n',
        encoding="utf-8")
    recipe = load_recipe(tmp_path / "table1.toml")
    values = {(c.row.name, c.column.name): c.values for c in recipe.cells}
    assert recipe.citation == "A paper"
    assert recipe.columns[0].title == "from the paper"
    assert values["plain", "a"] == {"data": "digits", "lr": 0.01, "batch": 8, "clients": 3, "settings": {}, "method": "fedavg"}
    assert values["plain", "b"]["lr"] == 0.2
    assert values["plain", "b"]["clients"] == 3
    assert values["dbe", "a"]["settings"] == {"mr.kappa": 7.0}
    assert values["dbe", "a"]["lr"] == 0.3
    assert values["dbe", "b"]["lr"] == 0.4
    assert values["dbe", "b"]["method"] == "mr"


WRONG = {
    "unknown key of the recipe": ("title =", "titel = 1\ntitle =", "has no key 'titel'. Did you mean 'title'"),
    "unknown key of a row": ('method = "fedavg"\n', 'methd = "x"\nmethod = "fedavg"\n', "has no key 'methd'"),
    "unknown key of a column": ('title = "accuracy"', 'title = "accuracy"\nwidth = 3', "columns.accuracy has no key 'width'"),
    "unknown method": ('method = "fedavg"\n', 'method = "fedavgg"\n', "Unknown method 'fedavgg'"),
    "unknown option of a method": ('"mr.kappa" = 5.0', '"mr.kapa" = 5.0', "no option 'kapa'. Did you mean 'kappa'"),
    "setting that no row takes": ('"mr.kappa" = 5.0', '"prox.mu" = 5.0', "'prox.mu' belongs to none"),
    "value out of range": ('"mr.kappa" = 5.0', '"mr.kappa" = -5.0', "must be at least 0"),
    "unknown setting of the run": ("lr = 0.1", "learning = 0.1", "no option 'learning'"),
    "unknown data set": ('data = "digits"', 'data = "digit"', "Unknown data source 'digit'"),
    "no data set": ('data = "digits"', 'data = ""', "A data source must be written name"),
    "unknown split": ("dirichlet(alpha=0.3)", "dirichle(alpha=0.3)", "Unknown split 'dirichle'"),
    "unknown option of a split": ("dirichlet(alpha=0.3)", "dirichlet(beta=0.3)", "no option 'beta'"),
    "unknown model": ("lr = 0.1", 'model = "resnet19"', "Unknown model 'resnet19'"),
    "unknown transform": ("lr = 0.1", 'transform = "crop+flipp"', "Unknown transform 'flipp'"),
    "seed in run": ("lr = 0.1", "seed = 3", "seeds are the recipe's"),
    "unknown selection": ('select = "best"', 'select = "bset"', "must be one of last, best"),
    "unknown measure": ('measure = "forgetting"', 'measure = "forgeting"', "Unknown measure 'forgeting'"),
    "measure without value": (', value = "present.lp"', "", "needs both 'measure' and 'value'"),
    "unknown unit": ('unit = ""', 'unit = "m"', "must be one of '%', ''"),
    "a list that is none": ("seeds = 2", "seeds = 2\ndraw = 3", "'draw' must be a list. Got 3"),
    "a text for a list": ("seeds = 2", 'seeds = 2\nscaled = "rounds"', "'scaled' must be a list"),
    "a number for a run": ('title = "accuracy"', 'title = "accuracy"\nrun = 3', "columns.accuracy: 'run' must be a table"),
    "a word for a score": ('score = { select = "last" }', 'score = "last"', "also: 'score' must be a table"),
    "a number for a method": ('method = "fedavg"\n', "method = 3\n", "rows.fedavg: 'method' must be a text"),
    "a number for the paper's values": ("paper = { accuracy = 80", "paper = 80 #", "rows.absent: 'paper' must be a table"),
    "digits in words": ('title = "accuracy"', 'title = "accuracy"\ndigits = "two"', "'digits' must be a whole number"),
    "rounds in %": ('select = "best"', "reach = 0.9", "scored by rounds, which % would multiply by 100"),
    "seconds beside %": ('score = { select = "last" }', 'score = { report = "seconds" }', "scored by seconds, which %"),
    "bytes in %": ('select = "best"', 'report = "bytes_up"', "scored by bytes, which %"),
    "a loss in %": ('select = "best"', 'what = "loss"', "scored by a loss, which %"),
    "paper's value for no column": ("accuracy = 80", "acuracy = 80", "column in rows.absent.paper: 'acuracy'"),
    "paper's value in words": ("accuracy = 80", 'accuracy = "about 80"', 'a number, "69.1 ± 0.6"'),
    "no method": ('method = "fedavg"\n', "", "rows.fedavg has no method"),
    "bad seeds": ("seeds = 2", "seeds = 0", "seeds must be a number from 1 up"),
    "values of the paper in a row of ours": ('title = "FedAvg"\n', 'title = "FedAvg"\nours = "why"\n', "marked as ours"),
    "seeds without end": ("seeds = 2", "seeds = 1000000000000000000000000000000", "seeds must be a number from 1 up to 1000"),
    "yes for a seed": ("seeds = 2", "seeds = [true]", "seeds must be a number"),
    "a number among readings": ('"None: a recipe for tests."', "5", "'readings' must be a list of texts. Got [5]"),
    "a number among notes": ('"A note."', "5", "'notes' must be a list of texts"),
    "a number among the columns of a mean": ('title = "accuracy"', 'title = "accuracy"\nmean_of = [5]',
                                             "'mean_of' must be a list of texts"),
    "a number among a row's columns": ('method = "fedavg"\n', 'method = "fedavg"\nonly = [5]\n', "'only' must be a list of texts"),
    "a number beside a score": ("seeds = 2", "seeds = 2\ndraw = [5]", "'draw' must be a list of tables"),
    "a setting in a setting": ('"mr.kappa" = 5.0', '"mr.kappa" = { x = 5.0 }',
                               "is written part.option=value, as in prox.mu=0.1. Got 'mr.kappa.x'"),
    "shrinking what is not there": ("seeds = 2", 'seeds = 2\nscaled = ["measure_evry"]',
                                    "Unknown setting in scaled: 'measure_evry'. Did you mean 'measure_every'"),
    "shrinking what is no whole number": ("seeds = 2", 'seeds = 2\nscaled = ["mr.kappa"]', "Unknown setting in scaled: 'mr.kappa'"),
    "shrinking the rounds twice": ("seeds = 2", 'seeds = 2\nscaled = ["rounds"]', "Unknown setting in scaled: 'rounds'"),
    "digits below the point": ('title = "accuracy"', 'title = "accuracy"\ndigits = -1',
                               "'digits' must be a whole number from 0 to 12. Got -1"),
    "yes for digits": ('title = "accuracy"', 'title = "accuracy"\ndigits = true', "'digits' must be a whole number from 0 to 12. Got True"),
    "a place in words": ('title = "accuracy"', 'title = "accuracy"\nx = "left"', "'x' is the column's place on an axis, a number"),
    "a paper's value that is no number": ("accuracy = 80", "accuracy = nan", "rows.absent.paper.accuracy: a paper's value is a number"),
    "a round that never comes": ('select = "best"', "select = 5", "it is scored in round 5, and its run has 4 rounds"),
    "a second score in a round that never comes": ('select = "last"', "select = 5", "it is scored in round 5, and its run has 4 rounds"),
    "an unknown curve": ("seeds = 2", 'seeds = 2\ndraw = [{ kind = "curves", y = "tset" }]',
                         "draw.y must be one of 'criterion', 'personalised'"),
    "a number for a curve": ("seeds = 2", 'seeds = 2\ndraw = [{ kind = "curves", y = 5 }]', "draw: 'y' must be a text. Got 5"),
    "a number for a picture's columns": ("seeds = 2", 'seeds = 2\ndraw = [{ kind = "bars", columns = 5 }]',
                                         "draw: 'columns' must be a list"),
    "a list in a picture's columns": ("seeds = 2", 'seeds = 2\ndraw = [{ kind = "bars", columns = [[]] }]',
                                      "draw.columns must be one of 'accuracy'"),
    "not TOML": ("[rows.dbe]", "[rows.dbe", "cannot be read"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_refused_when_the_file_is_read(what, tiny):
    old, new, message = WRONG[what]
    assert old in TINY
    tiny.write_text(TINY.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConsilienceError) as error:
        load_recipe(tiny)
    assert message in str(error.value)
    assert "tiny.toml" in str(error.value)


@pytest.mark.parametrize("wrong", [5, "last", [1]])
def test_a_second_score_is_a_table(wrong, tiny):
    without = TINY.replace('[[also]]\ntitle = "last round"\nscore = { select = "last" }\n', "")
    text = without.replace("seeds = 2", f"seeds = 2\nalso = [{wrong!r}]")
    tiny.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="'also' must be a list of tables"):
        load_recipe(tiny)


def test_printed_values(tiny):
    cells = {(c.row.name, c.column.name): c for c in load_recipe(tiny).cells}
    assert (cells["fedavg", "accuracy"].printed.value, cells["fedavg", "accuracy"].printed.spread) == (50.0, 60.0)
    assert cells["dbe", "kept"].printed.unreadable
    assert cells["absent", "kept"].printed.value is None
    assert not cells["absent", "kept"].printed.unreadable
    assert cells["fedavg", "kept"].printed is None


def test_a_row_that_waits_for_a_method_is_unavailable_until_it_comes(tiny):
    cell = load_recipe(tiny).select(["absent"], ["accuracy"])[0]
    assert cell.unavailable == "the method nothing_of_this_name is not implemented yet"
    tiny.write_text(TINY.replace("nothing_of_this_name", "scaffold"), encoding="utf-8")
    cell = load_recipe(tiny).select(["absent"], ["accuracy"])[0]
    assert cell.unavailable is None
    assert cell.values["method"] == "scaffold"


def test_unknown_rows_and_columns_of_a_selection(tiny):
    recipe = load_recipe(tiny)
    with pytest.raises(ConfigError, match=r"row of tiny.toml 'fedav'.*'fedavg'"):
        recipe.select(["fedav"])
    with pytest.raises(ConfigError, match="column"):
        recipe.select([], ["kepd"])
