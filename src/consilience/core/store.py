"""Where clients' states live between rounds. A client never visited occupies nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

from .client import ClientState


class ClientStore(ABC):
    """States by client number. What is put counts at once, but stays only if `commit` follows; `rollback` forgets it.

    So a round that breaks leaves every client as it was.
    """

    keeps_itself = False          # its states outlive the process by themselves, so snapshots leave them out

    def __init__(self, fresh: ClientState) -> None:
        self.fresh = fresh
        self._pending: dict[int, ClientState] = {}

    def get(self, number: int) -> ClientState:
        return self._pending[number] if number in self._pending else self._read(number)

    def put(self, number: int, state: ClientState) -> None:
        self._pending[number] = state

    def visited(self) -> Iterator[tuple[int, ClientState]]:
        """Clients that hold something, in the order of their numbers, one at a time."""
        for number in self.numbers():
            yield number, self.get(number)

    def numbers(self) -> Iterator[int]:
        """Their numbers alone; no state is read."""
        return iter(sorted({*self._numbers(), *self._pending}))

    def commit(self) -> None:
        """All that was put since the last commit stays, or, if that fails, none of it."""
        self._write(self._pending)
        self._pending = {}

    def rollback(self) -> None:
        self._pending = {}

    def clear(self) -> None:
        """Forget every client."""
        self._pending = {}
        self._forget()

    @abstractmethod
    def _forget(self) -> None:
        """Drop all committed states."""

    @abstractmethod
    def _read(self, number: int) -> ClientState:
        """The committed state, or `fresh`."""

    @abstractmethod
    def _write(self, states: Mapping[int, ClientState]) -> None:
        """Commit these states together."""

    @abstractmethod
    def _numbers(self) -> Iterator[int]:
        """Clients with a committed state."""


StoreFactory = Callable[[ClientState], ClientStore]


class MemoryStore(ClientStore):
    """States in memory."""

    def __init__(self, fresh: ClientState) -> None:
        super().__init__(fresh)
        self._states: dict[int, ClientState] = {}

    def _read(self, number: int) -> ClientState:
        return self._states.get(number, self.fresh)

    def _write(self, states: Mapping[int, ClientState]) -> None:
        self._states.update(states)

    def _numbers(self) -> Iterator[int]:
        return iter(self._states)

    def _forget(self) -> None:
        self._states = {}
