"""One HTML page that needs nothing beside itself: tables and text as HTML, figures drawn from embedded numbers."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from .. import __version__
from .gather import Gathered
from .reproduce import command_of, environments, settings_table
from .tables import Table

_SCRIPTS = ("svg.js", "figures.js", "page.js")
_FORMS = (("markdown", "Markdown"), ("latex", "LaTeX"), ("csv", "CSV"))


@dataclass
class Content:
    """What is on the page. Figures are plain numbers; `notes` are by section."""

    title: str
    gathered: Gathered
    results: list[Table]                       # one for each set of methods that can be compared
    clients_table: Table
    curves: dict[str, Any]
    clients: list[dict[str, Any]]
    splits: list[dict[str, Any]] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)
    traces: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)


def render_page(content: Content) -> str:
    """The page as text. Only the scripts written here may run: their hash stands in the page's own policy."""
    asset = lambda name: (files(__package__) / "assets" / name).read_text(encoding="utf-8")
    script = '"use strict";\n{\n' + "\n".join(asset(name) for name in _SCRIPTS) + "}\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'sha256-{digest}'"
    sections = _sections(content)
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in sections)
    body = "\n".join(f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>\n{inner}\n</section>'
                     for name, title, inner in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(content.title)}</title>
<style>
{asset("page.css")}</style>
</head>
<body>
<a class="skip" href="#results">To the results</a>
<header>
<h1>{escape(content.title)}</h1>
<p class="lead">{escape(_lead(content))}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{_warnings(content.gathered.notes)}
<noscript><p class="warnings">Figures are drawn by a script inside this page, and scripts are switched off. Tables can be read
without.</p></noscript>
{body}
</main>
<footer><p>Made by consilience {escape(__version__)}. This page holds all it needs and loads nothing.</p></footer>
<script type="application/json" id="report-data">{_embed(_figures(content))}</script>
<script>{script}</script>
</body>
</html>
"""


def _embed(value: Any) -> str:
    """JSON inside a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _figures(content: Content) -> dict[str, Any]:
    tables = [*((f"results{i}", t) for i, t in enumerate(content.results)), ("clients", content.clients_table)]
    copies = {f"{name}-{form}": table.render(form) for name, table in tables for form, _ in _FORMS}
    copies["commands"] = "\n".join(command_of(run) for run in content.gathered.runs)
    return {"groups": [{"label": g.label} for g in content.gathered.groups], "curves": content.curves, "clients": content.clients,
            "splits": content.splits, "maps": content.maps, "traces": content.traces, "copies": copies}


def _lead(content: Content) -> str:
    runs = content.gathered.runs
    describe = lambda about: f"{about.get('name', '?')} ({about.get('split', '?')}, {about.get('clients', '?')} clients)"
    data = list(dict.fromkeys(describe(r.about) for r in runs))
    seeds = sorted({r.seed for r in runs})
    number = lambda n, word: f"{n} {word}{'' if n == 1 else 's'}"
    shown = ", ".join(data[:3]) + (f" and {len(data) - 3} more" if len(data) > 3 else "")
    return f"{number(len(runs), 'run')}, {number(len(content.gathered.groups), 'method')}, {number(len(seeds), 'seed')}, on {shown}."


def _sections(content: Content) -> list[tuple[str, str, str]]:
    notes = lambda name: "".join(f'<p class="note">{escape(n)}</p>' for n in content.notes.get(name, []))
    figure = lambda name, title: f'<div id="figure-{name}" data-title="{escape(title)}"></div>'
    out = [("results", "Results", "".join(_table(t, f"results{i}", len(content.results) > 1) for i, t in enumerate(content.results))),
           ("curves", "Convergence", _curves_note(content) + figure("curves", "Convergence curves") + notes("curves"))]
    if content.clients:
        out.append(("clients", "Clients", _clients_note(content) + figure("clients", "Accuracy of every client, sorted")
                    + _table(content.clients_table, "clients") + notes("clients")))
    if content.splits or content.notes.get("splits"):
        picture = figure("split", "Samples of each class on each client") if content.splits else ""
        out.append(("split", "Split", picture + notes("splits")))
    if content.maps or content.notes.get("maps"):
        text = ('<p class="note">t-SNE of what the head receives in the model that each client is served by, before and after one round '
                "of local training, each map on its own. A point's shape tells its client.</p>")
        out.append(("maps", "Features", (text + figure("maps", "Feature maps") if content.maps else "") + notes("maps")))
    if content.traces:
        out.append(("traces", "During local training", figure("traces", "Likeness to the global model during local training")))
    out += [("settings", "Settings", _settings(content)), ("reproduce", "Reproduce", _reproduce(content))]
    return out


def _curves_note(content: Content) -> str:
    several = any(len(g.runs) > 1 for g in content.gathered.groups)
    thin = any(g["thinned"] for g in content.curves["groups"])
    words = ["Lines are means over seeds, bands one standard deviation to each side."] if several else []
    if thin:
        words.append("Long curves are thinned to what a screen shows; the last, best and worst rounds are always among the points.")
    return f'<p class="note">{escape(" ".join(words))}</p>' if words else ""


def _clients_note(content: Content) -> str:
    text = "Each client's own model (the global one where a method has no other) on the client's test samples, in the last scored round."
    if any(c["local"] for c in content.clients):
        text += (" A diamond is the same client training alone, with the same seed and split. A dashed line down marks a client that does "
                 "worse than alone.")
    return f'<p class="note">{escape(text)}</p>'


def _table(table: Table, name: str, titled: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(str(h))}</th>' for h in table.header)
    rows = "".join("<tr>" + "".join(f'<th scope="row">{escape(str(c))}</th>' if i == 0 else f"<td>{escape(str(c))}</td>"
                                    for i, c in enumerate(row)) + "</tr>" for row in table.rows)
    buttons = "".join(f'<button type="button" data-copy="{name}-{form}">Copy {words}</button>' for form, words in _FORMS)
    notes = "".join(f'<p class="note">{escape(n)}</p>' for n in table.notes)
    title = f"<h3>{escape(table.title)}</h3>" if titled else ""
    return (f'{title}<div class="scroll" tabindex="0" role="region" aria-label="Table: {escape(table.title or name)}">'
            f'<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{notes}<div class="actions">{buttons}</div>')


def _settings(content: Content) -> str:
    groups = content.gathered.groups
    rows = settings_table(groups)
    head = "".join(f'<th scope="col">{escape(g.label)}</th>' for g in groups)
    lines = []
    for row in rows:
        # the mark says in words what the colour says
        sign = ' <span title="differs between methods">≠</span>' if row["differs"] else ""
        cells = "".join(f"<td>{escape(v)}</td>" for v in row["values"])
        lines.append(f'<tr class="{"differs" if row["differs"] else "same"}"><th scope="row">{escape(row["name"])}{sign}</th>{cells}</tr>')
    several = len(groups) > 1
    only = ('<div class="controls"><label><input type="checkbox" id="only-differences" checked> only what differs (≠)</label></div>'
            if several else "")
    return (f'{only}<div class="scroll" tabindex="0" role="region" aria-label="Table: settings"><table id="settings-table" class="settings'
            f'{" only-differences" if several else ""}"><thead><tr><th scope="col">setting</th>{head}</tr></thead>'
            f'<tbody>{"".join(lines)}</tbody></table></div>')


def _reproduce(content: Content) -> str:
    parts = ['<p class="note">Equal settings and seed give equal numbers on the same engine and hardware.</p>',
             '<div class="actions"><button type="button" data-copy="commands">Copy all commands</button></div>']
    for group in content.gathered.groups:
        runs = "".join(f"<pre>{escape(command_of(run))}</pre>" for run in group.runs)
        seeds = ", ".join(str(r.seed) for r in group.runs)
        parts.append(f'<details{" open" if len(content.gathered.groups) == 1 else ""}><summary>{escape(group.label)}, '
                     f'seed{"s" if len(group.runs) > 1 else ""} {escape(seeds)}</summary>{runs}</details>')
    parts += [f'<p class="note">Run with {escape(e)}.</p>' for e in environments(content.gathered.groups)]
    return "\n".join(parts)


def _warnings(notes: Sequence[str]) -> str:
    return '<ul class="warnings">' + "".join(f"<li>{escape(n)}</li>" for n in notes) + "</ul>" if notes else ""
