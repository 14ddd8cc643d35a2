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


ROWS_A_STATEMENT = 50


@cache
def many_rows(statement: str) -> str:
    """Return an INSERT of one row as an INSERT of 50: a third cheaper a row.

    Parameters with a number (`?1`) are shared by all rows. They stand first in the row: SQLite
    numbers each plain `?` one higher than the highest before it.
    """
    head, row, tail = re.fullmatch(r"(.*VALUES )(\(.*\))(.*)", statement, re.DOTALL).groups()  # type: ignore[union-attr]  # our own text
    return head + ", ".join([row] * ROWS_A_STATEMENT) + tail


def insert_rows(
    connection: sqlite3.Connection,
    statement: str,
    shared: tuple[Any, ...],
    values: list[Any],
    width: int,
) -> None:
    """Run an INSERT for all rows of `values`, which lists them one after the other.

    Args:
        shared: values of the statement's numbered parameters.
        values: `width` values a row.
    """
    step = ROWS_A_STATEMENT * width
    whole = len(values) // step * step
    if whole:
        many = many_rows(statement)
        for start in range(0, whole, step):
            connection.execute(many, (*shared, *values[start : start + step]))
    for start in range(whole, len(values), width):
        connection.execute(statement, (*shared, *values[start : start + width]))


@cache
def migrations(prefix: str = DEFAULT_PREFIX) -> tuple[tuple[int, str, str], ...]:
    """Return the migrations as (number, name, SQL text), in order."""
    found = []
    for file in sorted((_FOLDER / "migrations").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append(
                (int(number), name, file.read_text("utf-8").replace(DEFAULT_PREFIX, prefix))
            )
    return tuple(found)


SCHEMA_VERSION = max(number for number, _, _ in migrations())
