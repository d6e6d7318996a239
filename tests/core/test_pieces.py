"""A gradient over a piece of the batch, at another point: what later hooks of the step are shown."""

from __future__ import annotations

from dataclasses import dataclass

from consilience.core.part import Batch, Part
from consilience.testing import run_tiny


@dataclass(frozen=True)
class Elsewhere(Part):
    """Its first pass is over the first half of the batch, and not at the model."""

    name = "elsewhere"

    def gradient(self, v, grad_at):
        half = Batch(*(t[: len(t) // 2] for t in v.batch))
        return grad_at({k: p + 0.0 for k, p in v.params.items()}, half)


def test_batch_and_trace_of_later_hooks_belong_together() -> None:
    seen: set[tuple[int, int]] = set()

    @dataclass(frozen=True)
    class Watcher(Part):
        name = "watcher"

        def grad(self, v, g):
            seen.add((len(v.batch.x), len(v.trace.logits)))
            return g
    run_tiny([Elsewhere(), Watcher()], rounds=1)
    assert seen == {(4, 4)}
