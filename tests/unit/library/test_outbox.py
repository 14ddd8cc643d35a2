"""What is sent on the user's connection leaves if and only if the user's transaction commits."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.driving import Driver, new_app, run_until_idle

from procession import App, Context, Inbox, MessageError, Outbox
from procession.errors import ConfigurationError, TransientError

Connect = Callable[..., sqlite3.Connection]


@pytest.fixture
def got() -> list[Any]:
    return []


@pytest.fixture
def app(file: Path, tmp_path: Path, got: list[Any]) -> Iterator[App]:
    """An app on the connections' file, that keeps what it consumed."""
    app = new_app(tmp_path)
    app.queue("q", session="s")
    app.queue("window", duplicate_window=timedelta(hours=1))
    app.topic("nobody")

    @app.consumer("q", name="c")
    def consume(payload: dict, ctx: Context) -> None:
        got.append((payload["n"], ctx.message.session))

    app.open()
    yield app
    app.close()


def test_G4_what_is_sent_arrives_with_the_commit_and_not_before(
    connection: sqlite3.Connection, app: App, got: list[Any]
) -> None:
    outbox = Outbox(connection)
    connection.execute("INSERT INTO effect (mark) VALUES ('order')")
    outbox.send("q", {"s": "a", "n": 1}, session="a")
    outbox.send("q", {"s": "a", "n": 2}, session="a")
    assert outbox.flush() == 2
    assert [status.waiting for status in app.status() if status.consumer == "c"] == [0]
    connection.commit()
    run_until_idle(app)
    assert got == [(1, "a"), (2, "a")]


def test_G4_what_is_rolled_back_never_arrives(
    connection: sqlite3.Connection, app: App, got: list[Any]
) -> None:
    with Outbox(connection) as outbox:
        outbox.send("q", {"s": "a", "n": 1}, session="a")
    connection.rollback()
    run_until_idle(app)
    assert got == []


def test_a_block_flushes_at_its_end_and_forgets_after_an_error(
    connection: sqlite3.Connection, app: App, got: list[Any]
) -> None:
    with Outbox(connection) as outbox:
        outbox.send("q", {"s": "a", "n": 1}, session="a")
        assert not connection.in_transaction, "nothing is written before the end"
    connection.commit()
    outbox = Outbox(connection)
    outbox.send("q", {"s": "a", "n": 2}, session="a")
    with pytest.raises(ZeroDivisionError), outbox:
        raise ZeroDivisionError
    assert outbox.flush() == 0
    run_until_idle(app)
    assert got == [(1, "a")]


def test_an_outbox_inside_of_a_once_block_shares_its_fate(
    connection: sqlite3.Connection, app: App, got: list[Any]
) -> None:
    inbox = Inbox(connection, consumer="billing")

    def send_and_fail() -> None:
        with inbox.once("m1", payload=b""):
            with Outbox(connection) as outbox:
                outbox.send("q", {"s": "a", "n": 1}, session="a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        send_and_fail()
    for _ in range(2):
        with inbox.once("m1", payload=b"") as first, Outbox(connection) as outbox:
            if first:
                outbox.send("q", {"s": "a", "n": 2}, session="a")
        connection.commit()
    run_until_idle(app)
    assert got == [(2, "a")]


def test_numbers_are_drawn_in_the_flush_so_commits_give_the_order(
    connect: Connect, app: App, got: list[Any]
) -> None:
    early, late = connect(), connect()
    outbox = Outbox(early)
    outbox.send("q", {"s": "a", "n": 2}, session="a")
    with Outbox(late) as other:
        other.send("q", {"s": "a", "n": 1}, session="a")
    late.commit()
    outbox.flush()
    early.commit()
    run_until_idle(app)
    assert got == [(1, "a"), (2, "a")]


def test_the_apps_rules_hold_where_the_app_is_given(
    connection: sqlite3.Connection, app: App, got: list[Any]
) -> None:
    with Outbox(connection, app=app) as outbox:
        outbox.send("q", {"s": "a", "n": 1})
        with pytest.raises(MessageError, match="session-mismatch"):
            outbox.send("q", {"s": "a", "n": 2}, session="b")
        with pytest.raises(ConfigurationError, match="elsewhere"):
            outbox.send("elsewhere", 1)
    connection.commit()
    run_until_idle(app)
    assert got == [(1, "a")]


@pytest.mark.parametrize(
    ("queue", "why"), [("elsewhere", "not declared"), ("nobody", "no subscriber")]
)
def test_a_refused_flush_writes_nothing_and_leaves_the_transaction(
    connection: sqlite3.Connection, app: App, queue: str, why: str
) -> None:
    connection.execute("INSERT INTO effect (mark) VALUES ('e')")
    outbox = Outbox(connection)
    outbox.send("window", 1, message_id="m1")
    outbox.send(queue, 1)
    with pytest.raises(ConfigurationError, match=why):
        outbox.flush()
    connection.commit()
    assert connection.execute("SELECT mark FROM effect").fetchall() == [("e",)]
    assert connection.execute("SELECT count(*) FROM procession_messages").fetchone() == (0,)
    with Outbox(connection) as again:
        again.send("window", 1, message_id="m1")
        assert again.flush() == 1, "the refused flush left no id in the duplicate window"


def test_an_id_within_the_duplicate_window_is_not_stored_again(
    connection: sqlite3.Connection, app: App
) -> None:
    outbox = Outbox(connection)
    for expected in (1, 0):
        outbox.send("window", 1, message_id="m1")
        assert outbox.flush() == expected


def test_C03_messages_are_kept_for_another_try_where_the_file_is_locked(
    connection: sqlite3.Connection, connect: Connect, app: App, got: list[Any]
) -> None:
    other = connect()
    other.execute("BEGIN IMMEDIATE")
    outbox = Outbox(connection)
    outbox.send("q", {"s": "a", "n": 1}, session="a")
    with pytest.raises(TransientError):
        outbox.flush()
    other.rollback()
    assert outbox.flush() == 1
    connection.commit()
    run_until_idle(app)
    assert got == [(1, "a")]


def test_a_second_flush_sends_nothing_again(
    connection: sqlite3.Connection, app: App, got: list[Any]
) -> None:
    outbox = Outbox(connection)
    outbox.send("q", {"s": "a", "n": 1}, session="a")
    assert [outbox.flush(), outbox.flush()] == [1, 0]
    outbox.send("q", {"s": "a", "n": 2}, session="a")
    assert outbox.flush() == 1
    connection.commit()
    run_until_idle(app)
    assert got == [(1, "a"), (2, "a")]


def test_options_of_a_send_are_those_of_an_app(
    connection: sqlite3.Connection, app: App, got: list[Any]
) -> None:
    with Outbox(connection) as outbox:
        outbox.send("q", {"s": "a", "n": 1}, session="a", after=timedelta(hours=1))
        message_id = outbox.send("q", {"s": "b", "n": 2}, session="b", headers={"tenant": "x"})
    connection.commit()
    assert len(message_id) == 36
    with Driver(app) as driver:
        driver.run_ready()
    assert got == [(2, "b")]
    (status,) = [status for status in app.status() if status.consumer == "c"]
    assert status.scheduled == 1


def test_the_users_row_factory_does_not_reach_our_statements(
    connection: sqlite3.Connection, app: App, got: list[Any]
) -> None:
    connection.row_factory, connection.text_factory = (lambda _, row: {"row": row}), bytes
    with Outbox(connection) as outbox:
        outbox.send("q", {"s": "a", "n": 1}, session="a")
    connection.commit()
    run_until_idle(app)
    assert got == [(1, "a")]


def test_an_empty_outbox_opens_no_transaction(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "no.db", isolation_level=None)) as connection:
        with Outbox(connection):
            pass
        assert Outbox(connection).flush() == 0
