"""Where clients' states live between rounds. A client never visited occupies nothing."""

from __future__ import annotations

from collections.abc import Iterator

from .client import ClientState


class MemoryStore:
    """States in memory. Other stores (on disk, on a client's own machine) answer to the same three calls."""

    def __init__(self, fresh: ClientState) -> None:
        self.fresh = fresh
        self._states: dict[int, ClientState] = {}

    def get(self, number: int) -> ClientState:
        return self._states.get(number, self.fresh)

    def put(self, number: int, state: ClientState) -> None:
        self._states[number] = state

    def visited(self) -> Iterator[tuple[int, ClientState]]:
        for number in sorted(self._states):
            yield number, self._states[number]
