"""The stage on which the store's suite plays: queues, workers and lanes of the store under test,
and each step of a batch in one line. Decides nothing and checks nothing by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from procession.abc import (
    Changes,
    ConsumerStatus,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterRecord,
    DeadLetters,
    Entry,
    Fetched,
    Hold,
    Lane,
    MarkingPublisher,
    QueueDeclaration,
    Receipt,
    Store,
    Topology,
    Upkeep,
    WorkerRecord,
    Workers,
)
from procession.errors import ProcessionError, Reason
from procession.message import BodyFormat, Delivery, Outgoing
from procession.outcome import End, InboxState
from procession.runtime.drive import drive

Result = TypeVar("Result")

QUEUE, CONSUMER = "orders", "ship"
OTHER_QUEUE, OTHER_CONSUMER = "receipts", "archive"
TOPIC, SUBSCRIBERS = "events", ("audit", "mail")
SILENT_TOPIC = "silence"
WINDOW_QUEUE = "news"
LEASE_MS = 600_000
WORKER_ROUNDS_MAX = 1_000
SWITCH_S = 1e-5
TABLE = "conformance_effects"


class StoreHooks:
    """What an adapter's test says of its store. `place` is needed, or in its stead the fixture
    `make_store`; where the store has SQL, `outside` and `own_table` too; the rest has a default
    that works or says what is left out.

    Attributes:
        moment_ms: how long a lease, a retry or a due time lasts in these tests. With a real clock
            it must be far longer than a few statements; with a test clock any number will do.
        own_table: a table of the store, which no handler may write.
        misuses: statements that a handler may not run.
        drivers_insert: an INSERT of a name into the tests' table as the store's driver takes it.
        ender: an INSERT of the name `taken`, a second time, that ends the whole transaction with
            its error (as SQLite's OR ROLLBACK does); "" where there is no such statement.
        slow_statement: a statement that runs for many seconds; "" where none is to be tried.
    """

    moment_ms = 300
    own_table = ""
    misuses: tuple[str, ...] = (
        "COMMIT",
        "ROLLBACK",
        "SAVEPOINT mine",
        f"DROP TABLE {TABLE}",
        "CREATE TABLE conformance_more (number INTEGER)",
    )
    drivers_insert = f"INSERT INTO {TABLE} (name) VALUES (:name)"  # noqa: S608
    ender = ""
    slow_statement = ""

    def place(self, folder: Path) -> Callable[[], Store]:
        """Override: return a function that makes a store, not opened yet. All that it makes are of
        one place, which is empty before the first is opened.

        Args:
            folder: an empty one, for whoever needs files.
        """
        raise NotImplementedError(f"a conformance test gives the hook place ({folder})")

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Callable[[], Store]:
        """Return `place`. Override it where the place needs other fixtures, or an end."""
        return self.place(tmp_path)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run one call of a protocol's method. A store that suspends gives its loop here."""
        return drive(coroutine)

    def pass_time(self, duration_ms: int) -> None:
        """Let this long pass on the store's clock. A test clock is moved instead."""
        time.sleep(duration_ms / 1000)

    def outside(self, store: Store, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement on a connection of its own, commit, and return its rows."""
        raise NotImplementedError("a store with features.sql gives the hook outside")

    def effect(self, lane: Lane, name: str) -> None:
        """Write a business row in the lane's open transaction, as a handler would."""
        lane.mark()
        lane.sql.execute(f"INSERT INTO {TABLE} (name) VALUES (:name)", {"name": name})  # noqa: S608

    def effects(self, store: Store) -> list[str]:
        """Return the names of the business rows that are committed, sorted."""
        return [row[0] for row in self.outside(store, f"SELECT name FROM {TABLE} ORDER BY name")]  # noqa: S608

    def make_schema_newer(self, store: Store) -> bool:
        """Make the schema look as if a later release had migrated it; False: there is no way."""
        del store
        return False


class Stage:
    """One store with its queues, and whoever works on it.

    Attributes:
        store: open, with the queues of these tests declared.
    """

    def __init__(self, make_store: Callable[[], Store], hooks: StoreHooks) -> None:
        self._make_store = make_store
        self._hooks = hooks
        self._closing: list[Any] = []
        self._lanes = 0
        self.run = hooks.run
        self.pass_time = hooks.pass_time
        self.store = self.open()
        self.features = self.store.features
        if self.features.sql:
            hooks.outside(self.store, f"CREATE TABLE {TABLE} (name VARCHAR(80) PRIMARY KEY)")
        self.run(self.store.declare(topology(window_ms=hooks.moment_ms)))
        self.publisher: MarkingPublisher = self._kept(self.run(self.store.publisher()))
        self.workers: Workers = self._kept(self.run(self.store.workers()))
        self.dead_letters: DeadLetters = self._kept(self.run(self.store.dead_letters()))

    def open(self) -> Store:
        """Open another store of the same place."""
        store = self._make_store()
        self.run(store.open(migrate="auto"))
        self._closing.append(store)
        return store

    def close(self) -> None:
        """Close whatever was made here, the stores last."""
        for thing in sorted(self._closing, key=lambda thing: hasattr(thing, "declare")):
            # A test may have taken its connection or its worker from it.
            with contextlib.suppress(ProcessionError):
                self.run(thing.close())

    def _kept(self, thing: Result) -> Result:
        self._closing.append(thing)
        return thing

    # Who works.

    def worker(self, *, lease_ms: int = LEASE_MS) -> str:
        """Register a new worker; return its id."""
        name = f"worker-{uuid.uuid4()}"
        record = WorkerRecord(
            id=name,
            lease_ms=lease_ms,
            host="conformance",
            process=1,
            consumers=(CONSUMER, OTHER_CONSUMER, *SUBSCRIBERS),
        )
        self.run(self.workers.register(record))
        return name

    def lane(
        self, worker: str | None = None, *, consumer: str = CONSUMER, number: int | None = None
    ) -> Lane:
        """Return a lane, of a worker of its own where none is named."""
        self._lanes += 1
        lane = self.run(
            self.store.lane(
                consumer,
                worker=worker or self.worker(),
                number=self._lanes if number is None else number,
            )
        )
        return self._kept(lane)

    def upkeep(self) -> Upkeep:
        """Return somebody who prunes and purges."""
        return self._kept(self.run(self.store.upkeep()))

    def expire(self, worker: str) -> None:
        """Let a worker of a lease of one moment run out of it, and end it."""
        self.pass_time(self._hooks.moment_ms + 20)
        assert self.run(self.workers.take_over(worker)) is not None

    def vanish(self, lane: Lane, worker: str) -> None:
        """End a worker as the death of its process does: nothing of it can commit any more, and
        somebody who saw it end takes over."""
        lane.interrupt()
        assert self.run(self.workers.take_over(worker, dead=True)) is not None

    # Sending.

    def send(
        self,
        *names: str,
        session: str | None = None,
        target: str = QUEUE,
        after_ms: int | None = None,
    ) -> Sequence[Receipt]:
        """Send messages, a transaction for all of them."""
        messages = [outgoing(name, session, target=target) for name in names]
        for message in messages:
            if after_ms is not None:
                message.is_plain = False
                message.after_ms = after_ms
        return self.run(self.publisher.publish(messages))

    # A batch, step by step.

    def fetch(self, lane: Lane, limit: int = 100) -> Fetched:
        """Accept, begin and fetch, as the consume flow does. The transaction stays open."""
        self.run(lane.accept(limit))
        self.run(lane.begin())
        return self.run(lane.fetch(limit))

    def take(self, lane: Lane, limit: int = 100) -> list[Delivery]:
        """As `fetch`, and return the deliveries."""
        return list(self.fetch(lane, limit).deliveries)

    def look(self, lane: Lane, limit: int = 100) -> list[str]:
        """Return the ids of what the lane may run now, and leave all as it is."""
        fetched = self.fetch(lane, limit)
        self.leave(lane, fetched)
        return ids(fetched.deliveries)

    def seen(self, consumer: str = CONSUMER) -> dict[str, Delivery]:
        """Return what may run now, by id, as a lane saw it that is closed again."""
        lane = self.lane(consumer=consumer)
        taken = self.take(lane)
        self.run(lane.rollback())
        self.run(lane.close())
        return {delivery.message_id.decode(): delivery for delivery in taken}

    def leave(self, lane: Lane, fetched: Fetched) -> None:
        """End a transaction in which nothing was done."""
        self.run(lane.commit() if fetched.changed else lane.rollback())

    def changes(self, deliveries: Collection[Delivery]) -> Changes:
        """Return what a batch writes in which all of these are processed."""
        changes = Changes()
        for delivery in deliveries:
            entry = Entry(delivery.message_id, print_of(delivery.body))
            if delivery.state is not None:
                entry.expected = InboxState(delivery.state)
            entry.out_of_order = delivery.replay_of is not None
            changes.entries.append(entry)
            changes.removed.append(delivery)
        if deliveries:
            changes.counts[End.PROCESSED, None] += len(deliveries)
        return self.fenced(changes, deliveries)

    def fenced(self, changes: Changes, deliveries: Iterable[Delivery]) -> Changes:
        """Make a batch conditional on its sessions, and give them up with its commit, where a
        transaction does not hold them by itself."""
        if self.features.concurrent_batches:
            sessions = {delivery.session for delivery in deliveries if delivery.session}
            changes.fence |= sessions
            changes.release |= sessions
        return changes

    def commit(self, lane: Lane, changes: Changes) -> None:
        """Flush and commit."""
        self.run(lane.flush(changes))
        self.run(lane.commit())

    def finish(self, lane: Lane, deliveries: Collection[Delivery]) -> None:
        """Process all of these: marker, removal and counts, committed."""
        self.commit(lane, self.changes(deliveries))

    def hold(self, lane: Lane, delivery: Delivery, *, after_ms: int | None = None) -> None:
        """Let a delivery of the open transaction wait for a moment, with its session."""
        changes = self.fenced(Changes(), [delivery])
        wait_ms = self._hooks.moment_ms if after_ms is None else after_ms
        changes.holds.append(Hold(delivery, after_ms=wait_ms, attempts=delivery.attempts))
        self.commit(lane, changes)

    def kill(
        self,
        lane: Lane,
        delivery: Delivery,
        *,
        reason: Reason = Reason.FAILED,
        fingerprint: bytes | None = None,
    ) -> None:
        """Make a delivery of the open transaction a dead letter, with its inbox row."""
        changes = self.fenced(Changes(), [delivery])
        printed = print_of(delivery.body) if fingerprint is None else fingerprint
        changes.dead_letters.append(
            DeadLetter(delivery, delivery.message_id, printed, reason, "as the test wants it")
        )
        if delivery.state is None:
            changes.entries.append(
                Entry(delivery.message_id, printed, InboxState.DEAD, End.DEAD_LETTERED)
            )
        changes.removed.append(delivery)
        changes.counts[End.DEAD_LETTERED, None] += 1
        self.commit(lane, changes)

    def begin_alone(self, lane: Lane, delivery: Delivery) -> Delivery:
        """Begin a lone run: count the attempt, open the transaction, read the message again."""
        self.run(lane.begin_attempt(delivery))
        self.run(lane.begin())
        fresh = self.run(lane.fetch_one(delivery.position))
        assert fresh is not None
        return fresh

    def alone(self, delivery: Delivery, changes: Changes) -> Changes:
        """Fence a lone run's batch, and give its session up with it."""
        assert delivery.session is not None
        changes.fence.add(delivery.session)
        changes.release.add(delivery.session)
        return changes

    def work(self, lane: Lane, limit: int = 100) -> list[str]:
        """Process, as the consume flow does, until the lane has nothing to do and `changed` says
        that there is nothing; return the ids in the order of their commits."""
        ended: list[str] = []
        for _ in range(WORKER_ROUNDS_MAX):
            fetched = self.fetch(lane, limit)
            if not fetched.deliveries:
                self.leave(lane, fetched)
                if not self.run(lane.changed()):
                    return ended
            elif fetched.alone or fetched.deliveries[0].attempts:
                self.run(lane.rollback())
                fresh = self.begin_alone(lane, fetched.deliveries[0])
                self.commit(lane, self.alone(fresh, self.changes([fresh])))
                ended += ids([fresh])
            else:
                self.finish(lane, fetched.deliveries)
                ended += ids(fetched.deliveries)
        raise AssertionError(f"the lane had not come to rest after {WORKER_ROUNDS_MAX} batches")

    def rest(self, lane: Lane) -> None:
        """Bring a lane to rest: it found nothing, and heard that there is nothing."""
        assert self.work(lane) == []

    # What is there.

    def effect(self, lane: Lane, name: str) -> None:
        """Write a business row in the lane's transaction."""
        self._hooks.effect(lane, name)

    def effects(self) -> list[str]:
        """Return the committed business rows."""
        return self._hooks.effects(self.store)

    def state(self, name: str | bytes, consumer: str = CONSUMER) -> InboxState | None:
        """Return what the inbox says of a key."""
        key = name.encode() if isinstance(name, str) else name
        row = self.run(self.store.inbox(consumer, key))
        return None if row is None else InboxState(row.state)

    def status(self, consumer: str = CONSUMER) -> ConsumerStatus:
        """Return the numbers of a consumer."""
        rows = self.run(self.store.status())
        return next(row for row in rows if row.consumer == consumer)

    def letters(self, *, status: str | None = "dead") -> list[DeadLetterRecord]:
        """Return the dead letters."""
        return self.run(self.dead_letters.find(DeadLetterFilter(status=status)))

    def picture(self, *keys: str) -> object:
        """Return all that a batch may change, to be compared with a later picture: business rows,
        queues, counts, dead letters, and the inbox's rows of these keys."""
        numbers = [
            dataclasses.replace(row, owned_sessions=0, head_age_ms=None)
            for row in self.run(self.store.status())
        ]
        rows = [self.run(self.store.inbox(CONSUMER, key.encode())) for key in keys]
        return self.effects(), numbers, self.letters(status=None), rows


def topology(*, window_ms: int) -> Topology:
    """Return the queues and consumers of these tests."""
    return Topology(
        queues=(
            QueueDeclaration(name=QUEUE, kind="queue"),
            QueueDeclaration(name=OTHER_QUEUE, kind="queue"),
            QueueDeclaration(name=TOPIC, kind="topic"),
            QueueDeclaration(name=SILENT_TOPIC, kind="topic"),
            QueueDeclaration(name=WINDOW_QUEUE, kind="queue", duplicate_window_ms=window_ms),
        ),
        consumers=(
            (QUEUE, CONSUMER),
            (OTHER_QUEUE, OTHER_CONSUMER),
            *((TOPIC, subscriber) for subscriber in SUBSCRIBERS),
        ),
    )


def outgoing(name: str, session: str | None = None, *, target: str = QUEUE) -> Outgoing:
    """Return a message whose body says its id."""
    return Outgoing(
        target,
        name.encode(),
        None if session is None else session.encode(),
        "conformance",
        int(BodyFormat.RAW),
        body_of(name),
    )


def ids(deliveries: Iterable[Delivery]) -> list[str]:
    """Return the message ids, as text."""
    return [delivery.message_id.decode() for delivery in deliveries]


def body_of(name: str) -> bytes:
    """Return the body of a message of these tests: any bytes at all."""
    return b"\x00\xff" + name.encode()


def print_of(body: bytes) -> bytes:
    """Return a fingerprint, 32 bytes."""
    return hashlib.sha256(body).digest()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls at the same moment, each on a thread that the interpreter interrupts all the
    time; return what each returned or raised."""
    outcomes: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def call(index: int) -> None:
        start.wait()
        try:
            outcomes[index] = calls[index]()
        except Exception as error:  # noqa: BLE001  it is the outcome
            outcomes[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    patience_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(patience_s)
    return outcomes
