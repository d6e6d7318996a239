"""`consilience data`: what data sets there are, whether their files are whole, and what a split looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from .. import options
from ..data import SOURCES, directory, load, save_split, statistics, verify
from ..data.download import download as fetch
from ..data.picture import draw_split
from ..data.sources import make
from ..runs.files import disk
from ..runs.progress import progress_bar
from .output import AsJson, print_json
from .output import out as _out

app = typer.Typer(no_args_is_help=True, help="List, check, fetch and look at data sets.")

Name = Annotated[str, typer.Argument(help="A data set, as in cifar10 or 'folder(path=\"photos\")'.", show_default=False)]
DataDir = Annotated[Path | None, typer.Option("--data-dir",
                                               help="Where the files are; without it CONSILIENCE_DATA, else a folder of the user's own.")]


@app.command("list")
def list_sources(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List every data set, and whether its files are here."""
    rows = []
    for name in sorted(SOURCES):
        place = verify.where(SOURCES[name](), data_dir)
        rows.append({"name": name, "title": SOURCES[name].title, "kind": SOURCES[name].kind, "found": place["found"],
                     "folder": place["folder"]})
    if as_json:
        return print_json(rows)
    table = _table("name", "what", "here")
    for row in rows:
        here = {True: row["folder"] or "always", False: "no", None: "yours: give a path"}[row["found"]]
        table.add_row(row["name"], row["title"], escape(here))
    _out().print(table)
    _out().print(f"Data directory: {escape(str(directory.data_directory(data_dir)))}", highlight=False, soft_wrap=True)


@app.command()
def info(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Say what a data set is and how to get it. Also where it is looked for, and its options."""
    source = make(name)
    place = verify.where(source, data_dir)
    settings = options.describe(type(source))
    document = {"name": source.name, "title": source.title, "kind": source.kind, "text": source.text,
                "doc": (type(source).__doc__ or "").strip(), "default_split": source.default_split,
                "default_test": source.default_test, "default_pool": source.default_pool, "options": settings, **place,
                "downloads": [d.url for d in source.downloads], "how_to_get": directory.how_to_get(source)}
    if as_json:
        return print_json(document)
    out = _out()
    out.print(f"[bold]{source.name}[/bold]: {escape(source.title)}\n", highlight=False)
    out.print(escape(_unindent(document["doc"])) + "\n", highlight=False)
    split = source.default_split or "by client or domain where there are any, else dirichlet(alpha=0.1)"
    out.print(f"Default split: {escape(split)}", highlight=False)
    if settings:
        table = _table("option", "default", "meaning")
        for row in settings:
            table.add_row(row["name"], str(row["default"]), escape(row["doc"] + (f" ({row['range']})" if row["range"] else "")))
        out.print(table)
    if place["found"]:
        out.print(f"Found: {escape(place['folder'] or 'always here')}", highlight=False, soft_wrap=True)
    elif place["looked_in"]:
        out.print("Not found. Looked in", highlight=False)
        for folder in place["looked_in"]:
            out.print(f"  {escape(folder)}", highlight=False, soft_wrap=True)
    if document["how_to_get"] and not place["found"]:
        out.print(escape(document["how_to_get"]), highlight=False)


@app.command()
def check(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Read a whole data set and check it. Compares checksums with the published ones, and counts. Exit code 2 if a file differs."""
    source = make(name)
    with progress_bar(of_bytes=True, transient=True) as bar:
        stages, read, total = _Stages(bar), 0, verify.bytes_to_check(source, data_dir)

        def report(count: int) -> None:
            nonlocal read
            read += count
            stages.tell("checksums", read, total)

        files = verify.check_files(source, data_dir, report)
        stages.tell("reading")
        dataset = source.read(data_dir)
        stages.tell("counting")
        held = verify.contents(dataset)
    ok = all(f["verdict"] != "differs" for f in files)
    if as_json:
        print_json({"name": source.name, "text": source.text, "ok": ok, "files": files, **held})
    else:
        _print_check(source.text, files, held, dataset.class_names)
    if not ok:
        raise typer.Exit(2)


def _print_check(text: str, files: list[dict[str, Any]], held: dict[str, Any], class_names: tuple[str, ...]) -> None:
    out = _out()
    if files:
        table = _table("file", "bytes", "verdict")
        for row in files:
            note = row["verdict"]
            if note == "differs":
                note += f": MD5 {row['md5']}, published {row['expected_md5'][0]}"
            table.add_row(escape(row["path"] or row["file"]), f"{row['size']:,}" if row["size"] is not None else "", note)
        out.print(table)
    shape = " × ".join(map(str, held["shape"]))
    out.print(f"{escape(text)}: {held['samples']:,} samples of {shape} ({held['dtype']}), {held['test_samples']:,} of them the "
              f"published test set; {held['classes']} classes; {held['megabytes']:,} MB; fingerprint {held['fingerprint']}",
              highlight=False, soft_wrap=True)
    for group, about in held["groups"].items():
        out.print(f"group {escape(group)}: {about['values']} values, {about['smallest']} to {about['largest']} samples", highlight=False)
    if held["by_class"]:
        counts = held["by_class"].items() if isinstance(held["by_class"], dict) else enumerate(held["by_class"])
        out.print("by class: " + escape(", ".join(f"{k} {v:,}" for k, v in counts)), highlight=False, soft_wrap=True)


@app.command()
def show(name: Name,
         split: Annotated[str | None, typer.Option(help="How to divide it, as in 'dirichlet(alpha=0.1)'.")] = None,
         clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
         seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
         shift: Annotated[str | None, typer.Option(help="Feature shift, as in 'rotation(step=15)'.")] = None,
         train: Annotated[float | None, typer.Option(help="Fraction of a client's samples to train on.")] = None,
         validation: Annotated[float | None, typer.Option(help="Fraction of a client's samples to validate on.")] = None,
         test: Annotated[str | None, typer.Option(help="What is tested: clients, global, both or published.")] = None,
         pool: Annotated[str | None, typer.Option(help="Which samples are divided: train or all.")] = None,
         split_file: Annotated[Path | None, typer.Option(help="Show this saved split.")] = None,
         save: Annotated[Path | None, typer.Option(help="Save the split to this file.")] = None,
         out: Annotated[Path | None, typer.Option(help="Draw the split to this file (.png, .svg, .pdf).")] = None,
         part: Annotated[str, typer.Option(help="What is counted and drawn: all, train, val or test.")] = "all",
         data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Divide a data set and show who gets what. Prints numbers, and draws a picture with --out."""
    with progress_bar(transient=True) as bar:
        stages = _Stages(bar)
        stages.tell("reading and dividing")
        data = load(name, split, clients, seed, shift=shift, train=train, validation=validation, test=test, pool=pool,
                    split_file=split_file, data_dir=data_dir)
        stages.tell("counting")
        numbers = statistics.describe(data, part)
        if save:
            stages.tell("saving the split")
            with disk("write", save):
                save_split(data, save)
        picture = None
        if out:
            stages.tell("drawing")
            with disk("write", out):
                picture = draw_split(data, out, part, data.description["class_names"])
    if as_json:
        return print_json({"description": data.description, "statistics": numbers,
                            "picture": str(picture) if picture else None,
                            "saved": str(save) if save else None})
    table = _table("client", "train", "validation", "test", "effective classes")
    counts = statistics.count_labels(data.y, statistics.rows_of(data, part), data.classes)
    effective = statistics.effective_classes(counts).tolist()
    for client, value in list(zip(data.clients, effective))[:_MOST]:
        table.add_row(escape(client.name), *(f"{len(rows):,}" for rows in client[1:]), f"{value:.2f}")
    console = _out()
    console.print(table)
    if data.population > _MOST:
        console.print(f"… and {data.population - _MOST} more clients", highlight=False)
    size, skew = numbers["size"], numbers["label_skew"]
    apart = f", {len(data.test):,} in the global test set" if len(data.test) else ""
    console.print(f"{escape(data.name)}, {escape(str(data.description['split']))}: {data.population} clients, {numbers['samples']:,} "
                  f"samples{apart}\n"
                  f"size {size['min']:.0f} to {size['max']:.0f} (spread {size['coefficient_of_variation']:.2f}); effective classes "
                  f"{numbers['effective_classes']['mean']:.2f}; label skew {skew['total_variation']:.2f} (total variation); "
                  f"hash {numbers['hash']}", highlight=False, soft_wrap=True)
    for what, path in (("Split saved to", save), ("Picture:", picture)):
        if path:
            console.print(f"{what} {escape(str(path))}", highlight=False, soft_wrap=True)


_MOST = 20      # clients listed one by one


@app.command()
def download(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Fetch a data set's files, check them and unpack them. Needs an internet connection."""
    source = make(name)
    with progress_bar(of_bytes=True, transient=True) as bar:
        paths = fetch(source, data_dir, _Stages(bar).tell)
    place = verify.where(source, data_dir)
    if as_json:
        return print_json({"name": source.name, "files": [str(p) for p in paths], "found": place["found"],
                            "folder": place["folder"]})
    for path in paths:
        _out().print(escape(str(path)), highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


class _Stages:
    """One stage of the work after another under one bar."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.what, self.task = bar, "", TaskID(-1)

    def tell(self, what: str, done: int = 0, total: int = 0) -> None:
        """So much of so much is done; a total of 0 is not known."""
        if what != self.what:
            if self.what:
                self.bar.remove_task(self.task)
            self.what, self.task = what, self.bar.add_task(what, total=total or None, note="")
        self.bar.update(self.task, completed=done, total=total or None)


def _unindent(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())
