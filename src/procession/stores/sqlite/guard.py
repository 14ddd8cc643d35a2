"""What a handler may do on the lane's connection: statements, inside the batch's transaction.

It can neither end the transaction, change the schema, nor touch this package's own tables: the
authorizer refuses such a statement when it is prepared, whichever way it came.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from procession.errors import StoreUnavailable, TransactionMisuse
from procession.stores.sqlite.connection import ours

SAVEPOINT = "SAVEPOINT procession_handler"
UNDO = "ROLLBACK TO procession_handler"
RELEASE = "RELEASE procession_handler"
USER_SAVEPOINT = "SAVEPOINT procession_user"
USER_UNDO = "ROLLBACK TO procession_user"
USER_RELEASE = "RELEASE procession_user"

_WRITES = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
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


class Guard:
    """The handler's side of one connection: implements `procession.abc.Sql`.

    Attributes:
        doomed: the first database error of the current handler outside a savepoint: its run has
            failed, whatever it does with the error.
        lost: an error that concerns the store: the whole batch must be rolled back.
    """

    def __init__(self, connection: sqlite3.Connection, prefix: str) -> None:
        self._connection = connection
        self._prefix = prefix
        self._guarded = False
        self._marked = False
        self._savepoint = False
        self._refused = ""
        self.doomed: BaseException | None = None
        self.lost: StoreUnavailable | None = None
        connection.set_authorizer(self._authorize)

    # The lane's side.

    def mark(self) -> None:
        """The next statement begins another handler's work."""
        self._guarded = True
        self._marked = False
        self.doomed = None

    def undo(self) -> bool:
        """Take back the current handler's statements; False where the transaction is gone."""
        self.doomed = None
        if not self._connection.in_transaction or self.lost is not None:
            return not self._marked and self.lost is None
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
        self._guarded = False

    def renew(self) -> None:
        """A new transaction begins: forget what went wrong in the last one."""
        self._guarded = False
        self._marked = False
        self._savepoint = False
        self.doomed = None
        self.lost = None

    # The handler's side.

    def execute(
        self, statement: str, parameters: Mapping[str, Any] | Sequence[Any]
    ) -> sqlite3.Cursor:
        connection = self._connection
        self._check_open()
        if not self._marked:
            self._begin_handler()
        try:
            return connection.execute(statement, parameters)
        except sqlite3.Error as error:
            raise self._failed(error, statement) from error

    def write(self, statement: str, parameters: Mapping[str, Any]) -> None:
        self.execute(statement, parameters)

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """Catch database errors inside: they take back this block only."""
        self._check_open()
        self._own(USER_SAVEPOINT)
        doomed = self.doomed
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:
                self._own(USER_UNDO)
                self._own(USER_RELEASE)
                self.doomed = doomed
            raise
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
            if self._savepoint:
                self._connection.execute(RELEASE)
                self._savepoint = False
            self._connection.execute(SAVEPOINT)
            self._savepoint = True
        finally:
            self._guarded = True
        self._marked = True

    def _check_open(self) -> None:
        if self.lost is not None:
            raise self.lost
        if not self._connection.in_transaction:
            raise TransactionMisuse(
                "the batch's transaction is not open any more: use ctx inside its handler only"
            )

    def _failed(self, error: sqlite3.Error, statement: str) -> BaseException:
        refused, self._refused = self._refused, ""
        if refused:
            mistaken = TransactionMisuse(
                f"a handler may not {refused} (in {statement[:100]!r}): the batch's transaction "
                "belongs to Procession; change the schema in a migration"
            )
            self.doomed = self.doomed or mistaken
            return mistaken
        mine = ours(error, "a handler's statement failed")
        if isinstance(mine, StoreUnavailable) or not self._connection.in_transaction:
            self.lost = (
                mine
                if isinstance(mine, StoreUnavailable)
                else StoreUnavailable(f"the transaction ended under a handler's statement: {error}")
            )
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
        elif action == sqlite3.SQLITE_PRAGMA and second is not None:
            self._refused = f"change a setting (PRAGMA {first})"
        elif action in _WRITES and (first or "").lower().startswith(self._prefix):
            self._refused = f"write Procession's own table {first}"
        else:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY


class HandlerConnection:
    """The lane's connection as `ctx.connection`: execute and executemany, nothing that ends the
    transaction.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def execute(
        self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] = ()
    ) -> sqlite3.Cursor:
        """As `sqlite3.Connection.execute`."""
        return self._guard.execute(statement, parameters)

    def executemany(
        self, statement: str, parameters: Iterable[Mapping[str, Any] | Sequence[Any]]
    ) -> None:
        """As `sqlite3.Connection.executemany`, without a cursor."""
        for row in parameters:
            self._guard.execute(statement, row)

    def __getattr__(self, name: str) -> Any:
        mistaken = TransactionMisuse(
            f"ctx.connection.{name} is not open to handlers: the batch's transaction belongs to "
            "Procession; use execute, executemany or ctx.savepoint()"
        )
        self._guard.doomed = self._guard.doomed or mistaken
        raise mistaken
