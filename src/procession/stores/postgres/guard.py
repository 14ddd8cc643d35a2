"""What a handler may do on the lane's connection: statements, inside the batch's transaction.

A statement is looked at before it is sent: nothing that ends the transaction, changes the schema or
a setting, or writes this package's own tables gets through. The extended protocol takes one
statement a text, so none can hide behind another.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import psycopg

from procession.errors import (
    DeferredWriteFailed,
    ProcessionError,
    StoreUnavailable,
    TransactionMisuse,
    TransientError,
)
from procession.stores.postgres.connection import Connection, as_query, ours
from procession.stores.postgres.wire import TEXT, Binder, Result, StatementFailed, Wire
from procession.stores.sql.named import Parsed, numbered

OURS = -1
_ALLOWED = frozenset(
    {"SELECT", "INSERT", "UPDATE", "DELETE", "MERGE", "WITH", "VALUES", "TABLE", "CALL", "SHOW",
     "EXPLAIN", "LOCK"}
)  # fmt: skip
_WRITES = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE", "INTO", "TRUNCATE", "LOCK"})
_SETS = frozenset({"SET_CONFIG", "PG_ADVISORY_LOCK", "PG_ADVISORY_LOCK_SHARED"})


class PostgresRows:
    """What a statement returned, read to its end: implements `procession.abc.Rows`."""

    __slots__ = ("_next", "_rows", "columns", "rowcount")

    def __init__(self, result: Result) -> None:
        self._rows = result.rows()
        self._next = 0
        self.columns = result.columns
        self.rowcount = len(self._rows) if result.count is None else result.count

    def fetchone(self) -> Any:
        rows = self.fetchmany(1)
        return rows[0] if rows else None

    def fetchmany(self, size: int = 1) -> list[Any]:
        start = self._next
        self._next = min(start + size, len(self._rows))
        return self._rows[start : self._next]

    def fetchall(self) -> list[Any]:
        return self.fetchmany(len(self._rows))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())


class Guard:
    """The handler's side of one connection: implements `procession.abc.Sql`.

    Attributes:
        doomed: the first database error of the current handler outside of a savepoint.
        lost: an error that ended the whole transaction.
        turn: held while the connection is in use.
        is_open: between the lane's begin and its end.
    """

    def __init__(self, connection: Connection, wire: Wire, prefix: str) -> None:
        self._connection = connection
        self._wire = wire
        self._bind = Binder(connection).bind
        self._prefix = prefix.upper()
        self._texts: Callable[[str], tuple[bytes, tuple[str, ...]]] = lru_cache(1_000)(self._read)
        self._run = -1
        self._savepoints = 0
        self._dirty = False
        self.doomed: BaseException | None = None
        self.lost: TransientError | None = None
        self.taken: StoreUnavailable | None = None
        self.turn = threading.RLock()
        self.is_open = False

    # The lane's side.

    def renew(self) -> None:
        """A new transaction begins."""
        self._run = -1
        self._dirty = False
        self.doomed = None
        self.lost = self.taken

    def mark(self) -> None:
        """The next statement begins another handler's work."""
        if self.lost is not None:
            raise self.lost
        self._run += 1
        self._dirty = False
        self.doomed = None

    def undo(self) -> bool:
        """Return whether the current handler has sent nothing: a transaction in which it has must
        go, since no savepoint divides its work from the others'."""
        self.doomed = None
        return not self._dirty and self.lost is None and self.is_open

    def end_handlers(self) -> None:
        """What comes now is this package's own."""
        if not self._wire.is_on:
            if self._connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                raise TransactionMisuse(ENDED)
            self._wire.on()
        # From here on every error of a handler's statement is a deferred one.
        self._run = OURS - 1

    # The handler's side.

    def execute(self, statement: str, parameters: Mapping[str, Any]) -> PostgresRows:
        with self.turn:
            self._send(statement, parameters, keep=True)
            return PostgresRows(self._drain()[0])

    def write(self, statement: str, parameters: Mapping[str, Any]) -> None:
        """Send a statement; its error is told by the next drain, as this handler's."""
        with self.turn:
            self._send(statement, parameters, keep=False)

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """Catch database errors inside: they take back this block only."""
        with self.turn:
            self._check_open()
            failed = self.doomed is not None
        if failed:  # the run has failed, and the transaction with it
            yield
            return
        with self.turn:
            self._dirty = True
            self._savepoints += 1
            name = b"procession_%d" % self._savepoints
            self._wire.send(b"SAVEPOINT " + name, (), tag=self._run)
            self._drain()
            run, doomed = self._run, self.doomed
        try:
            yield
        except BaseException:
            with self.turn:
                if run == self._run and self.lost is None and self.is_open:
                    self._wire.on()
                    self._wire.send(b"ROLLBACK TO SAVEPOINT " + name, (), tag=run)
                    self._wire.send(b"RELEASE SAVEPOINT " + name, (), tag=run)
                    self._drain()
                    self.doomed = doomed
            raise
        with self.turn:
            if run == self._run:
                self._check_open()
                self._wire.send(b"RELEASE SAVEPOINT " + name, (), tag=run)
                self._drain()

    @property
    def connection(self) -> HandlerConnection:
        """The driver's own connection, inside the batch's transaction."""
        with self.turn:
            self._check_open()
            if self._wire.pending:
                self._drain()
        return HandlerConnection(self, self._connection)

    def _send(self, statement: str, parameters: Mapping[str, Any], *, keep: bool) -> None:
        self._check_open()
        try:
            text, names = self._texts(statement)
        except TransactionMisuse as error:
            self.doomed = self.doomed or error
            raise
        try:
            values, types, formats = self._bind([parameters[name] for name in names])
        except (KeyError, psycopg.Error, TypeError, ValueError, UnicodeError) as error:
            fault = error
            if isinstance(error, KeyError):
                fault = psycopg.ProgrammingError(f"no value for parameter {error} was given")
            self.doomed = self.doomed or fault
            raise fault from None
        self._dirty = True
        self._wire.send(text, values, types, formats, tag=self._run, keep=keep, result_format=TEXT)

    def _drain(self) -> list[Result]:
        try:
            return self._wire.drain()
        except StatementFailed as failed:
            raise self.told(failed) from failed.error
        except psycopg.Error as error:
            self.lost = StoreUnavailable(f"the connection was lost: {error}")
            raise self.lost from error

    def told(self, failed: StatementFailed) -> BaseException:
        """Say whose failure it is, and what it means; return what is to be raised."""
        mine = ours(failed.error, "a handler's statement failed")
        if isinstance(mine, TransientError):
            self.lost = mine
            return mine
        if failed.tag == self._run and not isinstance(mine, ProcessionError):
            self.doomed = self.doomed or failed.error
            return failed.error
        if failed.tag >= 0:
            deferred = DeferredWriteFailed(failed.tag, failed.error)
            self.lost = deferred
            return deferred
        return failed.error

    def _check_open(self) -> None:
        if self.is_open and self.lost is None and self._wire.is_on:
            return
        if self.lost is not None:
            raise self.lost
        if not self.is_open:
            raise TransactionMisuse(
                "the batch's transaction is not open any more: use ctx inside its handler only"
            )
        if not self._wire.is_on:
            if self._connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                self.doomed = self.doomed or TransactionMisuse(ENDED)
                raise TransactionMisuse(ENDED)
            self._wire.on()

    def _read(self, statement: str) -> tuple[bytes, tuple[str, ...]]:
        parsed = numbered(statement)
        refused = self.refusal(parsed)
        if refused:
            raise TransactionMisuse(
                f"a handler may not {refused} (in {statement[:100]!r}): the batch's transaction "
                "belongs to Procession; change the schema in a migration"
            )
        return parsed.text.encode(), parsed.names

    def refusal(self, parsed: Parsed) -> str:
        """Say what a statement would do that no handler may, "" where there is nothing."""
        if parsed.first not in _ALLOWED:
            return f"run {parsed.first or 'an empty statement'}"
        if parsed.words & _SETS:
            return "change a setting or take a lock of the session"
        if parsed.words & _WRITES and any(word.startswith(self._prefix) for word in parsed.words):
            return "write Procession's own tables"
        return ""


ENDED = (
    "the batch's transaction ended inside a handler: nothing of this batch was recorded; "
    "a handler must not commit, roll back, close or change the schema"
)


class HandlerConnection:
    """The lane's connection as `ctx.connection`: cursors and statements in the driver's own form,
    nothing that ends the transaction.
    """

    def __init__(self, guard: Guard, connection: Connection) -> None:
        self._guard = guard
        self._connection = connection
        self._run = guard._run

    def execute(self, statement: str, parameters: Any = None, **options: Any) -> Any:
        """As `psycopg.Connection.execute`."""
        return self.cursor(**options).execute(statement, parameters)

    def cursor(self, **options: Any) -> HandlerCursor:
        """As `psycopg.Connection.cursor`."""
        guard = self._guard
        with guard.turn:
            if self._run != guard._run:
                raise TransactionMisuse(
                    "ctx.connection belongs to a run that is over: it must not be kept or used "
                    "after its handler has returned"
                )
            guard._check_open()
            return HandlerCursor(guard, self._connection.cursor(**options))

    def __getattr__(self, name: str) -> Any:
        mistaken = TransactionMisuse(
            f"ctx.connection.{name} is not open to handlers: the batch's transaction belongs to "
            "Procession; use execute, cursor or ctx.savepoint()"
        )
        self._guard.doomed = self._guard.doomed or mistaken
        raise mistaken


class HandlerCursor:
    """A cursor whose statements are looked at first."""

    def __init__(self, guard: Guard, cursor: psycopg.Cursor[Any]) -> None:
        self._guard = guard
        self._cursor = cursor

    def execute(self, statement: str, parameters: Any = None, **options: Any) -> HandlerCursor:
        """As `psycopg.Cursor.execute`, with one statement a text."""
        with self._turn(statement):
            self._cursor.execute(
                as_query(statement),
                parameters,
                prepare=not self._guard._connection.pooled,
                **options,
            )
        return self

    def executemany(self, statement: str, parameters: Any, **options: Any) -> None:
        """As `psycopg.Cursor.executemany`."""
        with self._turn(statement):
            self._cursor.executemany(as_query(statement), parameters, **options)

    @contextmanager
    def _turn(self, statement: str) -> Generator[None]:
        guard = self._guard
        with guard.turn:
            guard._check_open()
            refused = guard.refusal(numbered(statement))
            if refused:
                mistaken = TransactionMisuse(f"a handler may not {refused}")
                guard.doomed = guard.doomed or mistaken
                raise mistaken
            guard._wire.off()
            guard._dirty = True
            try:
                yield
            except psycopg.Error as error:
                mine = ours(error, "a handler's statement failed")
                if isinstance(mine, TransientError):
                    guard.lost = mine
                    raise mine from error
                guard.doomed = guard.doomed or error
                raise
            finally:
                with contextlib.suppress(psycopg.Error):
                    guard._wire.on()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cursor)
