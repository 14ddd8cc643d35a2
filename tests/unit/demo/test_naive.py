"""Promises that the consumers without an inbox are no straw men: each has the faults that are
shown, from the mechanism that is named, and no others."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from procession.demo import naive_queue
from procession.demo.app import LedgerText, make_tables
from procession.demo.hostile import Plan, plan_hostility
from procession.demo.ledgers import RawLine, split_lines
from procession.demo.naive import FIRST_LEDGERS, Sender, first_ledgers
from procession.demo.naive_queue import Queue, connect
from procession.demo.naive_worker import LEDGERS, TRANSACTIONS, handle
from procession.demo.producer import Books

HEADER = "InvoiceNo,StockCode,Quantity,UnitPrice\n"


def ledger(lines: int) -> str:
    return HEADER + "".join(f"536365,item{number},1,2.5\n" for number in range(lines))


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with closing(Queue(tmp_path / "queue.db")) as queue:
        yield queue


@pytest.fixture
def other(queue: Queue) -> Iterator[Queue]:
    with closing(Queue(queue.file)) as other:
        yield other


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    file = tmp_path / "demo.db"
    make_tables(file)
    with closing(connect(file)) as connection:
        yield connection


def applied(database: sqlite3.Connection) -> list[int]:
    rows = database.execute("SELECT line_number FROM order_lines ORDER BY applied")
    return [number for (number,) in rows]


def send_lines(queue: Queue, number: int) -> list[RawLine]:
    lines = split_lines("day", ledger(number))
    queue.send(TRANSACTIONS, map(msgspec.json.encode, lines))
    return lines


def consume(queue: Queue, database: sqlite3.Connection) -> None:
    while (message := queue.peek()) is not None:
        handle(message, queue, database)
        queue.delete(message.id)


def test_a_message_is_taken_by_one_consumer_at_a_time(queue: Queue, other: Queue) -> None:
    send_lines(queue, 3)

    taken = [queue.take(), other.take(), queue.take(), other.take()]

    assert [message and message.id for message in taken] == [1, 2, 3, None]


def test_what_was_taken_and_not_deleted_comes_again(
    queue: Queue, other: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_lines(queue, 1)
    taken = queue.take()
    assert other.take() is None

    now = naive_queue.time.time()
    monkeypatch.setattr(naive_queue.time, "time", lambda: now + naive_queue.VISIBLE_AGAIN_S)

    assert other.take() == taken


def test_what_is_deleted_never_comes_again(queue: Queue) -> None:
    send_lines(queue, 1)
    queue.delete(1)

    assert queue.peek() is None
    assert queue.counts() == (1, 0)
    assert not queue.holds(1)


def test_one_consumer_alone_applies_everything_once_and_in_sequence(
    queue: Queue, database: sqlite3.Connection
) -> None:
    text = LedgerText("day", ledger(20))
    queue.send(LEDGERS, [msgspec.json.encode(text)])

    consume(queue, database)

    assert applied(database) == list(range(1, 21))
    assert database.execute("SELECT * FROM orders").fetchall() == [("536365", 20, 50_000)]


def test_whoever_dies_after_the_effect_and_before_the_delete_counts_twice(
    queue: Queue, database: sqlite3.Connection
) -> None:
    send_lines(queue, 3)
    message = queue.peek()
    assert message is not None
    handle(message, queue, database)  # and dies

    consume(queue, database)

    assert applied(database) == [1, 1, 2, 3]
    assert database.execute("SELECT total_thousandths FROM orders").fetchone() == (10_000,)


def test_whoever_dies_before_the_effect_commits_changes_nothing(
    queue: Queue, database: sqlite3.Connection
) -> None:
    send_lines(queue, 1)
    database.execute(
        "CREATE TEMP TRIGGER dies BEFORE INSERT ON stock BEGIN SELECT raise(ABORT, 'dies'); END"
    )
    message = queue.peek()
    assert message is not None

    with pytest.raises(sqlite3.IntegrityError):
        handle(message, queue, database)

    assert applied(database) == []
    assert queue.peek() == message


def test_of_two_consumers_the_quicker_one_commits_first_whatever_the_sequence(
    queue: Queue, other: Queue, database: sqlite3.Connection
) -> None:
    send_lines(queue, 2)
    first, second = queue.take(), other.take()
    assert first is not None
    assert second is not None

    handle(second, other, database)
    handle(first, queue, database)

    assert applied(database) == [2, 1]


def books_of(folder: Path, days: int) -> Books:
    folder.mkdir()
    for day in range(days):
        (folder / f"day{day}.csv").write_text(ledger(10 + day))
    return Books(folder)


def drain(queue: Queue) -> list[tuple[str, bytes]]:
    """Remove what waits; return it."""
    messages = []
    while (message := queue.peek()) is not None:
        messages.append((message.topic, message.body))
        queue.delete(message.id)
    return messages


def sender_of(queue: Queue, books: Books, plan: Plan) -> Sender:
    return Sender(queue, books, plan, first_ledgers(books))


@pytest.mark.parametrize("seed", range(3))
def test_the_same_are_sent_twice_as_to_ours(tmp_path: Path, queue: Queue, seed: int) -> None:
    books = books_of(tmp_path / "ledgers", days=7)
    plan = plan_hostility(books.ledgers, seed=seed, kills=0)
    names = first_ledgers(books)

    sender = sender_of(queue, books, plan)
    texts = [msgspec.json.decode(body, type=LedgerText).name for _, body in drain(queue)]
    while not sender.done:
        sender.send_again(may_end=True)
    lines = [msgspec.json.decode(body, type=RawLine) for _, body in drain(queue)]

    assert names == ["day0", "day1", "day2"]
    assert len(names) == FIRST_LEDGERS
    assert texts == [name for name in names for _ in range(1 + (name in plan.twice))]
    assert lines == [line for name in names for line in plan.again[name]]
    split = sum(len(books.ledgers[name]) for name in texts)
    assert sender.total == len(texts) + split + len(lines)


def test_lines_are_sent_again_only_after_their_ledger_was_split(
    tmp_path: Path, queue: Queue
) -> None:
    books = books_of(tmp_path / "ledgers", days=1)
    sender = sender_of(queue, books, plan_hostility(books.ledgers, seed=1, kills=0))

    sender.send_again(may_end=True)
    assert not sender.done

    queue.delete(1)
    sender.send_again(may_end=False)
    assert not sender.done

    sender.send_again(may_end=True)
    assert sender.done
