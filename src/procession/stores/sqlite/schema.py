"""The schema in a file: its version, read and brought up to date. Never goes back."""

from __future__ import annotations

import sqlite3

from procession.errors import ConfigurationError
from procession.stores.sqlite.connection import ours
from procession.stores.sqlite.statements import SCHEMA_VERSION, migrations


def schema_version(connection: sqlite3.Connection, prefix: str, where: object) -> int:
    """Return the schema's version, 0 where there is none.

    Args:
        connection: of the database.
        prefix: of the tables' names.
        where: the database, for the errors.

    Raises:
        ConfigurationError: it is newer than this code, or the file is no database.
    """
    try:
        found = connection.execute(
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (f"{prefix}meta",)
        ).fetchone()
        if found is None:
            return 0
        row = connection.execute(f"SELECT value FROM {prefix}meta WHERE name = 'schema'").fetchone()
    except sqlite3.DatabaseError as error:
        raise ours(error, f"database {where}") or not_ours(prefix, where, error) from error
    try:
        return _known(0 if row is None else int(row[0]), where)
    except (TypeError, ValueError) as error:
        raise not_ours(prefix, where, error) from error


def not_ours(prefix: str, where: object, fault: Exception) -> ConfigurationError:
    """Return the error for tables that are named like ours and are not as ours are."""
    return ConfigurationError(
        f"database {where}: what is named {prefix}… there is not Procession's, or was changed by "
        f"another program ({fault}). Nothing was changed: check the path, restore the database, or "
        "give Procession's tables another name with table_prefix="
    )


def _known(version: int, where: object) -> int:
    if version > SCHEMA_VERSION:
        raise ConfigurationError(
            f"database {where} has schema version {version}, this code knows {SCHEMA_VERSION}: it "
            "was migrated by a newer release; upgrade this one"
        )
    return version


def bring_up_to_date(connection: sqlite3.Connection, prefix: str, where: object) -> None:
    """Run the migrations that are missing, inside an open write transaction: another process may
    have been first while this one waited for its turn.

    Raises:
        ConfigurationError: as `schema_version`, or a name is taken.
    """
    version = schema_version(connection, prefix, where)
    for number, _, text in migrations(prefix):
        if number > version:
            try:
                _run_script(connection, text)
            except sqlite3.DatabaseError as error:
                raise ours(error, f"database {where}") or not_ours(prefix, where, error) from error


def _run_script(connection: sqlite3.Connection, text: str) -> None:
    """Run statements one by one: `executescript` would commit the open transaction first."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
