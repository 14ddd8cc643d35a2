"""Whose transaction it is: opened in time, never ended, never poisoned, never left behind."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import threading
from collections.abc import Callable

import pytest

from procession import Inbox, Outbox, TransactionMisuse, TransientError, Verdict

Marks = Callable[[], list[str]]
Connect = Callable[..., sqlite3.Connection]
modern = pytest.mark.skipif(sys.version_info < (3, 12), reason="autocommit came with Python 3.12")


def once(connection: sqlite3.Connection, key: str = "m1", mark: str = "e") -> bool:
    with Inbox(connection, consumer="billing").once(key, payload=b"body") as first:
        if first:
            connection.execute("INSERT INTO effect (mark) VALUES (?)", (mark,))
    return bool(first)


def fail(connection: sqlite3.Connection, key: str = "m1", mark: str = "half") -> None:
    """Handle a delivery whose block raises after a statement."""
    with Inbox(connection, consumer="billing").once(key, payload=b"body"):
        connection.execute("INSERT INTO effect (mark) VALUES (?)", (mark,))
        raise ZeroDivisionError


# ---- opened in time ------------------------------------------------------------------------------


def test_the_write_lock_is_taken_on_entry(connection: sqlite3.Connection, connect: Connect) -> None:
    other = connect(isolation_level=None, timeout=0)
    inbox = Inbox(connection, consumer="billing")
    with inbox.once("m1", payload=b""), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")


def test_a_connection_that_commits_each_statement_is_refused(
    connect: Connect, marks: Marks
) -> None:
    connection = connect(isolation_level=None)
    with pytest.raises(TransactionMisuse, match="BEGIN IMMEDIATE"):
        once(connection)
    outbox = Outbox(connection)
    outbox.send("q", 1)
    with pytest.raises(TransactionMisuse, match="BEGIN IMMEDIATE"):
        outbox.flush()
    assert marks() == []


@pytest.mark.parametrize("how", ["statement", "begin"])
def test_it_works_there_in_a_transaction_of_the_users(
    connect: Connect, marks: Marks, how: str
) -> None:
    connection = connect(isolation_level=None)
    for _ in range(2):
        if how == "begin":
            Inbox(connection, consumer="billing").begin()
        else:
            connection.execute("BEGIN IMMEDIATE")
        once(connection)
        connection.execute("COMMIT")
    assert marks() == ["e"]


@modern
def test_autocommit_True_is_refused_and_autocommit_False_has_its_transaction(
    connect: Connect, marks: Marks
) -> None:
    with pytest.raises(TransactionMisuse, match="BEGIN IMMEDIATE"):
        once(connect(autocommit=True))
    connection = connect(autocommit=False)
    connection.rollback()
    for _ in range(2):
        once(connection)
        connection.commit()
    assert marks() == ["e"]


def test_begin_refuses_a_transaction_within_a_transaction(connection: sqlite3.Connection) -> None:
    inbox = Inbox(connection, consumer="billing")
    inbox.begin()
    with pytest.raises(TransactionMisuse, match="open"):
        inbox.begin()


def test_a_deferred_transaction_that_has_not_read_is_good_enough(
    connection: sqlite3.Connection, connect: Connect, marks: Marks
) -> None:
    connection.execute("BEGIN")
    other = connect()
    assert once(other)
    other.commit()
    assert not once(connection), "what was committed before the lock was there is seen"


def test_C03_a_transaction_that_read_too_early_is_told_to_begin_immediate(
    connection: sqlite3.Connection, connect: Connect, marks: Marks
) -> None:
    connection.execute("BEGIN")
    connection.execute("SELECT * FROM effect").fetchall()
    other = connect()
    once(other)
    other.commit()
    with pytest.raises(TransientError, match="BEGIN IMMEDIATE"):
        once(connection)
    assert connection.in_transaction, "it is the user's to roll back"
    connection.rollback()
    assert not once(connection)
    assert marks() == ["e"]


def test_a_cursor_that_is_still_being_read_is_told_at_once(connect: Connect, marks: Marks) -> None:
    connection, other = connect(timeout=60), connect()
    other.executemany("INSERT INTO effect (mark) VALUES (?)", [("a",), ("b",), ("c",)])
    other.commit()
    rows = connection.execute("SELECT mark FROM effect")
    rows.fetchone()
    other.execute("DELETE FROM effect")
    other.commit()
    with pytest.raises(TransientError, match="cursor"):
        once(connection)
    rows.close()
    assert once(connection)


def test_a_loop_over_a_cursor_may_record_and_commit_as_it_goes(
    connection: sqlite3.Connection,
) -> None:
    connection.execute("CREATE TABLE incoming (key TEXT)")
    connection.executemany("INSERT INTO incoming VALUES (?)", [("a",), ("b",), ("a",), ("c",)])
    connection.commit()
    answers = []
    for (key,) in connection.execute("SELECT key FROM incoming ORDER BY rowid"):
        answers.append(once(connection, key))
        connection.commit()
    assert answers == [True, True, False, True]


@pytest.mark.parametrize("begun", [False, True])
def test_C03_a_locked_database_is_told_as_a_transient_error(
    connection: sqlite3.Connection, connect: Connect, marks: Marks, begun: bool
) -> None:
    other = connect()
    other.execute("BEGIN IMMEDIATE")
    if begun:
        connection.execute("BEGIN")
    with pytest.raises(TransientError):
        once(connection)
    assert connection.in_transaction is begun
    other.rollback()
    assert once(connection)
    connection.commit()
    assert marks() == ["e"]


def test_the_connections_own_timeout_holds_and_is_kept(connect: Connect) -> None:
    connection = connect(timeout=0.25)
    once(connection)
    connection.commit()
    assert connection.execute("PRAGMA busy_timeout").fetchone() == (250,)


# ---- races ---------------------------------------------------------------------------------------


def test_C01_of_two_that_race_for_a_key_one_waits_and_is_told_duplicate(
    connect: Connect, marks: Marks
) -> None:
    winner = connect(timeout=10)
    loser = connect(timeout=10, check_same_thread=False)
    answers: list[Verdict] = []
    entered = threading.Event()

    def race() -> None:
        entered.set()
        with Inbox(loser, consumer="billing").once("m1", payload=b"body") as first:
            answers.append(first.verdict)
        loser.commit()

    thread = threading.Thread(target=race)
    with Inbox(winner, consumer="billing").once("m1", payload=b"body") as first:
        assert first
        thread.start()
        entered.wait()
        thread.join(0.1)
        assert answers == [], "it waits for the one that was first"
        winner.execute("INSERT INTO effect (mark) VALUES ('e')")
    winner.commit()
    thread.join()
    assert answers == [Verdict.DUPLICATE]
    assert marks() == ["e"]


def test_C01_the_loser_runs_where_the_first_one_rolls_back(connect: Connect, marks: Marks) -> None:
    first_one = connect(timeout=10)
    other = connect(timeout=10, check_same_thread=False)
    done: list[bool] = []
    once(first_one, mark="rolled back")
    thread = threading.Thread(target=lambda: (done.append(once(other)), other.commit()))
    thread.start()
    thread.join(0.05)
    first_one.rollback()
    thread.join()
    assert done == [True]
    assert marks() == ["e"]


# ---- never poisoned ------------------------------------------------------------------------------


def test_X06_a_duplicate_leaves_the_users_transaction_as_it_was(
    connection: sqlite3.Connection, marks: Marks
) -> None:
    once(connection)
    connection.commit()
    connection.execute("INSERT INTO effect (mark) VALUES ('before')")
    assert not once(connection)
    connection.execute("INSERT INTO effect (mark) VALUES ('after')")
    connection.commit()
    assert marks() == ["e", "before", "after"]


def test_X06_a_conflict_and_a_failed_block_leave_it_as_it_was_too(
    connection: sqlite3.Connection, marks: Marks
) -> None:
    once(connection)
    connection.commit()
    inbox = Inbox(connection, consumer="billing")
    connection.execute("INSERT INTO effect (mark) VALUES ('before')")
    with pytest.raises(Exception, match="another payload"), inbox.once("m1", payload=b"other"):
        pass
    with pytest.raises(ZeroDivisionError):
        fail(connection, "m2")
    assert connection.in_transaction
    connection.commit()
    assert marks() == ["e", "before"]


def test_X06_the_callers_savepoints_keep_working_inside_and_around(
    connection: sqlite3.Connection, marks: Marks
) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("SAVEPOINT outer_one")
    with Inbox(connection, consumer="billing").once("m1", payload=b"body") as first:
        assert first
        connection.execute("INSERT INTO effect (mark) VALUES ('kept')")
        connection.execute("SAVEPOINT mine")
        connection.execute("INSERT INTO effect (mark) VALUES ('undone')")
        connection.execute("ROLLBACK TO mine")
        connection.execute("RELEASE mine")
    assert not once(connection), "the marker outlived the block's own savepoint"
    connection.execute("ROLLBACK TO outer_one")
    assert once(connection, mark="again"), "a savepoint around both takes both back"
    connection.commit()
    assert marks() == ["again"]


def test_blocks_nest_and_an_inner_one_that_raises_keeps_the_outer(
    connection: sqlite3.Connection, marks: Marks
) -> None:
    inbox = Inbox(connection, consumer="billing")
    with inbox.once("outer", payload=b""):
        connection.execute("INSERT INTO effect (mark) VALUES ('outer')")
        with pytest.raises(ZeroDivisionError):
            fail(connection, "inner")
    connection.commit()
    assert marks() == ["outer"]
    assert once(connection, "inner")
    with inbox.once("outer", payload=b"") as first:
        assert not first


def test_a_rollback_past_an_inner_block_is_not_taken_for_the_outers_end(
    connection: sqlite3.Connection,
) -> None:
    inbox = Inbox(connection, consumer="billing")

    def handle_inner() -> None:
        with inbox.once("inner", payload=b""):
            connection.execute("ROLLBACK TO mine")

    with inbox.once("outer", payload=b""):
        connection.execute("SAVEPOINT mine")
        with pytest.raises(TransactionMisuse):
            handle_inner()
    connection.commit()
    with inbox.once("outer", payload=b"") as first:
        assert not first


def test_several_messages_may_share_a_transaction(
    connection: sqlite3.Connection, marks: Marks
) -> None:
    answers = [once(connection, key, key) for key in ("a", "b", "a", "c")]
    connection.commit()
    assert answers == [True, True, False, True]
    assert marks() == ["a", "b", "c"]


# ---- never left behind ---------------------------------------------------------------------------


def test_a_transaction_that_was_opened_for_a_failed_block_ends_with_it(
    connection: sqlite3.Connection, connect: Connect
) -> None:
    with pytest.raises(ZeroDivisionError):
        fail(connection)
    assert not connection.in_transaction
    connect(isolation_level=None, timeout=0).execute("BEGIN IMMEDIATE")


@pytest.mark.parametrize(
    "end",
    [
        sqlite3.Connection.commit,
        sqlite3.Connection.rollback,
        lambda connection: connection.executescript("SELECT 1"),
        lambda connection: connection.execute("INSERT OR ROLLBACK INTO only VALUES (1)"),
    ],
    ids=["commit", "rollback", "executescript", "a statement that rolls back all"],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_block_that_ends_the_transaction_is_an_error(
    connection: sqlite3.Connection, end: Callable[[sqlite3.Connection], object], goes_on: bool
) -> None:
    connection.execute("CREATE TABLE only (n INTEGER UNIQUE)")
    connection.execute("INSERT INTO only VALUES (1)")
    connection.commit()

    def handle() -> None:
        with Inbox(connection, consumer="billing").once("m1", payload=b"body"):
            with contextlib.suppress(sqlite3.IntegrityError):
                end(connection)
            if goes_on:
                connection.execute("INSERT INTO effect (mark) VALUES ('alone')")

    with pytest.raises(TransactionMisuse, match="ended inside the block"):
        handle()
    assert connection.in_transaction is goes_on, "what the user began is the user's to end"


def test_a_block_that_commits_and_then_fails_says_so(
    connection: sqlite3.Connection,
) -> None:
    def handle() -> None:
        with Inbox(connection, consumer="billing").once("m1", payload=b"body"):
            connection.commit()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        handle()
    assert "ended inside the block" in caught.value.__notes__[0]


def test_an_error_that_ended_the_transaction_goes_on_as_it_is(
    connection: sqlite3.Connection,
) -> None:
    connection.execute("CREATE TABLE only (n INTEGER UNIQUE)")
    connection.execute("INSERT INTO only VALUES (1)")
    connection.commit()
    with pytest.raises(sqlite3.IntegrityError):  # noqa: SIM117
        with Inbox(connection, consumer="billing").once("m1", payload=b"body"):
            connection.execute("INSERT OR ROLLBACK INTO only VALUES (1)")
    assert once(connection), "its marker went with the transaction"


def test_a_rollback_and_the_next_consumer_share_no_number(
    connection: sqlite3.Connection,
) -> None:
    billing = Inbox(connection, consumer="billing")
    with billing.once("m1", payload=b"body"):
        pass
    connection.rollback()
    with Inbox(connection, consumer="shipping").once("m1", payload=b"body"):
        pass
    connection.commit()
    with billing.once("m1", payload=b"body") as first:
        assert first


def test_a_read_only_database_is_told_as_unavailable(connect: Connect) -> None:
    connection = connect()
    connection.execute("PRAGMA query_only = ON")
    with pytest.raises(TransientError, match="cannot be written"):
        once(connection)
