"""`consilience methods`, `consilience explain` and `consilience new part`."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..errors import ConfigError
from ..parts.presets import PRESETS
from ..parts.registry import PARTS
from ..report.tables import Table
from ..runs.explain import explain as explain_stack
from ..runs.explain import list_methods
from ..runs.files import write_bytes
from ..runs.privacy import privacy_line
from ..runs.run import build_federation, load_data
from . import settings as s
from .output import AsJson, Format, out, print_json, print_table
from .templates import PART, PART_TEST

new_app = typer.Typer(no_args_is_help=True, help="Start something of your own.")


def methods(form: Format = "text", as_json: AsJson = False) -> None:
    """List all methods and parts. Each of these names can be used in a method, as in scaffold+dbe."""
    rows = list_methods()
    if as_json:
        return print_json(rows)
    body = [[r["name"], r["kind"], "+".join(r["parts"]) if r["kind"] == "method" else "", ", ".join(r["helps"]), r["paper"]] for r in rows]
    print_table(Table(["name", "kind", "parts", "made against", "published"], body, data=rows), form)


def explain(method: s.Method, data: s.Data = None, split: s.Split = None, clients: s.Clients = None, model: s.Model = None,
            taps: s.Taps = None, set_: s.Set = None, option: s.Option = None, data_dir: s.DataDir = None, as_json: AsJson = False) -> None:
    """Explain what a method does, keeps and sends. Lists parts, hooks, options, state, bytes, references and departures."""
    config = s.configure(None, set_, option, method=method, data=data, split=split, clients=clients, model=model, taps=taps,
                         data_dir=data_dir)
    document = explain_stack(config.stack(), build_federation(config, load_data(config)), config.run.rounds)
    if as_json:
        return print_json(document)
    _print_explanation(document)


def _print_explanation(d: dict[str, Any]) -> None:
    console = out()
    say = lambda text="": console.print(text)
    say(f"[bold]{escape(d['method'])}[/bold]: " + (" + ".join(p["name"] for p in d["parts"]) or "no part beside averaging"))
    for part in d["parts"]:
        say()
        say(f"[bold]{part['name']}[/bold]  {escape(part['idea'])}")
        say(f"  published  {escape(part['paper'])}")
        say(f"  hooks      {', '.join(part['hooks'])}")
        for o in part["options"]:
            limits = f"  ({o['range']})" if o["range"] else f"  (one of {', '.join(map(str, o['choices']))})" if o["choices"] else ""
            say(f"  option     {part['name']}.{o['name']} = {o['value']!r}{escape(limits)}  {escape(o['doc'])}")
        for line in part["departs"]:
            say(f"  departs    {escape(line)}")
        neutral = part["neutral"]
        say(f"  neutral    {', '.join(f'{k}={v}' for k, v in neutral.items()) or 'at any setting'}" if neutral is not None else
            f"  neutral    none: {escape(part['not_neutral'] or '')}")
        for key, upload in part["uploads"].items():
            secure = "a sum: could go through secure aggregation" if upload["secure_aggregation"] else \
                "read client by client: cannot go through secure aggregation"
            say(f"  uploads    {key} ({upload['reduced']}; {secure})")
        if part["privacy"]:
            say(f"  privacy    {escape(part['privacy'])}")
        if part["raw_averages"]:
            say(f"  [yellow]warning[/yellow]    raw data leave the client: {escape(part['raw_averages'])}. "
                "A federation must allow it (allow_raw_averages=true).")
    say()
    m = d["model"]
    say(f"[bold]model[/bold]  {m['parameters']:,} parameters and {m['buffers']:,} buffer entries, of which {m['travels']:,} travel")
    for phase in d["phases"]:
        work = "the run's local work" if phase["epochs"] is None else f"{phase['epochs']} epochs"
        say(f"  phase {phase['name']}: {phase['keys']} tensors of {'the model' if phase['model'] == 'model' else phase['model']}, {work}")
    for home, state in d["state"].items():
        say(f"[bold]{home}[/bold]  {state['where']}: {state['bytes']:,} bytes")
        shown = state["tensors"][:6]
        for t in shown:
            say(f"  {escape(t['path'])}  {'×'.join(map(str, t['shape'])) or 'scalar'}")
        if len(state["tensors"]) > len(shown):
            say(f"  … and {len(state['tensors']) - len(shown)} more")
    t = d["traffic"]
    say(f"[bold]traffic[/bold]  bytes per client: first round {t['first_round']['up']:,} up, {t['first_round']['down']:,} down; "
        f"later {t['later_rounds']['up']:,} up, {t['later_rounds']['down']:,} down")
    _print_privacy(d["privacy"], say)
    say("[bold]resolved[/bold]")
    for line in d["resolves"]:
        say(f"  {escape(line)}")
    for line in d["warnings"]:
        say(f"[yellow]warning[/yellow]  {escape(line)}")


def _print_privacy(d: dict[str, Any], say: Any) -> None:
    """What the server sees of single clients, and the forecast (ε, δ)."""
    sums = ["the model"] if d["model"]["travels"] and d["model"]["sum"] else []
    sums += [f"{u['part']}.{u['upload']}" for u in d["uploads"] if u["sum"]]
    say("[bold]what the server sees[/bold]")
    if sums:
        say(f"  sums over clients, which could go through secure aggregation: {escape(', '.join(sums))}")
    for line in d["secure_aggregation"] or []:
        say(f"  single clients: {escape(line)}")
    if not sums and not d["secure_aggregation"]:
        say("  nothing")
    if d["forecast"]:
        say(f"  after {d['forecast']['rounds']} rounds, if all answer: {escape(privacy_line(d['forecast']))}")


def _taken_by_python(name: str) -> bool:
    """Whether a file of this name could not be imported, or would hide a module that others need."""
    spec = importlib.util.find_spec(name)
    return keyword.iskeyword(name) or name in sys.stdlib_module_names or (spec is not None and "site-packages" in str(spec.origin))


@new_app.command("part")
def new_part(name: Annotated[str, typer.Argument(help="The part's name: small letters, digits and underscores.", show_default=False)],
             folder: Annotated[Path, typer.Option("--folder", help="Where to write it.")] = Path("."),
             as_json: AsJson = False) -> None:
    """Write the short file a part starts from, and its test."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"A part's name has small letters, digits and underscores, and starts with a letter. Got {name!r} instead.")
    if _taken_by_python(name):
        raise ConfigError(f"The name {name!r} means something to Python: {name}.py could not be imported beside it. Choose another.")
    if name in PARTS or name in PRESETS:
        raise ConfigError(f"The name {name!r} is taken by one of ours. Choose another.")
    cls = "".join(word.capitalize() for word in name.split("_"))
    files = {folder / f"{name}.py": PART.format(name=name, cls=cls), folder / f"test_{name}.py": PART_TEST.format(name=name, cls=cls)}
    for path in files:
        if path.exists():
            raise ConfigError(f"The file {str(path)!r} exists already. Choose another name or --folder.")
    for path, text in files.items():
        write_bytes(path, text.encode())
    if as_json:
        return print_json({"name": name, "class": cls, "files": [str(path) for path in files]})
    for path in files:
        out().print(f"wrote {path}", markup=False)
    out().print(f"Try it:   consilience run fedavg+{folder / name}.py:{cls} --rounds 5\nTest it:  pytest {folder / f'test_{name}.py'}",
                markup=False)
