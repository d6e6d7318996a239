"""Who hears how a set of runs goes on."""

from __future__ import annotations

from ..errors import warn_caller


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


class Warner(Watcher):
    """For whoever asked for no display: warnings alone, as Python's own."""

    def warned(self, message: str) -> None:
        warn_caller(message)
