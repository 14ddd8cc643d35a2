"""Loads the `.sql` files of a dialect: named statements, and numbered migrations."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from procession.errors import ConfigurationError

DEFAULT_PREFIX = "procession_"
_FOLDER = files("procession.stores.sql")
_PREFIX = re.compile(r"[a-z][a-z0-9_]{0,30}_")


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
def named_statements(dialect: str) -> dict[str, str]:
    """Return the statements of all of a dialect's `.sql` files by name, without their comments."""
    found: dict[str, str] = {}
    for file in sorted((_FOLDER / dialect).iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".sql"):
            continue
        parts = re.split(r"^-- name: (\w+)\n", file.read_text("utf-8"), flags=re.MULTILINE)[1:]
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            lines = [line.split("-- ")[0].rstrip() for line in body.splitlines()]
            found[name] = "\n".join(line for line in lines if line).strip().rstrip(";")
    return found


def renamed(text: str, prefix: str, schema: str = "") -> str:
    """Return SQL text with the tables' names as they are in this database. Both are checked."""
    where = f'"{schema}".' if schema else ""
    return text.replace(DEFAULT_PREFIX, f"{where}{prefix}")


@cache
def migrations(dialect: str) -> tuple[tuple[int, str, str], ...]:
    """Return a dialect's migrations as (number, name, SQL text), in order."""
    found = []
    folder = _FOLDER / dialect / "migrations"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append((int(number), name, file.read_text("utf-8")))
    return tuple(found)
