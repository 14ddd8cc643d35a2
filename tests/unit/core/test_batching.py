"""The size of the next batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procession.core.batching import BatchSize

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("committed"), st.integers(0, 500), st.floats(0, 10)),
        st.tuples(st.just("contended"), st.just(0), st.just(0.0)),
    ),
    max_size=60,
)


def play(size, steps):
    for what, handled, seconds in steps:
        if what == "committed":
            size.committed(handled, seconds)
        else:
            size.contended()


@given(batch_max=st.integers(1, 1_000), budget_s=st.floats(0.001, 1), steps=STEPS)
def test_a_batch_is_never_empty_and_never_over_its_limit(batch_max, budget_s, steps):
    size = BatchSize(batch_max=batch_max, budget_s=budget_s)
    play(size, steps)
    assert 1 <= size.next() <= batch_max


@given(message_s=st.floats(0.001, 1))
def test_a_slow_consumer_gets_what_fits_into_its_budget(message_s):
    size = BatchSize(batch_max=500, budget_s=0.05)
    size.committed(10, 10 * message_s)
    assert size.next() == max(1, min(500, int(0.05 / message_s)))


@given(steps=STEPS)
def test_quick_batches_without_contention_grow_back_to_the_limit(steps):
    size = BatchSize(batch_max=500, budget_s=0.05)
    play(size, steps)
    for _ in range(200):
        size.committed(500, 0.0005)
    assert size.next() == 500


@given(times=st.integers(0, 30))
def test_each_contention_halves_the_batch(times):
    size = BatchSize(batch_max=500, budget_s=0.05)
    for _ in range(times):
        size.contended()
    assert size.next() == max(1, 500 >> times)


@pytest.mark.parametrize(("batch_max", "budget_s"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_limits_that_make_no_sense_are_refused(batch_max, budget_s):
    with pytest.raises(ValueError, match="positive"):
        BatchSize(batch_max=batch_max, budget_s=budget_s)
