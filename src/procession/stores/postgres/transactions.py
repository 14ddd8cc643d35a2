"""Short transactions on PostgreSQL, outside of batches."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from procession.errors import StoreUnavailable
from procession.stores.postgres.connection import (
    Connection,
    Place,
    as_query,
    connect,
    local_settings,
    ours,
)
from procession.stores.postgres.statements import texts
from procession.stores.sql.sends import Found


class Rows:
    """What a statement returned."""

    __slots__ = ("_rows", "count")

    def __init__(self, cursor: psycopg.Cursor[Any]) -> None:
        self._rows = cursor.fetchall() if cursor.description is not None else []
        self.count: int | None = cursor.rowcount

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows."""
        return self._rows


class PostgresTransactions:
    """Implements `procession.stores.sql.transactions.Transactions`. Connects when it is first used,
    and again after the connection was lost.
    """

    def __init__(self, place: Place, prefix: str) -> None:
        self._place = place
        self.texts = texts(prefix, place.schema)
        self._connection: Connection | None = None
        self._connect("connecting")

    def _connect(self, what: str) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._place, what=what)
        return self._connection

    @contextmanager
    def write(self, what: str) -> Generator[_Run]:
        """See `Transactions.write`."""
        connection = self._connect(what)
        try:
            connection.execute("BEGIN")
            if connection.pooled:
                connection.execute(as_query(local_settings(self._place, lane=False)))
            yield _Run(connection, self.texts)
            _check_ended(connection.execute("COMMIT").statusmessage, what)
        except BaseException as error:
            with suppress(psycopg.Error):
                if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                    connection.execute("ROLLBACK")
            if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                connection.close()
            if isinstance(error, psycopg.Error):
                raise ours(error, what) or error from error
            raise

    @contextmanager
    def read(self, what: str) -> Generator[_Run]:
        """See `Transactions.read`: on one snapshot."""
        connection = self._connect(what)
        try:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield _Run(connection, self.texts)
        except psycopg.Error as error:
            raise ours(error, what) or StoreUnavailable(f"{what}: {error}") from error
        finally:
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK")

    def close(self) -> None:
        """See `Transactions.close`."""
        if self._connection is not None:
            self._connection.close()

    @property
    def connection(self) -> Connection:
        """The driver's connection."""
        return self._connect("connecting")


class _Run:
    """Runs named statements: implements `procession.stores.sql.sends.Run`."""

    def __init__(self, connection: Connection, named: dict[str, str]) -> None:
        self.connection = connection
        self._texts = named

    def __call__(self, name: str, **values: Any) -> Found:
        return Rows(self.connection.execute(as_query(self._texts[name]), values))


def _check_ended(tag: str | None, what: str) -> None:
    """Refuse the answer of a COMMIT that rolled back."""
    if tag != "COMMIT":
        raise StoreUnavailable(f"{what}: the server rolled the transaction back")
