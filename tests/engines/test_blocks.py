"""A schedule as launches of graphs: all steps, in their order, in as few launches as the graphs allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from consilience.core.part import Phase
from consilience.engines.slots import BLOCKS, blocks_of

MAIN, OTHER = Phase("main", ()), Phase("other", ())


@given(st.lists(st.integers(1, 3), max_size=40), st.lists(st.integers(1, 3), max_size=10))
def test_blocks_are_the_schedule(first, second):
    launches = blocks_of([(MAIN, first), (OTHER, second)])
    steps = [(phase.name, size) for phase, size, count in launches for _ in range(count)]
    assert steps == [("main", n) for n in first] + [("other", n) for n in second]
    assert {count for _, _, count in launches} <= set(BLOCKS)


def test_the_largest_blocks_come_first():
    # 14 = 8 + 4 + 1 + 1 of the size 10, then one of 7
    assert [(size, count) for _, size, count in blocks_of([(MAIN, [10] * 14 + [7])])] == [(10, 8), (10, 4), (10, 1), (10, 1), (7, 1)]
