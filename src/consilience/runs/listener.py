"""Who hears how a run, or a set of runs, goes on: displays and trackers override what they need."""

from __future__ import annotations

from typing import Any

from ..core.federation import Federation
from ..errors import warn_caller


class Listener:
    """Hears how a run goes on; for progress displays and trackers. Override what is needed."""

    def started(self, federation: Federation, rounds: int, done: int) -> None: ...
    def client_done(self, done: int, of: int) -> None: ...
    def scoring(self) -> None: ...                        # the round's clients have trained; models are scored and measures taken
    def round_done(self, record: dict[str, Any]) -> None: ...
    def warned(self, message: str) -> None: ...
    def noted(self, message: str) -> None: ...


class RunWarner(Listener):
    """For whoever asked for no display: warnings alone, as Python's own. Unheard, FedAvg's numbers could pass for another method's."""

    def warned(self, message: str) -> None:
        warn_caller(message)


class Watcher:
    """Hears how a set of runs goes on. Override what is needed."""

    def begin(self, what: str, runs: int, rounds: int) -> None: ...
    def rounds_done(self, rounds: int) -> None: ...

    def rounds_found(self, rounds: int) -> None:
        """The same, where the new ones were made before: by runs that are resumed, or only read."""
        self.rounds_done(rounds)

    def run_done(self, label: str, failure: str | None) -> None: ...
    def warned(self, message: str) -> None: ...
    def noted(self, label: str, note: str) -> None: ...


class RunsWarner(Watcher):
    """The same for a set of runs."""

    def warned(self, message: str) -> None:
        warn_caller(message)
