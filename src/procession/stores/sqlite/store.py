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
    Publisher,
    Topology,
    Workers,
)
from procession.config import Settings
from procession.errors import ConfigurationError
from procession.stores.sqlite.connection import Place
from procession.stores.sqlite.dead_letters import SqliteDeadLetters
from procession.stores.sqlite.lane import SqliteLane
from procession.stores.sqlite.publisher import SqlitePublisher
from procession.stores.sqlite.sends import zone
from procession.stores.sqlite.statements import (
    DEFAULT_PREFIX,
    SCHEMA_VERSION,
    check_prefix,
    migrations,
)
from procession.stores.sqlite.transactions import Transactions
from procession.stores.sqlite.workers import SqliteWorkers

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
        self._place = Place.of_url(url, busy_s=self._settings.busy_ms / 1000)
        self._prefix = check_prefix(prefix)
        self._main: Transactions | None = None
        self._subscriptions: dict[str, int] = {}

    @property
    def path(self) -> Path:
        """The database's file."""
        return self._place.path

    async def open(self, *, migrate: Literal["auto", "check"] = "auto") -> None:
        """See `Store.open`."""
        main = Transactions(self._place, self._prefix)
        try:
            self._bring_up_to_date(main, migrate)
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

    async def publisher(self) -> Publisher:
        """See `Store.publisher`."""
        return SqlitePublisher(self._place, self._prefix)

    async def dead_letters(self) -> DeadLetters:
        """See `Store.dead_letters`."""
        return SqliteDeadLetters(self._place, self._prefix)

    async def inbox(self, consumer: str, key: bytes) -> InboxRow | None:
        """See `Store.inbox`."""
        main = self._opened()
        with main.read("reading the inbox") as connection:
            row = connection.execute(main.sql["inbox_row"], (consumer, key)).fetchone()
        if row is None:
            return None
        return InboxRow(row[0], row[1], row[2], row[3], bool(row[4]))

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
        return self._main

    def _bring_up_to_date(self, main: Transactions, migrate: Literal["auto", "check"]) -> None:
        version = self.version(main.connection)
        if version > SCHEMA_VERSION:
            raise ConfigurationError(
                f"database {self._place.path} has schema version {version}, this code knows "
                f"{SCHEMA_VERSION}: it was migrated by a newer release; upgrade this one"
            )
        if version == SCHEMA_VERSION:
            return
        if migrate == "check":
            raise ConfigurationError(
                f"database {self._place.path} has schema version {version}, this code needs "
                f"{SCHEMA_VERSION}: run `procession migrate`, or set migrate='auto'"
            )
        with main.write("migrating") as connection:
            # Another process may have been first while this one waited for its turn.
            version = self.version(connection)
            for number, _, text in migrations(self._prefix):
                if number > version:
                    _run_script(connection, text)
                    connection.execute(
                        f"INSERT INTO {self._prefix}meta (name, value) VALUES ('schema', ?) "
                        "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                        (number,),
                    )

    def version(self, connection: sqlite3.Connection) -> int:
        """Return the schema's version, 0 where there is none."""
        try:
            found = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?",
                (f"{self._prefix}meta",),
            ).fetchone()
            if found is None:
                return 0
            row = connection.execute(
                f"SELECT value FROM {self._prefix}meta WHERE name = 'schema'"
            ).fetchone()
        except sqlite3.DatabaseError as error:
            raise ConfigurationError(
                f"{self._place.path} cannot be read as an SQLite database ({error}): check the path"
            ) from error
        return 0 if row is None else int(row[0])

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
        if taken is not None and taken[1] != queue:
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
            connection.execute(sql["name_reader"], (consumer, rows[0][0]))
        elif taken is None:
            connection.execute(sql["subscribe"], (queue, consumer))

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
        )


def _run_script(connection: sqlite3.Connection, text: str) -> None:
    """Run statements one by one: `executescript` would commit the open transaction first."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
