"""The store on PostgreSQL: connects, keeps its schema, and makes lanes and the rest."""

from __future__ import annotations

import functools
from typing import Any, cast

import psycopg

from procession.abc import Lane, MarkingPublisher, Upkeep
from procession.config import Settings
from procession.errors import ConfigurationError
from procession.stores.postgres.connection import Place, as_query
from procession.stores.postgres.lane import PostgresLane
from procession.stores.postgres.statements import SCHEMA_VERSION, migration_texts
from procession.stores.postgres.transactions import PostgresTransactions
from procession.stores.postgres.wakeups import Waker
from procession.stores.sql.files import DEFAULT_PREFIX, renamed
from procession.stores.sql.publisher import SqlPublisher
from procession.stores.sql.sends import Plan, Run
from procession.stores.sql.store import SqlStore
from procession.stores.sql.transactions import Transactions
from procession.stores.sql.upkeep import SqlUpkeep

# One migration at a time, whatever the prefix: an advisory lock of this number.
MIGRATION_LOCK = 0x70726F63
# Reads the catalog's tables: its functions may answer from before a lock was waited for.
FIND_TABLE = """
SELECT 1
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relname = %(table)s
  AND CASE WHEN %(schema)s::text = '' THEN pg_catalog.pg_table_is_visible(c.oid)
      ELSE n.nspname = %(schema)s::text END
"""
ROWS_A_PAGE = 40
COPY_ROWS_MIN = 200


class PostgresStore(SqlStore):
    """Implements `procession.abc.Store` on PostgreSQL 14 or newer.

    Args:
        url: `postgresql://user:password@host:port/database`; see `Place.of_url`.
        settings: its limits.
        prefix: of the tables' names.
    """

    def __init__(
        self, url: str, *, settings: Settings | None = None, prefix: str = DEFAULT_PREFIX
    ) -> None:
        settings = settings or Settings()
        self._place = Place.of_url(url, settings)
        super().__init__(self._place.shown, settings=settings, prefix=prefix)

    @property
    def place(self) -> Place:
        """Where the database is."""
        return self._place

    async def publisher(self) -> MarkingPublisher:
        """See `Store.publisher`."""
        transactions = PostgresTransactions(self._place, self._prefix)
        return SqlPublisher(
            transactions,
            write=self._write_plan,
            wake=functools.partial(Waker().wake, transactions),
        )

    async def upkeep(self) -> Upkeep:
        """See `Store.upkeep`."""
        return SqlUpkeep(self._transactions(), spans=self._span)

    def missing_migrations(self) -> tuple[int, list[tuple[int, str, str]]]:
        """Return the schema's version, 0 where there is none, and what it lacks as (number, name,
        SQL). Changes nothing.

        Raises:
            ConfigurationError: the schema is newer than this code.
            StoreUnavailable: the server cannot be reached.
        """
        transactions = self._transactions()
        try:
            version = self._known(self._version(transactions))
        finally:
            transactions.close()
        wanted = migration_texts(self._prefix, self._place.schema)
        return version, [found for found in wanted if found[0] > version]

    def _transactions(self) -> PostgresTransactions:
        return PostgresTransactions(self._place, self._prefix)

    @property
    def _newest(self) -> int:
        return SCHEMA_VERSION

    def _lane(self, subscription: int, worker: str, number: int) -> Lane:
        return PostgresLane(
            self._place,
            self._prefix,
            subscription=subscription,
            worker=worker,
            number=number,
            settings=self._settings,
        )

    def _table(self, name: str) -> str:
        return renamed(f"{DEFAULT_PREFIX}{name}", self._prefix, self._place.schema)

    def _version(self, transactions: Transactions) -> int:
        connection = cast("PostgresTransactions", transactions).connection
        meta = self._table("meta")
        named = {"table": f"{self._prefix}meta", "schema": self._place.schema}
        try:
            if connection.execute(FIND_TABLE, named).fetchone() is None:
                return 0
            found = connection.execute(as_query(f"SELECT value FROM {meta} WHERE name = 'schema'"))
            row = found.fetchone()
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"database {self._shown}: this role may not read {meta}: grant it SELECT, INSERT, "
                "UPDATE and DELETE on the tables, and USAGE on the sequences"
            ) from error
        return 0 if row is None else int(row[0])

    def _migrate(self, transactions: Transactions) -> None:
        try:
            with transactions.write("migrating") as run:
                connection = cast("Any", run).connection
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
                if self._place.schema:
                    self._make_schema(connection)
                version = self._known(self._version(transactions))
                for number, _, text in migration_texts(self._prefix, self._place.schema):
                    if number > version:
                        connection.execute(text)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"database {self._shown}: this role may not make tables ({error}): run "
                "`procession migrate` with one that may, and set migrate='check'"
            ) from error

    def _make_schema(self, connection: Any) -> None:
        found = connection.execute(
            "SELECT 1 FROM pg_namespace WHERE nspname = %s", (self._place.schema,)
        ).fetchone()
        if found is None:
            connection.execute(f'CREATE SCHEMA "{self._place.schema}"')

    def _write_plan(self, run: Run, plan: Plan) -> None:
        """Write the rows of a send: COPY where there are many."""
        if plan.rows:
            if len(plan.rows) >= COPY_ROWS_MIN:
                self._copy(cast("Any", run).connection, plan)
            else:
                columns = list(zip(*plan.rows, strict=True))
                names = ("subscriptions", "sessions", "numbers", "ids", "types", "formats",
                         "bodies", "headers", "sent", "expires", "due")  # fmt: skip
                run("send", **dict(zip(names, map(list, columns), strict=True)))
        if plan.tokens:
            run(
                "send_tokens",
                subscriptions=[token[0] for token in plan.tokens],
                sessions=[token[1] for token in plan.tokens],
                lows=[token[2] for token in plan.tokens],
            )

    def _copy(self, connection: Any, plan: Plan) -> None:
        messages = self._table("messages")
        with connection.cursor().copy(
            f"COPY {messages} (subscription, session, number, message_id, type, format, body, "
            "headers, sent_ms, expires_ms, due_at) FROM STDIN (FORMAT BINARY)"
        ) as copy:
            copy.set_types(
                ["int8", "bytea", "int8", "bytea", "text", "int2", "bytea", "text", "int8",
                 "int8", "timestamptz"]
            )  # fmt: skip
            for row in plan.rows:
                copy.write_row(row if row[10] is None else (*row[:10], _moment(row[10])))

    def _span(self, run: Run, step: int, limit: int) -> dict[str, Any] | None:
        """Return the pages of the inbox that a step of a walk looks at, None past the last one."""
        pages = max(1, limit // ROWS_A_PAGE)
        ((end,),) = run("inbox_pages", inbox=self._table("inbox")).rows()
        first = step * pages
        if first >= end:
            return None
        return {"first": f"({first},0)", "last": f"({first + pages},0)"}


def _moment(ms: int) -> Any:
    from datetime import UTC, datetime  # noqa: PLC0415

    return datetime.fromtimestamp(ms / 1000, UTC)
