"""The contiguous prefix, against a naive model: look at every position again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procession.core.watermark import Watermark


@st.composite
def histories(draw):
    positions = sorted(draw(st.sets(st.integers(0, 1_000), min_size=1, max_size=40)))
    return positions, draw(st.permutations(positions)), draw(st.integers(0, len(positions)))


@given(histories())
def test_R06_the_mark_never_passes_what_is_not_complete(history):
    positions, order, begun_first = history
    mark = Watermark()
    begun, complete, committed = [], set(), 0
    waiting = list(positions)
    for position in waiting[:begun_first]:
        mark.begin(position)
        begun.append(position)
    waiting = waiting[begun_first:]
    for position in order:
        while position not in begun:
            mark.begin(waiting[0])
            begun.append(waiting.pop(0))
        moved = mark.complete(position)
        complete.add(position)
        prefix = []
        for candidate in begun:
            if candidate not in complete:
                break
            prefix.append(candidate)
        expected = prefix[-1] + 1 if prefix and prefix[-1] + 1 > committed else None
        assert moved == expected
        committed = moved or committed
        assert mark.in_flight == len(begun) - len(complete)
    assert committed == positions[-1] + 1


def test_positions_only_grow():
    mark = Watermark()
    mark.begin(5)
    for position in (5, 4):
        with pytest.raises(ValueError, match="new watermark"):
            mark.begin(position)


def test_only_what_is_open_can_complete():
    mark = Watermark()
    mark.begin(5)
    mark.complete(5)
    for position in (5, 6):
        with pytest.raises(ValueError, match="not open"):
            mark.complete(position)


def test_a_long_log_leaves_nothing_behind():
    mark = Watermark()
    for position in range(10_000):
        mark.begin(position)
        assert mark.complete(position) == position + 1
    assert (mark._open, mark._running) == ([], set())
