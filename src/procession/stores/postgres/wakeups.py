"""Wakes idle lanes with NOTIFY: outside of transactions, seldom, and only if one sleeps.

NOTIFY takes a lock of the whole cluster at the commit. A lane that sleeps holds an advisory lock of
its subscription, shared; who has sent looks whether somebody holds it, and only then notifies. The
lane looks for work once more after it took the lock, so that no commit falls between the two.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import psycopg

from procession.stores.postgres.transactions import PostgresTransactions

# The class of advisory locks that sleepers hold; the object is the subscription's number.
SLEEPERS = 0x70726F
NOTIFY_EVERY_S = 0.005
SLEEP = "SELECT pg_advisory_lock_shared(%d, %d)"
AWAKE = "SELECT pg_advisory_unlock_shared(%d, %d)"
WAKE = (
    "SELECT pg_notify('procession_' || s, '') FROM unnest(%s::integer[]) AS s "
    "WHERE NOT pg_try_advisory_xact_lock(%s, s)"
)


def channel(subscription: int) -> str:
    """Return the channel on which a subscription's lanes listen."""
    return f"procession_{subscription}"


class Waker:
    """Wakes whoever sleeps, after a commit."""

    def __init__(self, transactions: PostgresTransactions) -> None:
        self._transactions = transactions
        self._last: dict[int, float] = {}

    def wake(self, subscriptions: Iterable[int]) -> None:
        """Notify the sleeping lanes of these. A failure is harmless: they look by themselves."""
        now = time.monotonic()
        wanted = [s for s in subscriptions if now - self._last.get(s, 0.0) >= NOTIFY_EVERY_S]
        if not wanted:
            return
        with contextlib.suppress(psycopg.Error):
            connection = self._transactions.connection
            if connection.pooled:
                return
            for subscription in wanted:
                self._last[subscription] = now
            connection.execute(WAKE, (wanted, SLEEPERS))
