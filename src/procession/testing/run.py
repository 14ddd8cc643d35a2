"""Runs an app in process, on the test's own thread, in milliseconds: real flows, a real store.

There are no sleeps: what waits for a retry or a due time is made due by `drain`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

from procession.abc import ConsumerStatus, DeadLetterRecord, InboxRow, Lane, WorkerRecord
from procession.app import App
from procession.flows.batch import LaneMemory
from procession.flows.consume import Consume
from procession.message import Outgoing, new_id
from procession.runtime.clock import HostClock
from procession.runtime.drive import drive
from procession.stores.memory import MemoryStore
from procession.stores.sqlite import SqliteStore

LEASE_MS = 3_600_000
STEPS_MAX = 100_000
Setup = str | Callable[[sqlite3.Connection], object]


class TestRun:
    """A running app; made by `run`.

    Attributes:
        sent: every message sent through it, by message id.
    """

    __test__ = False  # its name begins like a test's, for those who collect

    def __init__(self, app: App) -> None:
        self._app = app
        self._worker_id = new_id()
        self._flows: list[tuple[Consume, bool]] = []
        self._lanes: list[Lane] = []
        self._connections: list[sqlite3.Connection] = []
        self._runner: asyncio.Runner | None = None
        self.sent: dict[str, Outgoing] = {}

    def send(self, queue: str, payload: Any, **options: Any) -> str:
        """Send a message; parameters and errors are those of `App.send`. Returns its id."""
        outgoing = self._app.outgoing(queue, payload, **options)
        return self._publish(outgoing)

    def redeliver(self, message_id: str, payload: Any = None) -> str:
        """Store a message that was sent here once more: a duplicate; with another payload, a
        conflict."""
        first = self.sent[message_id]
        if payload is None:
            return self._publish(first)
        session = None if first.session is None else first.session.decode()
        changed = self._app.outgoing(first.target, payload, message_id=message_id, session=session)
        drive(self._app.publisher().publish([changed]))
        return message_id

    def drain(self) -> int:
        """Handle messages until none is left; return how many were in hand. Retries and scheduled
        messages do not wait: their time is now.

        Raises:
            RuntimeError: it does not come to rest: a handler sends for ever.
        """
        handled = 0
        for _ in range(STEPS_MAX):
            now = sum(self._step(flow, is_async=is_async) for flow, is_async in self._flows)
            handled += now
            if not now and not self._app.skip_waits():
                return handled
        raise RuntimeError(f"{STEPS_MAX} batches did not empty the queues: who sends for ever?")

    @property
    def connection(self) -> sqlite3.Connection:
        """A connection of its own to the database, to look at what was committed."""
        path = self._app.database
        if path is None:
            raise RuntimeError("the memory store has no connection: look at app.store.effects")
        connection = sqlite3.connect(path, isolation_level=None)
        self._connections.append(connection)
        return connection

    @property
    def dead_letters(self) -> list[DeadLetterRecord]:
        """Dead letters that wait for a decision."""
        return self._app.dead_letters()

    def recorded(self, consumer: str, message_id: str) -> InboxRow | None:
        """What the inbox says of a message."""
        return self._app.recorded(consumer, message_id)

    @property
    def status(self) -> dict[str, ConsumerStatus]:
        """Each consumer's numbers."""
        return {found.consumer or found.queue: found for found in self._app.status()}

    def _publish(self, outgoing: Outgoing) -> str:
        drive(self._app.publisher().publish([outgoing]))
        message_id = outgoing.message_id.decode()
        self.sent[message_id] = outgoing
        return message_id

    def _step(self, flow: Consume, *, is_async: bool) -> int:
        if not is_async:
            return drive(flow.step())
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(flow.step())

    def _start(self) -> None:
        app = self._app
        register(app, self._worker_id)
        for number, consumer in enumerate(app.consumers.values()):
            lane = drive(app.store.lane(consumer.name, worker=self._worker_id, number=number))
            memory = LaneMemory(
                settings=app.settings,
                clock=HostClock(),
                instrument=app.instrument,
                draw=lambda: 0.5,
            )
            flow = Consume(consumer, lane, memory, features=app.store.features)
            self._flows.append((flow, consumer.is_async))
            self._lanes.append(lane)

    def _stop(self) -> None:
        for lane in self._lanes:
            drive(lane.close())
        for connection in self._connections:
            connection.close()
        if self._runner is not None:
            self._runner.close()


@contextmanager
def run(app: App, *, setup: Setup | Iterable[str] = ()) -> Generator[TestRun]:
    """Run an app for a test, on an empty database of its own.

    The app's SQLite store is put into a temporary folder for the time of the block (an app on
    `memory://` keeps its store, emptied). Handlers run on this thread, in `drain`.

    Args:
        app: with its consumers.
        setup: makes the business tables: SQL text, several, or a function of a connection.

    Example:
        >>> from procession import App, testing
        >>> app = App("doc", store="sqlite:///doc.db")
        >>> @app.consumer("q", name="c")
        ... def count(payload: dict, ctx) -> None:
        ...     ctx.write("INSERT INTO seen (id) VALUES (:id)", id=payload["id"])
        >>> with testing.run(app, setup="CREATE TABLE seen (id)") as t:
        ...     first = t.send("q", {"id": 1})
        ...     again = t.redeliver(first)
        ...     handled = t.drain()
        ...     t.connection.execute("SELECT count(*) FROM seen").fetchone()
        (1,)
    """
    with (
        tempfile.TemporaryDirectory(prefix="procession-test-") as folder,
        ExitStack() as stack,
    ):
        if isinstance(app.store, SqliteStore):
            store: Any = SqliteStore(
                f"sqlite:///{folder}/test.db?synchronous=off", settings=app.settings
            )
        else:
            store = MemoryStore(settings=app.settings)
        with app.with_store(store):
            prepare(app, setup)
            stack.enter_context(app.ready_handlers())
            running = TestRun(app)
            running._start()  # noqa: SLF001  one unit
            try:
                yield running
            finally:
                running._stop()  # noqa: SLF001
                app.close()


def register(app: App, worker_id: str) -> None:
    """Register a worker of a test, with a lease that outlives it."""
    registry = drive(app.store.workers())
    drive(
        registry.register(
            WorkerRecord(
                id=worker_id,
                lease_ms=LEASE_MS,
                host="test",
                process=0,
                consumers=tuple(app.consumers),
            )
        )
    )
    drive(registry.close())


def prepare(app: App, setup: Setup | Iterable[str]) -> None:
    """Open the app's store and make the business tables."""
    app.open()
    if app.database is None:
        return
    steps = [setup] if isinstance(setup, str) or callable(setup) else list(setup)
    connection = sqlite3.connect(app.database)
    try:
        for step in steps:
            if isinstance(step, str):
                connection.executescript(step)
            else:
                step(connection)
        connection.commit()
    finally:
        connection.close()
