"""Loads the `.sql` files: named statements, and numbered migrations; runs inserts of many rows."""

from __future__ import annotations

import re
import sqlite3
from functools import cache
from importlib.resources import files
from typing import Any

from procession.errors import ConfigurationError

DEFAULT_PREFIX = "procession_"
_PREFIX = re.compile(r"[a-z][a-z0-9_]{0,30}_")
_RECORD = """
INSERT INTO procession_meta (name, value) VALUES ('schema', {number})
ON CONFLICT (name) DO UPDATE SET value = excluded.value;
"""
_FOLDER = files("procession.stores") / "sql" / "sqlite"


def check_prefix(prefix: str) -> str:
    """Return a table prefix that is safe inside SQL text.

    Raises:
        ConfigurationError: it is not 2 to 32 of a-z, 0-9 and _, from a letter to an underscore.
    """
    if not _PREFIX.fullmatch(prefix):
        raise ConfigurationError(
            f"table prefix {prefix!r}: use 2 to 32 of a-z, 0-9 and _, starting with a letter and "
            "ending with _, such as 'procession_'"
        )
    return prefix


@cache
def statements(prefix: str = DEFAULT_PREFIX) -> dict[str, str]:
    """Return the statements of queries.sql by name.

    The text ends with a comment that no user's statement has, so that the connection's statement
    cache never hands a handler a statement that was prepared for us.
    """
    text = (_FOLDER / "queries.sql").read_text("utf-8").replace(DEFAULT_PREFIX, prefix)
    named = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:]
    found = {}
    for name, body in zip(named[::2], named[1::2], strict=True):
        lines = [line for line in body.splitlines() if not line.startswith("--")]
        found[name] = "\n".join(lines).strip().rstrip(";") + f" /* procession {name} */"
    return found


# Many rows a statement are a third of the cost a row. Few sizes, since each is a text to prepare.
ROWS_A_STATEMENT = (64, 8, 1)


@cache
def many_rows(statement: str, rows: int) -> str:
    """Return an INSERT of one row as an INSERT of several."""
    head, row, tail = re.fullmatch(r"(.*VALUES )(\(.*\))(.*)", statement, re.DOTALL).groups()  # type: ignore[union-attr]  # our own text
    return head + ", ".join([row] * rows) + tail


def insert_rows(
    connection: sqlite3.Connection, statement: str, values: list[Any], width: int
) -> None:
    """Run an INSERT for all rows of `values`, which lists them one after the other, `width` values
    a row.

    Bytes are best given as bytearray: the driver looks for an adapter of each `bytes`, which takes
    more than four times as long as to bind it.
    """
    start, left = 0, len(values) // width
    for rows in ROWS_A_STATEMENT:
        if left < rows:
            continue
        many, step = many_rows(statement, rows), rows * width
        for _ in range(left // rows):
            connection.execute(many, values[start : start + step])
            start += step
        left %= rows


@cache
def migrations(prefix: str = DEFAULT_PREFIX) -> tuple[tuple[int, str, str], ...]:
    """Return the migrations as (number, name, SQL text), in order. Each records its number."""
    found = []
    for file in sorted((_FOLDER / "migrations").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            text = file.read_text("utf-8") + _RECORD.format(number=int(number))
            found.append((int(number), name, text.replace(DEFAULT_PREFIX, prefix)))
    return tuple(found)


SCHEMA_VERSION = max(number for number, _, _ in migrations())
