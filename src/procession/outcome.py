"""How a message ends, and how a handler says so. Values only.

A handler that returns has succeeded, whatever it returns (but an outcome object). It refuses a
message with `raise Reject(...)` and postpones it with `raise Retry(after=...)`; any other
exception is a failed run.
"""

from __future__ import annotations

import enum
from datetime import timedelta


class End(enum.StrEnum):
    """The closed list of ends: every message reaches exactly one of them."""

    PROCESSED = "processed"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    STALE = "stale"
    EXPIRED = "expired"
    DEAD_LETTERED = "dead-lettered"
    DISCARDED = "discarded"
    SKIPPED = "skipped"


class Standing(enum.StrEnum):
    """The closed list of what a message can be until its end."""

    SCHEDULED = "scheduled"
    WAITING = "waiting"
    RUNNING = "running"
    RETRYING = "retrying"
    EARLY = "early"
    PARKED = "parked"
    BLOCKED = "blocked"
    IN_PROGRESS = "in progress"


class Cause(enum.StrEnum):
    """Where a duplicate came from; a rise of one points at its likely fault."""

    RESENT = "resent"
    REDELIVERED = "redelivered"
    LOCK_EXPIRED = "lock_expired"
    REPLAYED = "replayed"
    CONCURRENT = "concurrent"


class InboxState(enum.IntEnum):
    """What the inbox says of a key. The numbers are stored; they never change."""

    IN_PROGRESS = 1
    HELD = 2
    DONE = 3
    DEAD = 4


class Outcome(Exception):
    """What a handler raises to decide about its message."""


class Reject(Outcome):
    """Refuse the message for good: it becomes a dead letter at once, without more attempts.

    Args:
        reason: for the operator who will read the dead letter.

    Example:
        >>> raise Reject("the order was already shipped")
        Traceback (most recent call last):
        procession.outcome.Reject: the order was already shipped
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(Outcome):
    """Run the message again later; its session waits behind it, other sessions go on.

    It counts as an attempt wherever it is raised, so a message that asks for ever ends as a dead
    letter like any other.

    Args:
        after: how long to wait, as a `timedelta` or in seconds (not negative).
        reason: kept with the attempt.

    Raises:
        ValueError: if `after` is negative.
    """

    def __init__(self, after: timedelta | float = 0, reason: str = "asked to run again") -> None:
        seconds = after.total_seconds() if isinstance(after, timedelta) else float(after)
        if not 0 <= seconds < float("inf"):
            msg = f"Retry(after={after!r}): give a duration of at least 0 seconds"
            raise ValueError(msg)
        super().__init__(reason)
        self.after_ms = int(seconds * 1000)
        self.reason = reason
