"""A small recipe on the digits that come with scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from consilience.recipes.format import Recipe
from consilience.recipes.load import load_recipe

TINY = """
title = "Two methods on digits"
seeds = 2
readings = ["None: a recipe for tests."]
notes = ["A note."]

[run]
data = "digits"
split = "dirichlet(alpha=0.3)"
clients = 4
rounds = 4
lr = 0.1
settings = { "mr.kappa" = 5.0 }

[score]
select = "best"

[[also]]
title = "last round"
score = { select = "last" }

[columns.accuracy]
title = "accuracy"

[columns.kept]
title = "what is kept"
unit = ""
digits = 3
score = { measure = "forgetting", value = "present.lp" }

[rows.fedavg]
title = "FedAvg"
method = "fedavg"
paper = { accuracy = "50.0 ± 60" }

[rows.dbe]
title = "FedAvg+DBE"
method = "fedavg+dbe"
paper = { accuracy = "99.5 ± 0.1", kept = "?" }

[rows.absent]
title = "A method to come"
awaits = "nothing_of_this_name"
paper = { accuracy = 80, kept = "-" }
"""


def load_tiny(folder: Path, text: str = TINY) -> Recipe:
    """The recipe, written to a file of the folder and read."""
    (folder / "tiny.toml").write_text(text, encoding="utf-8")
    return load_recipe(folder / "tiny.toml")


def entry(outcome: Any, row: str, column: str) -> Any:
    """What came out for one cell."""
    return next(e for e in outcome.entries if (e.cell.row.name, e.cell.column.name) == (row, column))
