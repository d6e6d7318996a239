"""A run: its configuration, its loop, what it records and how it goes on after a stop.

One run:       config, given (data and models that are objects), run (the loop), scoring (of a round), result; listener, progress, trackers.
Its folder:    folder, files, lock, states (of clients), environment, outside (the user's own code); reload opens it again.
Several runs:  many (processes), cluster (Ray); compare, entries (its rows), comparison (its table), statistics; tune; sweep, axes.
Afterwards:    measure, use (predictions), export, onboard (a new client).
Beforehand:    explain, privacy (what leaves a client).
"""

from .config import RunConfig
from .result import Result
from .run import build_federation, run

__all__ = ["Result", "RunConfig", "build_federation", "run"]
