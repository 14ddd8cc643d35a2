"""The verdict on a key, against a table that states it case by case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procession.core.inbox import Verdict, judge
from procession.outcome import InboxState

SAME, OTHER = b"s" * 32, b"o" * 32

TABLE = {
    # (state, same payload, it is the one that the row waits for): verdict
    (InboxState.DONE, True, False): Verdict.DUPLICATE,
    (InboxState.DONE, True, True): Verdict.DUPLICATE,
    (InboxState.DONE, False, False): Verdict.CONFLICT,
    (InboxState.DONE, False, True): Verdict.CONFLICT,
    (InboxState.HELD, True, False): Verdict.HELD,
    (InboxState.HELD, False, False): Verdict.CONFLICT,
    (InboxState.HELD, True, True): Verdict.FRESH,
    (InboxState.HELD, False, True): Verdict.FRESH,
    (InboxState.DEAD, True, False): Verdict.DEAD,
    (InboxState.DEAD, False, False): Verdict.CONFLICT,
    (InboxState.DEAD, True, True): Verdict.FRESH,
    (InboxState.DEAD, False, True): Verdict.FRESH,
    (InboxState.IN_PROGRESS, True, False): Verdict.BUSY,
    (InboxState.IN_PROGRESS, True, True): Verdict.BUSY,
    (InboxState.IN_PROGRESS, False, False): Verdict.CONFLICT,
    (InboxState.IN_PROGRESS, False, True): Verdict.CONFLICT,
}


def test_a_key_without_a_row_is_fresh():
    assert judge(None, None, SAME) is Verdict.FRESH
    assert judge(None, None, SAME, own=True) is Verdict.FRESH


def test_every_state_has_a_case():
    assert {state for state, _, _ in TABLE} == set(InboxState)


@pytest.mark.parametrize(("case", "verdict"), TABLE.items(), ids=str)
def test_each_case_has_its_verdict(case, verdict):
    state, same, own = case
    assert judge(state, SAME, SAME if same else OTHER, own=own) is verdict


@given(
    state=st.sampled_from(list(InboxState)),
    earlier=st.lists(st.binary(min_size=32, max_size=32), max_size=3),
    later=st.lists(st.binary(min_size=32, max_size=32), max_size=3),
)
def test_an_edited_message_is_known_by_each_of_its_fingerprints(state, earlier, later):
    recorded = b"".join([*earlier, SAME, *later])
    assert judge(state, recorded, SAME) is judge(state, SAME, SAME)
