"""What a batch asks its store to write, last before the commit. Values only.

All rows of a batch stand here, so that a store writes them set-based and in the one lock order.
"""

from __future__ import annotations

from collections import Counter

from procession.errors import Reason
from procession.message import Delivery, Outgoing
from procession.outcome import Cause, End, InboxState


class Entry:
    """A key on its way into the inbox.

    Attributes:
        key, fingerprint: what is recorded.
        state: the state to record.
        end: how its message ended, None if it has not.
        expected: None inserts the row (a second one is a `DuplicateKey`); a state moves the row
            on from it by compare-and-set (a held message, a replayed dead letter).
        out_of_order: the message was replayed after later ones of its session.
    """

    __slots__ = ("end", "expected", "fingerprint", "key", "out_of_order", "state")

    def __init__(
        self,
        key: bytes,
        fingerprint: bytes,
        state: InboxState = InboxState.DONE,
        end: End | None = End.PROCESSED,
        expected: InboxState | None = None,
        *,
        out_of_order: bool = False,
    ) -> None:
        self.key = key
        self.fingerprint = fingerprint
        self.state = state
        self.end = end
        self.expected = expected
        self.out_of_order = out_of_order


class DeadLetter:
    """A delivery that ends as a dead letter.

    A second one of the same consumer, key and fingerprint is folded into the first and counted
    there; without a key each position is one of its own. A letter that was decided on is opened
    again by a new death of its message, but not by a copy of what was decided on: `is_copy`, or
    a conflict.
    """

    __slots__ = ("delivery", "detail", "fingerprint", "is_copy", "key", "reason")

    def __init__(
        self,
        delivery: Delivery,
        key: bytes | None,
        fingerprint: bytes | None,
        reason: Reason,
        detail: str,
        *,
        is_copy: bool = False,
    ) -> None:
        self.is_copy = is_copy
        self.delivery = delivery
        self.key = key
        self.fingerprint = fingerprint
        self.reason = reason
        self.detail = detail


class Hold:
    """A delivery that must run again, alone, not before `after_ms` from now; its session waits.
    `after_ms` None puts it behind what its session waits for already.

    `take` says that the message is not in the store yet (it came from a broker): it is written
    into the held list, and an entry of the same batch makes its key `held`.
    """

    __slots__ = ("after_ms", "attempts", "delivery", "take")

    def __init__(
        self,
        delivery: Delivery,
        *,
        after_ms: int | None,
        attempts: int,
        take: bool = False,
    ) -> None:
        self.delivery = delivery
        self.after_ms = after_ms
        self.attempts = attempts
        self.take = take


class Changes:
    """Everything of one batch.

    Attributes:
        fence: sessions that must still be ours at the commit.
        release: owned sessions that this transaction gives up.
        sends: in order.
        entries: inbox rows.
        dead_letters: with their inbox rows among `entries` where they have a key.
        holds: messages that wait for another run.
        removed: deliveries to take out of the table queue, in the order of the fetch.
        counts: by end and cause.
        reruns: runs that began and did not commit since the last commit.
    """

    __slots__ = (
        "counts",
        "dead_letters",
        "entries",
        "fence",
        "holds",
        "release",
        "removed",
        "reruns",
        "sends",
    )

    def __init__(self) -> None:
        self.fence: set[bytes] = set()
        self.release: set[bytes] = set()
        self.sends: list[Outgoing] = []
        self.entries: list[Entry] = []
        self.dead_letters: list[DeadLetter] = []
        self.holds: list[Hold] = []
        self.removed: list[Delivery] = []
        self.counts: Counter[tuple[End, Cause | None]] = Counter()
        self.reruns = 0
