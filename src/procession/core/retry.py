"""Decides what follows a failed run of one message."""

from __future__ import annotations

from dataclasses import dataclass

from procession.config import RetryPolicy


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Hold the message and run it alone again after `after_ms` milliseconds."""

    after_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Make it a dead letter."""


def after_failure(
    policy: RetryPolicy, attempts: int, *, draw: float, asked_ms: int | None = None
) -> RunAgain | GiveUp:
    """Return what follows when a message's lone run number `attempts` failed.

    Args:
        policy: the consumer's.
        attempts: lone runs begun so far, this one included; at least 1.
        draw: a random number, 0 to 1, for the jitter.
        asked_ms: what the handler asked for with `Retry(after=...)`, which goes before backoff.

    Example:
        >>> after_failure(RetryPolicy(jitter=0), 2, draw=0.5)
        RunAgain(after_ms=3000)
        >>> after_failure(RetryPolicy(max_attempts=2), 2, draw=0.5)
        GiveUp()
    """
    if attempts >= policy.max_attempts:
        return GiveUp()
    if asked_ms is not None:
        return RunAgain(asked_ms)
    wait: float = policy.first_ms
    for _ in range(attempts - 1):
        wait *= policy.factor
        if wait >= policy.longest_ms:
            break
    wait = min(wait, policy.longest_ms)
    spread = wait * policy.jitter * (2 * draw - 1)
    return RunAgain(max(0, round(wait + spread)))
