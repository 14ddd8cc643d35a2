"""Runs an app in process, on the test's own thread, in milliseconds: real flows, a real store.

There are no sleeps: what waits for a retry or a due time is made due by `drain`, or by a clock that
`advance` moves.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

from procession.abc import ConsumerStatus, DeadLetterRecord, InboxRow, Lane, WorkerRecord
from procession.app import App
from procession.errors import ConfigurationError
from procession.flows.batch import LaneMemory
from procession.flows.consume import Consume
from procession.message import Outgoing, new_id
from procession.runtime.drive import drive
from procession.stores.memory import MemoryClock, MemoryStore
from procession.stores.sqlite import SqliteStore
from procession.stores.sqlite import connection as sqlite_connection

LEASE_MS = 100 * 366 * 24 * 3_600_000
STEPS_MAX = 100_000
Setup = str | Callable[[sqlite3.Connection], object]


class SimulatedCrash(KeyboardInterrupt):
    """The process dies here. A KeyboardInterrupt, so that nothing takes it for a failed run."""


class TestRun:
    """A running app; made by `run`.

    Attributes:
        sent: every message sent through it, by message id.
    """

    __test__ = False  # its name begins like a test's, for those who collect

    def __init__(self, app: App, clock: ShiftedClock) -> None:
        self._app = app
        self._clock = clock
        self._worker_id = new_id()
        self._flows: list[tuple[Consume, bool]] = []
        self._lanes: list[_MortalLane] = []
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

    def drain(self, *, skip_waits: bool = True) -> int:
        """Handle messages until none is left; return how many were in hand.

        Args:
            skip_waits: retries and scheduled messages do not wait: their time is now. Without it
                only what is due by the clock is handled; see `advance`.

        Raises:
            RuntimeError: it does not come to rest: a handler sends for ever.
        """
        handled = 0
        for _ in range(STEPS_MAX):
            now = sum(self._step(flow, is_async=is_async) for flow, is_async in self._flows)
            handled += now
            if not now and not (skip_waits and self._app.skip_waits()):
                return handled
        raise RuntimeError(f"{STEPS_MAX} batches did not empty the queues: who sends for ever?")

    def advance(self, by: timedelta) -> None:
        """Let time pass for queues, inbox and retries: what is scheduled becomes due, messages
        expire, duplicate windows end. Code that asks the system's clock itself does not notice.
        """
        self._clock.shift_ms += round(by / timedelta(milliseconds=1))

    def crash(self) -> int:
        """Handle a batch of each consumer in a process that is killed right before its commit, and
        let another one take over; return how many messages were in hand.

        What handlers wrote and sent through the context is gone, what they did elsewhere is not.
        The messages are there again: the next `drain` handles them.
        """
        in_hand = 0
        for lane, (flow, is_async) in zip(self._lanes, self._flows, strict=True):
            lane.is_doomed = True
            with suppress(SimulatedCrash):
                self._step(flow, is_async=is_async)
            in_hand += lane.in_hand
        self._end_lanes(killed=True)
        registry = drive(self._app.store.workers())
        drive(registry.take_over(self._worker_id, dead=True))
        drive(registry.close())
        self._worker_id = new_id()
        self._start()
        return in_hand

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
            lane: Any = _MortalLane(
                drive(app.store.lane(consumer.name, worker=self._worker_id, number=number))
            )
            memory = LaneMemory(
                settings=app.settings,
                clock=self._clock,
                instrument=app.instrument,
                draw=lambda: 0.5,
            )
            flow = Consume(consumer, lane, memory, features=app.store.features)
            self._flows.append((flow, consumer.is_async))
            self._lanes.append(lane)

    def _end_lanes(self, *, killed: bool = False) -> None:
        for lane in self._lanes:
            if killed:
                lane.interrupt()
            drive(lane.close())
        self._lanes, self._flows = [], []
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _stop(self) -> None:
        self._end_lanes()
        for connection in self._connections:
            connection.close()


class ShiftedClock(MemoryClock):
    """The host's clocks, all ahead by `shift_ms`; in the place of `time` for the SQLite store, and
    of the memory store's and the flows' clock."""

    def __init__(self) -> None:
        self.shift_ms = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time_ns(self) -> int:
        """As `time.time_ns`."""
        return time.time_ns() + self.shift_ms * 1_000_000

    def clock_gettime_ns(self, clock: int) -> int:
        """As `time.clock_gettime_ns`."""
        return time.clock_gettime_ns(clock) + self.shift_ms * 1_000_000

    def lease_ms(self) -> int:  # type: ignore[override]  # it has a state
        """Return milliseconds that only grow."""
        return self.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000_000

    def wall_ms(self) -> int:  # type: ignore[override]  # as above
        """Return milliseconds since 1970 UTC."""
        return self.time_ns() // 1_000_000

    monotonic_s = staticmethod(time.perf_counter)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Be the SQLite store's clock inside the block."""
        module: Any = sqlite_connection
        module.time, before = self, module.time
        try:
            yield
        finally:
            module.time = before


class _MortalLane:
    """A lane whose process can be doomed to die right before its next commit."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.is_doomed = False
        self.in_hand = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    async def fetch(self, limit: int) -> Any:
        """Count what is in hand."""
        found = await self._lane.fetch(limit)
        self.in_hand = len(found.deliveries)
        return found

    async def commit(self) -> None:
        """Commit, or die."""
        if self.is_doomed:
            raise SimulatedCrash
        await self._lane.commit()


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
    clock = ShiftedClock()
    with (
        tempfile.TemporaryDirectory(prefix="procession-test-") as folder,
        ExitStack() as stack,
    ):
        if isinstance(app.store, SqliteStore):
            store: Any = SqliteStore(
                f"sqlite:///{folder}/test.db?synchronous=off", settings=app.settings
            )
        elif isinstance(app.store, MemoryStore):
            store = MemoryStore(settings=app.settings, clock=clock)
        else:
            raise ConfigurationError(
                f"testing.run needs an app on sqlite:///… or memory://, and {app.name!r} keeps "
                "everything on a server: make the app of a function, and give it another store here"
            )
        with clock.in_place(), app.with_store(store):
            prepare(app, setup)
            stack.enter_context(app.ready_handlers())
            running = TestRun(app, clock)
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
