"""Upkeep on servers: forgets old keys in small steps, erases on request, lists sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from procession.abc import Purged, SessionStatus
from procession.errors import OperatorError
from procession.message import KEYLESS
from procession.stores.sql.sends import Run
from procession.stores.sql.transactions import Transactions

COUNTS_MANY = 200


class SqlUpkeep:
    """Implements `procession.abc.Upkeep`.

    Args:
        spans: returns the end of a walk through the inbox as a number, and what a step of it is
            called in the statement `prune_inbox`: one step looks at one span.
    """

    def __init__(
        self, transactions: Transactions, *, spans: Callable[[Run, int, int], dict[str, Any] | None]
    ) -> None:
        self._transactions = transactions
        self._spans = spans
        self._step = 0

    async def prune(self, *, retention_ms: int, resend_horizon_ms: int, limit: int) -> int | None:
        """See `Upkeep.prune`."""
        with self._transactions.write("pruning") as run:
            ((now,),) = run("now").rows()
            span = self._spans(run, self._step, limit)
            if span is None:
                self._step = 0
                self._fold_counts(run)
                return None
            removed = 0
            for row in run("subscriptions").rows():
                ((oldest,),) = run("oldest", subscription=row[0]).rows()
                cutoff = min(
                    now - retention_ms, (now if oldest is None else oldest) - resend_horizon_ms
                )
                removed += run("prune_inbox", **span, subscription=row[0], cutoff=cutoff).count or 0
            if self._step == 0:
                removed += (
                    run("prune_dead_letters", cutoff=now - retention_ms, limit=limit).count or 0
                )
        self._step += 1
        return removed

    async def prunable(self, *, retention_ms: int) -> int:
        """See `Upkeep.prunable`."""
        with self._transactions.read("counting what can be pruned") as run:
            return int(run("prunable", retention_ms=retention_ms).rows()[0][0])

    async def purge_key(self, consumer: str, key: bytes) -> Purged:
        """See `Upkeep.purge_key`."""
        with self._transactions.write(f"purging a key of {consumer}") as run:
            named = {"subscription": self._subscription(run, consumer), "key": key}
            inbox = run("purge_inbox", **named).count or 0
            dead = run("purge_dead_key", **named).count or 0
            messages = run("purge_message", **named).count or 0
        return Purged(messages=messages, inbox=inbox, dead_letters=dead)

    async def purge_session(self, consumer: str, session: bytes) -> Purged:
        """See `Upkeep.purge_session`."""
        with self._transactions.write(f"purging a session of {consumer}") as run:
            subscription = self._subscription(run, consumer)
            named = {"subscription": subscription, "session": session}
            keys = sorted(row[0] for row in run("session_keys", **named).rows())
            run("purge_session_row", **named)
            inbox = sum(
                run("purge_inbox", subscription=subscription, key=key).count or 0 for key in keys
            )
            dead = run("purge_dead_session", **named).count or 0
            messages = run("purge_session", **named).count or 0
        return Purged(messages=messages, inbox=inbox, dead_letters=dead)

    async def sessions(
        self, *, consumer: str | None = None, session: bytes | None = None, limit: int = 100
    ) -> list[SessionStatus]:
        """See `Upkeep.sessions`."""
        found: list[SessionStatus] = []
        with self._transactions.read("reading sessions") as run:
            ((now,),) = run("now").rows()
            for row in run("subscriptions").rows():
                if row[3] is None or consumer not in (None, row[3]):
                    continue
                rows = run("sessions", subscription=row[0], session=session, limit=limit).rows()
                found += [_session(row[3], columns, now) for columns in rows]
        found.sort(key=lambda status: (-status.backlog, status.consumer, status.session or b""))
        return found[:limit]

    async def close(self) -> None:
        """See `Upkeep.close`."""
        self._transactions.close()

    def _fold_counts(self, run: Run) -> None:
        if run("many_counts").rows()[0][0] >= COUNTS_MANY:
            run("fold_counts")

    def _subscription(self, run: Run, consumer: str) -> int:
        rows = run("reader_of", consumer=consumer).rows()
        if not rows:
            raise OperatorError(f"there is no consumer {consumer!r} in this database")
        return int(rows[0][0])


def _session(consumer: str, row: tuple[Any, ...], now: int) -> SessionStatus:
    session, backlog, oldest_ms, held, holder, retrying, dead = row
    keyless = not session or session.startswith(KEYLESS)
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
