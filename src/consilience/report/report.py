"""From folders of runs to the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import unknown
from ..metrics.criterion import ACCURACY
from ..runs.comparison import Comparison
from ..runs.files import write_bytes
from ..runs.statistics import spread
from .clients import client_scores
from .curves import draw_curves
from .features import MOST_SAMPLES, Tick, map_features
from .gather import Gathered, Group, gather
from .page import Content, render_page
from .splits import picture_splits
from .tables import Table
from .traces import draw_traces


def write_report(folders: Sequence[str | Path], path: str | Path, *, title: str | None = None, reference: str | None = None,
                 features: bool = False, samples: int = MOST_SAMPLES, data_dir: str | None = None,
                 gathered: Gathered | None = None, tick: Tick = lambda note: None) -> Path:
    """Write the page of all runs in and below `folders` to `path`, and return the path.

    `features` adds feature maps, which open each method's first run and train its clients for a round. `gathered` saves
    reading the folders twice.
    """
    content = collect(gathered or gather(folders), title=title, reference=reference, features=features, samples=samples,
                      data_dir=data_dir, tick=tick)
    write_bytes(Path(path), render_page(content).encode())
    return Path(path)


def collect(gathered: Gathered, *, title: str | None = None, reference: str | None = None, features: bool = False,
            samples: int = MOST_SAMPLES, data_dir: str | None = None, tick: Tick = lambda note: None) -> Content:
    """Everything on the page, as numbers."""
    groups = gathered.groups
    clients = client_scores(groups)
    splits, split_notes = picture_splits(gathered.runs, data_dir)
    maps, map_notes = map_features(groups, samples, data_dir, tick) if features else ([], [])
    names = list(dict.fromkeys(str(r.about.get("name", "?")) for r in gathered.runs))
    return Content(title or f"Runs on {', '.join(names)}", gathered, results_tables(groups, reference), clients_table(groups, clients),
                   draw_curves(groups), clients, splits, maps, draw_traces(groups), {"splits": split_notes, "maps": map_notes})


def results_tables(groups: Sequence[Group], reference: str | None = None) -> list[Table]:
    """Mean ± standard deviation over seeds and the paired difference to the reference, as a comparison prints it.

    Only methods that saw the same data can be compared: there is a table for each set of them.
    """
    labels = [g.label for g in groups]
    if reference is not None and reference not in labels:
        raise unknown("method for --reference", reference, labels)
    return [_results_table(own, reference) for own in comparable(groups)]


def comparable(groups: Sequence[Group]) -> list[list[Group]]:
    """Sets of groups on one data set whose splits agree wherever they share a seed."""
    sets: list[tuple[dict[Any, Any], list[Group]]] = []
    for group in groups:
        hashes = {(r.about.get("name"), r.seed): r.about.get("hash") for r in group.runs}
        # with no seed in common there is nothing to pair, but the data may still be the same
        names = {name for name, _ in hashes}
        fits = lambda known, hashes=hashes, names=names: (names == {name for name, _ in known}
                                                          and all(known.get(k, h) == h for k, h in hashes.items()))
        home = next((s for s in sets if fits(s[0])), None)
        if home is None:
            sets.append((dict(hashes), [group]))
        else:
            home[0].update(hashes)
            home[1].append(group)
    return [members for _, members in sets]


def _results_table(groups: Sequence[Group], reference: str | None) -> Table:
    labels = [g.label for g in groups]
    plain = next((g.label for g in groups if g.runs[0].method == "fedavg"), labels[0])
    documents: dict[tuple[str, int], dict[str, Any]] = {
        (g.label, r.seed): {"records": r.records, "data": r.about, "summary": r.summary(), "config": r.config}
        for g in groups for r in g.runs}
    seeds = sorted({r.seed for g in groups for r in g.runs})
    about = groups[0].runs[0].about
    title = f"{about.get('name', '?')}, {about.get('split', '?')}, {about.get('clients', '?')} clients"
    return Comparison(labels, seeds, documents, {}, reference if reference in labels else plain).table(title)


def clients_table(groups: Sequence[Group], entries: Sequence[dict[str, Any]]) -> Table:
    """How evenly a method serves its clients; means over seeds."""
    header = ["method", "worst client", "worst tenth", "mean of clients", "std over clients", "gain over alone", "worse than alone"]
    rows = []
    for number, group in enumerate(groups):
        own = [e for e in entries if e["group"] == number]
        mean = lambda key, own=own: spread([e[key] for e in own])
        cells = [group.label] + [f"{s.mean:.3f}" if (s := mean(k)) else "–" for k in ("worst", "bottom_decile", "mean", "std")]
        gain, harmed, of = mean("gain"), mean("harmed"), mean("compared")
        cells.append(f"{gain.mean:+.3f}" if gain else "–")
        cells.append(f"{harmed.mean:.3g} of {of.mean:.3g}" if harmed and of and of.mean else "–")
        rows.append(cells)
    note = "Means over seeds. The worst tenth is the mean of the lowest tenth of the clients, at least one."
    by = {e["measure"]: [groups[f["group"]].label for f in entries if f["measure"] == e["measure"]] for e in entries}
    judged = [f"{measure} for {', '.join(dict.fromkeys(labels))}" for measure, labels in by.items()] if {*by} - {ACCURACY} else []
    return Table(header, rows, "Clients", [note, *([f"By what runs were judged by: {'; '.join(judged)}."] if judged else [])])
