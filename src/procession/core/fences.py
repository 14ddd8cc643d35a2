"""Names holders, and decides whether a fence held."""

from __future__ import annotations

from collections.abc import Collection

from procession.errors import SessionLost


def holder_name(worker: str, lane: int, acceptance: int) -> str:
    """Name one acceptance: unique for ever, since a worker's id is, and the counter only grows.

    Example:
        >>> holder_name("0193", 0, 7)
        '0193.0.7'
    """
    return f"{worker}.{lane}.{acceptance}"


def check_fence(expected: Collection[bytes], found: Collection[bytes], holder: str) -> None:
    """Do nothing if every expected session is still held; else say which were lost.

    Raises:
        SessionLost: names the first lost sessions.
    """
    if len(found) == len(expected):
        return
    lost = sorted(set(expected) - set(found))
    names = ", ".join(repr(session.decode(errors="replace")) for session in lost[:5])
    raise SessionLost(
        f"session {names} was taken over (its holder was {holder}): nothing was committed; "
        "if this happens often, raise lease_ms or shorten the handler"
    )
