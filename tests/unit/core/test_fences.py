"""Names of holders, and the fence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procession.core.fences import check_fence, holder_name
from procession.errors import SessionLost

HOLDERS = st.tuples(st.uuids().map(str), st.integers(0, 99), st.integers(0, 10**9))
SESSIONS = st.sets(st.binary(min_size=1, max_size=8), max_size=8)


@given(first=HOLDERS, second=HOLDERS)
def test_two_acceptances_never_share_a_name(first, second):
    assert (holder_name(*first) == holder_name(*second)) == (first == second)


@given(expected=SESSIONS, lost=SESSIONS)
def test_the_fence_holds_only_if_every_session_is_still_held(expected, lost):
    found = expected - lost
    if found == expected:
        check_fence(expected, found, "w.0.1")
        return
    with pytest.raises(SessionLost):
        check_fence(expected, found, "w.0.1")


def test_a_lost_session_is_named_and_says_what_to_do():
    with pytest.raises(SessionLost, match=r"'order-7' was taken over .*w\.0\.1.* raise lease_ms"):
        check_fence([b"order-7", b"order-8"], [b"order-8"], "w.0.1")
