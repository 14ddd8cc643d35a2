"""Files that are no database of ours: each is named, with what to do, and left as it was."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from tests.driving import column, new_app, run_until_idle, sql

from procession import Inbox
from procession.errors import ConfigurationError, StoreUnavailable


@pytest.fixture
def database(tmp_path):
    """A database of ours, closed, as bytes."""
    app = new_app(tmp_path)
    app.queue("q")
    app.send("q", {"n": 1})
    app.close()
    content = (tmp_path / "t.db").read_bytes()
    (tmp_path / "t.db").unlink()
    return content


DAMAGES = {
    "truncated": (lambda content: content[: len(content) // 2], "damaged: restore it"),
    "truncated in the header": (lambda content: content[:60], "damaged: restore it"),
    "a page overwritten": (
        lambda content: content[:4096] + b"\xff" * 8192 + content[12_288:],
        "damaged: restore it",
    ),
    "wrong magic": (lambda content: b"SQLite formed 3\0" + content[16:], "not an SQLite database"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_left_alone(tmp_path, database, damage, says):
    content = damage(database)
    (tmp_path / "t.db").write_bytes(content)
    app = new_app(tmp_path)
    app.queue("q")
    for use in (app.open, app.status, lambda: app.send("q", {})):
        with pytest.raises((StoreUnavailable, ConfigurationError), match=rf"t\.db.*{says}"):
            use()
    assert (tmp_path / "t.db").read_bytes() == content


SCHEMAS = {
    "a table of our name": "CREATE TABLE procession_messages (id INTEGER PRIMARY KEY)",
    "a view of our name": "CREATE VIEW procession_inbox AS SELECT 1",
    "an index of our name": "CREATE TABLE x (a); CREATE INDEX procession_subscriptions ON x (a)",
    "another meta": "CREATE TABLE procession_meta (foo)",
    "an empty meta": "CREATE TABLE procession_meta (name TEXT, value INTEGER)",
    "a version that is none": "CREATE TABLE procession_meta (name, value);"
    "INSERT INTO procession_meta VALUES ('schema', 'abc')",
    "a version without tables": "CREATE TABLE procession_meta (name, value);"
    "INSERT INTO procession_meta VALUES ('schema', 1)",
}


def schema(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()


@pytest.mark.parametrize("script", SCHEMAS.values(), ids=SCHEMAS)
def test_another_applications_tables_of_our_names_are_told_and_nothing_is_changed(tmp_path, script):
    with closing(sqlite3.connect(tmp_path / "t.db")) as connection:
        connection.executescript(script)
    before = schema(tmp_path / "t.db")
    app = new_app(tmp_path)
    app.queue("q")
    with pytest.raises(ConfigurationError, match=r"t\.db.*not Procession's.*table_prefix="):
        app.send("q", {})
    assert schema(tmp_path / "t.db") == before

    ours = new_app(tmp_path, table_prefix="ours_")
    ours.queue("q")
    ours.send("q", {})
    assert [status.waiting for status in ours.status()] == [1]
    ours.close()


def test_another_applications_tables_stay_beside_ours(tmp_path):
    with closing(sqlite3.connect(tmp_path / "t.db")) as connection:
        connection.executescript(
            "CREATE TABLE customers (name); INSERT INTO customers VALUES ('a')"
        )
    app = new_app(tmp_path)
    seen = []

    @app.consumer("q", name="c")
    def handle(payload: dict):
        seen.append(payload)

    app.send("q", {})
    run_until_idle(app)
    assert len(seen) == 1
    assert column(app, "SELECT name FROM customers") == ["a"]
    app.close()


def test_a_table_that_was_dropped_while_in_use_is_told_to_senders_and_operators(make):
    app = make()
    app.queue("q")
    app.send("q", {})
    sql(app, "DROP TABLE procession_messages")
    for use in (lambda: app.send("q", {}), app.status):
        with pytest.raises(ConfigurationError, match="no such table: procession_messages"):
            use()


def test_an_error_of_the_store_names_the_database(make):
    app = make(settings={"busy_ms": 20})
    app.queue("q")
    app.send("q", {})
    with closing(sqlite3.connect(app.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=r"t\.db stayed locked for 0.02 s"):
            app.send("q", {})
        other.execute("ROLLBACK")


def test_the_library_tells_of_another_applications_tables_and_changes_nothing(tmp_path):
    with closing(sqlite3.connect(tmp_path / "t.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE procession_messages (id INTEGER PRIMARY KEY)")
        with pytest.raises(ConfigurationError, match="not Procession's"):
            Inbox.prepare(connection)
    assert [name for _, name, _ in schema(tmp_path / "t.db")] == ["procession_messages"]
