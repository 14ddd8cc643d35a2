"""Short write transactions outside of batches: operators, senders, leases."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager

from procession.errors import StoreUnavailable
from procession.stores.sqlite.connection import Place, Turnstile, connect, ours
from procession.stores.sqlite.statements import statements


class Transactions:
    """A connection for one short transaction after another."""

    def __init__(self, place: Place, prefix: str) -> None:
        self.sql = statements(prefix)
        self.connection = connect(place)
        self._turnstile = Turnstile(place)

    @contextmanager
    def write(self, what: str) -> Generator[sqlite3.Connection]:
        """Run the block in a write transaction: committed at its end, or rolled back.

        Raises:
            StoreUnavailable: the database cannot be written now.
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
                raise ours(error, what) or error from error
            raise

    @contextmanager
    def read(self, what: str) -> Generator[sqlite3.Connection]:
        """Run the block's reads on one snapshot."""
        try:
            self.connection.execute("BEGIN")
            yield self.connection
        except sqlite3.Error as error:
            raise ours(error, what) or StoreUnavailable(f"{what}: {error}") from error
        finally:
            with contextlib.suppress(sqlite3.Error):
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")

    async def close(self) -> None:
        """Close the connection. Harmless twice."""
        self.connection.close()
        self._turnstile.close()
