"""What a handler may do on the lane's connection: statements, inside the batch's transaction.

It can neither end the transaction, change the schema, nor touch this package's own tables: the
authorizer refuses such a statement when it is prepared, whichever way it came. It never gets hold
of a cursor, so nothing of it outlives its run.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from procession.errors import StoreUnavailable, TransactionMisuse
from procession.stores.sqlite.connection import ours

# A statement that was prepared for us passes the authorizer unseen, so no handler's text may equal
# one of ours: each of ours ends with this comment.
OURS = "/* procession"
SAVEPOINT = "SAVEPOINT procession_handler /* procession */"
UNDO = "ROLLBACK TO procession_handler /* procession */"
RELEASE = "RELEASE procession_handler /* procession */"
USER_SAVEPOINT = "SAVEPOINT procession_user /* procession */"
USER_UNDO = "ROLLBACK TO procession_user /* procession */"
USER_RELEASE = "RELEASE procession_user /* procession */"

# Runs with savepoints after a deferred statement failed without one.
CAREFUL_RUNS = 5_000

Result = TypeVar("Result")

_WRITES = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
_LOOKS = {"table_info", "table_xinfo", "index_list", "index_info", "foreign_key_list"}
_ENDS = {sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT}
_SCHEMA = {
    getattr(sqlite3, f"SQLITE_{verb}_{noun}")
    for verb in ("CREATE", "DROP")
    for noun in (
        "INDEX",
        "TABLE",
        "TRIGGER",
        "VIEW",
        "TEMP_INDEX",
        "TEMP_TABLE",
        "TEMP_TRIGGER",
        "TEMP_VIEW",
        "VTABLE",
    )
} | {
    sqlite3.SQLITE_ALTER_TABLE,
    sqlite3.SQLITE_REINDEX,
    sqlite3.SQLITE_ANALYZE,
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
}


# What a statement may raise: `Warning` is what Python 3.11 says of two statements in one text.
_FAULTS = (sqlite3.Error, sqlite3.Warning, MemoryError)


class SqliteRows:
    """What a statement returned, read to its end: implements `procession.abc.Rows`.

    A cursor half read would hide errors of its later rows, keep the transaction's snapshot open
    past the commit, and keep a connection that was taken from a handler from letting go of its
    write lock.
    """

    __slots__ = ("_next", "_rows", "description", "lastrowid", "rowcount")

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self.description = cursor.description
        self._rows: list[Any] = [] if self.description is None else cursor.fetchall()
        self._next = 0
        self.rowcount = cursor.rowcount
        self.lastrowid = cursor.lastrowid

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


def _read_to_its_end(cursor: sqlite3.Cursor) -> None:
    if cursor.description is not None:
        cursor.fetchall()


class Guard:
    """The handler's side of one connection: implements `procession.abc.Sql`.

    Attributes:
        doomed: the first database error of the current handler outside a savepoint: its run has
            failed, whatever it does with the error.
        lost: an error that concerns the store: the whole batch must be rolled back.
        turn: held while the connection is in use, so that it is never taken away (see
            `SqliteLane.interrupt`) under a running statement.
        run: another number for each handler's run: what was kept of an earlier one is refused.
    """

    def __init__(self, connection: sqlite3.Connection, prefix: str) -> None:
        self._connection = connection
        # One for all statements, which are read to their end: a fresh one costs 0.3 µs each time.
        self._cursor = connection.cursor()
        self._prefix = prefix
        self._guarded = False
        self._marked = False
        self._bare = False
        self._careful = 0
        self._savepoint = False
        self._refused = ""
        self.doomed: BaseException | None = None
        self.lost: StoreUnavailable | None = None
        self.turn = threading.RLock()
        self.run = 0
        connection.set_authorizer(self._authorize)

    # The lane's side.

    def mark(self) -> None:
        """The next statement begins another handler's work."""
        if self.lost is not None:
            raise self.lost
        self.run += 1
        self._guarded = True
        self._marked = False
        self._bare = False
        self.doomed = None

    def undo(self) -> bool:
        """Take back the current handler's statements; False where the transaction is gone, or
        holds statements that no savepoint divides from the other handlers'."""
        self.doomed = None
        with self.turn:
            if self.lost is not None or not self._connection.in_transaction:
                return False
            if self._bare:
                self._careful = CAREFUL_RUNS
                return False
            if self._marked:
                with self.unguarded():
                    self._connection.execute(UNDO)
                self._marked = False
        return True

    @contextmanager
    def unguarded(self) -> Generator[None]:
        """Let this package's own statements through."""
        before, self._guarded = self._guarded, False
        try:
            yield
        finally:
            self._guarded = before

    def open_gate(self) -> None:
        """From here on, until the next `mark`, statements are this package's own."""
        self.run += 1
        self._guarded = False

    def renew(self) -> None:
        """A new transaction begins: forget what went wrong in the last one."""
        self._guarded = False
        self._marked = False
        self._bare = False
        self._savepoint = False
        self.doomed = None
        self.lost = None

    def end_handlers(self) -> None:
        """All handlers of the batch have run: their last savepoint would make each of this
        package's own rows dearer."""
        self.open_gate()
        if self._connection.in_transaction:
            self._release()

    # The handler's side.

    def execute(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any]) -> SqliteRows:
        with self.turn:
            self._check_open()
            if not self._marked:
                self._begin_handler()
            return self._run_statement(statement, parameters, SqliteRows)

    def write(self, statement: str, parameters: Mapping[str, Any]) -> None:
        """Run a deferred statement. Nothing of its handler comes after it that could fail, so it
        needs no savepoint: an error, seldom, costs a rerun of the batch. The next runs have
        savepoints again, so that many errors never cost a rerun each."""
        with self.turn:
            self._check_open()
            if not (self._marked or self._bare):
                self._begin_deferred()
            self._run_statement(statement, parameters, _read_to_its_end)

    def _run_statement(
        self,
        statement: str,
        parameters: Mapping[str, Any] | Sequence[Any],
        read: Callable[[sqlite3.Cursor], Result],
    ) -> Result:
        try:
            if OURS in statement:
                self._refused = "run a statement of Procession's own"
                raise sqlite3.ProgrammingError(self._refused)
            return read(self._cursor.execute(statement, parameters))
        except _FAULTS as error:
            failed = self._failed(error, statement)
            if failed is error:
                raise
            raise failed from error

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """Catch database errors inside: they take back this block only."""
        with self.turn:
            self._check_open()
            self._own(USER_SAVEPOINT)
            run, doomed = self.run, self.doomed
        try:
            yield
        except BaseException:
            with self.turn:
                if run == self.run and self.lost is None and self._connection.in_transaction:
                    self._own(USER_UNDO)
                    self._own(USER_RELEASE)
                    self.doomed = doomed
            raise
        with self.turn:
            if run == self.run:
                self._check_open()
                self._own(USER_RELEASE)

    @property
    def connection(self) -> HandlerConnection:
        return HandlerConnection(self)

    def _own(self, statement: str) -> None:
        if not self._marked:
            self._begin_handler()
        with self.unguarded():
            self._connection.execute(statement)

    def _begin_handler(self) -> None:
        """Set a savepoint before the first statement of a handler; one without statements costs
        nothing. The last one goes first: each open savepoint makes every write dearer.
        """
        self._guarded = False
        try:
            self._release()
            self._cursor.execute(SAVEPOINT)
            self._savepoint = True
        finally:
            self._guarded = True
        self._marked = True

    def _begin_deferred(self) -> None:
        if self._careful:
            self._careful -= 1
            self._begin_handler()
            return
        self._bare = True
        if self._savepoint:
            with self.unguarded():
                self._release()

    def _release(self) -> None:
        if self._savepoint:
            self._cursor.execute(RELEASE)
            self._savepoint = False

    def _check_open(self) -> None:
        if self.lost is not None:
            raise self.lost
        if not self._connection.in_transaction:
            raise TransactionMisuse(
                "the batch's transaction is not open any more: use ctx inside its handler only"
            )

    def _failed(self, error: BaseException, statement: str) -> BaseException:
        refused, self._refused = self._refused, ""
        if refused:
            mistaken = TransactionMisuse(
                f"a handler may not {refused} (in {statement[:100]!r}): the batch's transaction "
                "belongs to Procession; change the schema in a migration"
            )
            self.doomed = self.doomed or mistaken
            return mistaken
        if isinstance(error, sqlite3.Error):
            mine = ours(error, "a handler's statement failed")
            if isinstance(mine, StoreUnavailable):
                self.lost = mine
        # A statement may have ended the transaction (INSERT OR ROLLBACK, RAISE(ROLLBACK) in a
        # trigger): that is this handler's failure, and nothing runs after it (see `_check_open`).
        self.doomed = self.doomed or error
        return error

    def _authorize(
        self, action: int, first: str | None, second: str | None, _db: str | None, _by: str | None
    ) -> int:
        if not self._guarded:
            return sqlite3.SQLITE_OK
        if action in _ENDS:
            self._refused = f"end or nest the transaction ({first or action})"
        elif action in _SCHEMA:
            self._refused = f"change the schema ({first or action})"
        elif action == sqlite3.SQLITE_PRAGMA and second is not None and first not in _LOOKS:
            self._refused = f"change a setting (PRAGMA {first})"
        elif action in _WRITES and (first or "").lower().startswith(self._prefix):
            self._refused = f"write Procession's own table {first}"
        else:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY


class HandlerConnection:
    """The lane's connection as `ctx.connection`: execute and executemany, nothing that ends the
    transaction. It ends with the handler's run.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._run = guard.run

    def execute(
        self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] = ()
    ) -> SqliteRows:
        """As `sqlite3.Connection.execute`, with the rows read already."""
        if self._run != self._guard.run:
            raise TransactionMisuse(
                "ctx.connection belongs to a run that is over: it must not be kept or used after "
                "its handler has returned"
            )
        return self._guard.execute(statement, parameters)

    def executemany(
        self, statement: str, parameters: Iterable[Mapping[str, Any] | Sequence[Any]]
    ) -> None:
        """As `sqlite3.Connection.executemany`, without a cursor."""
        for row in parameters:
            self.execute(statement, row)

    def __getattr__(self, name: str) -> Any:
        mistaken = TransactionMisuse(
            f"ctx.connection.{name} is not open to handlers: the batch's transaction belongs to "
            "Procession; use execute, executemany or ctx.savepoint()"
        )
        self._guard.doomed = self._guard.doomed or mistaken
        raise mistaken
