"""Several methods, several seeds, one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..errors import ConfigError, unknown
from .comparison import SCORES, Comparison, check_score
from .config import RunConfig, flatten_settings
from .entries import Entry, make_entries
from .given import own_model
from .lock import make_folder
from .many import Job, folder_in, run_many
from .progress import RunsProgress, progress_bar
from .run import load_data
from .tune import Tuning, tune_entries, with_validation
from .watcher import Warner, Watcher

Key = tuple[str, int]


def compare(methods: Sequence[str], data: str = "digits", *, seeds: int | Sequence[int] = 3, out: str | Path | None = None,
            jobs: int | None = None, progress: bool = False, with_local: bool = True, again: bool = False,
            overrides: Mapping[str, Mapping[str, Any]] | None = None, reference: str | None = None, score: str = "last",
            tune: int | None = None, on: str = "here", **settings: Any) -> Comparison:
    """Run every method with every seed, in parallel where there are cores, and put the results side by side.

    `settings` are the names of `RunConfig`, as in `run`, and those of methods (`settings={'dbe.kappa': 5}`) reach the methods that have
    them; `overrides` gives single rows settings of their own. `seeds` are so many from `seed` up, or a list. With `out` the runs are kept
    there, each in a folder of its own, so that an interrupted comparison goes on where it was, beside comparison.json and comparison.md.
    A run that fails is reported in its row; the others go on. With `tune` every method is first given that many configurations to choose
    from by validation, on a seed that is not compared; a learning rate among the settings is then fixed. `progress` shows a bar.

    `reference` is the row that gains are counted from (fedavg where it is one, else the first method), `with_local` adds the row of clients
    that train alone, and `score` says which rounds are reported: last, best_by_validation, best_by_test or mean_of_best_five. Runs are made
    `jobs` at a time (as many as there are cores, or one on a GPU), "here" or `on` "ray"; finished ones are read, unless `again`.
    """
    if not isinstance(data, str):
        raise ConfigError("The 'data' of a comparison must be a name: its runs are made in processes of their own, which do not see data "
                          f"in memory. Got {type(data).__name__} instead. Write arrays to a file, np.savez('mine.npz', x=x, y=y, "
                          "client=client), and compare on \"arrays(path='mine.npz')\".")
    if "method" in settings:
        raise ConfigError(f"A comparison has `methods`, each a row: add {settings['method']!r} to them.")
    of_methods = flatten_settings(settings.pop("settings", None) or {})
    base = RunConfig.make({**settings, "data": data, "method": "fedavg", "model": own_model(settings.get("model"))})
    base = dataclasses.replace(base, settings=of_methods)
    first = base.policy.seed
    with progress_bar() if progress else nullcontext() as bar:
        return compare_config([methods] if isinstance(methods, str) else methods, base,
                              range(first, first + seeds) if isinstance(seeds, int) else seeds, out=out, jobs=jobs,
                              with_local=with_local, again=again, overrides=overrides, reference=reference, score=score, tune=tune,
                              learning_rates=(base.policy.lr,) if "lr" in settings else None, save=out is not None,
                              watcher=RunsProgress(bar) if bar else None, on=on)


def compare_config(methods: Sequence[str], base: RunConfig, seeds: Sequence[int], *, out: str | Path | None = None,
                   jobs: int | None = None, with_local: bool = True, again: bool = False,
                   overrides: Mapping[str, Mapping[str, Any]] | None = None, reference: str | None = None, score: str = "last",
                   tune: int | None = None, learning_rates: Sequence[float] | None = None, save: bool = False,
                   watcher: Watcher | None = None, on: str = "here", per_client: bool = False) -> Comparison:
    """A comparison of runs that a configuration describes but for their methods and seeds.

    `save` writes comparison.json and comparison.md into `out`, with a table of single clients where `per_client` is set.
    `on` is "here", or "ray" for runs on a cluster.
    """
    check_score(score)
    watcher = watcher or Warner()
    seeds = list(dict.fromkeys(seeds))
    if not seeds:
        raise ConfigError("A comparison needs at least one seed.")
    entries, remarks = make_entries(methods, base, with_local, overrides)
    given, base = dict(base.settings), dataclasses.replace(base, settings={})        # the rows have theirs
    reference = _reference(reference, entries, with_local)
    tuning: Tuning | None = None
    if out is not None:
        make_folder(Path(out))              # said before hours of training, not after them
    if tune is not None:
        base, said = with_validation(base)
        tuning = tune_entries(entries, base, seeds, tune, score=score, learning_rates=learning_rates, out=out, jobs=jobs, again=again,
                              watcher=watcher, on=on)
        entries = [tuning.settled(e) for e in entries]
        remarks = remarks + said
    elif score == "best_by_validation" and not base.run.validation and not len(load_data(base).table.val.rows):
        raise ConfigError("The score best_by_validation needs validation samples: set validation=0.1 or so.")
    failures: dict[Key, str] = {}
    work: dict[Key, Job] = {}
    for entry in entries:
        for seed in seeds:
            if tuning and (why := tuning.searches[entry.name].failure()):
                failures[entry.name, seed] = why
                continue
            config = entry.config(base, seed)
            work[entry.name, seed] = Job(f"{entry.name}, seed {seed}", config, folder_in(out, config))
    outcomes = dict(zip(work, run_many(list(work.values()), "comparing", workers=jobs, again=again, watcher=watcher, on=on)))
    failures |= {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, str)}
    documents = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, dict)}
    alike = all(len({why for (_, s), why in failures.items() if s == seed}) == 1 for seed in seeds)     # its split has sizes of its own
    if not documents and len(entries) > 1 and alike:                                   # not the methods' fault: the data, or the run
        raise ConfigError(f"No run could be made: {next(iter(failures.values()))}")
    shared = {k: v for k, v in base.portable().items() if k not in ("method", "settings", "seed")} | {"settings": given}
    folders = {key: Path(job.folder).name for key, job in work.items() if job.folder}
    comparison = Comparison([e.name for e in entries], seeds, documents, failures, reference, score, shared, folders, remarks, tuning)
    if save and out is not None:
        comparison.save(out, per_client)
    return comparison


def _reference(asked: str | None, entries: Sequence[Entry], with_local: bool) -> str:
    """The row that gains are counted from: the one asked for, FedAvg, or the first that was typed."""
    names = {e.name: e.name for e in entries}
    if asked is None:
        plain = [e.name for e in entries if e.method == "fedavg" and not e.values]
        return (plain or [e.name for e in entries][1 if with_local and len(entries) > 1 else 0:])[0]
    for entry in entries:
        names.setdefault(entry.method, entry.name)
    if asked.strip() not in names:
        raise unknown("reference", asked, names)
    return names[asked.strip()]


__all__ = ["SCORES", "Comparison", "Watcher", "compare", "compare_config"]
