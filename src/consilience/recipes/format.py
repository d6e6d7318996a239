"""What a recipe is: a table or figure of a paper as data. `docs/recipes.md` describes the file format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigError, unknown
from ..options import check, option
from ..runs.config import RunConfig

KINDS = ("table", "figure")
DEFAULT_ROUNDS = RunConfig().run.rounds
UNITS = ("%", "")                              # "%": a fraction times 100; "": the number as it is
DRAWINGS = ("curves", "bars", "trace", "features", "predicted", "splits")


def scaled_rounds(rounds: int, scale: float) -> int:
    return max(1, round(rounds * scale))


@dataclass(frozen=True)
class Score:
    """The scoring protocol of a cell: which model, which samples, which rounds; or a measure of the trained run."""

    model: str = option("own", "own: the clients' own models where the method has them, else the global one",
                        choices=("own", "personalised", "global"))
    samples: str = option("clients", "clients: each client's test samples; test: the global test set; validation; held_out: the "
                                     "samples of clients that take no part", choices=("clients", "test", "validation", "held_out"))
    client: str | None = option(None, "of this client alone, by name")
    average: str = option("pooled", "over the samples of all clients, over clients, or of the worst client",
                          choices=("pooled", "clients", "worst"))
    what: str = option("accuracy", "what is read from a round's record", choices=("accuracy", "loss", "dice", "dice_foreground"))
    select: str | int = option("last", "which round: last, best, validation, best5, or a number")
    judge: str = option("clients", "with select=validation: mean over clients of their accuracy, or pooled over samples",
                        choices=("clients", "pooled"))
    reach: float | None = option(None, "instead of a score: the first scored round at or above this fraction", low=0.0, high=1.0)
    reach_row: str | None = option(None, "instead of a score: the first scored round at or above what this row of the same column has")
    report: str = option("value", "the value, the round it is taken at, seconds or bytes that clients sent up to that round, or seconds "
                                  "per round", choices=("value", "round", "seconds", "seconds_per_round", "bytes_up"))
    measure: str | None = option(None, "instead of records: a measure of the trained run, as in mdl(n=5000)")
    value: str | None = option(None, "the place in the measure's result, as in right_endpoint.bits")
    taken: str | None = option(None, "instead of accuracy: a number that the run's own measures took on its way, as in shifted_test.mean")
    factor: float = option(1.0, "the number is multiplied by this")

    def __post_init__(self) -> None:
        check(self, "the score")
        known = ("last", "best", "validation", "best5")
        if isinstance(self.select, str) and self.select not in known:
            raise ConfigError(f"The 'select' option of the score must be one of {', '.join(known)}, or the number of a round. "
                              f"Got {self.select!r} instead.")
        if isinstance(self.select, int) and self.select < 1:
            raise ConfigError(f"The 'select' option of the score must be a round from 1 up. Got {self.select} instead.")
        if (self.measure is None) != (self.value is None):
            raise ConfigError("The score needs both 'measure' and 'value', as in measure = \"forgetting\", value = \"absent.lp\".")
        if self.reach is not None and self.reach_row is not None:
            raise ConfigError("The score has both 'reach' and 'reach_row': a threshold is a number, or another row's.")
        if self.taken is not None and (self.measure is not None or "." not in self.taken):
            raise ConfigError("The 'taken' option of the score is a measure of the run and the place of the number in its result, as in "
                              f"shifted_test.mean, and stands alone, without 'measure'. Got {self.taken!r}.")
        if self.what == "loss" and (self.client is not None or self.average != "pooled"):
            raise ConfigError("The score asks for a loss by client, but records hold losses pooled over samples alone. "
                              "Set average = \"pooled\", and no client.")
        if self.client is not None and self.samples == "test":
            raise ConfigError("The score asks for one client on the global test set, which belongs to none.")

    def shrunk(self, scale: float) -> Score:
        """As a run with a share of the rounds is scored: a round that is named by its number shrinks as the rounds do."""
        return replace(self, select=scaled_rounds(self.select, scale)) if isinstance(self.select, int) and scale != 1.0 else self

    @property
    def settled(self) -> bool:
        """Whether a value that is there stays, whatever rounds follow: the first round at a threshold, or what a named round has."""
        threshold = self.reach is not None or self.reach_row is not None
        return threshold or (isinstance(self.select, int) and self.report != "seconds_per_round")

    @property
    def no_fraction(self) -> str | None:
        """What the score counts, where that is surely no fraction."""
        if self.measure:
            return None
        if self.reach is not None or self.reach_row is not None or self.report == "round":
            return "rounds"
        if self.report != "value":
            return "bytes" if self.report == "bytes_up" else "seconds"
        return "a loss" if self.what == "loss" and self.taken is None else None

    def sentence(self) -> str:
        """The protocol in words."""
        if self.measure:
            return f"{self.value} of the measure {self.measure}, taken of the trained run"
        who = {"own": "clients' own models where the method has them, else the global model", "personalised": "clients' own models",
               "global": "global model"}[self.model]
        where = {"clients": "on the clients' test samples", "test": "on the global test set",
                 "validation": "on the clients' validation samples",
                 "held_out": "on the samples of the clients that take no part"}[self.samples]
        average = {"pooled": ", pooled over samples", "clients": ", mean over clients", "worst": ", worst client"}[self.average]
        how = "" if self.samples == "test" else f", client {self.client}" if self.client else average
        judge = "mean over clients" if self.judge == "clients" else "pooled"
        named = {"last": "of the last round", "best": "of the round where it is best (chosen by the test samples themselves)",
                 "validation": f"of the round with the best validation accuracy ({judge})",
                 "best5": "averaged over the five best rounds (chosen by the test samples themselves)"}
        when = named[self.select] if isinstance(self.select, str) else f"of round {self.select}"
        if self.taken is not None:
            name, _, place = self.taken.partition(".")
            what, when = f"{place} of the measure {name}", f"{when}, among those it was taken at"
        else:
            what = f"{self.what.replace('_', ' ')} of the {who} {where}{how}"
        text = f"{what}, {when}"
        if self.reach is not None:
            return f"first scored round with {what} at or above {self.reach}"
        if self.reach_row is not None:
            return f"first scored round at or above what the row {self.reach_row} has: the {text}"
        if self.report == "bytes_up" and self.select == "last":
            return "bytes that all clients sent up to the last scored round"
        return {"value": "", "round": "the round of the ", "seconds": "seconds up to the round of the ",
                "bytes_up": "bytes that all clients sent up to the round of the ",
                "seconds_per_round": "seconds per round, scoring included, of the run with the "}[self.report] + text


@dataclass(frozen=True)
class Printed:
    """What the paper prints in a cell. `value` is None for a dash ("-") and for a number that could not be read ("?")."""

    value: float | None
    spread: float | None = None
    text: str = ""

    @property
    def unreadable(self) -> bool:
        return self.text == "?"

    def shown(self, digits: int) -> str:
        if self.value is None:
            return "unreadable" if self.unreadable else "–"
        return f"{self.value:.{digits}f}" + (f" ± {self.spread:.{digits}f}" if self.spread is not None else "")


_NUMBER = re.compile(r"^([+-]?\d+(?:\.\d+)?)(?:\s*±\s*(\d+(?:\.\d+)?))?$")


def parse_printed(given: Any, where: str) -> Printed:
    """97.69, "69.1 ± 0.6", "-" for a dash in the paper, "?" for a number that cannot be read."""
    if isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given):
        return Printed(float(given), None, str(given))
    if isinstance(given, str):
        if given.strip() in ("-", "?"):
            return Printed(None, None, given.strip())
        if found := _NUMBER.match(given.strip()):
            return Printed(float(found[1]), float(found[2]) if found[2] else None, given.strip())
    raise ConfigError(f"{where}: a paper's value is a number, \"69.1 ± 0.6\", \"-\" or \"?\". Got {given!r} instead.")


@dataclass(frozen=True)
class Column:
    """What varies across a table: data, split, model, or what is scored."""

    name: str
    title: str
    run: Mapping[str, Any] = field(default_factory=dict)
    score: Mapping[str, Any] = field(default_factory=dict)
    unit: str | None = None
    digits: int | None = None
    x: float | None = None                     # where the column stands on a figure's axis
    mean_of: tuple[str, ...] = ()              # nothing is run: the mean of these columns,
    minus: tuple[str, ...] = ()                # less the mean of these
    ours: str | None = None                    # not in the paper: why it is here
    unavailable: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A method with its settings."""

    name: str
    title: str
    method: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    score: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, Printed] = field(default_factory=dict)
    cells: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)       # column -> method, run, score, …
    only: tuple[str, ...] = ()                 # columns the row has; none: all
    ours: str | None = None
    unavailable: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Also:
    """A second score, printed beside the first."""

    title: str
    score: Mapping[str, Any]


@dataclass(frozen=True)
class Drawing:
    """A picture made of the runs."""

    kind: str
    title: str = ""
    x: str = "round"                           # curves: round, seconds, bytes
    y: str = "personalised"                    # curves: a score of the report's curves; trace: a list of the trace
    measure: str = ""                          # trace: which measure
    colour: str = "class"                      # features: class or client
    model: str = "personalised"                # features, predicted
    training: tuple[str, ...] = ("before", "after")
    together: str = "row"                      # features: which panels share one map: those of a row, of the figure, or each alone
    client: str = ""                           # features, predicted: one client's model alone, by its name or as half
    sample_class: int | None = None            # predicted: also the answer on one sample of this class
    columns: tuple[str, ...] = ()              # bars: over these; all where none is named


@dataclass(frozen=True)
class Cell:
    """One entry of a table: what is run, how it is scored, what the paper says, and why it cannot be had if so."""

    row: Row
    column: Column
    values: Mapping[str, Any] | None           # settings of its run; None where it cannot be had, or is a mean of others
    score: Score
    also: tuple[tuple[str, Score], ...]
    printed: Printed | None
    unit: str
    digits: int
    unavailable: str | None = None
    note: str = ""

    @property
    def ours(self) -> str | None:
        return self.row.ours or self.column.ours

    @property
    def method(self) -> str:
        return str((self.values or {}).get("method", self.row.method))

    @property
    def rounds(self) -> int:
        """Of its run, as the recipe has it."""
        return int((self.values or {}).get("rounds", DEFAULT_ROUNDS))


@dataclass(frozen=True)
class Recipe:
    """A table or figure of a paper."""

    name: str                                  # dbe/table5
    title: str
    citation: str
    kind: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    cells: tuple[Cell, ...]                    # row by row; a row's missing columns have none
    seeds: tuple[int, ...]
    readings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    scaled: tuple[str, ...] = ()               # settings that shrink with the rounds
    unavailable: str | None = None             # the whole of it

    def select(self, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> list[Cell]:
        """The cells of some rows and columns; none named: all."""
        for kind, asked, known in (("row", rows, self.rows), ("column", columns, self.columns)):
            for name in asked:
                if name not in [k.name for k in known]:
                    raise unknown(f"{kind} of {self.name}", name, [k.name for k in known])
        return [c for c in self.cells if (not rows or c.row.name in rows) and (not columns or c.column.name in columns)]

    @property
    def data(self) -> list[str]:
        """The data sets its cells need, by name."""
        return sorted({c.values.get("data", "digits").partition("(")[0] for c in self.cells if c.values is not None})

    @property
    def untrained(self) -> bool:
        """Whether it only pictures data."""
        return bool(self.drawings) and all(d.kind == "splits" for d in self.drawings)

    def available(self) -> Iterator[Cell]:
        return (c for c in self.cells if c.unavailable is None)
