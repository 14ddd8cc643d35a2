"""The inbox and the queues on a connection that is not ours, inside its own transaction.

Never commits, and never rolls back what its user did: a savepoint bounds what is taken back. The
write lock is taken before anything is read, so what is read is what holds at the commit.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from procession.abc import InboxRow
from procession.errors import ConfigurationError, ProcessionError, TransactionMisuse
from procession.message import Outgoing
from procession.outcome import End, InboxState
from procession.stores.sqlite.connection import Place, Turnstile, ours, wall_now
from procession.stores.sqlite.schema import bring_up_to_date, schema_version
from procession.stores.sqlite.sends import Sender
from procession.stores.sqlite.statements import SCHEMA_VERSION, check_prefix, statements

_SAVEPOINTS = itertools.count(1)
# A note, and no error of its own: what the block raised goes on.
_ENDED = (
    "the transaction was ended inside the block: if that was a commit, the key is recorded, and "
    "its message will not run again; commit after the block"
)


class UserConnection:
    """An open `sqlite3.Connection` of the user's, used by one thread at a time."""

    def __init__(self, connection: sqlite3.Connection, prefix: str) -> None:
        self._connection = connection
        self._prefix = check_prefix(prefix)
        self._sql = statements(prefix)
        self._sender = Sender(connection, self._sql)

    def prepare(self) -> None:
        """Make the tables or bring them up to date: in the open transaction, whose commit is the
        user's, else in one of its own.
        """
        connection = self._connection
        own = not connection.in_transaction
        if own:
            self.begin()
        try:
            with self._plain("preparing the tables"):
                bring_up_to_date(connection, self._prefix, self._name())
                if own:
                    connection.execute("COMMIT")
        except BaseException:
            if own:
                self._roll_back()
            raise

    def begin(self) -> None:
        """Open a write transaction, as BEGIN IMMEDIATE, but in turn with this package's workers:
        where they are busy, SQLite's own way of waiting lets others wait for seconds.
        """
        connection = self._connection
        if connection.in_transaction:
            raise TransactionMisuse(
                "a transaction is open on this connection already (with autocommit=False one "
                "always is): commit or roll back before begin()"
            )
        with self._plain("beginning a transaction"):
            path = self._path()
            if not path:
                connection.execute("BEGIN IMMEDIATE")
                return
            (wait_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
            turnstile = Turnstile(Place(path=Path(path), busy_s=wait_ms / 1000))
            # The turnstile does the waiting: who waits inside of SQLite would keep it closed.
            connection.execute("PRAGMA busy_timeout = 0")
            try:
                turnstile.begin(connection)
            finally:
                turnstile.close()
                connection.execute(f"PRAGMA busy_timeout = {wait_ms}")

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """Run the block in the user's write transaction; if it raises, nothing of it stays.

        Where no transaction is open, and the connection is of those that open one by themselves
        before the first write, this opens it. One that was opened here holds nothing but the
        block, so it ends with a block that raises, and no write lock stays behind.

        Raises:
            TransactionMisuse: no transaction is open and none may be, or the block ended it.
            TransientError: the write lock was not to be had: the transaction must run again.
            ConfigurationError: there are no tables, or of another version.
        """
        opened = not self._connection.in_transaction
        if opened:
            self._check_opens()
            self.begin()
        name = f"procession_{next(_SAVEPOINTS)}"
        try:
            with self._plain("taking the write lock"):
                self._lock()
            self._connection.execute(f"SAVEPOINT {name}")
        except BaseException:
            if opened:
                self._roll_back()
            raise
        try:
            yield
        except BaseException as error:
            if not self._undo(name):
                error.add_note(_ENDED)
            elif opened:
                self._roll_back()
            raise
        self._release(name)

    def find(self, consumer: str, key: bytes) -> tuple[int, InboxRow | None]:
        """Return the consumer's number, making it where it is new, and the inbox row of a key."""
        with self._plain("reading the inbox") as connection:
            row = connection.execute(self._sql["inbox_row"], (consumer, key)).fetchone()
            found = None if row is None else InboxRow(row[0], row[1], row[2], row[3], bool(row[4]))
            return self._subscription(consumer), found

    def record(self, subscription: int, key: bytes, fingerprint: bytes) -> None:
        """Insert a key as done, and count it as processed."""
        row = (subscription, key, int(InboxState.DONE), None, fingerprint, wall_now(), None)
        with self._plain("recording a key") as connection:
            connection.execute(self._sql["record"], row)
            connection.execute(self._sql["count"], (subscription, End.PROCESSED, "", 1))

    def count(self, subscription: int, end: End) -> None:
        """Count another end of a message."""
        with self._plain("counting") as connection:
            connection.execute(self._sql["count"], (subscription, end, "", 1))

    def send(self, messages: Sequence[Outgoing]) -> int:
        """Write messages into their queues; return how many were stored."""
        with self._plain("sending"):
            return sum(self._sender.send(messages))

    def _subscription(self, consumer: str) -> int:
        """Return the consumer's number. Asked each time: a transaction that made it may have been
        rolled back, and another consumer have got the number since.
        """
        row = self._connection.execute(self._sql["reader_of"], (consumer,)).fetchone()
        if row is not None:
            return int(row[0])
        made = self._connection.execute(self._sql["add_library_consumer"], (consumer,))
        return int(made.lastrowid or 0)

    def _check_opens(self) -> None:
        connection = self._connection
        # `autocommit` came with Python 3.12; False keeps a transaction open at all times.
        if connection.isolation_level is None or getattr(connection, "autocommit", False) is True:
            raise TransactionMisuse(
                "no transaction is open, and this connection commits each statement by itself: the "
                "key would be recorded even if your own statements fail. Call begin() of the inbox "
                'or outbox, or connection.execute("BEGIN IMMEDIATE"), before, and commit after'
            )

    def _lock(self) -> None:
        """Take the write lock and check the schema."""
        rows = self._connection.execute(self._sql["lock"]).fetchall()
        if rows != [(SCHEMA_VERSION,)]:
            raise self._unfit() or ConfigurationError(f"database {self._name()} lost its version")

    def _undo(self, name: str) -> bool:
        """Take back the savepoint's statements; return False where the savepoint is gone."""
        try:
            self._connection.execute(f"ROLLBACK TO {name}")
            self._connection.execute(f"RELEASE {name}")
        except sqlite3.Error:
            return False
        return True

    def _release(self, name: str) -> None:
        try:
            self._connection.execute(f"RELEASE {name}")
        except sqlite3.OperationalError as error:
            raise TransactionMisuse(
                "the transaction ended inside the block, by a commit, a rollback, or an error that "
                "rolls back all: what the block wrote and the key that was recorded are no longer "
                "one. Roll back, and commit after the block"
            ) from error

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    @contextmanager
    def _plain(self, what: str) -> Generator[sqlite3.Connection]:
        """Run our own statements: rows are tuples and text is str, whatever the user's are, and an
        error says what it means.
        """
        connection = self._connection
        factories = connection.row_factory, connection.text_factory
        connection.row_factory, connection.text_factory = None, str
        try:
            yield connection
        except sqlite3.Error as error:
            raise self._meaning(error, what) or error from error
        finally:
            connection.row_factory, connection.text_factory = factories

    def _meaning(self, error: sqlite3.Error, what: str) -> ProcessionError | None:
        found = ours(error, what)
        if found is not None or getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_ERROR:
            return found
        return self._unfit()

    def _unfit(self) -> ConfigurationError | None:
        """Return what is wrong with the schema, None where nothing is."""
        version = schema_version(self._connection, self._prefix, self._name())
        if version == SCHEMA_VERSION:
            return None
        has = f"has schema version {version}, this code needs {SCHEMA_VERSION}"
        return ConfigurationError(
            f"database {self._name()} {has if version else 'has no tables of this prefix'} "
            f"({self._prefix}…): call Inbox.prepare(connection) once, or run `procession migrate`"
        )

    def _path(self) -> str:
        """Return the file of the main database, "" where there is none."""
        rows = self._connection.execute("PRAGMA database_list").fetchall()
        return next((row[2] or "" for row in rows if row[1] == "main"), "")

    def _name(self) -> str:
        return self._path() or "in memory"
