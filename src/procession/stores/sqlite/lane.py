"""A lane on SQLite: one connection, one batch transaction at a time.

The write lock is taken before anything is read, so the transaction itself is the acceptance of
every session in it; a row in `sessions` is written only for what must outlive a transaction: a
run begun alone, a session that waits, a broker's session.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, TypeVar, cast

from procession.abc import Changes, DeadLetter, Entry, Fetched, Hold, InboxRow
from procession.core.fences import check_fence, holder_name
from procession.errors import (
    ConfigurationError,
    DuplicateKey,
    MessageGone,
    SessionLost,
    StoreUnavailable,
    TransactionMisuse,
    WorkerLost,
)
from procession.message import KEYLESS, Delivery
from procession.outcome import End
from procession.stores.sqlite.connection import (
    BUSY_POLL_S,
    Place,
    Turnstile,
    boot_id,
    connect,
    lease_now,
    ours,
    wall_now,
)
from procession.stores.sqlite.guard import Guard
from procession.stores.sqlite.sends import Sender, headers_of, zone
from procession.stores.sqlite.statements import insert_rows, statements

COMMIT = "COMMIT /* procession */"
ROLLBACK = "ROLLBACK /* procession */"
ZEROS_ALWAYS = "PRAGMA secure_delete = ON /* procession */"
ZEROS_SELDOM = "PRAGMA secure_delete = FAST /* procession */"
DUE_MAX = 1_000
HELD_SESSIONS_MAX = 16
# How long a running statement may take to notice that it is to end.
INTERRUPT_S = 2.0
ASIDE_ROUNDS_MAX = 4
# Bodies in memory at a time: a batch of large messages ends early.
BATCH_BYTES_MAX = 32 * 1024 * 1024
# What is stored in `ended`: plain text, which the driver binds faster than an enum, and NULL for
# what nearly every row says.
ENDED: dict[End | None, str | None] = {
    None: None,
    **{end: end.value for end in End},
    End.PROCESSED: None,
}
# One counter for the process, which is one worker at a time: a lane that is made anew under its old
# name must not find a holder of its own name again.
ACCEPTANCES = itertools.count(1)
UNIQUE_VIOLATION = {sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY}


Method = TypeVar("Method", bound=Callable[..., Any])


def _in_turn(method: Method) -> Method:
    """Keep `interrupt` from closing the connection while a method uses it: that would crash."""

    @functools.wraps(method)
    async def in_turn(self: SqliteLane, *arguments: Any, **named: Any) -> Any:
        with self.sql.turn:
            return await method(self, *arguments, **named)

    return cast("Method", in_turn)


class SqliteLane:
    """Implements `procession.abc.Lane`."""

    def __init__(
        self,
        place: Place,
        prefix: str,
        *,
        subscription: int,
        worker: str,
        number: int,
    ) -> None:
        self._place = place
        self._sql = statements(prefix)
        self._connection = connect(place)
        self._turnstile = Turnstile(place)
        self._guard = Guard(self._connection, prefix)
        self._sender = Sender(self._connection, self._sql)
        self._subscription = subscription
        self._worker = worker
        self._number = number
        (zeros,) = self._connection.execute("PRAGMA secure_delete").fetchone()
        self._writes_zeros = zeros == 1
        self._owned: dict[bytes, str] = {}
        self._pending: dict[bytes, str | None] = {}
        self._low, self._high = zone(subscription)
        self._gate: tuple[Any, ...] = ()
        self._in_order: list[int] = []
        self._data_version = -1
        self._next_due_ms: int | None = None
        self._next_due_is_known = False
        self._interrupted = False
        self._closed = False

    @property
    def sql(self) -> Guard:
        """What handlers use."""
        return self._guard

    # Acceptance: each method is a transaction of its own.

    async def accept(self, limit: int) -> None:
        """The transaction is the acceptance: nothing to do."""

    @_in_turn
    async def own(self, sessions: Collection[bytes]) -> set[bytes]:
        """See `Lane.own`."""
        await self.begin()
        try:
            mine = {session for session in sorted(sessions) if self._own(session)}
            await self.commit()
        except BaseException:
            await self.rollback()
            raise
        return mine

    @_in_turn
    async def release(self, sessions: Collection[bytes]) -> None:
        """See `Lane.release`."""
        self._begin()
        try:
            for session in sorted(sessions):
                self._release(session)
            await self.commit()
        except BaseException:
            await self.rollback()
            raise

    @_in_turn
    async def begin_attempt(self, delivery: Delivery, *, again: bool = False) -> int:
        """See `Lane.begin_attempt`."""
        await self.begin()
        try:
            session = session_of(delivery)
            if not self._own(session):
                raise SessionLost(  # noqa: TRY301
                    f"session {session!r} is owned by another holder: message "
                    f"{delivery.message_id!r} runs there"
                )
            row = self._connection.execute(
                self._sql["count_attempt"],
                {"position": delivery.position, "session": session, "step": 0 if again else 1},
            ).fetchone()
            if row is None:
                raise MessageGone(  # noqa: TRY301
                    f"message {delivery.message_id!r} is not in the queue any more"
                )
            await self.commit()
        except BaseException:
            await self.rollback()
            raise
        delivery.session = session
        delivery.attempts = row[0]
        delivery.held = bool(row[1])
        return delivery.attempts

    # The batch transaction.

    @_in_turn
    async def begin(self) -> None:
        """See `Lane.begin`."""
        self._begin()
        try:
            gate = self._connection.execute(
                self._sql["gate"],
                {
                    "worker": self._worker,
                    "subscription": self._subscription,
                    "lease_now": lease_now(),
                    "now": wall_now(),
                },
            ).fetchone()
        except sqlite3.Error as error:
            await self.rollback()
            raise ours(error, "reading the queue") or error from error
        if gate is None or not gate[0]:
            await self.rollback()
            if gate is None:
                raise ConfigurationError(f"subscription {self._subscription} is gone")
            raise WorkerLost(
                f"worker {self._worker} was taken over after its lease had ended: nothing was "
                "committed; if this happens without a pause of the process, raise lease_ms"
            )
        self._gate = gate

    @_in_turn
    async def fetch(self, limit: int) -> Fetched:
        """See `Lane.fetch`."""
        _, suspect_size, suspect_through, held_open, due = self._gate
        changed = False
        if suspect_size:
            limit = min(limit, suspect_size)
        deliveries: list[Delivery] = []
        if due:
            self._connection.execute(self._sql["make_due"], {"now": wall_now(), "limit": DUE_MAX})
            changed = True
        if held_open:
            deliveries = self._fetch_held(limit)
            changed = changed or not deliveries
        first: int | None = None
        if len(deliveries) < limit:
            in_order, moved = self._fetch_in_order(limit - len(deliveries))
            first = in_order[0].position if in_order else None
            self._in_order = [delivery.position for delivery in in_order]
            changed = changed or moved
            passed = first is None or first > suspect_through
            if suspect_size and passed and not deliveries:
                self._connection.execute(self._sql["trust"], (self._subscription,))
                suspect_size, changed = 0, True
            deliveries += in_order
        else:
            self._in_order = []
        return Fetched(deliveries=deliveries, alone=suspect_size == 1, changed=changed)

    @_in_turn
    async def fetch_one(self, position: int) -> Delivery | None:
        """See `Lane.fetch_one`."""
        row = self._connection.execute(
            self._sql["fetch_one"],
            {
                "position": position,
                "subscription": self._subscription,
                "worker": self._worker,
                "low": self._low,
                "high": self._high,
            },
        ).fetchone()
        if row is None:
            return None
        self._in_order = []
        return Delivery(*row)

    @_in_turn
    async def waiting(self, sessions: Collection[bytes]) -> set[bytes]:
        """See `Lane.waiting`."""
        return {
            session
            for session in sessions
            if self._connection.execute(
                self._sql["is_waiting"], (self._subscription, session)
            ).fetchone()
        }

    @_in_turn
    async def judge(self, keys: Sequence[bytes]) -> dict[bytes, InboxRow]:
        """See `Lane.judge`."""
        found = {}
        for key in keys:
            row = self._connection.execute(self._sql["judge"], (self._subscription, key)).fetchone()
            if row is not None:
                found[key] = InboxRow(row[1], row[2])
        return found

    def mark(self) -> None:
        """See `Lane.mark`."""
        self._guard.mark()

    async def undo(self) -> bool:
        """See `Lane.undo`."""
        try:
            return self._guard.undo()
        except sqlite3.Error:
            return False

    async def flush(self, changes: Changes) -> None:
        """See `Lane.flush`."""
        with self._guard.turn:
            self._guard.end_handlers()
            if self._guard.lost is not None:
                raise self._guard.lost
            if not self._connection.in_transaction:
                raise _misused()
            try:
                self._flush(changes)
            except sqlite3.Error as error:
                raise self._fault(error, "writing the batch's rows") from error

    def _flush(self, changes: Changes) -> None:
        self._fence(changes.fence)
        if changes.sends:
            self._sender.send(changes.sends)
        self._record(changes.entries)
        for dead in changes.dead_letters:
            self._kill(dead)
        for hold in changes.holds:
            self._hold(hold)
        if changes.removed:
            self._remove(changes)
        for session in changes.release:
            self._release(session)
        self._count(changes)

    async def commit(self) -> None:
        """See `Lane.commit`."""
        with self._guard.turn:
            self._guard.open_gate()
            if self._guard.lost is not None:
                raise self._guard.lost
            if not self._connection.in_transaction:
                raise _misused()
            self._next_due_is_known = False
            try:
                self._connection.execute(COMMIT)
            except sqlite3.Error as error:
                await self.rollback()
                raise self._fault(error, "commit") from error
            for session, holder in self._pending.items():
                if holder is None:
                    self._owned.pop(session, None)
                else:
                    self._owned[session] = holder
            self._pending.clear()

    async def rollback(self) -> None:
        """See `Lane.rollback`."""
        with self._guard.turn:
            self._roll_back()

    def _roll_back(self) -> None:
        self._guard.open_gate()
        self._pending.clear()
        # A closed connection has nothing to roll back; a failed rollback has ended its
        # transaction already (sqlite.org/lang_transaction.html).
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute(ROLLBACK)

    def _fault(self, error: sqlite3.Error, what: str) -> Exception:
        """Return what an error of our own statements means: the store's fault, or, as it stands,
        that of what the batch wrote (a deferred constraint at the commit)."""
        return self._guard.lost or ours(error, what) or error

    # Between batches.

    @_in_turn
    async def changed(self) -> bool:
        """See `Lane.changed`: another connection committed, or something has become due."""
        try:
            version = self._connection.execute("PRAGMA data_version /* procession */").fetchone()[0]
            if not self._next_due_is_known or version != self._data_version:
                self._next_due_ms = self._next_due()
                self._next_due_is_known = True
            if version != self._data_version:
                self._data_version = version
                return True
        except sqlite3.Error as error:
            raise ours(error, "looking for work") or error from error
        return self._next_due_ms is not None and self._next_due_ms <= lease_now()

    async def doze(self) -> bool:
        """See `Lane.doze`: a file gives no sign."""
        return False

    def interrupt(self) -> None:
        """See `Lane.interrupt`."""
        self._interrupted = True
        self._guard.lost = StoreUnavailable("the connection was taken from a handler that hung")
        give_up = time.monotonic() + INTERRUPT_S
        while not self._guard.turn.acquire(timeout=BUSY_POLL_S):
            # A statement runs. It ends with an error; a connection closed under it would crash.
            # Its lane may have noticed and closed the connection by itself meanwhile.
            with contextlib.suppress(sqlite3.Error):
                self._connection.interrupt()
            if time.monotonic() > give_up:
                return
        try:
            # Rolled back first: a statement that somebody keeps alive would keep a closed
            # connection's write lock. Closed at once: the zombie's next statement would autocommit.
            self._roll_back()
            self._connection.close()
        finally:
            self._guard.turn.release()

    @_in_turn
    async def close(self) -> None:
        """See `Lane.close`."""
        if self._closed:
            return
        self._closed = True
        await self.rollback()
        if self._owned and not self._interrupted:
            # The lease of the worker frees them where this cannot.
            with contextlib.suppress(sqlite3.Error, StoreUnavailable):
                await self.release(list(self._owned))
        self._connection.close()
        self._turnstile.close()

    # Parts.

    def _begin(self) -> None:
        with self._guard.turn:
            if self._interrupted:
                raise StoreUnavailable("this lane's connection was taken from it")
            self._guard.renew()
            self._turnstile.begin(self._connection)

    def _next_due(self) -> int | None:
        """Return when, on the lease clock, something scheduled or held may run, if ever."""
        low, high = self._low, self._high
        scheduled = self._connection.execute(
            self._sql["next_scheduled"], {"low": low, "high": high}
        ).fetchone()
        retry = self._connection.execute(
            self._sql["next_retry"], {"subscription": self._subscription, "worker": self._worker}
        ).fetchone()[0]
        times = [] if retry is None else [int(retry)]
        if scheduled is not None:
            times.append(int(scheduled[0]) - wall_now() + lease_now())
        return min(times, default=None)

    def _own(self, session: bytes) -> bool:
        holder = holder_name(self._worker, self._number, next(ACCEPTANCES))
        row = self._connection.execute(
            self._sql["own"],
            {
                "subscription": self._subscription,
                "session": session,
                "holder": holder,
                "worker": self._worker,
            },
        ).fetchone()
        self._pending[session] = None if row is None else holder
        return row is not None

    def _release(self, session: bytes) -> None:
        holder = self._owned.get(session, "")
        self._pending[session] = None
        self._connection.execute(self._sql["release"], (self._subscription, session, holder))
        self._connection.execute(self._sql["drop_session_row"], (self._subscription, session))

    def _fence(self, sessions: Collection[bytes]) -> None:
        found = [
            session
            for session in sessions
            if self._connection.execute(
                self._sql["fence"],
                (self._subscription, session, self._owned.get(session, "")),
            ).fetchone()
        ]
        check_fence(sessions, found, f"{self._worker}.{self._number}")

    def _fetch_in_order(self, limit: int) -> tuple[list[Delivery], bool]:
        """Read the head of the queue; set aside what belongs to sessions that wait."""
        parameters = {
            "subscription": self._subscription,
            "worker": self._worker,
            "low": self._low,
            "high": self._high,
            "limit": limit,
        }
        moved = False
        deliveries: list[Delivery] = []
        for _ in range(ASIDE_ROUNDS_MAX):
            rows = _up_to(self._connection.execute(self._sql["fetch"], parameters))
            blocked = [row for row in rows if row[14]]
            if not blocked:
                deliveries += [Delivery(*row) for row in rows]
                break
            self._set_aside(blocked)
            moved = True
            deliveries += [Delivery(*row) for row in rows if not row[14]]
            if len(rows) < limit or len(deliveries) * 2 >= limit:
                break
            parameters["low"] = rows[-1][0]
            parameters["limit"] = limit - len(deliveries)
        else:
            # Others may have work behind this long line; an idle lane must look again.
            self._data_version = -1
        return deliveries, moved

    def _set_aside(self, rows: list[tuple[Any, ...]]) -> None:
        self._connection.executemany(self._sql["set_aside"], [(row[0],) for row in rows])
        held = Counter(row[1] for row in rows)
        self._connection.executemany(
            self._sql["add_held"],
            [(self._subscription, session, number) for session, number in held.items()],
        )

    def _fetch_held(self, limit: int) -> list[Delivery]:
        sessions = self._connection.execute(
            self._sql["open_held_sessions"],
            {
                "subscription": self._subscription,
                "lease_now": lease_now(),
                "worker": self._worker,
                "limit": min(limit, HELD_SESSIONS_MAX),
            },
        ).fetchall()
        deliveries: list[Delivery] = []
        share = max(1, limit // 2 // max(1, len(sessions)))
        for (session,) in sessions:
            rows = self._connection.execute(
                self._sql["fetch_held"],
                {
                    "subscription": self._subscription,
                    "session": session,
                    "low": self._low,
                    "high": self._high,
                    "limit": share,
                },
            )
            found = [Delivery(*row) for row in rows]
            if not found:
                self._forget_held(session)
            deliveries += found
        return deliveries

    def _forget_held(self, session: bytes) -> None:
        """Nothing is held of it any more: another program took its messages away."""
        named = {"subscription": self._subscription, "session": session}
        self._connection.execute(self._sql["purge_session_row"], named)
        self._connection.execute(self._sql["drop_session_row"], (self._subscription, session))

    def _record(self, entries: list[Entry]) -> None:
        now = wall_now()
        subscription = self._subscription
        done: list[Any] = []
        others: list[Entry] = []
        for entry in entries:
            if entry.expected is None and entry.end is End.PROCESSED and not entry.out_of_order:
                done += (subscription, bytearray(entry.key), bytearray(entry.fingerprint), now)
            else:
                others.append(entry)
        try:
            insert_rows(self._connection, self._sql["record_done"], done, width=4)
            for entry in others:
                if entry.expected is None:
                    self._connection.execute(
                        self._sql["record"],
                        (
                            subscription,
                            entry.key,
                            int(entry.state),
                            ENDED[entry.end],
                            entry.fingerprint,
                            now,
                            1 if entry.out_of_order else None,
                        ),
                    )
        except sqlite3.IntegrityError as error:
            if error.sqlite_errorcode in UNIQUE_VIOLATION:
                raise DuplicateKey("another transaction recorded one of these keys") from error
            raise
        for entry in others:
            if entry.expected is not None:
                self._move_on(entry, now)

    def _move_on(self, entry: Entry, now: int) -> None:
        moved = self._connection.execute(
            self._sql["move_on"],
            {
                "subscription": self._subscription,
                "key": entry.key,
                "state": entry.state,
                "ended": ENDED[entry.end],
                "now": now,
                "out_of_order": 1 if entry.out_of_order else None,
                "fingerprint": entry.fingerprint,
                "expected": entry.expected,
            },
        )
        if moved.rowcount != 1:
            raise DuplicateKey(f"key {entry.key!r} has moved on from {entry.expected!r}")

    def _kill(self, dead: DeadLetter) -> None:
        delivery = dead.delivery
        if delivery.replay_of is not None:
            again = self._connection.execute(
                self._sql["died_again"],
                {
                    "number": delivery.replay_of,
                    "reason": dead.reason,
                    "detail": dead.detail,
                    "attempts": delivery.attempts,
                    "errors": delivery.errors,
                    "entry": json.dumps({"at_ms": wall_now(), "what": "the replay failed"}),
                },
            )
            if again.rowcount == 1:
                return
        if dead.is_copy:
            folded = self._connection.execute(
                self._sql["fold_copy"], {"subscription": self._subscription, "key": dead.key}
            )
            if folded.rowcount == 1:
                return
        self._connection.execute(
            self._sql["kill"],
            {
                "entry": json.dumps({"at_ms": wall_now(), "what": "died again"}),
                "subscription": self._subscription,
                "reason": dead.reason,
                "detail": dead.detail,
                "key": dead.key,
                "fingerprint": dead.fingerprint,
                "position": delivery.position,
                "message_id": delivery.message_id,
                "session": public_session(delivery),
                "type": delivery.type,
                "format": delivery.format,
                "body": delivery.body,
                "headers": headers_of(delivery),
                "sent_ms": delivery.sent_at_ms,
                "attempts": delivery.attempts,
                "errors": delivery.errors,
                "now": wall_now(),
            },
        )

    def _hold(self, hold: Hold) -> None:
        delivery = hold.delivery
        session = session_of(delivery)
        if hold.take:
            number = self._sender.draw(1)
            delivery.position = self._low + number
            session = session_of(delivery)
            self._connection.execute(
                self._sql["take_held"],
                (
                    -delivery.position,
                    session,
                    delivery.message_id,
                    delivery.type,
                    delivery.format,
                    delivery.body,
                    headers_of(delivery),
                    delivery.sent_at_ms,
                    delivery.expires_ms,
                    hold.attempts,
                    delivery.errors,
                    delivery.replay_of,
                ),
            )
        else:
            updated = self._connection.execute(
                self._sql["hold"],
                {
                    "position": delivery.position,
                    "session": session,
                    "attempts": hold.attempts,
                    "errors": delivery.errors,
                },
            )
            if updated.rowcount != 1:
                raise MessageGone(f"message {delivery.message_id!r} is not in the queue any more")
        if hold.after_ms is None:
            self._connection.execute(self._sql["add_held"], (self._subscription, session, 1))
            return
        self._connection.execute(
            self._sql["wait"],
            {
                "subscription": self._subscription,
                "session": session,
                "held": 0 if delivery.held else 1,
                "retry_at": lease_now() + hold.after_ms,
                "boot": boot_id(),
            },
        )

    @contextlib.contextmanager
    def _without_zeros(self) -> Generator[None]:
        """Remove messages without writing zeros over the pages that they leave, where SQLite was
        built to do so (Debian's is): the log of a batch would be a seventh longer. What handlers
        delete is deleted as the build says.
        """
        if not self._writes_zeros:
            yield
            return
        self._connection.execute(ZEROS_SELDOM).fetchall()
        try:
            yield
        finally:
            self._connection.execute(ZEROS_ALWAYS).fetchall()

    def _remove(self, changes: Changes) -> None:
        removed = [delivery for delivery in changes.removed if delivery.lock is None]
        positions = [delivery.position for delivery in removed]
        if positions and positions == self._in_order[: len(positions)]:
            # Whatever lay between them was set aside in this transaction, so the range is exact.
            with self._without_zeros():
                found = self._connection.execute(
                    self._sql["remove_range"], (positions[0], positions[-1])
                ).rowcount
        else:
            found = self._connection.executemany(
                self._sql["remove"],
                [
                    (-delivery.position if delivery.held else delivery.position,)
                    for delivery in removed
                ],
            ).rowcount
        if found != len(removed):
            raise MessageGone(
                f"{len(removed)} messages were handled, {found} could be removed: another worker "
                "took some; nothing was committed"
            )
        held = Counter(session_of(delivery) for delivery in removed if delivery.held)
        for session, number in held.items():
            self._connection.execute(self._sql["add_held"], (self._subscription, session, -number))
            self._connection.execute(self._sql["drop_session_row"], (self._subscription, session))
        self._end_replays(changes)

    def _end_replays(self, changes: Changes) -> None:
        died = {dead.delivery.replay_of for dead in changes.dead_letters}
        for delivery in changes.removed:
            if delivery.replay_of is not None and delivery.replay_of not in died:
                entry = json.dumps({"at_ms": wall_now(), "what": "the replay ended"})
                self._connection.execute(
                    self._sql["replay_ended"], {"number": delivery.replay_of, "entry": entry}
                )

    def _count(self, changes: Changes) -> None:
        for (end, cause), number in changes.counts.items():
            self._connection.execute(
                self._sql["count"], (self._subscription, end, cause or "", number)
            )
        if changes.reruns:
            self._connection.execute(
                self._sql["count"], (self._subscription, "rerun", "", changes.reruns)
            )


def _up_to(cursor: sqlite3.Cursor) -> list[tuple[Any, ...]]:
    """Read rows until their bodies fill the memory that a batch may use; at least one."""
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in cursor:
        rows.append(row)
        size += len(row[5])
        if size >= BATCH_BYTES_MAX:
            break
    return rows


def session_of(delivery: Delivery) -> bytes:
    """Return the delivery's session; one without becomes a session of its own."""
    if delivery.session is not None:
        return delivery.session
    return KEYLESS + str(delivery.position).encode()


def public_session(delivery: Delivery) -> bytes | None:
    """Return the session as the user knows it."""
    session = delivery.session
    return None if session is None or session.startswith(KEYLESS) else session


def _misused() -> TransactionMisuse:
    return TransactionMisuse(
        "the batch's transaction ended inside a handler: nothing of this batch was recorded; "
        "a handler must not commit, roll back, close or change the schema"
    )
