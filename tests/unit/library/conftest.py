"""A file with the tables and a business table, and connections to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from procession import Inbox


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "t.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        Inbox.prepare(connection)
        connection.execute(
            "CREATE TABLE effect (id INTEGER PRIMARY KEY, mark TEXT, parent REFERENCES effect)"
        )
    return path


@pytest.fixture
def connect(file: Path) -> Iterator[Callable[..., sqlite3.Connection]]:
    opened: list[sqlite3.Connection] = []

    def connect(**options: Any) -> sqlite3.Connection:
        connection = sqlite3.connect(file, **{"timeout": 0.05, **options})
        opened.append(connection)
        if not connection.in_transaction:
            connection.execute("PRAGMA synchronous = OFF")
        return connection

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def connection(connect: Callable[..., sqlite3.Connection]) -> sqlite3.Connection:
    return connect()


@pytest.fixture
def marks(connect: Callable[..., sqlite3.Connection]) -> Callable[[], list[str]]:
    """Return what is committed, as another program sees it."""
    reader = connect(isolation_level=None)
    return lambda: [row[0] for row in reader.execute("SELECT mark FROM effect ORDER BY rowid")]
