"""Steps an app's consumers on the test's own thread: real store, real flow, no threads, and no wait
but that of a retry.

`run_until_idle(app)` is enough for most tests; `Driver` is there for those that look between two
batches, or play several workers on one file.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from procession import App, Event, RetryPolicy, Settings
from procession.abc import Source, WorkerRecord
from procession.app.consumers import ConsumerDefinition
from procession.flows.batch import LaneMemory
from procession.flows.consume import Consume
from procession.message import new_id
from procession.runtime.clock import HostClock
from procession.runtime.drive import drive

QUICK = RetryPolicy(max_attempts=3, first_ms=1, factor=1, jitter=0)
ENDLESS = RetryPolicy(max_attempts=1_000, first_ms=1, factor=1, jitter=0)
PAUSE_S = 0.001


class Recorder:
    """An instrument that keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[tuple[Event, dict[str, Any]]] = []

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        self.events.append((event, fields))

    def of(self, event: Event) -> list[dict[str, Any]]:
        return [fields for known, fields in self.events if known is event]


def new_app(folder: Path, **options: Any) -> App:
    """Return an app on a fresh file, without waits for the disk and with short retries."""
    settings = options.pop("settings", {})
    name = options.pop("file", "t.db")
    options.setdefault("retry", QUICK)
    url = options.pop("store", f"sqlite:///{folder}/{name}?synchronous=off")
    return App("t", store=url, settings=Settings(**settings), **options)


def sql(app: App, statement: str, parameters: Any = ()) -> list[Any]:
    """Run a statement on the app's file from outside, as another program would."""
    connection = sqlite3.connect(str(app.database), isolation_level=None, timeout=5)
    try:
        return connection.execute(statement, parameters).fetchall()
    finally:
        connection.close()


def column(app: App, statement: str, parameters: Any = ()) -> list[Any]:
    """Return the first column of a query."""
    return [row[0] for row in sql(app, statement, parameters)]


def foreign(app: App, queue: str = "q", **columns: Any) -> int:
    """Insert a row into a queue as a program that only knows SQL would; return its position."""
    app.open()
    (number,) = column(
        app, "UPDATE procession_meta SET value = value + 1 WHERE name = 'number' RETURNING value"
    )
    (reader,) = column(app, "SELECT id FROM procession_subscriptions WHERE queue = ?", (queue,))
    row = {
        "id": (reader << 43) + number,
        "message_id": b"foreign",
        "format": 2,
        "body": b"{}",
        "sent_ms": 0,
        **columns,
    }
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    sql(app, f"INSERT INTO procession_messages ({names}) VALUES ({marks})", tuple(row.values()))
    return row["id"]


def ends(app: App, consumer: str = "c") -> dict[str, int]:
    """Return how a consumer's messages ended, by end, whatever the cause."""
    found: Counter[str] = Counter()
    for status in app.status():
        if status.consumer == consumer:
            for (end, _), number in status.counts.items():
                found[end] += number
    return dict(found)


def unfinished(app: App, consumer: str = "c") -> int:
    """Return how many messages of a consumer have not ended."""
    return sum(s.waiting + s.held + s.scheduled for s in app.status() if s.consumer == consumer)


class _Seat:
    """One consumer's lane with its flow."""

    def __init__(self, driver: Driver, consumer: ConsumerDefinition, number: int) -> None:
        app = driver.app
        self.runner = asyncio.Runner() if consumer.is_async else None
        self.memory = LaneMemory(
            settings=app.settings,
            clock=HostClock(),
            instrument=app.instrument,
            draw=lambda: 0.5,
        )
        self.lane: Any = drive(
            app.store.lane(consumer.name, worker=driver.worker_id, number=number)
        )
        self.flow = Consume(
            consumer,
            self.lane,
            self.memory,
            features=app.store.features,
            source=driver.source,
        )

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return drive(coroutine) if self.runner is None else self.runner.run(coroutine)

    def close(self) -> None:
        drive(self.flow.close())
        drive(self.lane.close())
        if self.runner is not None:
            self.runner.close()


class Driver:
    """A registered worker with one lane a consumer, stepped by hand.

    Args:
        source: a broker's queue, for an app with one consumer.
    """

    def __init__(self, app: App, *, lease_ms: int = 30_000, source: Source | None = None) -> None:
        app.open()
        self.app = app
        self.source = source
        self.worker_id = new_id()
        self.workers = drive(app.store.workers())
        drive(
            self.workers.register(
                WorkerRecord(
                    id=self.worker_id,
                    lease_ms=lease_ms,
                    host="test",
                    process=0,
                    consumers=tuple(app.consumers),
                )
            )
        )
        self.seats = {
            name: _Seat(self, consumer, number)
            for number, (name, consumer) in enumerate(app.consumers.items())
        }

    def lane(self, consumer: str = "c") -> Any:
        return self.seats[consumer].lane

    def memory(self, consumer: str = "c") -> LaneMemory:
        return self.seats[consumer].memory

    def step(self, consumer: str = "c") -> int:
        """Handle one batch; return how many messages were in hand."""
        seat = self.seats[consumer]
        return int(seat.run(seat.flow.step()))

    def run_ready(self) -> int:
        """Step until no consumer finds anything; return the number of steps that did."""
        steps = 0
        while handled := [name for name in self.seats if self.step(name)]:
            steps += len(handled)
            assert steps < 20_000, "the consumers never come to rest"
        return steps

    def run(self, *, timeout_s: float = 30.0) -> None:
        """Step until every message has ended, waiting for retries and due times."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.run_ready()
            left = {name: unfinished(self.app, name) for name in self.seats}
            if not any(left.values()):
                return
            assert time.monotonic() < deadline, f"messages that never ended: {left}"
            time.sleep(PAUSE_S)

    def vanish(self) -> None:
        """Stop as a killed process does: nothing is given back, nobody is told."""
        for seat in self.seats.values():
            seat.lane._connection.close()
            if seat.runner is not None:
                seat.runner.close()
        self.seats = {}

    def take_over(self, other: Driver) -> list[str] | None:
        """Take over another driver's work, having seen it end."""
        return drive(self.workers.take_over(other.worker_id, dead=True))

    def close(self) -> None:
        for seat in self.seats.values():
            seat.close()
        drive(self.workers.leave(self.worker_id))
        drive(self.workers.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run_until_idle(app: App, *, timeout_s: float = 30.0) -> None:
    """Run all consumers of an app until each of their messages has ended."""
    with Driver(app) as driver:
        driver.run(timeout_s=timeout_s)


def wait_until(condition: Callable[[], object], what: str, *, timeout_s: float = 30.0) -> None:
    """Wait for something that other threads or processes do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for: {what}"
        time.sleep(0.005)
