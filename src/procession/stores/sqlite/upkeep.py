"""Upkeep on SQLite: forgets old keys in small steps, erases on request, lists sessions."""

from __future__ import annotations

import sqlite3
from typing import Any

from procession.abc import Purged, SessionStatus
from procession.errors import OperatorError
from procession.message import KEYLESS
from procession.stores.sqlite.connection import Place, lease_now, wall_now
from procession.stores.sqlite.sends import zone
from procession.stores.sqlite.transactions import Transactions

JUMP_MS = 60_000
STEADY_MS = 3_600_000


class SqliteUpkeep(Transactions):
    """Implements `procession.abc.Upkeep`.

    The inbox is in order of insertion, so that a walk from its start meets the oldest rows first;
    where the walk is, is remembered here and nowhere else.
    """

    def __init__(self, place: Place, prefix: str) -> None:
        super().__init__(place, prefix)
        self._after = 0
        self._at_the_end = False
        self._drift_ms = wall_now() - lease_now()
        self._not_before = 0

    async def prune(self, *, retention_ms: int, resend_horizon_ms: int, limit: int) -> int | None:
        if self._clock_jumped():
            return None
        with self.write("pruning") as connection:
            now, removed = wall_now(), 0
            last, newest_ms = connection.execute(
                self.sql["prune_span"], {"after": self._after, "limit": limit}
            ).fetchone()
            if last is None or self._at_the_end:
                self._after, self._at_the_end = 0, False
                return None
            for row in connection.execute(self.sql["subscriptions"]).fetchall():
                cutoff = min(
                    now - retention_ms, self._oldest(connection, row[0], now) - resend_horizon_ms
                )
                removed += connection.execute(
                    self.sql["prune_inbox"],
                    {
                        "after": self._after,
                        "last": last,
                        "subscription": row[0],
                        "cutoff": cutoff,
                    },
                ).rowcount
            removed += connection.execute(
                self.sql["prune_dead_letters"], {"cutoff": now - retention_ms, "limit": limit}
            ).rowcount
        # What comes after a row that is too young was recorded later still.
        self._after, self._at_the_end = last, newest_ms >= now - retention_ms
        return removed

    async def prunable(self, *, retention_ms: int) -> int:
        with self.read("counting what can be pruned") as connection:
            row = connection.execute(
                self.sql["prunable"], {"cutoff": wall_now() - retention_ms}
            ).fetchone()
        return int(row[0])

    async def purge_key(self, consumer: str, key: bytes) -> Purged:
        with self.write(f"purging a key of {consumer}") as connection:
            subscription = self._subscription(connection, consumer)
            low, high = zone(subscription)
            named = {"subscription": subscription, "key": key, "low": low, "high": high}
            removed = connection.execute(self.sql["purge_message"], named).fetchall()
            for session, held in removed:
                if held:
                    connection.execute(self.sql["add_held"], (subscription, session, -1))
                    connection.execute(self.sql["drop_session_row"], (subscription, session))
            return Purged(
                messages=len(removed),
                inbox=connection.execute(self.sql["purge_inbox"], named).rowcount,
                dead_letters=connection.execute(self.sql["purge_dead_key"], named).rowcount,
            )

    async def purge_session(self, consumer: str, session: bytes) -> Purged:
        with self.write(f"purging a session of {consumer}") as connection:
            subscription = self._subscription(connection, consumer)
            low, high = zone(subscription)
            named = {"subscription": subscription, "session": session, "low": low, "high": high}
            keys = [
                row[0] for row in connection.execute(self.sql["session_keys"], named).fetchall()
            ]
            inbox = sum(
                connection.execute(
                    self.sql["purge_inbox"], {"subscription": subscription, "key": key}
                ).rowcount
                for key in keys
            )
            messages = connection.execute(self.sql["purge_session"], named).rowcount
            dead = connection.execute(self.sql["purge_dead_session"], named).rowcount
            connection.execute(self.sql["purge_session_row"], named)
            connection.execute(self.sql["drop_session_row"], (subscription, session))
        return Purged(messages=messages, inbox=inbox, dead_letters=dead)

    async def sessions(
        self, *, consumer: str | None = None, session: bytes | None = None, limit: int = 100
    ) -> list[SessionStatus]:
        now, found = wall_now(), []
        with self.read("reading sessions") as connection:
            for row in connection.execute(self.sql["subscriptions"]).fetchall():
                if row[3] is None or consumer not in (None, row[3]):
                    continue
                low, high = zone(row[0])
                rows = connection.execute(
                    self.sql["sessions"],
                    {
                        "subscription": row[0],
                        "low": low,
                        "high": high,
                        "session": session,
                        "limit": limit,
                    },
                ).fetchall()
                found += [_session(row[3], columns, now) for columns in rows]
        found.sort(key=lambda status: (-status.backlog, status.consumer, status.session or b""))
        return found[:limit]

    def _clock_jumped(self) -> bool:
        """Whether the wall clock went another way than the boot-time clock lately: what it says is
        old must not be believed before it has been steady for an hour."""
        drift_ms = wall_now() - lease_now()
        if abs(drift_ms - self._drift_ms) > JUMP_MS:
            self._drift_ms = drift_ms
            self._not_before = lease_now() + STEADY_MS
        return lease_now() < self._not_before

    def _oldest(self, connection: sqlite3.Connection, subscription: int, now: int) -> int:
        """Return when the oldest waiting message was sent: keys younger than it must stay."""
        low, high = zone(subscription)
        row = connection.execute(self.sql["oldest"], {"low": low, "high": high}).fetchone()
        return min((int(value) for value in row if value is not None), default=now)

    def _subscription(self, connection: sqlite3.Connection, consumer: str) -> int:
        row = connection.execute(self.sql["reader_of"], (consumer,)).fetchone()
        if row is None:
            raise OperatorError(f"there is no consumer {consumer!r} in this database")
        return int(row[0])


def _session(consumer: str, row: tuple[Any, ...], now: int) -> SessionStatus:
    session, backlog, oldest_ms, held, holder, retrying, dead = row
    keyless = session is None or session.startswith(KEYLESS)
    return SessionStatus(
        consumer=consumer,
        session=None if keyless else session,
        backlog=backlog,
        head_age_ms=0 if oldest_ms is None else max(0, now - oldest_ms),
        held=held,
        holder=holder,
        retrying=bool(retrying),
        dead_letters=dead,
    )
