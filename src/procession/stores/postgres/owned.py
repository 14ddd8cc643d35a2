"""What a lane knows of the sessions that it holds, and of the messages that it has read."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from procession.message import KEYLESS, Delivery


class Owned:
    """A session that this lane holds.

    Attributes:
        cursor: everything up to this number was read and has ended.
        drained: nothing more was there when it was read last; since when.
        suspicion: how many holders vanished with it.
        kept: a broker's: it is given up by the flow alone.
        waits: it has a retry time in hand.
    """

    __slots__ = ("cursor", "drained", "holder", "idle_since", "kept", "suspicion", "waits")

    def __init__(self, holder: str, *, cursor: int = 0, suspicion: int = 0) -> None:
        self.holder = holder
        self.cursor = cursor
        self.suspicion = suspicion
        self.drained = False
        self.idle_since = 0.0
        self.kept = False
        self.waits = False


# Where a delivery was read: its session (empty for none), and the place of its row. A plain tuple:
# one is made for each message.
Read: TypeAlias = tuple[bytes, bytes]


class Reading(NamedTuple):
    """What a read transaction saw: sessions in the order in which they were read, whether each was
    read to its end, and their tokens.
    """

    rows: list[tuple[Any, ...]]
    keys: list[bytes]
    tokens: list[tuple[bytes, int]]
    drained: set[bytes]


class ReadPlan(NamedTuple):
    """What the next read is to look at.

    Attributes:
        keys: sessions, in this order.
        limit: messages in all; `each`: of one session.
        keyless_first: messages without a session come first.
        alone: what is found runs alone.
    """

    keys: list[bytes]
    limit: int
    each: int
    keyless_first: bool
    alone: bool


def session_of(delivery: Delivery) -> bytes:
    """Return the delivery's session; one without becomes a session of its own."""
    if delivery.session is not None:
        return delivery.session
    return KEYLESS + str(delivery.position).encode()


def public_session(delivery: Delivery) -> bytes | None:
    """Return the session as the user knows it."""
    session = delivery.session
    return None if session is None or session.startswith(KEYLESS) else session
