"""One lane: a thread with a connection of its own that handles batch after batch.

Whatever ends a batch early, the lane goes on: it pauses while the store is away, begins again
under a new name after a takeover, and rebuilds itself after a fault of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from procession.abc import Lane, Source, Store
from procession.config import Settings
from procession.core.crowding import Crowd
from procession.errors import ProcessionError, StoreUnavailable, WorkerLost
from procession.flows.batch import Consumer, LaneMemory
from procession.flows.consume import Consume
from procession.runtime.clock import HostClock
from procession.runtime.drive import drive
from procession.telemetry import Event, Instrument

CANCEL_GRACE_S = 1.0
MAKE_WAY_S = 0.05
THREADS = itertools.count(1)


class RunnableConsumer(Consumer, Protocol):
    """A consumer as the runtime knows it.

    Attributes:
        concurrency: lanes in a process.
        is_async: whether any of its handlers needs an event loop.
    """

    concurrency: int

    @property
    def is_async(self) -> bool: ...  # noqa: D102  said above


class LaneThread(threading.Thread):
    """Handles batches of one consumer until told to stop.

    Attributes:
        memory: what the lane knows; the watchdog reads `current` and `since_s`.
        abandoned: its connection was taken from it; whatever it does has no effect.
        unavailable: why it waits, while the store cannot be used; else "".
        place: among the lanes of its consumer; the last ones make way first.
        batch_since_s: since when it is in its present batch, by `time.monotonic`; None between two.
    """

    def __init__(  # noqa: PLR0913  wired by the worker alone
        self,
        store: Store,
        consumer: RunnableConsumer,
        *,
        number: int,
        worker_id: Callable[[], str],
        worker_lost: Callable[[str], None],
        settings: Settings,
        instrument: Instrument,
        source: Source | None = None,
        suspects: Sequence[int] = (),
        crowd: Crowd | None = None,
        place: int = 0,
    ) -> None:
        # A lane that takes a hung one's place takes its number: threads have numbers of their own.
        name = f"procession-{consumer.name}-{number}.{next(THREADS)}"
        super().__init__(name=name, daemon=True)
        self._store = store
        self.consumer = consumer
        self.number = number
        self._worker_id = worker_id
        self._worker_lost = worker_lost
        self._settings = settings
        self._instrument = instrument
        self._source = source
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._lane: Lane | None = None
        self._lane_worker = ""
        self._flow: Consume | None = None
        self.abandoned = False
        self.unavailable = ""
        self.batch_since_s: float | None = None
        self.memory = LaneMemory(
            settings=settings,
            clock=HostClock(),
            instrument=instrument,
            draw=random.random,
            suspects=suspects,
            crowd=crowd,
        )
        self.place = place
        self.memory.own_thread = True

    def stop(self) -> None:
        """Take no more batches; the running one goes on to its commit."""
        self._stopping.set()

    def run(self) -> None:
        """Work until stopped."""
        runner = asyncio.Runner() if self.consumer.is_async else None
        try:
            if runner is not None:
                self._loop = runner.get_loop()
            self._work(runner)
        finally:
            self._close()
            if runner is not None:
                runner.close()

    def abandon(self) -> None:
        """Take the connection from a handler that hangs, from another thread."""
        self.abandoned = True
        self._stopping.set()
        if self._lane is not None:
            self._lane.interrupt()

    def cancel(self) -> bool:
        """Cancel an async handler that hangs, from another thread; False where there is none."""
        loop, task = self._loop, self._task
        if loop is None or task is None:
            return False
        self.memory.timed_out = True
        loop.call_soon_threadsafe(task.cancel)
        return True

    def _work(self, runner: asyncio.Runner | None) -> None:
        pause_s = 0.0
        while not self._stopping.is_set():
            if not self._has_its_turn():
                continue
            self.batch_since_s = time.monotonic()
            try:
                flow = self._flow or self._build()
                handled = self._drive(runner, flow.step())
                self.batch_since_s = None
            except WorkerLost as error:
                self._instrument.emit(
                    Event.SESSION_LOST, {"consumer": self.consumer.name, "detail": str(error)}
                )
                self._close()
                self._worker_lost(self._lane_worker)
            except BaseException as error:  # noqa: BLE001  a lane outlives every fault
                if self.abandoned:
                    return
                pause_s = self._pause(error, pause_s)
            else:
                if pause_s:
                    pause_s = 0.0
                    self.unavailable = ""
                    self._instrument.emit(Event.STORE_AVAILABLE, {"consumer": self.consumer.name})
                if not handled:
                    self._wait_for_work()

    def _has_its_turn(self) -> bool:
        """Make way where lanes met on shared rows: what it holds goes to those that still work."""
        if self.place < self.memory.crowd.allowed:
            return True
        self._close()
        self._stopping.wait(MAKE_WAY_S)
        return False

    def _drive(self, runner: asyncio.Runner | None, step: Coroutine[Any, Any, int]) -> int:
        if runner is None:
            return drive(step)
        return runner.run(self._as_task(step))

    async def _as_task(self, step: Coroutine[Any, Any, int]) -> int:
        self._task = asyncio.current_task()
        try:
            return await step
        finally:
            self._task = None

    def _build(self) -> Consume:
        self._lane_worker = self._worker_id()
        self._lane = drive(
            self._store.lane(self.consumer.name, worker=self._lane_worker, number=self.number)
        )
        self._flow = Consume(
            self.consumer,
            self._lane,
            self.memory,
            features=self._store.features,
            source=self._source,
        )
        return self._flow

    def _pause(self, error: BaseException, last_s: float) -> float:
        """Wait after a fault, twice as long each time, with a fresh connection behind it."""
        self.batch_since_s = None
        longest_s = self._settings.pause_longest_ms / 1000
        pause_s = min(longest_s, last_s * 2 or self._settings.pause_ms / 1000)
        self.unavailable = f"{type(error).__name__}: {error}"
        if not last_s:
            self._instrument.emit(
                Event.STORE_UNAVAILABLE,
                {
                    "consumer": self.consumer.name,
                    "error": self.unavailable,
                    "fault": not isinstance(error, StoreUnavailable),
                },
            )
        self._close()
        self._stopping.wait(pause_s)
        return pause_s

    def _wait_for_work(self) -> None:
        """Look for a sign of work every few milliseconds: no lock, no transaction."""
        idle_s = self._settings.idle_ms / 1000
        lane = self._lane
        while lane is not None and not self._stopping.is_set():
            try:
                if drive(lane.changed()):
                    return
                if self._source is None and drive(lane.doze()):
                    continue
            except Exception:  # noqa: BLE001  the next step meets it again, and pauses
                return
            self._stopping.wait(idle_s)
            if self._source is not None:
                return

    def _close(self) -> None:
        flow, self._flow = self._flow, None
        lane, self._lane = self._lane, None
        # What cannot be given back now, the lease's end gives back.
        with contextlib.suppress(ProcessionError):
            if flow is not None:
                drive(flow.close())
        with contextlib.suppress(ProcessionError):
            if lane is not None:
                drive(lane.close())
