"""What the stores on servers share: declarations, status, and what is made from a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from procession.abc import (
    ConsumerStatus,
    DeadLetters,
    Features,
    InboxRow,
    Lane,
    MarkingPublisher,
    Topology,
    Upkeep,
    Workers,
)
from procession.config import Settings
from procession.errors import ConfigurationError
from procession.stores.sql.dead_letters import SqlDeadLetters
from procession.stores.sql.files import check_prefix
from procession.stores.sql.sends import Run
from procession.stores.sql.transactions import Transactions
from procession.stores.sql.workers import SqlWorkers

# What stands for the queue of a consumer that the library made: it reads none.
NO_QUEUE = ""
IDLE_SHARE = 0.9


class SqlStore(ABC):
    """Implements most of `procession.abc.Store` on a server.

    Args:
        shown: the database, for errors; without secrets.
        settings: its limits.
        prefix: of the tables' names.
    """

    features = Features(
        blocking=True, savepoints=False, concurrent_batches=True, durable=True, sql=True
    )

    def __init__(self, shown: str, *, settings: Settings | None, prefix: str) -> None:
        self._settings = settings or Settings()
        self._prefix = check_prefix(prefix)
        self._shown = shown
        self._main: Transactions | None = None
        self._subscriptions: dict[str, int] = {}

    # What each database does its own way.

    @abstractmethod
    def _transactions(self) -> Transactions:
        """Return a connection for short transactions."""

    @abstractmethod
    def _version(self, transactions: Transactions) -> int:
        """Return the schema's version, 0 where there is none."""

    @abstractmethod
    def _migrate(self, transactions: Transactions) -> None:
        """Bring the schema up to date; others may be doing the same."""

    @property
    @abstractmethod
    def _newest(self) -> int:
        """The schema's version that this code knows."""

    @abstractmethod
    def _lane(self, subscription: int, worker: str, number: int) -> Lane: ...

    @abstractmethod
    async def publisher(self) -> MarkingPublisher:
        """See `Store.publisher`."""

    @abstractmethod
    async def upkeep(self) -> Upkeep:
        """See `Store.upkeep`."""

    # What they share.

    async def open(self, *, migrate: Literal["auto", "check"] = "auto") -> None:
        """See `Store.open`."""
        limit_ms, lease_ms = self._settings.handler_limit_ms, self._settings.lease_ms
        if limit_ms >= lease_ms * IDLE_SHARE:
            raise ConfigurationError(
                f"handler_limit_ms ({limit_ms}) must be below {IDLE_SHARE:.0%} of lease_ms "
                f"({lease_ms}) on a database server: past that share the server ends a transaction "
                "without statements, so that a stopped process lets go of its rows before anyone "
                "takes over"
            )
        main = self._transactions()
        try:
            self._bring_up_to_date(main, migrate)
        except BaseException:
            main.close()
            raise
        self._main = main

    async def declare(self, topology: Topology) -> None:
        """See `Store.declare`."""
        with self._opened().write("declaring queues and consumers") as run:
            for queue in topology.queues:
                self._declare_queue(run, queue.name, queue.kind, queue.duplicate_window_ms)
            for queue_name, consumer in topology.consumers:
                self._subscribe(run, queue_name, consumer)
        self._subscriptions = {}

    async def lane(self, consumer: str, *, worker: str, number: int) -> Lane:
        """See `Store.lane`."""
        return self._lane(self._subscription(consumer), worker, number)

    async def workers(self) -> Workers:
        """See `Store.workers`."""
        return SqlWorkers(
            self._transactions(),
            batch_max=self._settings.batch_max,
            suspect_batch=self._settings.suspect_batch,
        )

    async def dead_letters(self) -> DeadLetters:
        """See `Store.dead_letters`."""
        return SqlDeadLetters(self._transactions())

    async def inbox(self, consumer: str, key: bytes) -> InboxRow | None:
        """See `Store.inbox`."""
        with self._opened().read("reading the inbox") as run:
            rows = run("inbox_row", consumer=consumer, key=key).rows()
        if not rows:
            return None
        state, fingerprint, end, recorded_ms, out_of_order = rows[0]
        return InboxRow(state, fingerprint, end, recorded_ms, bool(out_of_order))

    async def skip_waits(self) -> int:
        """See `Store.skip_waits`."""
        with self._opened().write("making everything due") as run:
            return (run("skip_retries").count or 0) + (run("skip_due").count or 0)

    async def status(self) -> list[ConsumerStatus]:
        """See `Store.status`."""
        with self._opened().read("reading the status") as run:
            return [
                self._status(run, row)
                for row in run("subscriptions").rows()
                if row[2] == "queue" or row[3] is not None
            ]

    async def close(self) -> None:
        """See `Store.close`."""
        if self._main is not None:
            self._main.close()
            self._main = None

    def _opened(self) -> Transactions:
        if self._main is None:
            raise ConfigurationError("the store is not open: call open() first")
        return self._main

    def _bring_up_to_date(self, main: Transactions, migrate: Literal["auto", "check"]) -> None:
        version = self._known(self._version(main))
        if version == self._newest:
            return
        if migrate == "check":
            raise ConfigurationError(
                f"database {self._shown} has schema version {version}, this code needs "
                f"{self._newest}: run `procession migrate`, or set migrate='auto'"
            )
        self._migrate(main)

    def _known(self, version: int) -> int:
        if version > self._newest:
            raise ConfigurationError(
                f"database {self._shown} has schema version {version}, this code knows "
                f"{self._newest}: it was migrated by a newer release; upgrade this one"
            )
        return version

    def _declare_queue(self, run: Run, name: str, kind: str, window_ms: int) -> None:
        rows = run("readers", queue=name).rows()
        if rows and rows[0][1] != kind:
            raise ConfigurationError(
                f"{name!r} is a {rows[0][1]} in the database and a {kind} in the code: one of the "
                "two must be renamed"
            )
        if not rows:
            run("declare", queue=name, kind=kind, window=window_ms)
        else:
            run("set_window", window=window_ms, queue=name)

    def _subscribe(self, run: Run, queue: str, consumer: str) -> None:
        rows = run("readers", queue=queue).rows()
        readers = run("reader_of", consumer=consumer).rows()
        taken = readers[0] if readers else None
        of_library = taken if taken is not None and taken[1] == NO_QUEUE else None
        if taken is not None and taken[1] not in (queue, NO_QUEUE):
            raise ConfigurationError(
                f"consumer {consumer!r} reads {taken[1]!r} in this database: its name is part of "
                f"its dedup keys, so give the consumer of {queue!r} another one"
            )
        if rows[0][1] == "queue":
            owner = rows[0][2]
            if owner not in (None, consumer):
                raise ConfigurationError(
                    f"queue {queue!r} belongs to consumer {owner!r} in this database, the code "
                    f"calls it {consumer!r}: a consumer's name is part of its dedup keys, so a new "
                    f"name would run old messages again. Keep name={owner!r}"
                )
            if of_library is not None:
                self._give_queue(run, of_library[0], rows[0][0])
            elif owner is None:
                run("name_reader", consumer=consumer, id=rows[0][0])
        elif of_library is not None:
            run("give_queue", queue=queue, kind="topic", window=0, id=of_library[0])
        elif taken is None:
            run("subscribe", queue=queue, consumer=consumer)

    def _give_queue(self, run: Run, consumer: int, queue: int) -> None:
        """Make a consumer of the library the reader of a queue that has none. It keeps its number,
        under which its keys are recorded; what waits in the queue moves to it.
        """
        ((name, kind, window),) = run("reader", id=queue).rows()
        run("move_messages", to_id=consumer, from_id=queue)
        run("move_tokens", to_id=consumer, from_id=queue)
        run("drop_reader", id=queue)
        run("give_queue", queue=name, kind=kind, window=window, id=consumer)

    def _subscription(self, consumer: str) -> int:
        found = self._subscriptions.get(consumer)
        if found is None:
            with self._opened().read("looking for a consumer") as run:
                rows = run("reader_of", consumer=consumer).rows()
            if not rows:
                raise ConfigurationError(f"consumer {consumer!r} is not declared in this database")
            found = self._subscriptions[consumer] = int(rows[0][0])
        return found

    def _status(self, run: Run, row: tuple[int, str, str, str]) -> ConsumerStatus:
        subscription, queue, _, consumer = row
        named = {"subscription": subscription}
        ((waiting, scheduled, held, sent_ms, now),) = run("numbers", **named).rows()
        ((retrying, owned),) = run("session_numbers", **named).rows()
        counts = {(end, cause): int(number) for end, cause, number in run("counts", **named).rows()}
        reruns = counts.pop(("rerun", ""), 0)
        return ConsumerStatus(
            queue=queue,
            consumer=consumer,
            waiting=waiting,
            scheduled=scheduled,
            held=held,
            retrying_sessions=retrying,
            owned_sessions=owned,
            dead_letters=run("dead_number", **named).rows()[0][0],
            counts=counts,
            reruns=reruns,
            head_age_ms=None if sent_ms is None else max(0, now - sent_ms),
        )
