"""`consilience recipes` and `consilience reproduce`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ..recipes.check import missing_data
from ..recipes.draw import draw
from ..recipes.format import Recipe
from ..recipes.load import load_recipe, recipe_names
from ..recipes.page import write_html, write_outcome
from ..recipes.run import Order, data_in
from ..recipes.run import reproduce as run_recipe
from ..report.tables import FORMATS, Table
from . import settings as s
from .output import AsJson, Format, err, print_json, print_table, progress_bar, warn
from .train import RunsProgress


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
    """List the papers' tables and figures that can be run again, and what each of them needs."""
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
    cells = [{"row": c.row.name, "column": c.column.name, "method": c.method, "paper": c.printed.text if c.printed else None,
              "ours": c.ours, "unavailable": c.unavailable or (missing_data(c.values) if c.values is not None else None),
              "run": dict(c.values) if c.values is not None else None, "protocol": c.score.sentence()} for c in recipe.cells]
    if as_json:
        return print_json({**_facts(recipe), "readings": list(recipe.readings), "notes": list(recipe.notes), "cell_list": cells})
    rows = [[str(c["row"]), str(c["column"]), "ours" if c["ours"] else str(c["paper"] or "–"), str(c["method"] or "–"),
             str(c["unavailable"] or "yes")] for c in cells]
    notes = [*(f"Reading: {r}" for r in recipe.readings), *recipe.notes]
    notes += [f"Unavailable: {recipe.unavailable}."] if recipe.unavailable else []
    print_table(Table(["row", "column", "paper", "method", "can be run"], rows, f"{recipe.name}: {recipe.title}", notes, cells), form)


Names = Annotated[list[str] | None, typer.Option(help="Only these, by name; separated by commas, or repeated.")]


def _names(given: list[str] | None) -> tuple[str, ...]:
    return tuple(n.strip() for text in given or () for n in text.split(",") if n.strip())


def reproduce(name: Annotated[str, typer.Argument(help="A recipe, as in dbe/table5, or the path of your own .toml file.",
                                                  show_default=False)],
              rows: Names = None, columns: Names = None,
              seeds: Annotated[int | None, typer.Option("--seeds", help="How many seeds; by default the recipe's own.", min=1)] = None,
              scale: Annotated[float, typer.Option("--rounds-scale", help="Run this share of the recipe's rounds. Every output says so.",
                                                   min=0.0001, max=100)] = 1.0,
              engine: s.Engine = None, device: s.Device = None, data_dir: s.DataDir = None,
              out_: Annotated[Path | None, typer.Option("--out", help="Folder of the runs and results; without it reproductions/ and "
                                                        "the recipe's name.")] = None,
              runs: Annotated[Path | None, typer.Option("--runs", help="Folder of the run folders, to share runs between recipes; "
                                                        "without it runs/ inside --out.")] = None,
              jobs: Annotated[int | None, typer.Option("--jobs", help="Runs at a time; by default as many as cores, or one on a GPU.",
                                                       min=1)] = None,
              again: Annotated[bool, typer.Option("--again", help="Run anew what is finished.")] = False,
              report_only: Annotated[bool, typer.Option("--report-only", help="Train and measure nothing: table and page of what is "
                                                             "there.")] = False,
              form: Format = "text", as_json: AsJson = False) -> None:
    """Run a paper's table or figure again and print paper, ours and difference. The same command goes on where it was."""
    if form not in FORMATS:
        Table([], []).render(form)                                # says which there are, before anything is run
    recipe = load_recipe(name)
    order = Order(_names(rows), _names(columns), seeds, scale, engine, device)
    folder = out_ or Path("reproductions") / re.sub(r"[^A-Za-z0-9_.-]+", "-", recipe.name.removesuffix(".toml"))
    with progress_bar() as bar:
        tell = lambda what: bar.console.print(what, highlight=False, markup=False)
        outcome = run_recipe(recipe, folder, order, data_dir=data_dir, jobs=jobs, again=again, train=not report_only,
                             runs=runs, watcher=RunsProgress(bar), tell=tell)
        draw(outcome, folder, data_dir=data_dir, tell=tell)
        with data_in(data_dir):
            report = write_html(outcome, folder)
    written = [*write_outcome(outcome, folder), *([report] if report else [])]
    if as_json:
        print_json(outcome.document())
    elif outcome.entries:
        print_table(outcome.table(order.rows, order.columns), form)
    else:
        typer.echo("\n".join([f"{recipe.name}: {recipe.title}", *([f"Unavailable: {recipe.unavailable}."] if recipe.unavailable else []),
                              *(str(folder / f) for f in outcome.figures), *outcome.remarks]))
    failed = [f"{e.cell.row.title}, {e.cell.column.title}, seed {seed} {state}" for e in outcome.entries
              for seed, state in e.states.items() if state.startswith("failed")]
    for line in failed:
        warn(line)
    err().print(f"Wrote {', '.join(p.name for p in written)}"
                + (f" and {len(outcome.figures)} figures" if outcome.figures else "") + f" in {folder}", soft_wrap=True, markup=False)
    if failed:
        raise typer.Exit(3)
