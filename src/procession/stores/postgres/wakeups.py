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

from procession.stores.postgres.connection import as_query
from procession.stores.postgres.transactions import PostgresTransactions
from procession.stores.postgres.wire import Wire, int_array

# The class of advisory locks that sleepers hold; the object is the subscription's number.
SLEEPERS = 0x70726F
NOTIFY_EVERY_S = 0.005
# How long a lane sleeps before it looks by itself: retries and scheduled messages give no sign.
DOZE_S = 0.1
OURS = -1
WAKE = (
    "SELECT pg_notify('procession_' || s, '') FROM unnest({}::bigint[]) AS s "
    f"WHERE NOT pg_try_advisory_xact_lock({SLEEPERS}, s::integer)"
)


def channel(subscription: int) -> str:
    """Return the channel on which a subscription's lanes listen."""
    return f"procession_{subscription}"


class Sleeper:
    """The side of a lane: it listens once, and holds its subscription's lock while it sleeps.

    Attributes:
        asleep: whether it holds the lock.
    """

    def __init__(self, wire: Wire, subscription: int) -> None:
        self._wire = wire
        self._subscription = subscription
        self._listens = False
        self.asleep = False

    def doze(self) -> None:
        """Fall asleep, or, asleep already, wait for a sign."""
        wire = self._wire
        if self.asleep:
            wire.wait(DOZE_S)
            return
        if not self._listens:
            wire.send(b"LISTEN " + channel(self._subscription).encode(), (), tag=OURS)
            self._listens = True
        self._lock(b"pg_advisory_lock_shared")
        wire.drain()
        self.asleep = True

    def wake(self) -> None:
        """Give the lock back, with the next statements that are sent."""
        if self.asleep:
            self.asleep = False
            self._lock(b"pg_advisory_unlock_shared")

    def _lock(self, function: bytes) -> None:
        self._wire.send(
            b"SELECT " + function + b"(%d, %d)" % (SLEEPERS, self._subscription), (), tag=OURS
        )


class Waker:
    """The side of who sends: says whom to wake after a commit, each seldom."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}

    def due(self, subscriptions: Iterable[int]) -> list[int]:
        """Return those of these that were not notified a moment ago."""
        now = time.monotonic()
        wanted = [s for s in subscriptions if now - self._last.get(s, 0.0) >= NOTIFY_EVERY_S]
        self._last.update(dict.fromkeys(wanted, now))
        return wanted

    def send(self, wire: Wire, subscriptions: Iterable[int]) -> None:
        """Send the notification behind a COMMIT, in the same round trip."""
        wanted = self.due(subscriptions)
        if wanted:
            wire.send(WAKE.format("$1").encode(), [int_array(wanted)], (), [1], tag=OURS)

    def wake(self, transactions: PostgresTransactions, subscriptions: Iterable[int]) -> None:
        """Notify on a connection of its own. A failure is harmless: lanes look by themselves."""
        wanted = self.due(subscriptions)
        if not wanted:
            return
        with contextlib.suppress(psycopg.Error):
            connection = transactions.connection
            if not connection.pooled:
                connection.execute(as_query(WAKE.format("%s")), (wanted,))
