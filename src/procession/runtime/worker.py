"""A worker: this process with its lanes, its lease, and a keeper that watches both.

The keeper renews the lease on a thread of its own, so no handler can block it; takes over workers
that vanished; and takes the connection from handlers that hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from procession.abc import Source, Store, WorkerRecord, Workers
from procession.config import Settings
from procession.core.crowding import Crowd
from procession.errors import ProcessionError, WorkerLost
from procession.message import new_id
from procession.runtime.drive import drive
from procession.runtime.lane import CANCEL_GRACE_S, LaneThread, RunnableConsumer
from procession.runtime.lifeline import Lifeline
from procession.runtime.upkeep import UpkeepTurns
from procession.telemetry import Event, Instrument

EXIT_REPLACE_ME = 70
EXIT_ABORTED = 130
TICK_S = 0.05
SAID_CHARS_MAX = 300


class Worker:
    """Runs all consumers of an app in this process.

    Args:
        worker_id: the id of its first incarnation, where the parent process chose one.
        lifespan: entered before the lanes start, left when they have stopped.
    """

    def __init__(  # noqa: PLR0913  made by the app
        self,
        store: Store,
        consumers: Sequence[RunnableConsumer],
        *,
        settings: Settings,
        instrument: Instrument,
        worker_id: str | None = None,
        source: Source | None = None,
        lifespan: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._store = store
        self._lifespan = lifespan
        self._life = contextlib.ExitStack()
        self._renewed_s = 0.0
        self._consumers = list(consumers)
        self._settings = settings
        self._instrument = instrument
        self._source = source
        self._id = worker_id or new_id()
        self._registry: Workers | None = None
        self._lanes: list[LaneThread] = []
        self._crowds: dict[str, Crowd] = {}
        self._numbers = 0
        self._hung: list[LaneThread] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None
        self._watchdog: threading.Thread | None = None
        self._signals = 0
        self._lifeline: Lifeline | None = None
        self._may_exit = False
        self.exit_code = 0

    @property
    def id(self) -> str:
        """The id of this incarnation."""
        return self._id

    def start(self) -> None:
        """Register, and start the lanes and the keeper.

        Raises:
            StoreUnavailable: the store cannot be written.
        """
        self._life.enter_context(self._lifespan())
        self._registry = drive(self._store.workers())
        drive(self._registry.register(self._record(self._id)))
        self._renewed_s = time.monotonic()
        self._instrument.emit(Event.WORKER_STARTED, {"worker": self._id})
        for consumer in self._consumers:
            lanes = self._lanes_of(consumer)
            self._crowds[consumer.name] = Crowd(lanes)
            for place in range(lanes):
                self._start_lane(consumer, place=place)
        # Two threads: a renewal waits for a hanging handler's transaction, the watchdog must not.
        self._keeper = threading.Thread(target=self._keep, name="procession-keeper", daemon=True)
        self._watchdog = threading.Thread(
            target=self._watch, name="procession-watchdog", daemon=True
        )
        self._keeper.start()
        self._watchdog.start()

    def stop(self) -> None:
        """Ask the lanes to finish their batch and stop. Returns at once."""
        self._stopping.set()
        for lane in list(self._lanes):
            lane.stop()

    def join(self) -> None:
        """Wait until the lanes have stopped, at most the settings' `stop_ms`; then end the lease.

        A handler that does not end in time loses its connection: its message is redelivered.
        """
        deadline = time.monotonic() + self._settings.stop_ms / 1000
        for lane in list(self._lanes):
            lane.join(max(0.0, deadline - time.monotonic()))
        late = [lane for lane in self._lanes if lane.is_alive()]
        for lane in late:
            lane.abandon()
        for thread in (self._keeper, self._watchdog):
            if thread is not None:
                thread.join(CANCEL_GRACE_S)
        with contextlib.suppress(ProcessionError):
            self._end_lease(vanished=bool(late or self._hung))
        self._life.close()
        self._instrument.emit(Event.WORKER_STOPPED, {"worker": self._id})

    def health(self) -> dict[str, Any]:
        """Return whether it lives and is ready, and why not. Callable from any thread.

        It lives until something is wrong that only a fresh process mends: a lane that ended, one
        that has been in a batch for longer than a handler limit and a lease, too many hung
        handlers. It is ready while its lanes run, its lease is renewed in time, and no lane waits
        for the store.
        """
        now = time.monotonic()
        stopping = self._stopping.is_set()
        lanes = [self._lane_health(lane, now) for lane in list(self._lanes)]
        lease_left_s = max(0.0, self._renewed_s + self._settings.lease_ms / 1000 - now)
        hung = sum(lane.is_alive() for lane in list(self._hung))
        faults = [
            f"the lane of consumer {lane['consumer']!r} {what}"
            for lane in lanes
            for what in (
                *(["has ended"] if not lane["alive"] and not stopping else []),
                *([f"is stuck in a batch for {lane['batch_s']:g} s"] if lane["stuck"] else []),
            )
        ]
        if self._may_exit and hung >= self._settings.abandoned_max:
            faults.append(f"{hung} handlers hang, whose threads only a fresh process is rid of")
        waits = [
            f"consumer {lane['consumer']!r} waits for the store: {lane['unavailable']}"
            for lane in lanes
            if lane["unavailable"]
        ]
        if stopping:
            waits.append("it stops")
        elif not lanes:
            waits.append("it starts")
        elif not lease_left_s:
            waits.append("its lease has ended: the store took no renewal in time")
        return {
            "live": not faults,
            "ready": not faults and not waits,
            "why": faults + waits,
            "worker": self._id,
            "lease_left_s": round(lease_left_s, 3),
            "hung_handlers": hung,
            "lanes": lanes,
        }

    def _lane_health(self, lane: LaneThread, now: float) -> dict[str, Any]:
        since_s = lane.batch_since_s
        batch_s = 0.0 if since_s is None else max(0.0, now - since_s)
        limit_s = (self._settings.handler_limit_ms + self._settings.lease_ms) / 1000
        return {
            "consumer": lane.consumer.name,
            "alive": lane.ident is None or lane.is_alive(),
            "stuck": lane.is_alive() and batch_s > limit_s,
            "batch_s": round(batch_s, 3),
            "unavailable": lane.unavailable,
        }

    def _said(self) -> str:
        """Return what the supervisor is told each second: one line, whatever there is to say."""
        found = self.health()
        return json.dumps(
            {
                "worker": self._id,
                "live": found["live"],
                "ready": found["ready"],
                "why": "; ".join(found["why"])[:SAID_CHARS_MAX],
            }
        )

    def _end_lease(self, *, vanished: bool) -> None:
        # With a connection of its own: the keeper may be waiting for the store on the other one.
        registry = drive(self._store.workers())
        try:
            if vanished:
                drive(registry.take_over(self._id, dead=True))
            else:
                drive(registry.leave(self._id))
        finally:
            drive(registry.close())

    def run(self) -> None:
        """Start, work until SIGTERM or SIGINT, stop in good order. A second signal aborts, unless
        the worker belongs to a supervisor (`stop_with_parent`), which then does that.

        Raises:
            SystemExit: with 70 after too many hung handlers: the supervisor starts another one.
        """
        self._may_exit = True
        previous = {
            number: signal.signal(number, self._signalled)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self.start()
            while not self._stopping.wait(TICK_S):
                pass
            self.stop()
            self.join()
        finally:
            if self._lifeline is not None:
                self._lifeline.stop()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.exit_code:
            raise SystemExit(self.exit_code)

    def stop_with_parent(self, pipe: int | None = None) -> None:
        """Belong to the parent process: stop when it is gone.

        Args:
            pipe: file descriptor to which a `Supervisor` listens each second for a sign of life
                and the worker's health.
        """
        self._lifeline = Lifeline(self._said, self._stopping.set, pipe)
        self._lifeline.start()

    def _signalled(self, _number: int, _frame: object) -> None:
        self._signals += 1
        # A stop reaches a supervised worker twice where the whole process group is told (Ctrl-C,
        # systemd), once directly and once through its supervisor: that must not abort it.
        if self._signals > 1 and self._lifeline is None:
            os._exit(EXIT_ABORTED)
        self._stopping.set()

    def _record(self, worker_id: str) -> WorkerRecord:
        return WorkerRecord(
            id=worker_id,
            lease_ms=self._settings.lease_ms,
            host=socket.gethostname(),
            process=os.getpid(),
            consumers=tuple(consumer.name for consumer in self._consumers),
        )

    def _lanes_of(self, consumer: RunnableConsumer) -> int:
        return consumer.concurrency if self._store.features.concurrent_batches else 1

    def _start_lane(
        self,
        consumer: RunnableConsumer,
        *,
        place: int = 0,
        suspects: Sequence[int] = (),
        instead_of: LaneThread | None = None,
    ) -> None:
        """Start a lane. One that takes another's place takes its number, too: then the store frees
        what the other one held.
        """
        if instead_of is None:
            self._numbers += 1
        lane = LaneThread(
            self._store,
            consumer,
            number=self._numbers if instead_of is None else instead_of.number,
            worker_id=lambda: self._id,
            worker_lost=self._begin_again,
            settings=self._settings,
            instrument=self._instrument,
            source=self._source,
            suspects=suspects,
            crowd=self._crowds[consumer.name],
            place=place if instead_of is None else instead_of.place,
        )
        self._lanes.append(lane)
        lane.start()

    def _begin_again(self, lost: str) -> None:
        """Register under a new id after a takeover: an id is never used twice."""
        with self._lock:
            if lost != self._id or self._stopping.is_set():
                return
            fresh = new_id()
            with contextlib.suppress(ProcessionError):
                registry = drive(self._store.workers())
                try:
                    drive(registry.register(self._record(fresh)))
                finally:
                    drive(registry.close())
                self._id = fresh
                self._renewed_s = time.monotonic()
                self._instrument.emit(Event.WORKER_STARTED, {"worker": fresh, "instead_of": lost})

    # The keeper's thread.

    def _keep(self) -> None:
        upkeep = UpkeepTurns(self._store, self._settings)
        try:
            self._keep_lease(upkeep)
        finally:
            upkeep.close()
            if self._registry is not None:
                drive(self._registry.close())

    def _keep_lease(self, upkeep: UpkeepTurns) -> None:
        renew_s = self._settings.renew_ms / 1000
        due = time.monotonic() + renew_s
        while not self._all_stopped():
            time.sleep(min(TICK_S, renew_s))
            try:
                if time.monotonic() >= due:
                    due = time.monotonic() + renew_s
                    self._renew_and_look()
                if not self._stopping.is_set():
                    upkeep.turn()
            except Exception as error:  # noqa: BLE001  without its keeper a worker loses its lease
                self._instrument.emit(
                    Event.STORE_UNAVAILABLE,
                    {"consumer": "", "error": f"{type(error).__name__}: {error}", "fault": True},
                )

    def _all_stopped(self) -> bool:
        return self._stopping.is_set() and not any(
            lane.is_alive() and not lane.abandoned for lane in self._lanes
        )

    def _renew_and_look(self) -> None:
        registry = self._registry
        if registry is None:
            return
        try:
            drive(registry.renew(self._id))
            self._renewed_s = time.monotonic()
        except WorkerLost:
            self._begin_again(self._id)
        except ProcessionError as error:
            self._instrument.emit(
                Event.STORE_UNAVAILABLE, {"consumer": "", "error": str(error), "fault": False}
            )
            return
        with contextlib.suppress(ProcessionError):
            for worker in drive(registry.expired()):
                if worker == self._id:
                    continue
                consumers = drive(registry.take_over(worker))
                if consumers is not None:
                    self._instrument.emit(
                        Event.WORKER_TAKEN_OVER, {"worker": worker, "consumers": consumers}
                    )

    # The watchdog's thread.

    def _watch(self) -> None:
        while not self._all_stopped():
            time.sleep(TICK_S)
            try:
                self._watch_lanes()
            except Exception as error:  # noqa: BLE001  without its watchdog a worker can hang for ever
                self._instrument.emit(
                    Event.STORE_UNAVAILABLE,
                    {"consumer": "", "error": f"{type(error).__name__}: {error}", "fault": True},
                )

    def _watch_lanes(self) -> None:
        limit_s = self._settings.handler_limit_ms / 1000
        for lane in list(self._lanes):
            memory = lane.memory
            delivery, since_s = memory.current, memory.since_s
            if delivery is None:
                continue
            seconds = memory.clock.monotonic_s() - since_s
            if seconds <= limit_s or memory.current is not delivery:
                continue
            if not memory.timed_out and lane.cancel():
                continue
            if memory.timed_out and seconds <= limit_s + CANCEL_GRACE_S:
                continue
            self._replace(lane, delivery.position, seconds)

    def _replace(self, lane: LaneThread, position: int, seconds: float) -> None:
        delivery = lane.memory.current
        lane.abandon()
        self._lanes.remove(lane)
        self._hung.append(lane)
        self._instrument.emit(
            Event.LANE_HUNG,
            {
                "consumer": lane.consumer.name,
                "key": delivery.message_id.decode(errors="replace") if delivery else None,
                "seconds": round(seconds, 3),
            },
        )
        self._hung = [hung for hung in self._hung if hung.is_alive()]
        if self._may_exit and len(self._hung) >= self._settings.abandoned_max:
            # Threads cannot be killed: a fresh process is the only way to be rid of them. Inside
            # another program (`with app:`) there is none to be had: the others go on.
            self.exit_code = EXIT_REPLACE_ME
            self._stopping.set()
            return
        self._start_lane(lane.consumer, suspects=[*lane.memory.alone, position], instead_of=lane)
