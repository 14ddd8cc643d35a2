"""A store in memory, for tests and the simulator: nothing survives the process.

It behaves like a server on which transactions overlap: a session is accepted before its messages
are read, each transaction sees what others have committed, and fence, unique keys and removals are
decided at the commit, all at once. There is no SQL; `ctx.connection` is a small ledger of numbers
and values that commits and rolls back with the batch.
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeVar

from procession.abc import (
    Changes,
    ConsumerStatus,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterRecord,
    Entry,
    Features,
    Fetched,
    Hold,
    InboxRow,
    Purged,
    Receipt,
    SessionStatus,
    Topology,
    WorkerRecord,
)
from procession.abc.records import replaced_body
from procession.config import Settings
from procession.core.fences import check_fence, holder_name
from procession.core.fingerprints import matches
from procession.errors import (
    ConfigurationError,
    DuplicateKey,
    MessageGone,
    OperatorError,
    Reason,
    SessionLost,
    StoreUnavailable,
    TransactionMisuse,
    WorkerLost,
)
from procession.message import KEYLESS, Delivery, Outgoing
from procession.outcome import End, InboxState

FEATURES = Features(
    blocking=True, savepoints=False, concurrent_batches=True, durable=False, sql=False
)
Point = Callable[[str], Awaitable[None]]


async def no_point(_name: str) -> None:
    """Between two steps nothing happens; the simulator's point may suspend, or never return."""


Kind = TypeVar("Kind", bound=type)


def one_at_a_time(kind: Kind) -> Kind:
    """Let a thread have the store to itself during each call: an app's lanes run on threads."""

    def exclusive(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
            with getattr(self, "_store", self).lock:
                return await method(self, *args, **kwargs)

        return locked

    for name, method in list(vars(kind).items()):
        if inspect.iscoroutinefunction(method):
            setattr(kind, name, exclusive(method))
    return kind


class MemoryClock:
    """The store's clock: leases and retry times by `lease_ms`, due times by `wall_ms`."""

    @staticmethod
    def lease_ms() -> int:
        """Return milliseconds that only grow."""
        return time.monotonic_ns() // 1_000_000

    @staticmethod
    def wall_ms() -> int:
        """Return milliseconds since 1970 UTC."""
        return time.time_ns() // 1_000_000


@dataclass(slots=True)
class _Row:
    """A waiting message."""

    position: int
    session: bytes | None
    message: Outgoing
    sent_ms: int
    due_ms: int | None
    expires_ms: int | None
    attempts: int = 0
    errors: str | None = None
    replay_of: int | None = None
    taken: bool = False
    holder: str | None = None


@dataclass(slots=True)
class _Session:
    holder: str | None = None
    worker: str | None = None
    retry_at: int = 0
    suspicion: int = 0


@dataclass(slots=True)
class _Inbox:
    state: int
    fingerprint: bytes
    end: str | None
    recorded_ms: int
    out_of_order: bool


@dataclass(slots=True)
class _Subscription:
    number: int
    queue: str
    kind: str
    consumer: str | None
    window_ms: int
    rows: dict[int, _Row] = field(default_factory=dict)
    sessions: dict[bytes, _Session] = field(default_factory=dict)
    inbox: dict[bytes, _Inbox] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reruns: int = 0

    def session(self, key: bytes) -> _Session:
        return self.sessions.setdefault(key, _Session())

    def forget(self, key: bytes) -> None:
        """Drop a session's row that says nothing."""
        row = self.sessions.get(key)
        if row is not None and row == _Session():
            del self.sessions[key]


@dataclass(slots=True)
class _Worker:
    record: WorkerRecord
    until: int


@one_at_a_time
class MemoryStore:
    """Implements `procession.abc.Store`.

    Args:
        clock: where its time comes from.
        point: awaited between any two steps; the simulator suspends and crashes there.

    Attributes:
        effects: what handlers have committed through `ctx.connection`.
    """

    features = FEATURES

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        clock: MemoryClock | None = None,
        point: Point = no_point,
    ) -> None:
        self.settings = settings or Settings()
        self.clock = clock or MemoryClock()
        self.point = point
        # Re-entrant: the simulator's lanes share a thread, and are suspended within a call.
        self.lock = threading.RLock()
        self.effects: dict[Any, Any] = {}
        self.subscriptions: list[_Subscription] = []
        self.workers_by_id: dict[str, _Worker] = {}
        self.letters: dict[int, DeadLetterRecord] = {}
        self.recent: dict[tuple[str, bytes], tuple[int, bytes]] = {}
        self.version = 0
        self.marks: dict[str, int] = {}
        self.number = 0
        self.acceptances = 0
        self.ended_holders: set[str] = set()

    async def open(self, *, migrate: Literal["auto", "check"] = "auto") -> None:
        """See `Store.open`: there is no schema to check."""

    async def declare(self, topology: Topology) -> None:
        await self.point("declare")
        before = [(subscription, subscription.consumer) for subscription in self.subscriptions]
        try:
            self._declare(topology)
        except ConfigurationError:
            self.subscriptions = [subscription for subscription, _ in before]
            for subscription, consumer in before:
                subscription.consumer = consumer
            raise

    def _declare(self, topology: Topology) -> None:
        for queue in topology.queues:
            known = [s for s in self.subscriptions if s.queue == queue.name]
            if known and known[0].kind != queue.kind:
                raise ConfigurationError(f"{queue.name!r} is a {known[0].kind}")
            if not known:
                self._subscribe(queue.name, queue.kind, None, queue.duplicate_window_ms)
        for name, consumer in topology.consumers:
            self._declare_consumer(name, consumer)

    def _declare_consumer(self, name: str, consumer: str) -> None:
        readers = [s for s in self.subscriptions if s.queue == name]
        mine = next((s for s in self.subscriptions if s.consumer == consumer), None)
        if mine is not None and mine.queue != name:
            raise ConfigurationError(f"consumer {consumer!r} reads {mine.queue!r}")
        if readers[0].kind == "queue":
            if readers[0].consumer not in (None, consumer):
                raise ConfigurationError(
                    f"queue {name!r} belongs to consumer {readers[0].consumer!r}"
                )
            readers[0].consumer = consumer
        elif mine is None:
            self._subscribe(name, "topic", consumer, readers[0].window_ms)

    def _subscribe(self, queue: str, kind: str, consumer: str | None, window_ms: int) -> None:
        number = len(self.subscriptions) + 1
        self.subscriptions.append(_Subscription(number, queue, kind, consumer, window_ms))

    async def lane(self, consumer: str, *, worker: str, number: int) -> MemoryLane:
        return MemoryLane(self, self.subscription(consumer), worker, number)

    async def workers(self) -> MemoryWorkers:
        return MemoryWorkers(self)

    async def publisher(self) -> MemoryTablePublisher:
        return MemoryTablePublisher(self)

    async def dead_letters(self) -> MemoryDeadLetters:
        return MemoryDeadLetters(self)

    async def upkeep(self) -> MemoryUpkeep:
        return MemoryUpkeep(self)

    async def inbox(self, consumer: str, key: bytes) -> InboxRow | None:
        row = self.subscription(consumer).inbox.get(key)
        if row is None:
            return None
        return InboxRow(row.state, row.fingerprint, row.end, row.recorded_ms, row.out_of_order)

    async def skip_waits(self) -> int:
        now, wall, skipped = self.clock.lease_ms(), self.clock.wall_ms(), 0
        for subscription in self.subscriptions:
            for session in subscription.sessions.values():
                skipped += session.retry_at > now
                session.retry_at = 0
            for row in subscription.rows.values():
                skipped += row.due_ms is not None and row.due_ms > wall
                row.due_ms = None
        self.version += 1
        return skipped

    async def status(self) -> list[ConsumerStatus]:
        return [
            self._status(subscription)
            for subscription in self.subscriptions
            if subscription.kind == "queue" or subscription.consumer is not None
        ]

    async def close(self) -> None:
        """See `Store.close`: what is in memory stays with the object."""

    def subscription(self, consumer: str) -> _Subscription:
        """Return a consumer's subscription."""
        for subscription in self.subscriptions:
            if subscription.consumer == consumer:
                return subscription
        raise ConfigurationError(f"consumer {consumer!r} is not declared in this store")

    def _status(self, subscription: _Subscription) -> ConsumerStatus:
        now, wall = self.clock.lease_ms(), self.clock.wall_ms()
        waiting = {key for key, session in subscription.sessions.items() if session.retry_at > now}
        rows = subscription.rows.values()
        scheduled = sum(1 for row in rows if row.due_ms is not None and row.due_ms > wall)
        held = sum(1 for row in rows if row.session in waiting)
        sent = [row.sent_ms for row in rows if row.due_ms is None or row.due_ms <= wall]
        return ConsumerStatus(
            queue=subscription.queue,
            consumer=subscription.consumer,
            waiting=len(rows) - scheduled - held,
            scheduled=scheduled,
            held=held,
            retrying_sessions=len(waiting),
            owned_sessions=sum(1 for s in subscription.sessions.values() if s.holder),
            dead_letters=sum(
                1
                for letter in self.letters.values()
                if letter.consumer == subscription.consumer and letter.status == "dead"
            ),
            counts=dict(subscription.counts),
            reruns=subscription.reruns,
            head_age_ms=max(0, wall - min(sent)) if sent else None,
        )

    def draw(self) -> int:
        """Draw the next number: like a server's sequence, before the commit and never undone."""
        self.number += 1
        return self.number

    def readers(self, target: str) -> list[_Subscription]:
        """Return who gets a message for a queue or topic, or raise `ConfigurationError`."""
        known = [s for s in self.subscriptions if s.queue == target]
        if not known:
            raise ConfigurationError(f"queue or topic {target!r} is not declared")
        if known[0].kind == "queue":
            return known[:1]
        subscribers = [s for s in known if s.consumer is not None]
        if not subscribers:
            raise ConfigurationError(f"topic {target!r} has no subscriber")
        return subscribers

    def put(self, message: Outgoing, number: int) -> bool:
        """Store a message for each of its readers; False where the window folds it."""
        wall = self.clock.wall_ms()
        readers = self.readers(message.target)
        window_ms = readers[0].window_ms
        if window_ms:
            last = self.recent.get((message.target, message.message_id))
            if last is not None and last[0] > wall - window_ms and last[1] == message.body:
                return False
            self.recent[message.target, message.message_id] = (wall, message.body)
        due_ms = message.due_ms if message.after_ms is None else wall + message.after_ms
        expires_ms = None if message.lifetime_ms is None else wall + message.lifetime_ms
        for reader in readers:
            reader.rows[number] = _Row(number, message.session, message, wall, due_ms, expires_ms)
        self.version += 1
        return True

    def read(self, subscription: _Subscription, row: _Row) -> Delivery:
        """Make a delivery of a row."""
        recorded = subscription.inbox.get(row.message.message_id)
        message = row.message
        return Delivery(
            row.position,
            row.session,
            message.message_id,
            message.type,
            message.format,
            message.body,
            message.headers,
            row.sent_ms,
            row.expires_ms,
            row.attempts,
            row.errors,
            row.replay_of,
            None if recorded is None else recorded.state,
            None if recorded is None else recorded.fingerprint,
            row.taken,
        )


class Effects:
    """The handler's side of a transaction: numbers and values by name, read with its own writes."""

    def __init__(self, committed: dict[Any, Any]) -> None:
        self._committed = committed
        self._added: Counter[Any] = Counter()
        self._set: dict[Any, Any] = {}
        self._mark: tuple[Counter[Any], dict[Any, Any]] = (Counter(), {})
        self.doomed: BaseException | None = None
        self.lost: StoreUnavailable | None = None
        self.is_open = True

    def get(self, name: Any, default: Any = 0) -> Any:
        """Return a value as this transaction sees it."""
        self._check()
        base = self._set.get(name, self._committed.get(name, default))
        return base + self._added[name] if name in self._added else base

    def add(self, name: Any, number: int = 1) -> None:
        """Add to a number; sums of overlapping transactions add up."""
        self._check()
        self._added[name] += number

    def append(self, name: Any, value: Any) -> None:
        """Add a value to the end of a tuple."""
        self.set(name, (*self.get(name, ()), value))

    def set(self, name: Any, value: Any) -> None:
        """Set a value; of overlapping transactions the last one to commit wins."""
        self._check()
        self._set[name] = value

    @property
    def connection(self) -> Effects:
        """What `ctx.connection` is."""
        self._check()
        return self

    def execute(self, statement: str, parameters: Mapping[str, Any]) -> NoReturn:  # noqa: ARG002
        """Refuse: there is no SQL."""
        self.doomed = TransactionMisuse(
            "the memory store has no SQL: use ctx.connection.add and set, or an SQL store"
        )
        raise self.doomed

    def write(self, statement: str, parameters: Mapping[str, Any]) -> None:
        """Refuse: there is no SQL."""
        self.execute(statement, parameters)

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """Take back the block's writes if it raises."""
        self._check()
        before = (self._added.copy(), self._set.copy())
        doomed = self.doomed
        try:
            yield
        except BaseException:
            self._added, self._set = before
            self.doomed = doomed
            raise

    def mark(self) -> None:
        """Another handler begins."""
        self._mark = (self._added.copy(), self._set.copy())
        self.doomed = None

    def wrote(self) -> bool:
        """Whether the handler since the last mark wrote anything."""
        return self._mark != (self._added, self._set)

    def apply(self) -> None:
        """Commit."""
        self._committed.update(self._set)
        for name, number in self._added.items():
            self._committed[name] = self._committed.get(name, 0) + number

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost
        if not self.is_open:
            raise TransactionMisuse("the batch's transaction is not open any more")


@one_at_a_time
class MemoryLane:
    """Implements `procession.abc.Lane`."""

    def __init__(
        self, store: MemoryStore, subscription: _Subscription, worker: str, number: int
    ) -> None:
        self._store = store
        self._subscription = subscription
        self._worker = worker
        self._number = number
        self._owned: dict[bytes, str] = {}
        self._accepted: set[bytes] = set()
        self._owned_rows: dict[int, str] = {}
        self._sql = self._closed_sql()
        self._changes: Changes | None = None
        self._numbers: list[int] = []
        self._seen_version = -1
        self._interrupted = False

    @property
    def sql(self) -> Effects:
        return self._sql

    # Acceptance.

    async def accept(self, limit: int) -> None:
        await self._store.point("accept")
        self._check_worker()
        self._accept(limit)

    def _accept(self, limit: int) -> None:
        """Own visible sessions and keyless messages, oldest first; give up drained ones."""
        busy = {row.session for row in self._subscription.rows.values()}
        for session in self._accepted - busy:
            self._release(session)
        accepted = 0
        for row in self._visible():
            if accepted >= limit:
                break
            if row.session is None:
                if row.holder is None or self._has_ended(row.holder):
                    row.holder = self._owned_rows[row.position] = self._next_holder()
                    accepted += 1
            elif row.session not in self._owned:
                if len(self._owned) >= self._store.settings.sessions_max:
                    continue
                if self._own(row.session):
                    self._accepted.add(row.session)
                    accepted += 1

    async def own(self, sessions: Collection[bytes]) -> set[bytes]:
        await self._store.point("own")
        self._check_worker()
        mine = {session for session in sorted(sessions) if self._own(session)}
        self._accepted -= mine
        return mine

    async def release(self, sessions: Collection[bytes]) -> None:
        await self._store.point("release")
        for session in sessions:
            self._release(session)

    async def begin_attempt(self, delivery: Delivery, *, again: bool = False) -> int:
        await self._store.point("begin_attempt")
        self._check_worker()
        row = self._row(delivery)
        if row.session is None:
            row.session = KEYLESS + str(row.position).encode()
            row.holder = None
            self._owned_rows.pop(row.position, None)
        if not self._own(row.session):
            raise SessionLost(f"session {row.session!r} is owned by another holder")
        row.attempts = max(1, row.attempts + (0 if again else 1))
        delivery.session = row.session
        delivery.attempts = row.attempts
        return row.attempts

    # The transaction.

    async def begin(self) -> None:
        await self._store.point("begin")
        if self._interrupted:
            raise StoreUnavailable("this lane's connection was taken from it")
        self._check_worker()
        self._sql = Effects(self._store.effects)
        self._changes = None

    async def fetch(self, limit: int) -> Fetched:
        await self._store.point("fetch")
        mine = [
            row
            for row in self._visible()
            if (
                self._owned_rows.get(row.position) == row.holder
                if row.session is None and row.holder is not None
                else row.session in self._owned
                and self._subscription.session(row.session).holder == self._owned[row.session]
            )
        ]
        suspicion = max(
            (self._subscription.sessions[row.session].suspicion for row in mine if row.session),
            default=0,
        )
        if suspicion:
            limit = min(limit, self._store.settings.suspect_batch)
        deliveries = [self._store.read(self._subscription, row) for row in mine[:limit]]
        return Fetched(deliveries=deliveries, alone=suspicion > 1)

    async def fetch_one(self, position: int) -> Delivery | None:
        await self._store.point("fetch_one")
        row = self._subscription.rows.get(position)
        if row is None or self._is_of_another(row):
            return None
        return self._store.read(self._subscription, row)

    async def waiting(self, sessions: Collection[bytes]) -> set[bytes]:
        return {row.session for row in self._subscription.rows.values() if row.session} & set(
            sessions
        )

    async def judge(self, keys: Sequence[bytes]) -> dict[bytes, InboxRow]:
        await self._store.point("judge")
        inbox = self._subscription.inbox
        return {
            key: InboxRow(inbox[key].state, inbox[key].fingerprint) for key in keys if key in inbox
        }

    def mark(self) -> None:
        self._sql.mark()

    async def undo(self) -> bool:
        await self._store.point("undo")
        return not self._sql.wrote() and self._sql.lost is None

    async def flush(self, changes: Changes) -> None:
        await self._store.point("flush")
        if self._sql.lost is not None:
            raise self._sql.lost
        if not self._sql.is_open:
            raise TransactionMisuse("there is no transaction to write in")
        self._validate(changes)
        self._changes = changes
        # Here, as a server's sequence does: who draws first may commit last.
        self._numbers = [self._store.draw() for _ in changes.sends]

    async def commit(self) -> None:
        await self._store.point("commit")
        if not self._sql.is_open:
            raise TransactionMisuse("there is no transaction to commit")
        if self._interrupted:
            raise StoreUnavailable("this lane's connection was taken from it")
        changes, self._changes = self._changes, None
        if changes is not None:
            # Between flush and here another lane may have committed: this is the arbiter.
            self._validate(changes)
            self._apply(changes)
        self._sql.apply()
        self._sql.is_open = False
        # From here it is durable, whether or not the caller lives to hear of it.
        await self._store.point("committed")

    async def rollback(self) -> None:
        self._sql.is_open = False
        self._changes = None

    async def changed(self) -> bool:
        if self._seen_version != self._store.version:
            self._seen_version = self._store.version
            return True
        return any(True for _ in self._visible())

    async def doze(self) -> bool:
        return False

    def interrupt(self) -> None:
        with self._store.lock:
            self._interrupted = True
            self._sql.lost = StoreUnavailable("the connection was taken from a handler that hung")
            self._store.ended_holders |= {*self._owned.values(), *self._owned_rows.values()}

    async def close(self) -> None:
        self._sql.is_open = False
        for session in list(self._owned):
            self._release(session)
        for position, holder in self._owned_rows.items():
            row = self._subscription.rows.get(position)
            if row is not None and row.holder == holder:
                row.holder = None
        self._owned_rows.clear()

    # Parts.

    def _closed_sql(self) -> Effects:
        sql = Effects(self._store.effects)
        sql.is_open = False
        return sql

    def _check_worker(self) -> None:
        if self._worker not in self._store.workers_by_id:
            raise WorkerLost(f"worker {self._worker} was taken over: nothing was committed")

    def _next_holder(self) -> str:
        self._store.acceptances += 1
        return holder_name(self._worker, self._number, self._store.acceptances)

    def _visible(self) -> list[_Row]:
        """Return, in order, the messages that may run now and are not another lane's."""
        now, wall = self._store.clock.lease_ms(), self._store.clock.wall_ms()
        sessions = self._subscription.sessions
        visible = []
        for position in sorted(self._subscription.rows):
            row = self._subscription.rows[position]
            if row.due_ms is not None and row.due_ms > wall:
                continue
            if row.session is not None:
                session = sessions.get(row.session)
                if session is not None and session.retry_at > now:
                    continue
            if not self._is_of_another(row):
                visible.append(row)
        return visible

    def _is_of_another(self, row: _Row) -> bool:
        """Whether another lane holds the message's session. What a lane held whose connection was
        taken from it is free for its own worker; others wait for the takeover."""
        if row.session is None:
            holder, mine = row.holder, self._owned_rows.get(row.position)
        else:
            session = self._subscription.sessions.get(row.session)
            holder = None if session is None else session.holder
            mine = self._owned.get(row.session)
        return holder not in (None, mine) and not self._has_ended(holder)

    def _has_ended(self, holder: str | None) -> bool:
        return holder in self._store.ended_holders and holder.startswith(f"{self._worker}.")

    def _own(self, key: bytes) -> bool:
        session = self._subscription.session(key)
        if session.worker not in (None, self._worker):
            self._owned.pop(key, None)
            return False
        session.holder = self._owned[key] = self._next_holder()
        session.worker = self._worker
        return True

    def _release(self, key: bytes) -> None:
        holder = self._owned.pop(key, None)
        self._accepted.discard(key)
        session = self._subscription.sessions.get(key)
        if session is not None and holder is not None and session.holder == holder:
            session.holder = session.worker = None
            self._subscription.forget(key)
            self._store.version += 1

    def _row(self, delivery: Delivery) -> _Row:
        row = self._subscription.rows.get(delivery.position)
        if row is None:
            raise MessageGone(f"message {delivery.message_id!r} is not in the queue any more")
        return row

    def _validate(self, changes: Changes) -> None:
        self._check_worker()
        found = [
            session
            for session in changes.fence
            if session in self._owned
            and session in self._subscription.sessions
            and self._subscription.sessions[session].holder == self._owned[session]
        ]
        check_fence(changes.fence, found, f"{self._worker}.{self._number}")
        keys = set()
        for entry in changes.entries:
            row = self._subscription.inbox.get(entry.key)
            if (None if row is None else row.state) != entry.expected or entry.key in keys:
                raise DuplicateKey(f"key {entry.key!r} was recorded by another transaction")
            keys.add(entry.key)
        for delivery in changes.removed:
            if delivery.lock is None:
                self._check_row(delivery)
        for hold in changes.holds:
            if not hold.take:
                self._check_row(hold.delivery)
        for message in changes.sends:
            self._store.readers(message.target)

    def _check_row(self, delivery: Delivery) -> None:
        row = self._row(delivery)
        if row.session is None and row.holder != self._owned_rows.get(row.position):
            raise MessageGone(f"message {delivery.message_id!r} was taken by another lane")

    def _apply(self, changes: Changes) -> None:
        subscription = self._subscription
        for message, number in zip(changes.sends, self._numbers, strict=True):
            self._store.put(message, number)
        for entry in changes.entries:
            self._record(entry)
        for dead in changes.dead_letters:
            self._kill(dead)
        for hold in changes.holds:
            self._hold(hold)
        self._end_replays(changes)
        for delivery in changes.removed:
            if delivery.lock is None:
                del subscription.rows[delivery.position]
                self._owned_rows.pop(delivery.position, None)
        for session in changes.fence:
            subscription.session(session).suspicion = 0
        for session in changes.release:
            self._release(session)
        for (end, cause), number in changes.counts.items():
            subscription.counts[end.value, cause.value if cause else ""] += number
        subscription.reruns += changes.reruns
        self._store.version += 1

    def _record(self, entry: Entry) -> None:
        old = self._subscription.inbox.get(entry.key)
        fingerprint = entry.fingerprint
        if old is not None:
            known = matches(old.fingerprint, fingerprint)
            fingerprint = old.fingerprint if known else fingerprint + old.fingerprint
        self._subscription.inbox[entry.key] = _Inbox(
            int(entry.state),
            fingerprint,
            None if entry.end is None else entry.end.value,
            self._store.clock.wall_ms(),
            entry.out_of_order,
        )

    def _kill(self, dead: DeadLetter) -> None:
        letters, delivery = self._store.letters, dead.delivery
        if delivery.replay_of is not None:
            letters[delivery.replay_of] = replace(
                letters[delivery.replay_of],
                status="dead",
                reason=dead.reason.value,
                detail=dead.detail,
                attempts=delivery.attempts,
                errors=_errors_of(delivery),
            )
            return
        consumer = self._subscription.consumer or ""
        for number, letter in sorted(letters.items(), reverse=True):
            if letter.consumer == consumer and _is_of(letter, dead):
                letters[number] = _folded(letter, dead)
                return
        session = delivery.session
        number = len(letters) + 1
        letters[number] = DeadLetterRecord(
            number=number,
            consumer=consumer,
            queue=self._subscription.queue,
            status="dead",
            reason=dead.reason.value,
            detail=dead.detail,
            key=dead.key,
            fingerprint=dead.fingerprint,
            message_id=delivery.message_id,
            session=None if session is None or session.startswith(KEYLESS) else session,
            type=delivery.type,
            format=int(delivery.format),
            body=delivery.body,
            headers=dict(delivery.headers),
            position=delivery.position,
            attempts=delivery.attempts,
            errors=_errors_of(delivery),
            copies=1,
            sent_at_ms=delivery.sent_at_ms,
            died_at_ms=self._store.clock.wall_ms(),
        )

    def _hold(self, hold: Hold) -> None:
        delivery = hold.delivery
        if hold.take:
            self._take(delivery)
        row = self._subscription.rows[delivery.position]
        if row.session is None:
            row.session = KEYLESS + str(row.position).encode()
            row.holder = None
            self._owned_rows.pop(row.position, None)
        row.attempts, row.errors = hold.attempts, delivery.errors
        if hold.after_ms is not None:
            session = self._subscription.session(row.session)
            session.retry_at = self._store.clock.lease_ms() + hold.after_ms

    def _take(self, delivery: Delivery) -> None:
        message = Outgoing(
            self._subscription.queue,
            delivery.message_id,
            delivery.session,
            delivery.type,
            int(delivery.format),
            delivery.body,
        )
        message.headers = dict(delivery.headers)
        delivery.position = self._store.draw()
        self._subscription.rows[delivery.position] = _Row(
            delivery.position,
            delivery.session,
            message,
            delivery.sent_at_ms,
            None,
            delivery.expires_ms,
            taken=True,
        )

    def _end_replays(self, changes: Changes) -> None:
        died = {dead.delivery.replay_of for dead in changes.dead_letters}
        for delivery in changes.removed:
            number = delivery.replay_of
            if number is not None and number not in died:
                letter = self._store.letters[number]
                self._store.letters[number] = replace(letter, status="replayed")


@one_at_a_time
class MemoryWorkers:
    """Implements `procession.abc.Workers`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def register(self, worker: WorkerRecord) -> None:
        await self._store.point("register")
        until = self._store.clock.lease_ms() + worker.lease_ms
        self._store.workers_by_id[worker.id] = _Worker(worker, until)

    async def renew(self, worker: str) -> None:
        await self._store.point("renew")
        found = self._store.workers_by_id.get(worker)
        if found is None:
            raise WorkerLost(f"worker {worker} was taken over")
        found.until = self._store.clock.lease_ms() + found.record.lease_ms

    async def expired(self) -> list[str]:
        now = self._store.clock.lease_ms()
        return [name for name, found in self._store.workers_by_id.items() if found.until < now]

    async def known(self) -> list[str]:
        return list(self._store.workers_by_id)

    async def take_over(self, worker: str, *, dead: bool = False) -> list[str] | None:
        await self._store.point("take_over")
        found = self._store.workers_by_id.get(worker)
        if found is None or not (dead or found.until < self._store.clock.lease_ms()):
            return None
        self._end(worker, suspicion=1)
        return list(found.record.consumers)

    async def leave(self, worker: str) -> None:
        await self._store.point("leave")
        if worker in self._store.workers_by_id:
            self._end(worker, suspicion=0)

    async def close(self) -> None:
        """See `Workers.close`."""

    def _end(self, worker: str, *, suspicion: int) -> None:
        del self._store.workers_by_id[worker]
        for subscription in self._store.subscriptions:
            for key, session in list(subscription.sessions.items()):
                if session.worker == worker:
                    session.holder = session.worker = None
                    session.suspicion += suspicion
                    subscription.forget(key)
            for row in subscription.rows.values():
                if row.holder is not None and row.holder.startswith(f"{worker}."):
                    row.holder = None
                    if suspicion:
                        # A keyless suspect becomes a session of its own, which can be suspected.
                        row.session = KEYLESS + str(row.position).encode()
                        subscription.session(row.session).suspicion += suspicion
        self._store.version += 1


@one_at_a_time
class MemoryTablePublisher:
    """Implements `procession.abc.Publisher` for the table queues of the store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def publish(self, messages: Sequence[Outgoing]) -> list[Receipt]:
        await self._store.point("publish")
        for message in messages:
            self._store.readers(message.target)
        return [
            Receipt(message.message_id, self._store.put(message, self._store.draw()))
            for message in messages
        ]

    async def publish_marked(
        self, messages: Sequence[Outgoing], *, mark: str, number: int
    ) -> list[Receipt]:
        receipts = await self.publish(messages)
        self._store.marks[mark] = number
        return receipts

    async def marked(self, mark: str) -> int:
        return self._store.marks.get(mark, 0)

    async def close(self) -> None:
        """See `Publisher.close`."""


@one_at_a_time
class MemoryDeadLetters:
    """Implements `procession.abc.DeadLetters`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def find(self, wanted: DeadLetterFilter) -> list[DeadLetterRecord]:
        session = None if wanted.session is None else wanted.session.encode()
        found = [
            letter
            for letter in self._store.letters.values()
            if wanted.number in (None, letter.number)
            and wanted.consumer in (None, letter.consumer)
            and session in (None, letter.session)
            and wanted.reason in (None, letter.reason)
            and wanted.status in (None, letter.status)
        ]
        found.sort(key=lambda letter: (letter.consumer, letter.session or b"", letter.position))
        return found[: wanted.limit]

    async def edit(self, number: int, *, body: bytes, fingerprint: bytes, by: str) -> None:
        await self._store.point("edit")
        letter = self._waiting(number)
        self._store.letters[number] = replace(
            letter,
            body=body,
            fingerprint=fingerprint,
            history=(*letter.history, {"what": "edited", "by": by, **replaced_body(letter.body)}),
        )
        row = self._subscription(letter).inbox.get(letter.key or b"")
        if row is not None and letter.reason != Reason.CONFLICT:
            row.fingerprint = fingerprint + row.fingerprint

    async def replay(self, number: int, *, by: str, as_new: bytes | None = None) -> None:
        await self._store.point("replay")
        letter = self._waiting(number)
        if letter.reason == Reason.CONFLICT and as_new is None:
            raise OperatorError(f"dead letter {number} is a conflict: give it a new key")
        self._store.letters[number] = replace(
            letter, status="queued", history=(*letter.history, {"what": "replayed", "by": by})
        )
        message = Outgoing(
            letter.queue,
            letter.message_id if as_new is None else as_new,
            letter.session,
            letter.type,
            letter.format,
            letter.body,
        )
        message.headers = dict(letter.headers)
        position = self._store.draw()
        self._subscription(letter).rows[position] = _Row(
            position,
            letter.session,
            message,
            letter.sent_at_ms,
            None,
            None,
            replay_of=number,
        )
        self._store.version += 1

    async def discard(self, number: int, *, by: str, why: str) -> None:
        await self._store.point("discard")
        letter = self._waiting(number)
        entry = {"what": "discarded", "by": by, "why": why}
        self._store.letters[number] = replace(
            letter, status="discarded", history=(*letter.history, entry)
        )
        self._subscription(letter).counts[End.DISCARDED.value, ""] += 1

    async def close(self) -> None:
        """See `DeadLetters.close`."""

    def _subscription(self, letter: DeadLetterRecord) -> _Subscription:
        return self._store.subscription(letter.consumer)

    def _waiting(self, number: int) -> DeadLetterRecord:
        letter = self._store.letters.get(number)
        if letter is None:
            raise OperatorError(f"there is no dead letter {number}")
        if letter.status != "dead":
            raise OperatorError(f"dead letter {number} is {letter.status} already")
        return letter


def _errors_of(delivery: Delivery) -> tuple[str, ...]:
    return tuple(json.loads(delivery.errors)) if delivery.errors else ()


class MemoryUpkeep:
    """Implements `procession.abc.Upkeep`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._done = False

    async def prune(
        self,
        *,
        retention_ms: int,
        resend_horizon_ms: int,
        limit: int,  # noqa: ARG002
    ) -> int | None:
        """See `Upkeep.prune`: the whole walk is one step here, however many keys there are."""
        await self._store.point("prune")
        self._done = not self._done
        if not self._done:
            return None
        now, removed = self._store.clock.wall_ms(), 0
        for subscription in self._store.subscriptions:
            oldest = min((row.sent_ms for row in subscription.rows.values()), default=now)
            cutoff = min(now - retention_ms, oldest - resend_horizon_ms)
            open_keys = {
                letter.key
                for letter in self._store.letters.values()
                if letter.consumer == subscription.consumer and letter.status in ("dead", "queued")
            }
            old = [
                key
                for key, row in subscription.inbox.items()
                if row.state == InboxState.DONE
                and row.recorded_ms < cutoff
                and key not in open_keys
            ]
            for key in old:
                del subscription.inbox[key]
            removed += len(old)
        return removed

    async def prunable(self, *, retention_ms: int) -> int:
        cutoff = self._store.clock.wall_ms() - retention_ms
        return sum(
            row.state == InboxState.DONE and row.recorded_ms < cutoff
            for subscription in self._store.subscriptions
            for row in subscription.inbox.values()
        )

    async def purge_key(self, consumer: str, key: bytes) -> Purged:
        return self._purge(consumer, lambda found, _session: found == key, {key})

    async def purge_session(self, consumer: str, session: bytes) -> Purged:
        return self._purge(consumer, lambda _key, found: found == session, set())

    async def sessions(
        self, *, consumer: str | None = None, session: bytes | None = None, limit: int = 100
    ) -> list[SessionStatus]:
        now = self._store.clock.wall_ms()
        found = []
        for subscription in self._store.subscriptions:
            if subscription.consumer is None or consumer not in (None, subscription.consumer):
                continue
            lines: dict[bytes | None, list[_Row]] = {}
            for row in subscription.rows.values():
                lines.setdefault(row.session, []).append(row)
            found += [
                self._session(subscription, key, rows, now)
                for key, rows in lines.items()
                if session in (None, key)
            ]
        found.sort(key=lambda status: (-status.backlog, status.consumer, status.session or b""))
        return found[:limit]

    async def close(self) -> None:
        """See `Upkeep.close`."""

    def _session(
        self, subscription: _Subscription, key: bytes | None, rows: list[_Row], now: int
    ) -> SessionStatus:
        session = subscription.sessions.get(key or b"", _Session())
        retrying = session.retry_at > self._store.clock.lease_ms()
        return SessionStatus(
            consumer=subscription.consumer or "",
            session=None if key is None or key.startswith(KEYLESS) else key,
            backlog=len(rows),
            head_age_ms=now - min(row.sent_ms for row in rows),
            held=len(rows) if retrying else 0,
            holder=session.holder,
            retrying=retrying,
            dead_letters=sum(
                letter.session == key and letter.status == "dead"
                for letter in self._store.letters.values()
                if letter.consumer == subscription.consumer
            ),
        )

    def _purge(
        self,
        consumer: str,
        wanted: Callable[[bytes | None, bytes | None], bool],
        keys: set[bytes],
    ) -> Purged:
        try:
            subscription = self._store.subscription(consumer)
        except ConfigurationError as error:
            raise OperatorError(str(error)) from error
        rows = [
            row for row in subscription.rows.values() if wanted(row.message.message_id, row.session)
        ]
        letters = [
            letter
            for letter in self._store.letters.values()
            if letter.consumer == consumer and wanted(letter.key, letter.session)
        ]
        keys = keys | {row.message.message_id for row in rows}
        keys |= {letter.key for letter in letters if letter.key is not None}
        for row in rows:
            del subscription.rows[row.position]
        busy = {row.session for row in subscription.rows.values()}
        for session in {row.session for row in rows} - busy:
            if session in subscription.sessions:
                subscription.sessions[session].retry_at = 0  # what it waited for is gone
                subscription.forget(session)
        for letter in letters:
            del self._store.letters[letter.number]
        inbox = sum(subscription.inbox.pop(key, None) is not None for key in keys)
        return Purged(messages=len(rows), inbox=inbox, dead_letters=len(letters))


def _is_of(letter: DeadLetterRecord, dead: DeadLetter) -> bool:
    """Whether a death is of the letter's message."""
    if dead.key is None:
        return letter.key is None and letter.position == dead.delivery.position
    if dead.is_copy:
        return letter.key == dead.key and letter.reason != Reason.CONFLICT
    return (letter.key, letter.fingerprint) == (dead.key, dead.fingerprint)


def _folded(letter: DeadLetterRecord, dead: DeadLetter) -> DeadLetterRecord:
    """Count a death on its letter, and open it again if it was decided on."""
    counted = replace(letter, copies=letter.copies + 1)
    decided = letter.status in ("replayed", "discarded")
    if dead.is_copy or not decided or dead.reason == Reason.CONFLICT:
        return counted
    return replace(
        counted,
        status="dead",
        reason=dead.reason.value,
        detail=dead.detail,
        history=(*letter.history, {"what": "died again"}),
    )
