"""SQLite without a queue: the raw loops that everything is compared with, and the business tables.

FULL, write-ahead log, the standard library's driver: what the store uses, too.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.measure import Timing, quiet
from bench.workload import Expected, Sent, row_names

RAW_BATCH = 1_000
INBOX = "INSERT INTO inbox (id, at) VALUES (?, ?) ON CONFLICT DO NOTHING RETURNING id"
ADD = "UPDATE orders SET balance = balance + :amount, n = n + 1"
ORDER = "disorder = disorder + (last_seq + 1 <> :seq), last_seq = :seq"
EFFECT = f"{ADD}, {ORDER} WHERE id = :row"
SHARED_EFFECT = f"{ADD} WHERE id = :row"


def by_place(statement: str) -> str:
    """Return the statement with `?` for each `:name`, in the order of the text."""
    return re.sub(r":\w+", "?", statement)


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA wal_autocheckpoint = 4000")
    return connection


def make_rows(connection: sqlite3.Connection, names: Iterable[str]) -> None:
    """Make the business table with a row for each name."""
    connection.execute(
        "CREATE TABLE orders (id TEXT PRIMARY KEY, balance INTEGER NOT NULL DEFAULT 0, "
        "n INTEGER NOT NULL DEFAULT 0, last_seq INTEGER NOT NULL DEFAULT 0, "
        "disorder INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID"
    )
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO orders (id) VALUES (?)", [(name,) for name in names])
    connection.execute("COMMIT")


def make_inbox(connection: sqlite3.Connection) -> None:
    """Make the table of the raw loops."""
    connection.execute(
        "CREATE TABLE inbox (id TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID"
    )


def check_rows(connection: sqlite3.Connection, wanted: Expected, *, shared: bool = False) -> None:
    """Stop the benchmark where the business rows are not exactly what they must be."""
    found = {
        name: (balance, n)
        for name, balance, n in connection.execute("SELECT id, balance, n FROM orders WHERE n > 0")
    }
    assert found == wanted.rows, "sums or numbers of effects differ"
    if not shared:  # a shared row has no sequence of its own
        (disorder,) = connection.execute("SELECT sum(disorder) FROM orders").fetchone()
        assert disorder == wanted.gaps, f"{disorder} effects out of order, {wanted.gaps} expected"


def raw(
    path: Path, sent: Sequence[Sent], wanted: Expected, *, batch: int, shared: bool = False
) -> Timing:
    """Insert the key and run the effect, `batch` messages a transaction, without any queue."""
    connection = connect(path)
    make_rows(connection, row_names(shared=shared))
    make_inbox(connection)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # The quickest way this driver has: parameters by place, made beforehand.
    effect, now = by_place(SHARED_EFFECT if shared else EFFECT), int(time.time())
    rows = [
        ((m.id, now), (m.amount, m.row) if shared else (m.amount, m.seq, m.seq, m.row))
        for m in sent
    ]
    execute = connection.execute
    quiet()
    timing = Timing(len(sent))
    for start in range(0, len(rows), batch):
        execute("BEGIN IMMEDIATE")
        for key, values in rows[start : start + batch]:
            if execute(INBOX, key).fetchone() is not None:
                execute(effect, values)
        execute("COMMIT")
    timing.stop()
    check_rows(connection, wanted, shared=shared)
    (keys,) = execute("SELECT count(*) FROM inbox").fetchone()
    assert keys == wanted.keys
    connection.close()
    return timing
