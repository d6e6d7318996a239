"""Which samples a client trains on, in which order and in which batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import memory, rng, tree
from .memory_layout import lay_out
from .part import Phase
from .policy import Policy
from .population import Population, RowTable

Schedule = list[tuple[Phase, list[int]]]      # phase by phase, the sizes of its batches
ON_DEVICE = 4096                              # orders of at least so many samples are drawn on the GPU that holds the data
AT_ONCE, SEVERAL = 1 << 22, 4                 # numbers of input in one pass over a client on a GPU; batches joined into one at most


def steps_in(schedule: Schedule) -> int:
    return sum(len(sizes) for _, sizes in schedule)


class Rows(NamedTuple):
    """A client's samples: those it trains on and those parts asked to hold back."""

    train: Tensor
    reserved: Tensor


class ClientRows:
    """Every client's rows, worked out when asked for: nothing here grows with the population but the table itself."""

    def __init__(self, table: RowTable, seed: int, share_held: float) -> None:
        self.table, self.seed, self.share = table, seed, share_held
        self.different_sizes = [self.left(n) for n in table.sizes.unique().tolist()]
        self._recent = lru_cache(64)(self._divide)           # a client's hooks ask several times

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> Rows:
        return self._recent(number)

    def left(self, samples: int) -> int:
        """With how many of so many samples a client trains, once parts have held back theirs."""
        return samples - int(samples * self.share)

    def _divide(self, number: int) -> Rows:
        own = self.table[number]
        held = len(own) - self.left(len(own))
        if not held:
            return Rows(own, own[:0])
        order = rng.permutation(rng.key(self.seed, "reserve", number), len(own))
        return Rows(own[order[held:].sort().values], own[order[:held].sort().values])

    def size_of(self, number: int) -> int:
        start, end = self.table.starts[number: number + 2].tolist()
        return self.left(end - start)

    def sizes_of(self, numbers: Sequence[int]) -> list[int]:
        """The same for many clients at once, of whom there may be 100,000."""
        which = torch.tensor(numbers, dtype=torch.int64)
        return [self.left(n) for n in (self.table.starts[which + 1] - self.table.starts[which]).tolist()]


class Samples:
    """The population's tensors on the device, and keyed orders over them."""

    def __init__(self, population: Population, policy: Policy, pooled: bool, share_held: float, device: torch.device) -> None:
        self.policy, self.device, self.transform = policy, device, population.transform
        self.x, self.y = population.x.to(device), population.y.to(device)
        self.rows = ClientRows(RowTable.of([population.table.rows]) if pooled else population.table, policy.seed, share_held)
        self._gather, self._first = getattr(population.transform, "gather", None), torch.zeros(1, dtype=torch.int64, device=device)
        self.smallest = 1                     # smallest batch that the model and the parts can work with
        self.several = SEVERAL if device.type == "cuda" else 1      # 1 again once the GPU's memory did not suffice

    def __len__(self) -> int:
        return len(self.rows)

    def size_of(self, number: int) -> int:
        """Training samples of a client."""
        return self.rows.size_of(number)

    def inputs(self, rows: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Samples transformed as in evaluation; with a key, as in training."""
        rows = tree.to(rows, self.device)
        if self._gather is not None and key is None:  # in one kernel, where transform and samples allow it
            picked = self._gather(self.x, self.y, rows[None], self._first, len(rows), None, self.policy.layout == "channels_last")
            if picked is not None:
                return picked
        drawn = None if key is None else tree.to(key, self.device)
        x, y = self.transform(self.x.index_select(0, rows), self.y.index_select(0, rows), drawn)
        return lay_out(x, self.policy), y.long()                     # masks are stored in bytes

    def batches(self, rows: Tensor, joined: bool = False, key: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Samples in order, in batches for evaluation; `joined`, several of them as one where samples are small and on a GPU. With a key
        they are transformed as in training, each batch by a key of its own.
        """
        rows = tree.to(rows, self.device)             # once for all batches
        size = self.policy.eval_batch
        if joined:
            size = max(size, min(self.several * size, AT_ONCE // max(self.x[:1].numel(), 1)))
        for start in range(0, len(rows), size):
            yield self.inputs(rows[start: start + size], None if key is None else rng.fold(key, start))

    def let_go(self) -> None:
        """Samples that are mapped from a file need not stay in memory once they have been looked at."""
        memory.let_go((self.x, self.y, self.rows.table.rows))

    def schedule(self, number: int, phases: list[Phase]) -> Schedule:
        """The batches a client makes, phase by phase; empty when it cannot make one."""
        out = [(p, self._sizes(self.size_of(number), p)) for p in phases]
        return out if any(sizes for _, sizes in out) else []

    def longest(self, phases: list[Phase]) -> int:
        """Steps of the client with the longest schedule."""
        return max(self.steps_for(n, phases) for n in self.rows.different_sizes)

    def steps_for(self, samples: int, phases: list[Phase]) -> int:
        """Steps of a client with so many samples."""
        return sum(len(self._sizes(samples, p)) for p in phases)

    @property
    def too_few(self) -> tuple[str, str]:
        """How few samples leave a client without a step, and the cure."""
        if self.policy.last_batch == "drop":
            return f"a batch of {self.policy.batch}", "Use a smaller batch, or last_batch=keep."
        return f"the {self.smallest} that this method and model need in a batch", "Join such clients, or leave them out of the split."

    def _sizes(self, samples: int, phase: Phase) -> list[int]:
        """Sizes of the batches a client makes in a phase. A last batch under `smallest` is dropped in any case."""
        policy = self.policy
        full, rest = divmod(samples, policy.batch)
        if policy.sampling == "replacement":
            epoch = [policy.batch] * (max(full, 1) if samples else 0)
        else:
            epoch = [policy.batch] * full + ([rest] if policy.last_batch == "keep" and rest >= self.smallest else [])
        if not epoch:
            return []
        if phase.epochs is None and policy.steps is not None:
            return (epoch * (policy.steps // len(epoch) + 1))[: policy.steps]
        return epoch * (policy.epochs if phase.epochs is None else phase.epochs)

    def places(self, number: int, round_number: int, schedule: Schedule) -> Tensor:
        """(steps, batch): the samples of every step, by their number among the client's own. What a smaller last batch leaves over is
        padding, never read.
        """
        on_device = self.device.type == "cuda" and steps_in(schedule) * self.policy.batch >= ON_DEVICE
        device = self.device if on_device else torch.device("cpu")             # the same numbers, drawn and sorted there
        orders = [_draw_order(self.size_of(number), sizes, self.policy, device,
                              rng.key(self.policy.seed, "order", number, round_number, phase.name)) for phase, sizes in schedule]
        return torch.cat(orders) if orders else torch.zeros((0, self.policy.batch), dtype=torch.int64)

    def rows_at(self, number: int, places: Tensor) -> Tensor:
        """The rows of those samples."""
        return tree.to(self.rows[number].train, places.device)[places]

    def order(self, number: int, round_number: int, schedule: Schedule) -> Tensor:
        """(steps, batch): the rows of the samples of every step."""
        return self.rows_at(number, self.places(number, round_number, schedule))


def _draw_order(samples: int, sizes: list[int], policy: Policy, device: torch.device, key: Tensor) -> Tensor:
    steps, batch = len(sizes), policy.batch
    if not steps:
        return torch.zeros((0, batch), dtype=torch.int64, device=device)
    if policy.sampling == "replacement":
        return rng.integers(tree.to(key, device), max(samples, 1), (steps, batch))
    full = samples // batch
    per_epoch = full + (1 if steps > full and sizes[full] < batch else 0)
    epochs = -(-steps // per_epoch)
    orders = rng.shuffles(tree.to(rng.keys(key, each=range(epochs)), device), samples)[:, : per_epoch * batch]
    missing = per_epoch * batch - orders.shape[1]
    if missing:
        orders = torch.cat([orders, orders.new_zeros((epochs, missing))], 1)
    return orders.reshape(-1, batch)[:steps]
