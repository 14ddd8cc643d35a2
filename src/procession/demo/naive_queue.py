"""A queue as people write one: a table of messages, a look at its head, a delete when it is done.

It lies in a file of its own, as a broker's messages lie on another server than the tables: what a
consumer writes and what it tells the queue can never be one transaction. It loses nothing: what was
taken and not deleted comes again.
"""

import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

VISIBLE_AGAIN_S: Final = 2.0  # as long as the leases of the other demo
BUSY_S: Final = 30.0

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS messages (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    topic      TEXT NOT NULL,
    body       BLOB NOT NULL,
    visible_at REAL NOT NULL DEFAULT 0
) STRICT
"""


class Delivery(NamedTuple):
    """A message in hand."""

    id: int
    topic: str
    body: bytes


class Queue:
    """One process's connection to the queue."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._connection = connect(file)
        self._connection.execute(_TABLE)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def send(self, topic: str, bodies: Iterable[bytes]) -> int:
        """Append messages, all or none; return the last one's id."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO messages (topic, body) VALUES (?, ?)",
                ((topic, body) for body in bodies),
            )
            (last,) = connection.execute("SELECT max(id) FROM messages").fetchone()
        return int(last or 0)

    def peek(self) -> Delivery | None:
        """Return the oldest message: enough for who is alone."""
        row = self._connection.execute(
            "SELECT id, topic, body FROM messages ORDER BY id LIMIT 1"
        ).fetchone()
        return None if row is None else Delivery(*row)

    def take(self) -> Delivery | None:
        """Take the oldest message that nobody has; others do not see it for `VISIBLE_AGAIN_S`."""
        now = time.time()
        rows = self._connection.execute(
            "UPDATE messages SET visible_at = ? WHERE id ="
            " (SELECT id FROM messages WHERE visible_at <= ? ORDER BY id LIMIT 1)"
            " RETURNING id, topic, body",
            (now + VISIBLE_AGAIN_S, now),
        ).fetchall()
        return Delivery(*rows[0]) if rows else None

    def delete(self, message: int) -> None:
        """Remove a message that is done."""
        self._connection.execute("DELETE FROM messages WHERE id = ?", (message,))

    def holds(self, message: int) -> bool:
        """Whether a message is still to be done."""
        found = self._connection.execute("SELECT 1 FROM messages WHERE id = ?", (message,))
        return found.fetchone() is not None

    def counts(self) -> tuple[int, int]:
        """Return how many messages there have been, and how many of them are still to be done."""
        sent, waiting = self._connection.execute(
            "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'messages'), 0),"
            " (SELECT count(*) FROM messages)"
        ).fetchone()
        return sent, waiting


def connect(file: Path) -> sqlite3.Connection:
    """Open a file as most programs that care do: WAL, waiting for others, autocommit until BEGIN.

    A killed process loses nothing in these settings; only a power cut could.
    """
    connection = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
