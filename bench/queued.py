"""The candidate: an app with table queues on one file, worked off in this process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bench.measure import Timing, quiet
from bench.sqlite import EFFECT, SHARED_EFFECT, check_rows, connect, make_rows
from bench.workload import Expected, Paid, Sent
from procession import App, Context, Event, Instrument, RetryPolicy, Settings
from procession.abc import Lane, WorkerRecord
from procession.flows.batch import LaneMemory
from procession.flows.consume import Consume
from procession.runtime.clock import HostClock
from procession.runtime.drive import drive

QUEUE = "payments"
PATIENCE_S = 600.0
Handler = Callable[[Paid, Context], None]


def pay(payment: Paid, ctx: Context) -> None:
    """The effect of workload W."""
    ctx.write(EFFECT, amount=payment.amount, seq=payment.seq, row=payment.row)


def pay_shared(payment: Paid, ctx: Context) -> None:
    """The same on rows that keys share."""
    ctx.write(SHARED_EFFECT, amount=payment.amount, row=payment.row)


class Handled:
    """An instrument that says when so many messages have ended, without being asked."""

    def __init__(self) -> None:
        self.number = 0
        self._wanted = 0
        self._reached = threading.Event()

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        if event is Event.BATCH_COMMITTED:
            self.number += fields["handled"]
            if self.number >= self._wanted:
                self._reached.set()

    def expect(self, number: int) -> None:
        self._wanted = self.number + number
        self._reached.clear()

    def wait(self) -> None:
        assert self._reached.wait(PATIENCE_S), f"{self.number} of {self._wanted} have ended"


class Queued:
    """An app with one consumer of one queue, on a file of its own."""

    def __init__(
        self,
        folder: Path,
        handler: Handler = pay,
        *,
        rows: Sequence[str],
        instruments: Iterable[Instrument] = (),
        settings: Settings | None = None,
    ) -> None:
        self.path = (folder / "queue.db").absolute()
        self.handled = Handled()
        self.app = App(
            "bench",
            store=f"sqlite:///{self.path}",
            settings=settings,
            retry=RetryPolicy(max_attempts=1),
            instruments=[self.handled, *instruments],
        )
        self.consumer = self.app.consumer(QUEUE, name=QUEUE, session="order_id")(handler)
        self.app.open()
        with closing(connect(self.path)) as connection:
            make_rows(connection, rows)

    def fill(self, sent: Sequence[Sent]) -> None:
        """Send the messages, and leave nothing in the write-ahead log."""
        make = self.app.outgoing
        self.app.publish(make(QUEUE, one.payload, message_id=one.id) for one in sent)
        with closing(connect(self.path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def work(self, number: int) -> Timing:
        """Start a worker, wait until `number` messages have ended, stop it. Starting counts."""
        worker = self.app.worker()
        self.handled.expect(number)
        quiet()
        timing = Timing(number)
        worker.start()
        self.handled.wait()
        timing.stop()
        worker.stop()
        worker.join()
        return timing

    def work_without_thread(
        self, number: int, prepare: Callable[[Lane], None] = lambda _: None
    ) -> Timing:
        """Drive the consume flow from here: what is left is no thread's and no lease's share.
        `prepare` gets the lane before."""
        with self._flow(prepare) as flow:
            quiet()
            end = self.handled.number + number
            timing = Timing(number)
            while self.handled.number < end:
                assert drive(flow.step()), f"{end - self.handled.number} messages are missing"
            timing.stop()
        return timing

    @contextmanager
    def _flow(self, prepare: Callable[[Lane], None]) -> Iterator[Consume]:
        store = self.app.store
        workers = drive(store.workers())
        record = WorkerRecord(id="bench", lease_ms=60_000, host="", process=0, consumers=(QUEUE,))
        drive(workers.register(record))
        lane = drive(store.lane(QUEUE, worker="bench", number=1))
        prepare(lane)
        memory = LaneMemory(
            settings=self.app.settings,
            clock=HostClock(),
            instrument=self.app.instrument,
            draw=random.random,
        )
        try:
            yield Consume(self.consumer, lane, memory, features=store.features)
        finally:
            drive(lane.close())
            drive(workers.leave("bench"))
            drive(workers.close())

    def check(self, wanted: Expected, *, dead: int = 0, shared: bool = False) -> None:
        """Stop the benchmark where anything is not exactly as it must be: sums, order, inbox,
        counts, an empty queue."""
        with closing(connect(self.path)) as connection:
            check_rows(connection, wanted, shared=shared)
            keys, done = connection.execute(
                "SELECT count(*), count(*) FILTER (WHERE state = 3) FROM procession_inbox"
            ).fetchone()
        assert (keys, done) == (wanted.keys, wanted.effects), f"{keys} inbox rows, {done} done"
        (status,) = self.app.status()
        assert status.waiting == status.held == status.scheduled == 0
        assert status.counts["processed", ""] == wanted.effects
        assert status.dead_letters == dead, f"{status.dead_letters} dead letters"
