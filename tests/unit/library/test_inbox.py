"""What the inbox answers, and that its marker shares the fate of the user's transaction."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procession import Conflict, Inbox, MessageError, Verdict
from procession.errors import ConfigurationError

Marks = Callable[[], list[str]]
Connect = Callable[..., sqlite3.Connection]


def deliver(
    connection: sqlite3.Connection, key: Any = "m1", payload: Any = b"body", mark: str = "e"
) -> bool:
    """Handle one delivery as a user's loop does."""
    with Inbox(connection, consumer="billing").once(key, payload=payload) as first:
        if first:
            connection.execute("INSERT INTO effect (mark) VALUES (?)", (mark,))
    connection.commit()
    return bool(first)


def test_a_message_takes_effect_once(connection: sqlite3.Connection, marks: Marks) -> None:
    assert [deliver(connection), deliver(connection), deliver(connection, "m2")] == [
        True,
        False,
        True,
    ]
    assert marks() == ["e", "e"]


def test_each_consumer_has_its_own_keys(connection: sqlite3.Connection) -> None:
    for consumer in ("billing", "shipping"):
        with Inbox(connection, consumer=consumer).once("m1", payload=b"") as first:
            assert first
    connection.commit()


def test_the_answer_tells_verdict_end_and_time(connection: sqlite3.Connection) -> None:
    inbox = Inbox(connection, consumer="billing")
    with inbox.once("m1", payload=b"body") as fresh:
        assert (fresh.verdict, fresh.end, fresh.recorded_at_ms) == (Verdict.FRESH, None, None)
    connection.commit()
    with inbox.once("m1", payload=b"body") as again:
        assert (again.verdict, again.end) == (Verdict.DUPLICATE, "processed")
    recorded = connection.execute("SELECT recorded_ms FROM procession_inbox").fetchone()[0]
    assert again.recorded_at_ms == recorded


def test_nothing_is_committed_before_the_user_commits(
    connection: sqlite3.Connection, connect: Connect
) -> None:
    with Inbox(connection, consumer="billing").once("m1", payload=b"body"):
        pass
    other = connect()
    assert other.execute("SELECT count(*) FROM procession_inbox").fetchone() == (0,)
    connection.rollback()
    assert deliver(connection)


def test_X04_T04_a_block_that_raises_leaves_no_marker(
    connection: sqlite3.Connection, marks: Marks
) -> None:
    connection.execute("CREATE TABLE only (n INTEGER UNIQUE)")
    inbox = Inbox(connection, consumer="billing")
    with pytest.raises(sqlite3.IntegrityError), inbox.once("m1", payload=b"body"):
        connection.executemany("INSERT INTO only VALUES (?)", [(1,), (1,)])
    connection.commit()
    assert connection.execute("SELECT count(*) FROM only").fetchone() == (0,)
    assert deliver(connection)
    assert marks() == ["e"]


def test_T04_a_commit_that_fails_leaves_no_marker(
    connection: sqlite3.Connection, marks: Marks
) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(
        "CREATE TABLE late (parent INTEGER REFERENCES effect DEFERRABLE INITIALLY DEFERRED)"
    )
    with Inbox(connection, consumer="billing").once("m1", payload=b"body") as first:
        assert first
        connection.execute("INSERT INTO late VALUES (404)")
    with pytest.raises(sqlite3.IntegrityError):
        connection.commit()
    connection.rollback()
    assert deliver(connection)
    assert marks() == ["e"]


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO effect (mark, parent) VALUES ('e', 404)",
        "INSERT INTO only (mark) VALUES ('there')",
        """INSERT INTO procession_inbox (subscription, key, state, fingerprint, recorded_ms)
        SELECT subscription, key, state, fingerprint, 0 FROM procession_inbox""",
    ],
    ids=["foreign key", "unique column of a business table", "unique key of the inbox itself"],
)
def test_X05_an_integrity_error_of_the_block_is_no_duplicate(
    connection: sqlite3.Connection, statement: str
) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("CREATE TABLE only (mark TEXT UNIQUE)")
    connection.execute("INSERT INTO only VALUES ('there')")
    connection.commit()
    inbox = Inbox(connection, consumer="billing")
    with pytest.raises(sqlite3.IntegrityError), inbox.once("m1", payload=b"body"):
        connection.execute(statement)
    connection.commit()
    assert deliver(connection)


def test_the_same_key_with_another_payload_raises_and_takes_no_effect(
    connection: sqlite3.Connection, marks: Marks
) -> None:
    deliver(connection, payload={"amount": 1})
    with pytest.raises(Conflict, match="'m1' of consumer 'billing'") as caught:
        deliver(connection, payload={"amount": 2})
    assert caught.value.reason == "conflict"
    assert marks() == ["e"]
    assert not deliver(connection, payload={"amount": 1}), "the first payload stays the known one"


def test_a_conflict_is_told_where_the_user_asks_for_it(connection: sqlite3.Connection) -> None:
    deliver(connection, payload=b"one")
    inbox = Inbox(connection, consumer="billing")
    with inbox.once("m1", payload=b"two", on_conflict="tell") as first:
        assert not first
        assert (first.verdict, first.end) == (Verdict.CONFLICT, "processed")


def test_payloads_are_compared_as_an_app_compares_them(connection: sqlite3.Connection) -> None:
    assert deliver(connection, payload={"a": 1, "b": 2.0})
    assert not deliver(connection, payload={"b": 2, "a": 1})
    with pytest.raises(Conflict):
        deliver(connection, payload=b'{"b": 2, "a": 1}')
    assert not deliver(connection, payload=b'{"a":1,"b":2}')


@pytest.mark.parametrize("key", ["ä-7", 7, uuid.UUID(int=7), b"m-7"])
def test_a_key_is_a_str_an_int_a_uuid_or_bytes(connection: sqlite3.Connection, key: Any) -> None:
    assert deliver(connection, key)
    assert not deliver(connection, key if isinstance(key, bytes) else str(key))


@pytest.mark.parametrize("key", [None, "", "  ", "a\0b", "x" * 513, 1.5, True, b"\xff"])
def test_what_is_no_key_is_refused_and_opens_no_transaction(
    connection: sqlite3.Connection, key: Any
) -> None:
    with pytest.raises(MessageError):
        deliver(connection, key)
    assert not connection.in_transaction


def test_a_payload_that_has_no_json_is_refused(connection: sqlite3.Connection) -> None:
    with pytest.raises(MessageError, match="unserializable"):
        deliver(connection, payload={"a": object()})


def test_arguments_are_checked_when_the_inbox_is_made(connection: sqlite3.Connection) -> None:
    with pytest.raises(ConfigurationError, match="consumer"):
        Inbox(connection, consumer=" ")
    with pytest.raises(ConfigurationError, match="prefix"):
        Inbox(connection, consumer="b", table_prefix="x; DROP TABLE")
    with pytest.raises(ConfigurationError, match=r"sqlite3\.Connection"):
        Inbox("t.db", consumer="b")  # type: ignore[arg-type]
    inbox = Inbox(connection, consumer="b")
    wrong: Any = "ignore"
    with pytest.raises(ConfigurationError, match="on_conflict"):
        inbox.once("m1", payload=b"", on_conflict=wrong).__enter__()


@pytest.mark.parametrize("factory", [sqlite3.Row, lambda _, row: {"row": row}])
def test_the_users_factories_neither_hinder_nor_change(
    connection: sqlite3.Connection, factory: Any
) -> None:
    connection.row_factory, connection.text_factory = factory, bytes
    assert [deliver(connection), deliver(connection)] == [True, False]
    with Inbox(connection, consumer="billing").once("m1", payload=b"body") as again:
        assert connection.row_factory is factory
        assert connection.text_factory is bytes
    assert again.end == "processed"


def test_no_table_is_made_unasked(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "empty.db")
    with pytest.raises(ConfigurationError, match=r"Inbox\.prepare"):
        deliver(connection)
    assert not connection.in_transaction
    assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.close()


def test_prepare_is_harmless_twice_and_keeps_what_is_there(
    connection: sqlite3.Connection,
) -> None:
    deliver(connection)
    Inbox.prepare(connection)
    assert not connection.in_transaction
    assert not deliver(connection)


def test_prepare_in_an_open_transaction_is_the_users_to_commit(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "new.db")
    connection.execute("BEGIN IMMEDIATE")
    Inbox.prepare(connection)
    assert connection.in_transaction
    connection.rollback()
    assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.close()


def test_tables_of_another_release_are_refused_in_words(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE procession_meta SET value = 99 WHERE name = 'schema'")
    connection.commit()
    with pytest.raises(ConfigurationError, match=r"version 99.*newer release"):
        deliver(connection)
    with pytest.raises(ConfigurationError, match=r"version 99.*newer release"):
        Inbox.prepare(connection)
    assert not connection.in_transaction


def test_a_file_may_hold_two_inboxes_under_two_prefixes(connection: sqlite3.Connection) -> None:
    deliver(connection)
    Inbox.prepare(connection, table_prefix="mine_")
    with Inbox(connection, consumer="billing", table_prefix="mine_").once(
        "m1", payload=b"body"
    ) as first:
        assert first


def test_an_inbox_in_memory_works_like_one_in_a_file() -> None:
    connection = sqlite3.connect(":memory:")
    Inbox.prepare(connection)
    connection.execute("CREATE TABLE effect (mark TEXT)")
    assert [deliver(connection), deliver(connection)] == [True, False]
    connection.close()
