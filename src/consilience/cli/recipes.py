"""`consilience recipes` and `consilience reproduce`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..recipes.check import absent_source, missing_data
from ..recipes.collect import obstacles
from ..recipes.draw import draw
from ..recipes.folders import RUNS
from ..recipes.format import Recipe
from ..recipes.load import load_recipe, recipe_names
from ..recipes.merge import merge_runs
from ..recipes.orders import Order, Piece, Selection, parse_asked, split_names
from ..recipes.outcome import Outcome
from ..recipes.page import write_html, write_outcome
from ..recipes.results import write_results
from ..recipes.run import data_in, reproduce_all
from ..report.tables import FORMATS, Table
from ..runs.progress import RunsProgress, progress_bar
from . import settings as s
from .output import AsJson, Format, err, print_json, print_table, printed_first, warn


def _facts(recipe: Recipe) -> dict[str, Any]:
    cells = [c for c in recipe.cells if c.unavailable is None]
    needs = [(c.values.get("data", "digits"), c.values.get("proxy")) for c in cells if c.values is not None]
    absent = {need for need in set(needs) if missing_data({"data": need[0], "proxy": need[1]})}
    return {"name": recipe.name, "title": recipe.title, "rows": [r.name for r in recipe.rows], "columns": [c.name for c in recipe.columns],
            "cells": len(recipe.cells), "available": len(cells), "ready": sum(need not in absent for need in needs),
            "seeds": list(recipe.seeds), "data": recipe.data, "data_missing": sorted({d.partition("(")[0] for d, _ in absent}),
            "paper": recipe.citation, "unavailable": recipe.unavailable,
            "reasons": sorted({c.unavailable for c in recipe.cells if c.unavailable})}


def recipes(name: Annotated[str | None, typer.Argument(help="One recipe, in full; none: a list of all.", show_default=False)] = None,
            data_dir: s.DataDir = None, form: Format = "text", as_json: AsJson = False) -> None:
    """List the papers' tables and figures to run again. Says what each of them needs."""
    with data_in(data_dir):
        if name is not None:
            return _show(load_recipe(name), form, as_json)
        facts = [_facts(load_recipe(n)) for n in recipe_names()]
    if as_json:
        return print_json(facts)
    rows = []
    for f in facts:
        data = [d + (" (not here)" if d in f["data_missing"] else "") for d in f["data"]]
        rows.append([f["name"], f["title"], str(len(f["rows"])), str(len(f["columns"])),
                     f"{f['ready']} of {f['cells']}" if f["cells"] else "–", ", ".join(data) or "–"])
    print_table(Table(["recipe", "title", "rows", "columns", "cells that can be run here", "data"], rows, data=facts), form)


def _show(recipe: Recipe, form: str, as_json: bool) -> None:
    """Every cell with the paper's value and why it cannot be had."""
    reasons = obstacles(recipe)
    cells = [{"row": c.row.name, "column": c.column.name, "method": c.method, "paper": c.printed.text if c.printed else None,
              "ours": c.ours, "unavailable": why,
              "run": dict(c.values) if c.values is not None else None, "protocol": c.score.sentence()}
             for c, why in zip(recipe.cells, reasons)]
    if as_json:
        return print_json({**_facts(recipe), "readings": list(recipe.readings), "notes": list(recipe.notes), "cell_list": cells})
    in_short = {} if form == "csv" else _in_short(recipe, reasons)       # CSV has no notes to explain them
    rows = [[str(c["row"]), str(c["column"]), "ours" if c["ours"] else cell.printed.shown(cell.digits) if cell.printed else "–",
             str(c["method"] or "–"), in_short.get(str(c["unavailable"]), str(c["unavailable"] or "yes"))]
            for c, cell in zip(cells, recipe.cells)]
    notes = [f"{short[0].upper()}{short[1:]}: {reason}." for reason, short in in_short.items() if reason != recipe.unavailable]
    notes += [*(f"Reading: {r}" for r in recipe.readings), *recipe.notes]
    notes += [f"Unavailable: {recipe.unavailable}."] if recipe.unavailable else []
    print_table(Table(["row", "column", "paper", "method", "can be run"], rows, f"{recipe.name}: {recipe.title}", notes, cells), form)


def _in_short(recipe: Recipe, reasons: Sequence[str | None]) -> dict[str, str]:
    """A few words for every reason why cells cannot be had: the reason itself stands once below the table, not on every line of it."""
    words = {recipe.unavailable: "no"} if recipe.unavailable else {}
    numbered = 0
    for cell, reason in zip(recipe.cells, reasons):
        if not reason or reason in words:
            continue
        if cell.unavailable:
            numbered += 1
            words[reason] = f"no ({numbered})"
        elif cell.values is not None:                            # a mean of columns has the reason of one of them
            words[reason] = f"needs {absent_source(cell.values)}"
    return words


Names = Annotated[list[str] | None, typer.Option(help="Only these, by name and in this order; separated by commas, or repeated.")]


def _pieces(asked: Sequence[str], rows: tuple[str, ...], columns: tuple[str, ...], seeds: int | None, scale: float, engine: str | None,
            device: str | None, changed: tuple[tuple[str, str], ...], out: Path | None, runs: Path | None, skip: int = 0) -> list[Piece]:
    """What is asked of every recipe, and where its results go. They share their runs; one named twice is one piece with all its cells."""
    parsed = [parse_asked(text) for text in asked]
    if (rows or columns) and (len(parsed) > 1 or any(r or c for _, r, c in parsed)):
        raise ConfigError("--rows and --columns belong to one recipe. Write them behind its name, as in dbe/table5:local,fedavg:fmnist.")
    top = out or Path("reproductions")
    selections: dict[str, list[Selection]] = {}
    for name, own_rows, own_columns in parsed:
        selections.setdefault(name, []).append((own_rows or rows, own_columns or columns))
    pieces: list[Piece] = []
    for name, ((first_rows, first_columns), *beside) in selections.items():
        recipe = load_recipe(name)
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", recipe.name.removesuffix(".toml"))
        folder = out if out is not None and len(selections) == 1 else top / plain
        if other := next((before for before, piece in zip(selections, pieces) if folder == piece.out), None):
            raise ConfigError(f"The recipes {other!r} and {name!r} would be written to one folder, {folder}. Give each a command and an "
                              "--out of its own.")
        place = runs or (folder if len(selections) == 1 else top) / RUNS
        order = Order(first_rows, first_columns, seeds, scale, engine, device, changed, skip, tuple(beside))
        order.cells_of(recipe)                                    # a row or column that is not there is said before anything is done
        pieces.append(Piece(recipe, order, folder, place))
    return pieces


def reproduce(names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Recipes, as in dbe/table5, or paths of your own .toml "
                                                         "files; rows and columns may follow, as in dbe/table5:local,fedavg:fmnist.",
                                                         show_default=False)],
              rows: Names = None, columns: Names = None,
              seeds: Annotated[int | None, typer.Option("--seeds", help="How many seeds; by default the recipe's own.", min=1)] = None,
              skip: Annotated[int, typer.Option("--skip-seeds", help="Leave out the recipe's first N seeds, for instance because another "
                                                "machine has them. --skip-seeds 1 --seeds 1 is the second alone.", min=0)] = 0,
              scale: Annotated[float, typer.Option("--rounds-scale", help="Run this share of the recipe's rounds. Every output says so.",
                                                   min=0.0001, max=100)] = 1.0,
              engine: s.Engine = None, device: s.Device = None, data_dir: s.DataDir = None,
              option: Annotated[list[str] | None, typer.Option("--option", "-o", help="A setting of all runs, as in precision=bfloat16. "
                                                               "Every output says so. May be repeated.")] = None,
              out_: Annotated[Path | None, typer.Option("--out", help="Folder of the runs and results; with several recipes, a folder in "
                                                        "it for each. Without it reproductions/ and the recipe's name.")] = None,
              runs: Annotated[Path | None, typer.Option("--runs", help="Folder of the run folders, so that recipes can share runs; "
                                                        "without it runs/ inside --out.")] = None,
              jobs: Annotated[int | None, typer.Option("--jobs", "--at-once", help="Runs at a time, each in a process of its own; by "
                                                       "default as many as cores, or one on a GPU.", min=1)] = None,
              minutes: Annotated[float | None, typer.Option("--max-minutes", help="Stop after so many minutes, between two rounds. "
                                                            "The same command resumes.", min=0.01)] = None,
              again: Annotated[bool, typer.Option("--again", help="Run again what is finished.")] = False,
              merge: Annotated[list[Path] | None, typer.Option("--merge", help="First take over runs from this folder or archive "
                                                               "(.tar, .tar.gz, .zip). Of two copies of a run, the one that has "
                                                               "come further stays. May be repeated.")] = None,
              report_only: Annotated[bool, typer.Option("--report-only", help="Make table and page of what is there, without training "
                                                             "or measuring.")] = False,
              results: Annotated[Path | None, typer.Option("--results", help="Also keep the records as CSV in this folder, and make the "
                                                           "recipe's page there from all records that it holds.")] = None,
              form: Format = "text", as_json: AsJson = False) -> None:
    """Run papers' tables or figures again. Prints paper, ours and difference. The same command resumes an interrupted one."""
    until = None if minutes is None else time.time() + 60 * minutes
    if form not in FORMATS:
        Table([], []).render(form)                                # says which there are, before anything is run
    chosen_rows, chosen_columns = (split_names(",".join(given or ())) for given in (rows, columns))
    pairs = [pair.partition("=") for pair in option or ()]
    if any(not equals for _, equals, _ in pairs):
        raise typer.BadParameter("takes name=value, as in precision=bfloat16.", param_hint="--option")
    changed = tuple((name.strip(), value.strip()) for name, _, value in pairs)
    pieces = _pieces(names, chosen_rows, chosen_columns, seeds, scale, engine, device, changed, out_, runs, skip)
    for place in dict.fromkeys(p.runs for p in pieces) if merge else ():
        merge_runs(merge or (), place)
    with printed_first() as write:
        with progress_bar() as bar:
            tell = lambda what: bar.console.print(what, highlight=False, markup=False, soft_wrap=True)

            def finished(piece: Piece, outcome: Outcome) -> None:
                """What is there is written down after every run: the machine may not be there for the last one."""
                write(partial(write_outcome, outcome, piece.out))
                if results is not None:
                    write(partial(write_results, outcome, piece.order, results))
            outcomes = reproduce_all(pieces, data_dir=data_dir, jobs=jobs, again=again, train=not report_only, until=until,
                                     watcher=RunsProgress(bar), tell=tell, finished=finished)
            for piece, outcome in zip(pieces, outcomes):
                draw(outcome, piece.out, data_dir=data_dir, until=until, tell=tell)
        for piece, outcome in zip(pieces, outcomes):
            write(partial(_write, piece, outcome, data_dir, results))
        documents = [outcome.document() for outcome in outcomes]
        if as_json:
            print_json(documents[0] if len(documents) == 1 else {"recipes": documents})
        for piece, outcome in zip(pieces, outcomes) if not as_json else ():
            _print(piece, outcome, form)
        failed: dict[str, list[str]] = {}
        for entry in (e for outcome in outcomes for e in outcome.entries):
            for seed, state in entry.states.items():
                if state.startswith("failed"):
                    failed.setdefault(state, []).append(f"{entry.cell.row.title}, {entry.cell.column.title}, seed {seed}")
        for state, cells in failed.items():                # what ended all of them is said once
            warn(f"{'; '.join(cells[:3])}{f' and {len(cells) - 3} more' if len(cells) > 3 else ''} {state}")
        if failed:
            raise typer.Exit(3)


def _write(piece: Piece, outcome: Outcome, data_dir: Path | None, results: Path | None) -> None:
    with data_in(data_dir):
        report = write_html(outcome, piece.out)
    written = [*write_outcome(outcome, piece.out), *([report] if report else [])]
    figures = f" and {many} figure{'s' if many > 1 else ''}" if (many := len(outcome.figures)) else ""
    err().print(f"Wrote {', '.join(p.name for p in written)}{figures} in {piece.out}", soft_wrap=True, markup=False)
    if results is not None and outcome.entries:
        page = write_results(outcome, piece.order, results, piece.out)
        said = f"Wrote {page} and the records of its runs" if page else f"No page: nothing of {piece.recipe.name} was run"
        err().print(said, soft_wrap=True, markup=False)


def _print(piece: Piece, outcome: Outcome, form: str) -> None:
    if outcome.entries:
        return print_table(outcome.table(cells=piece.order.cells_of(piece.recipe)), form)
    recipe = piece.recipe
    typer.echo("\n".join([f"{recipe.name}: {recipe.title}", *([f"Unavailable: {recipe.unavailable}."] if recipe.unavailable else []),
                          *(str(piece.out / f) for f in outcome.figures), *outcome.remarks]))
