"""A lane on PostgreSQL: one connection, one batch transaction at a time, all of it in a pipeline.

Sessions are accepted in short transactions of their own and stay with the lane while they have
work. Three round trips a batch: begin and read; the batch's rows; commit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

import psycopg
from psycopg import pq

from procession.abc import Changes, Fetched, InboxRow
from procession.config import Settings
from procession.core.fences import holder_name
from procession.errors import (
    ConfigurationError,
    MessageGone,
    SessionLost,
    StoreUnavailable,
    TransactionMisuse,
    TransientError,
    WorkerLost,
)
from procession.message import Delivery
from procession.stores.postgres.connection import Place, local_settings, ours
from procession.stores.postgres.flush import Flush
from procession.stores.postgres.guard import ENDED, OURS, Guard
from procession.stores.postgres.owned import Owned, session_of
from procession.stores.postgres.reading import FULL_LOOK_S, Reader
from procession.stores.postgres.wakeups import DOZE_S, Sleeper, Waker
from procession.stores.postgres.wire import Result, StatementFailed, bytes_array, text_array

COMMITTED = b"COMMIT"
# Sessions taken at a time, at first; doubled while they do not fill a batch.
SESSIONS_FIRST = 64
# A full batch says that there is work in hand; others' sessions are looked at all the same, now
# and then, so that none of them starves.
BATCHES_BETWEEN_LOOKS = 4
STICKY_S = 1.0
DUE_MAX = 1_000
# Past this, tokens are looked for from the last one taken on, which passes over dead rows.
SLOW_LOOK_S = 0.1
ACCEPTANCES = itertools.count(1)

Method = TypeVar("Method", bound=Callable[..., Any])


def _in_turn(method: Method) -> Method:
    """Keep two threads off the connection, and say what an error of it means."""

    @functools.wraps(method)
    async def in_turn(self: PostgresLane, *arguments: Any, **named: Any) -> Any:
        with self.sql.turn:
            try:
                return await method(self, *arguments, **named)
            except StatementFailed as failed:
                raise self.meaning(failed) from failed.error
            except psycopg.Error as error:
                raise (
                    self.sql.taken
                    or ours(error, method.__name__)
                    or StoreUnavailable(f"{method.__name__}: {error}")
                ) from error

    return cast("Method", in_turn)


class PostgresLane(Reader):
    """Implements `procession.abc.Lane`."""

    def __init__(
        self,
        place: Place,
        prefix: str,
        *,
        subscription: int,
        worker: str,
        number: int,
        settings: Settings,
    ) -> None:
        super().__init__(
            place,
            prefix,
            subscription=subscription,
            worker=worker,
            number=number,
            settings=settings,
        )
        self._sessions_max = settings.sessions_max
        self._sleeper = Sleeper(self._wire, subscription)
        self._waker = Waker()
        self._fresh = True
        self._limit: int | None = None
        self._prefetched: Fetched | None = None
        self._looked = 0
        self._want = SESSIONS_FIRST
        self._after = 0
        self._slow_look = False
        self._closed = False
        self._interrupted = False

    @property
    def sql(self) -> Guard:
        """What handlers use."""
        return self._guard

    # Acceptance: each method is a transaction of its own.

    @_in_turn
    async def accept(self, limit: int) -> None:
        """See `Lane.accept`."""
        self._limit = limit
        now = time.monotonic()
        self._looked += 1
        in_hand = any(not owned.drained for owned in self._owned.values())
        if in_hand and not self._look and self._looked < BATCHES_BETWEEN_LOOKS:
            return
        self._looked = 0
        self._look = False
        self._check_usable()
        self._begin_short()
        given_up = self._idle(now)
        if given_up:
            self._send_give_up(given_up)
        room = max(0, self._sessions_max - len(self._owned) + len(given_up))
        if now - self._full_look_s > FULL_LOOK_S or not self._slow_look:
            self._after, self._full_look_s = 0, now
        # Fewer for a slow consumer, whose batches are small: the rest is for other lanes.
        tokens = max(0, min(self._want, room, max(limit, 1)))
        holder = self._new_holder()
        self._send("make_due", limit=DUE_MAX)
        if tokens:
            self._send("accept", holder=holder, after=self._after, tokens=tokens)
            self._send("accept_due", holder=holder, limit=tokens)
        results = self._end_short()
        if not self._after:
            self._slow_look = time.monotonic() - now > SLOW_LOOK_S
        for key in given_up:
            self._forget(key)
        if not tokens:
            return
        *_, taken, due = results
        self._take_in(holder, taken, due, tokens)

    def _take_in(self, holder: str, taken: Result, due: Result, tokens: int) -> None:
        rows = taken.rows()
        accepted = 0
        for key, low, suspicion, mine, is_new in rows:
            self._after = max(self._after, low)
            if mine:
                accepted += 1
                cursor = low - 1 if is_new else 0
                self._own(key, Owned(holder, cursor=cursor, suspicion=suspicion or 0))
        for key, suspicion in due.rows():
            self._own(key, Owned(holder, suspicion=suspicion or 0))
        if not rows:
            self._full_look_s = 0.0
        if len(rows) >= tokens:
            # There may be more of them.
            self._look = not accepted
            self._want = min(self._sessions_max, self._want * 2)

    @_in_turn
    async def own(self, sessions: Collection[bytes]) -> set[bytes]:
        """See `Lane.own`."""
        self._check_usable()
        keys = sorted(sessions)
        holder = self._new_holder()
        self._begin_short()
        self._send("own", keys=bytes_array(keys), holder=holder)
        *_, worker, owned = self._end_short()
        if not worker.rows():
            raise self._worker_lost()
        mine = set()
        for key, suspicion in owned.rows():
            kept = Owned(holder, suspicion=suspicion)
            kept.kept = True
            self._own(key, kept)
            mine.add(key)
        for key in set(keys) - mine:
            self._forget(key)
        return mine

    @_in_turn
    async def release(self, sessions: Collection[bytes]) -> None:
        """See `Lane.release`."""
        mine = {key: self._owned[key] for key in sorted(sessions) if key in self._owned}
        if not mine:
            return
        self._check_usable()
        self._begin_short()
        self._send_give_up(mine)
        self._end_short()
        self._full_look_s = 0.0
        for key in mine:
            self._forget(key)

    @_in_turn
    async def begin_attempt(self, delivery: Delivery, *, again: bool = False) -> int:
        """See `Lane.begin_attempt`."""
        self._check_usable()
        read = self._reads.get(delivery.position)
        stored = read[0] if read is not None else delivery.session or b""
        session = session_of(delivery)
        holder = self._new_holder()
        self._begin_short(durable=True)
        self._send("own", keys=bytes_array([session]), holder=holder)
        self._send(
            "count_attempt",
            step=0 if again else 1,
            session=stored,
            own_session=session,
            number=delivery.position,
        )
        results = self._finish_short_unless(
            lambda results: self._attempt_refused(results, delivery, session)
        )
        *_, owned, counted = results
        ((_, suspicion),) = owned.rows()
        ((attempts,),) = counted.rows()
        before = self._owned.get(session)
        mine = Owned(holder, suspicion=suspicion)
        if before is not None:
            mine.cursor, mine.kept, mine.waits = before.cursor, before.kept, before.waits
        self._own(session, mine)
        self._reads[delivery.position] = (session, b"")
        delivery.session = session
        delivery.attempts = attempts
        return delivery.attempts

    def _attempt_refused(
        self, results: Sequence[Result], delivery: Delivery, session: bytes
    ) -> Exception | None:
        *_, worker, owned, counted = results
        if not worker.rows():
            return self._worker_lost()
        if not owned.rows():
            self._forget(session)
            return SessionLost(
                f"session {session!r} is owned by another holder: message "
                f"{delivery.message_id!r} runs there"
            )
        if not counted.rows():
            return MessageGone(f"message {delivery.message_id!r} is not in the queue any more")
        return None

    # The batch transaction.

    @_in_turn
    async def begin(self) -> None:
        """See `Lane.begin`: with the gate, and, where `accept` said how many, the messages."""
        self._check_usable()
        self._guard.renew()
        self._guard.is_open = True
        self._after_commit = []
        self._targets.clear()
        self._prefetched = None
        self._wire.on()
        self._sleeper.wake()
        limit, self._limit = self._limit, None
        try:
            if self._fresh:
                self._free_own()
            self._wire.forget_prepared()
            self._wire.send(b"BEGIN", (), tag=OURS)
            if self._connection.pooled:
                self._wire.send(local_settings(self._place, lane=True).encode(), (), tag=OURS)
            self._send("gate")
            if limit is not None:
                self._send_reading(limit)
            gate, *results = self._wire.drain()
            self._suspects = self._gate(gate)
            if limit is not None:
                self._prefetched = self._read(results, limit)
        except BaseException:
            self._roll_back()
            raise

    def _gate(self, gate: Result) -> tuple[int, int]:
        ((alive, size, through),) = gate.rows() or [(None, 0, 0)]
        if alive is None:
            raise ConfigurationError(f"subscription {self._subscription} is gone")
        if not alive:
            raise self._worker_lost()
        return size, through

    @_in_turn
    async def fetch(self, limit: int) -> Fetched:
        """See `Lane.fetch`."""
        fetched, self._prefetched = self._prefetched, None
        if fetched is None:
            self._send_reading(limit)
            fetched = self._read(self._wire.drain(), limit)
        return fetched

    @_in_turn
    async def fetch_one(self, position: int) -> Delivery | None:
        """See `Lane.fetch_one`."""
        read = self._reads.get(position)
        keys = sorted(self._owned) if read is None else [read[0]]
        mine = [key for key in keys if key in self._owned]
        self._send(
            "fetch_one",
            keys=bytes_array(mine),
            holders=text_array([self._owned[key].holder for key in mine]),
            number=position,
        )
        rows = self._wire.drain()[-1].rows()
        if not rows:
            return None
        return self._delivery(rows[0], mine[rows[0][0] - 1])

    @_in_turn
    async def waiting(self, sessions: Collection[bytes]) -> set[bytes]:
        """See `Lane.waiting`."""
        if not sessions:
            return set()
        self._send("waiting", keys=bytes_array(sorted(sessions)))
        return {row[0] for row in self._wire.drain()[-1].rows()}

    @_in_turn
    async def judge(self, keys: Sequence[bytes]) -> dict[bytes, InboxRow]:
        """See `Lane.judge`."""
        self._send("judge", keys=bytes_array(list(keys)))
        return {row[0]: InboxRow(row[1], row[2]) for row in self._wire.drain()[-1].rows()}

    def mark(self) -> None:
        """See `Lane.mark`."""
        self._guard.mark()

    async def undo(self) -> bool:
        """See `Lane.undo`."""
        return self._guard.undo()

    @_in_turn
    async def flush(self, changes: Changes) -> None:
        """See `Lane.flush`."""
        guard = self._guard
        if guard.lost is not None:
            raise guard.lost
        if not guard.is_open:
            raise TransactionMisuse(ENDED)
        guard.end_handlers()
        Flush(self, changes).run()

    @_in_turn
    async def commit(self) -> None:
        """See `Lane.commit`."""
        guard = self._guard
        if guard.lost is not None:
            raise guard.lost
        if not guard.is_open:
            raise TransactionMisuse(ENDED)
        guard.is_open = False
        try:
            guard.end_handlers()
            self._wire.send(b"COMMIT", (), tag=OURS, keep=True)
            if self._targets and not self._connection.pooled:
                # Its own transaction, behind the commit.
                self._waker.send(self._wire, self._targets)
            (ended,) = self._wire.drain()
        except BaseException:
            self._roll_back()
            raise
        if ended.command != COMMITTED:
            self._roll_back()
            raise TransactionMisuse(
                "the server rolled the batch's transaction back: an error in it was passed over"
            )
        for step in self._after_commit:
            step()
        self._after_commit = []

    async def rollback(self) -> None:
        """See `Lane.rollback`."""
        with self._guard.turn:
            self._roll_back()

    def _roll_back(self) -> None:
        guard = self._guard
        guard.is_open = False
        self._after_commit = []
        self._prefetched = None
        # What the transaction had read must be read again.
        self._look = True
        try:
            if self._connection.closed or self._interrupted:
                return
            self._wire.on()
            if self._wire.pending:
                with contextlib.suppress(StatementFailed):
                    self._wire.drain()
            if self._wire.status != pq.TransactionStatus.IDLE:
                self._wire.send(b"ROLLBACK", (), tag=OURS)
                self._wire.drain()
        except (psycopg.Error, StatementFailed):
            # The connection is lost, and the server rolls back; this lane is not used again.
            self._connection.close()

    # Between batches.

    @_in_turn
    async def changed(self) -> bool:
        """See `Lane.changed`."""
        self._check_usable()
        if any(not owned.drained and not owned.kept for owned in self._owned.values()):
            self._look = True
            return True
        if self._idle(time.monotonic()):
            self._look = True
            return True
        self._wire.on()
        self._send("changed", after=0)
        ((changed,),) = self._wire.drain()[-1].rows()
        if changed:
            self._look = True
            self._full_look_s = self._keyless_look_s = 0.0
        return bool(changed)

    @_in_turn
    async def doze(self) -> bool:
        """See `Lane.doze`. Behind a pooler nobody can be woken: it sleeps for as long."""
        self._check_usable()
        if self._connection.pooled:
            time.sleep(DOZE_S)  # noqa: ASYNC251  a blocking store, on its own thread
        else:
            self._sleeper.doze()
        return True

    def interrupt(self) -> None:
        """See `Lane.interrupt`."""
        self._interrupted = True
        taken = StoreUnavailable("the connection was taken from a handler that hung")
        self._guard.taken = self._guard.lost = taken
        # First the running statement, through a connection of its own; then the socket, so that no
        # later one gets through: the server rolls back when it sees the end of it.
        with contextlib.suppress(psycopg.Error):
            self._connection.pgconn.get_cancel().cancel()
        with contextlib.suppress(OSError, psycopg.Error):
            duplicate = socket.socket(fileno=os.dup(self._connection.pgconn.socket))
            try:
                duplicate.shutdown(socket.SHUT_RDWR)
            finally:
                duplicate.close()

    async def close(self) -> None:
        """See `Lane.close`."""
        if self._closed:
            return
        self._closed = True
        await self.rollback()
        with self._guard.turn:
            if self._owned and not self._interrupted and not self._connection.closed:
                # The lease of the worker frees them where this cannot.
                with contextlib.suppress(psycopg.Error, StatementFailed, TransientError):
                    self._begin_short()
                    self._send_give_up(self._owned)
                    self._end_short()
            self._connection.close()

    # Parts.

    def _check_usable(self) -> None:
        if self._interrupted:
            raise StoreUnavailable("this lane's connection was taken from it")
        if self._connection.closed:
            raise StoreUnavailable("this lane's connection is closed")

    def _worker_lost(self) -> WorkerLost:
        return WorkerLost(
            f"worker {self._worker} was taken over after its lease had ended: nothing was "
            "committed; if this happens without a pause of the process, raise lease_ms"
        )

    def _new_holder(self) -> str:
        return holder_name(self._worker, self._number, next(ACCEPTANCES))

    def _idle(self, now: float) -> dict[bytes, Owned]:
        """Return the sessions to give up: those idle for long, and, where there is no room, those
        that are idle at all."""
        crowded = len(self._owned) >= self._sessions_max
        return {
            key: owned
            for key, owned in self._owned.items()
            if owned.drained and not owned.kept and (crowded or now - owned.idle_since > STICKY_S)
        }

    def _begin_short(self, *, durable: bool = False) -> None:
        """Begin a transaction of this lane alone. An acceptance that a crash of the server undoes
        is as if it had not been: every connection is lost with it."""
        self._wire.on()
        self._sleeper.wake()
        if self._fresh:
            self._free_own()
        self._wire.send(b"BEGIN", (), tag=OURS)
        if not durable:
            self._wire.send(b"SET LOCAL synchronous_commit = off", (), tag=OURS)
        self._send("plan_by_index", keep=False)
        self._send("keep_worker")

    def _end_short(self) -> list[Result]:
        self._wire.send(b"COMMIT", (), tag=OURS)
        try:
            return self._wire.drain()
        except BaseException:
            self._roll_back()
            raise

    def _finish_short_unless(
        self, refusal: Callable[[Sequence[Result]], Exception | None]
    ) -> list[Result]:
        try:
            results = self._wire.drain()
            refused = refusal(results)
        except BaseException:
            self._roll_back()
            raise
        if refused is not None:
            self._roll_back()
            raise refused
        self._end_short()
        return results

    def _free_own(self) -> None:
        """Free what an earlier connection of this lane owned, once its last batch has ended."""
        self._wire.send(b"BEGIN", (), tag=OURS)
        self._send("plan_by_index", keep=False)
        self._send("free_lane", keep=False)
        self._wire.send(b"COMMIT", (), tag=OURS)
        self._wire.drain()
        self._fresh = False
