"""Short write transactions outside of batches: operators, senders, leases."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager

from procession.errors import ConfigurationError, StoreUnavailable
from procession.stores.sqlite.connection import Place, Turnstile, code_of, connect, ours
from procession.stores.sqlite.schema import not_ours
from procession.stores.sqlite.statements import statements


class Transactions:
    """A connection for one short transaction after another."""

    def __init__(self, place: Place, prefix: str) -> None:
        self.sql = statements(prefix)
        self._prefix = prefix
        self._path = place.path
        self.connection = connect(place)
        self._turnstile = Turnstile(place)

    @contextmanager
    def write(self, what: str) -> Generator[sqlite3.Connection]:
        """Run the block in a write transaction: committed at its end, or rolled back.

        Raises:
            StoreUnavailable: the database cannot be written now.
            ConfigurationError: our tables are missing or were changed.
        """
        self._turnstile.begin(self.connection)
        try:
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise ours(error, self._at(what)) or self._changed(error) or error from error
            raise

    @contextmanager
    def read(self, what: str) -> Generator[sqlite3.Connection]:
        """Run the block's reads on one snapshot."""
        try:
            self.connection.execute("BEGIN")
            yield self.connection
        except sqlite3.Error as error:
            raise (
                ours(error, self._at(what))
                or self._changed(error)
                or StoreUnavailable(f"{self._at(what)}: {error}")
            ) from error
        finally:
            with contextlib.suppress(sqlite3.Error):
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")

    def _at(self, what: str) -> str:
        return f"{what} in database {self._path}"

    def _changed(self, error: sqlite3.Error) -> ConfigurationError | None:
        # A statement of ours that SQLite does not understand: a table is missing or another's.
        if code_of(error) != sqlite3.SQLITE_ERROR:
            return None
        return not_ours(self._prefix, self._path, error)

    async def close(self) -> None:
        """Close the connection. Harmless twice."""
        self.connection.close()
        self._turnstile.close()
