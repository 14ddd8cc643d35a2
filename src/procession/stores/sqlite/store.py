"""The store itself: opens the file, keeps its schema, and makes lanes and the rest."""

from __future__ import annotations

import sqlite3
from pathlib import Path
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
from procession.stores.sqlite.connection import Place, connect, lease_now, wall_now
from procession.stores.sqlite.dead_letters import SqliteDeadLetters
from procession.stores.sqlite.lane import SqliteLane
from procession.stores.sqlite.publisher import SqlitePublisher
from procession.stores.sqlite.schema import bring_up_to_date, schema_version
from procession.stores.sqlite.sends import zone
from procession.stores.sqlite.statements import (
    DEFAULT_PREFIX,
    SCHEMA_VERSION,
    check_prefix,
    migrations,
)
from procession.stores.sqlite.transactions import Transactions
from procession.stores.sqlite.upkeep import SqliteUpkeep
from procession.stores.sqlite.workers import SqliteWorkers

# What stands for the queue of a consumer that the library made: it reads none.
NO_QUEUE = ""
FEATURES = Features(
    blocking=True, savepoints=True, concurrent_batches=False, durable=True, sql=True
)


class SqliteStore:
    """Implements `procession.abc.Store` on one file.

    Args:
        url: `sqlite:///file.db`; see `Place.of_url`.
        settings: its limits.
        prefix: of the tables' names.
    """

    features = FEATURES

    def __init__(
        self, url: str, *, settings: Settings | None = None, prefix: str = DEFAULT_PREFIX
    ) -> None:
        self._settings = settings or Settings()
        self._named = Place.of_url(url, busy_s=self._settings.busy_ms / 1000)
        self._place = self._named
        self._prefix = check_prefix(prefix)
        self._main: Transactions | None = None
        self._subscriptions: dict[str, int] = {}

    @property
    def path(self) -> Path:
        """The database's file."""
        return self._place.path

    async def open(self, *, migrate: Literal["auto", "check"] = "auto") -> None:
        """See `Store.open`."""
        main = Transactions(self._named, self._prefix)
        try:
            self._bring_up_to_date(main, migrate)
            self._place = self._named.settled()
        except BaseException:
            await main.close()
            raise
        self._main = main

    async def declare(self, topology: Topology) -> None:
        """See `Store.declare`."""
        main = self._opened()
        with main.write("declaring queues and consumers") as connection:
            for queue in topology.queues:
                self._declare_queue(connection, queue.name, queue.kind, queue.duplicate_window_ms)
            for queue_name, consumer in topology.consumers:
                self._subscribe(connection, queue_name, consumer)
        self._subscriptions = {}

    async def lane(self, consumer: str, *, worker: str, number: int) -> Lane:
        """See `Store.lane`."""
        return SqliteLane(
            self._place,
            self._prefix,
            subscription=self._subscription(consumer),
            worker=worker,
            number=number,
        )

    async def workers(self) -> Workers:
        """See `Store.workers`."""
        return SqliteWorkers(
            self._place,
            self._prefix,
            batch_max=self._settings.batch_max,
            suspect_batch=self._settings.suspect_batch,
        )

    async def publisher(self) -> MarkingPublisher:
        """See `Store.publisher`."""
        return SqlitePublisher(self._place, self._prefix)

    async def dead_letters(self) -> DeadLetters:
        """See `Store.dead_letters`."""
        return SqliteDeadLetters(self._place, self._prefix)

    async def upkeep(self) -> Upkeep:
        """See `Store.upkeep`."""
        return SqliteUpkeep(self._place, self._prefix)

    async def inbox(self, consumer: str, key: bytes) -> InboxRow | None:
        """See `Store.inbox`."""
        main = self._opened()
        with main.read("reading the inbox") as connection:
            row = connection.execute(main.sql["inbox_row"], (consumer, key)).fetchone()
        if row is None:
            return None
        return InboxRow(row[0], row[1], row[2], row[3], bool(row[4]))

    async def skip_waits(self) -> int:
        main = self._opened()
        with main.write("making everything due") as connection:
            retries = connection.execute(main.sql["skip_retries"], (lease_now(),)).rowcount
            scheduled = connection.execute(main.sql["skip_due"], (wall_now(),)).rowcount
        return retries + scheduled

    async def status(self) -> list[ConsumerStatus]:
        """See `Store.status`."""
        main = self._opened()
        with main.read("reading the status") as connection:
            rows = connection.execute(main.sql["subscriptions"]).fetchall()
            return [
                self._status(connection, main.sql, row)
                for row in rows
                if row[2] == "queue" or row[3] is not None
            ]

    async def close(self) -> None:
        """See `Store.close`."""
        if self._main is not None:
            await self._main.close()
            self._main = None

    def _opened(self) -> Transactions:
        if self._main is None:
            raise ConfigurationError("the store is not open: call open() first")
        self._place.check()
        return self._main

    def _bring_up_to_date(self, main: Transactions, migrate: Literal["auto", "check"]) -> None:
        version = schema_version(main.connection, self._prefix, self._place.path)
        if version == SCHEMA_VERSION:
            return
        if migrate == "check":
            raise ConfigurationError(
                f"database {self._place.path} has schema version {version}, this code needs "
                f"{SCHEMA_VERSION}: run `procession migrate`, or set migrate='auto'"
            )
        with main.write("migrating") as connection:
            bring_up_to_date(connection, self._prefix, self._place.path)

    def missing_migrations(self) -> tuple[int, list[tuple[int, str, str]]]:
        """Return the schema's version, 0 where there is none, and what it lacks as (number, name,
        SQL). Changes nothing, and makes no file.

        Raises:
            ConfigurationError: the schema is newer than this code, or the file is no database.
            StoreUnavailable: the file cannot be opened.
        """
        version = 0
        if self._named.path.exists():
            connection = connect(self._named)
            try:
                version = schema_version(connection, self._prefix, self._place.path)
            finally:
                connection.close()
        return version, [found for found in migrations(self._prefix) if found[0] > version]

    def _declare_queue(
        self, connection: sqlite3.Connection, name: str, kind: str, window_ms: int
    ) -> None:
        rows = connection.execute(self._opened().sql["readers"], (name,)).fetchall()
        if rows and rows[0][1] != kind:
            raise ConfigurationError(
                f"{name!r} is a {rows[0][1]} in the database and a {kind} in the code: one of the "
                "two must be renamed"
            )
        if not rows:
            connection.execute(self._opened().sql["declare"], (name, kind, window_ms))
        else:
            connection.execute(self._opened().sql["set_window"], (window_ms, name))

    def _subscribe(self, connection: sqlite3.Connection, queue: str, consumer: str) -> None:
        sql = self._opened().sql
        rows = connection.execute(sql["readers"], (queue,)).fetchall()
        taken = connection.execute(sql["reader_of"], (consumer,)).fetchone()
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
                self._give_queue(connection, of_library[0], rows[0][0])
            else:
                connection.execute(sql["name_reader"], (consumer, rows[0][0]))
        elif of_library is not None:
            connection.execute(sql["give_queue"], (queue, "topic", 0, of_library[0]))
        elif taken is None:
            connection.execute(sql["subscribe"], (queue, consumer))

    def _give_queue(self, connection: sqlite3.Connection, consumer: int, queue: int) -> None:
        """Make a consumer of the library the reader of a queue that has none. It keeps its number,
        under which its keys are recorded; what waits in the queue moves to it.
        """
        sql = self._opened().sql
        low, high = zone(queue)
        span = {"low": low, "high": high, "by": zone(consumer)[0] - low}
        connection.execute(sql["move_messages"], span)
        row = connection.execute(sql["drop_reader"], (queue,)).fetchall()[0]
        connection.execute(sql["give_queue"], (*row, consumer))

    def _subscription(self, consumer: str) -> int:
        found = self._subscriptions.get(consumer)
        if found is None:
            main = self._opened()
            row = main.connection.execute(main.sql["reader_of"], (consumer,)).fetchone()
            if row is None:
                raise ConfigurationError(f"consumer {consumer!r} is not declared in this database")
            found = self._subscriptions[consumer] = int(row[0])
        return found

    def _status(
        self, connection: sqlite3.Connection, sql: dict[str, str], row: tuple[int, str, str, str]
    ) -> ConsumerStatus:
        subscription, queue, _, consumer = row
        low, high = zone(subscription)
        span = {"low": low, "high": high}
        held, retrying, owned = connection.execute(sql["held_numbers"], (subscription,)).fetchone()
        counts = {
            (end, cause): number
            for end, cause, number in connection.execute(sql["counts"], (subscription,))
        }
        reruns = counts.pop(("rerun", ""), 0)
        (sent_ms,) = connection.execute(sql["head"], span).fetchone()
        return ConsumerStatus(
            queue=queue,
            consumer=consumer,
            waiting=connection.execute(sql["waiting"], span).fetchone()[0],
            scheduled=connection.execute(sql["scheduled"], span).fetchone()[0],
            held=held,
            retrying_sessions=retrying,
            owned_sessions=owned,
            dead_letters=connection.execute(sql["dead_number"], (subscription,)).fetchone()[0],
            counts=counts,
            reruns=reruns,
            head_age_ms=None if sent_ms is None else max(0, wall_now() - sent_ms),
        )
