from hypothesis import given
from hypothesis import strategies as st

from procession.core.crowding import QUIET_COMMITS, QUIET_COMMITS_MAX, Crowd


def quiet(crowd, commits):
    for _ in range(commits):
        crowd.committed()


def test_half_of_the_lanes_make_way_each_time_down_to_one():
    crowd = Crowd(8)
    seen = []
    while crowd.contended():
        seen.append(crowd.allowed)
    assert seen == [4, 2, 1]


def test_a_single_lane_leaves_it_to_smaller_batches():
    assert not Crowd(1).contended()


def test_lanes_come_back_one_by_one_after_quiet_commits():
    crowd = Crowd(4)
    crowd.contended()
    quiet(crowd, QUIET_COMMITS - 1)
    assert crowd.allowed == 2
    quiet(crowd, 1)
    assert crowd.allowed == 3


def test_a_return_that_ended_in_contention_at_once_is_tried_later_next_time():
    crowd = Crowd(2)
    crowd.contended()
    crowd.contended()
    quiet(crowd, QUIET_COMMITS)
    assert crowd.allowed == 1
    quiet(crowd, QUIET_COMMITS)
    assert crowd.allowed == 2


@given(st.integers(1, 16), st.lists(st.booleans(), max_size=300))
def test_always_one_works_and_never_more_than_there_are(lanes, history):
    crowd = Crowd(lanes)
    for contended in history:
        crowd.contended() if contended else crowd.committed()
        assert 1 <= crowd.allowed <= lanes


def test_all_come_back_in_the_end():
    crowd = Crowd(8)
    for _ in range(20):
        crowd.contended()
    quiet(crowd, 8 * QUIET_COMMITS_MAX)
    assert crowd.allowed == 8
