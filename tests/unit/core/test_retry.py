"""What follows a failed lone run, against a naive model."""

from hypothesis import given
from hypothesis import strategies as st

from procession.config import RetryPolicy
from procession.core.retry import GiveUp, RunAgain, after_failure

POLICIES = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 50),
    first_ms=st.integers(0, 5_000),
    factor=st.floats(1, 10),
    longest_ms=st.integers(5_000, 600_000),
    jitter=st.floats(0, 1),
)


@given(policy=POLICIES, attempts=st.integers(1, 60), draw=st.floats(0, 1))
def test_attempts_are_bounded_and_waits_too(policy, attempts, draw):
    decision = after_failure(policy, attempts, draw=draw)
    if attempts >= policy.max_attempts:
        assert decision == GiveUp()
        return
    plain = min(policy.first_ms * policy.factor ** (attempts - 1), policy.longest_ms)
    assert isinstance(decision, RunAgain)
    assert plain * (1 - policy.jitter) - 1 <= decision.after_ms <= plain * (1 + policy.jitter) + 1


@given(policy=POLICIES, attempts=st.integers(1, 60), asked=st.integers(0, 10**9))
def test_what_the_handler_asks_for_goes_before_backoff_but_not_before_the_limit(
    policy, attempts, asked
):
    decision = after_failure(policy, attempts, draw=0.5, asked_ms=asked)
    expected = GiveUp() if attempts >= policy.max_attempts else RunAgain(asked)
    assert decision == expected


@given(policy=POLICIES)
def test_waits_never_shrink_from_one_attempt_to_the_next(policy):
    waits = [
        decision.after_ms
        for attempts in range(1, policy.max_attempts)
        if isinstance(decision := after_failure(policy, attempts, draw=0.5), RunAgain)
    ]
    assert waits == sorted(waits)
