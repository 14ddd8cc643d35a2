"""Decides what the inbox's row of a key means for a delivery that carries the key."""

from __future__ import annotations

import enum

from procession.core.fingerprints import matches
from procession.outcome import InboxState


class Verdict(enum.Enum):
    """What to do with a delivery, by its key alone."""

    FRESH = "run it"
    DUPLICATE = "settle it: the same message took effect already"
    CONFLICT = "its key took effect, or died, with another payload"
    HELD = "settle it: the store holds the message already and will run it"
    DEAD = "settle it: the message is a dead letter; only a replay runs it"
    BUSY = "leave it: a copy is being worked on elsewhere"


def judge(
    state: int | None, recorded: bytes | None, fingerprint: bytes, *, own: bool = False
) -> Verdict:
    """Return the verdict for a delivery whose key has the given inbox row.

    Args:
        state: the row's `InboxState`, or None where there is no row.
        recorded: the fingerprints of the row, 32 bytes each.
        fingerprint: of the delivery, 32 bytes.
        own: the delivery is the one that this row waits for: a held message coming from the
            held list, or a replayed dead letter.

    Example:
        >>> judge(InboxState.DONE, b"a" * 32, b"b" * 32)
        <Verdict.CONFLICT: 'its key took effect, or died, with another payload'>
    """
    if state is None:
        return Verdict.FRESH
    if own and state in (InboxState.HELD, InboxState.DEAD):
        return Verdict.FRESH
    if not matches(recorded or b"", fingerprint):
        return Verdict.CONFLICT
    match InboxState(state):
        case InboxState.DONE:
            return Verdict.DUPLICATE
        case InboxState.HELD:
            return Verdict.HELD
        case InboxState.DEAD:
            return Verdict.DEAD
        case InboxState.IN_PROGRESS:
            return Verdict.BUSY
