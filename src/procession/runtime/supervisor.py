"""Keeps worker processes running: one that ends is buried, so that its work is free at once, and
replaced; one that falls silent is killed first.

It touches no messages. When it dies, its workers stop by themselves (`Lifeline`); when one of them
dies, nothing is lost (G10), and a supervisor only makes the wait for its lease unnecessary.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from procession.abc import Store
from procession.config import Settings
from procession.errors import ConfigurationError, ProcessionError
from procession.message import new_id
from procession.runtime.drive import drive
from procession.runtime.lifeline import BEAT_S
from procession.runtime.worker import EXIT_ABORTED, EXIT_REPLACE_ME
from procession.telemetry import Event, Instrument

TICK_S = 0.05
HEALTHY_S = 60.0
"""After so long a life the next death is waited for as if it were the first."""
SILENT_S = 5.0
"""A worker that was silent for so long lives no more, and so does a supervisor that looked at
nothing."""
# However short the lease, a worker is not killed for a sign of life that is not due yet.
BEATS_MISSED = 3
STOP_MARGIN_S = 5.0
BURIAL_S = 5.0
PROCESSES_MAX = 256

EXIT_STOPPED = 0
EXIT_UNCLEAN = 1
EXIT_CONFIGURATION = 2

_LOG = logging.getLogger("procession")
_ENDED_AS_ASKED = (0, -signal.SIGTERM, EXIT_REPLACE_ME)
_READ_BYTES = 65_536


class Supervisor:
    """Runs a number of worker processes until SIGTERM or SIGINT.

    Args:
        command: starts one worker; `--worker-id ID --lifeline FD` is added to it.
        store: open; dead workers are taken over in it.
        settings: `stop_ms`, `lease_ms` and the pauses are used.
        instrument: is told of takeovers.
        processes: how many workers, 1 to 256.

    Raises:
        ConfigurationError: `processes` is out of range.
    """

    def __init__(
        self,
        command: Sequence[str],
        store: Store,
        *,
        settings: Settings,
        instrument: Instrument,
        processes: int = 1,
    ) -> None:
        if not 1 <= processes <= PROCESSES_MAX:
            raise ConfigurationError(f"processes is {processes}, must be 1 to {PROCESSES_MAX}")
        self._command = tuple(command)
        self._store = store
        self._settings = settings
        self._instrument = instrument
        self._seats = [_Seat(number + 1) for number in range(processes)]
        self._signals = 0
        self._worked = False
        self._refused = False
        self._closing = threading.Event()
        self._looked_s = time.monotonic()

    def health(self) -> dict[str, Any]:
        """Return whether all workers live, and whether one at least is ready; what is wrong with
        each. Callable from any thread.

        A worker that ended is replaced, which is no fault: until then it is not ready. A worker
        that is stuck or silent is one, for as long as it is not replaced.
        """
        workers = [_said_by(seat.number, seat.child) for seat in self._seats]
        idle_s = time.monotonic() - self._looked_s
        why = [f"worker {one['number']}: {one['why']}" for one in workers if one["why"]]
        if idle_s > SILENT_S:
            why.insert(0, f"the supervisor has not looked at its workers for {idle_s:.0f} s")
        if self._signals:
            why.insert(0, "it stops")
        live = idle_s <= SILENT_S and all(one["live"] for one in workers)
        return {
            "live": live,
            "ready": live and not self._signals and any(one["ready"] for one in workers),
            "why": why,
            "workers": workers,
        }

    def run(self) -> int:
        """Supervise until told to stop; then stop all workers in good order.

        The first SIGTERM or SIGINT is passed on as SIGTERM, and whoever has not ended after the
        settings' `stop_ms` and 5 s is killed; a second signal kills at once. What a killed worker
        had in hand is rolled back and runs again.

        Returns:
            An exit code: 0 all stopped in good order; 1 some had to be killed; 2 the first worker
            refused its configuration; 130 a second signal ended it.
        """
        previous = {
            number: signal.signal(number, self._signalled)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self._keep()
            return self._stop()
        finally:
            for seat in self._seats:
                seat.kill()
                seat.leave()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _signalled(self, _number: int, _frame: object) -> None:
        self._signals += 1

    # While it runs.

    def _keep(self) -> None:
        while not self._signals and not self._refused:
            now = self._looked_s = time.monotonic()
            for seat in self._seats:
                self._look(seat, now)
            time.sleep(TICK_S)

    def _look(self, seat: _Seat, now: float) -> None:
        child = seat.child
        if child is None:
            if now >= seat.due_s and not seat.is_burying:
                self._start(seat, now)
            return
        if child.listen():
            self._worked = True
        code = child.process.poll()
        if code is not None:
            self._replace(seat, child, code, now)
        elif child.silent_s > max(self._settings.lease_ms / 1000, BEATS_MISSED * BEAT_S):
            _LOG.error(
                "worker process %d (pid %d) has given no sign of life for %.0f s and is killed: "
                "it is stopped, or a handler never gives the interpreter back",
                seat.number,
                child.process.pid,
                child.silent_s,
            )
            child.process.kill()

    def _start(self, seat: _Seat, now: float) -> None:
        try:
            seat.child = _Child(self._command)
        except OSError as error:
            seat.due_s = now + self._next_pause(seat)
            _LOG.error("worker process %d cannot be started: %s", seat.number, error)

    def _next_pause(self, seat: _Seat) -> float:
        first_s, longest_s = self._settings.pause_ms / 1000, self._settings.pause_longest_ms / 1000
        seat.pause_s = min(longest_s, seat.pause_s * 2 or first_s)
        return seat.pause_s

    def _replace(self, seat: _Seat, child: _Child, code: int, now: float) -> None:
        seat.leave()
        if code == EXIT_CONFIGURATION and not self._worked:
            self._refused = True
            return
        if now - child.started_s >= HEALTHY_S:
            seat.pause_s = 0.0
        pause_s = 0.0 if code == EXIT_REPLACE_ME else self._next_pause(seat)
        seat.due_s = now + pause_s
        _LOG.log(
            logging.WARNING if code else logging.INFO,
            "worker process %d (pid %d) ended (%s); another one starts in %g s",
            seat.number,
            child.process.pid,
            _named(code),
            pause_s,
        )
        self._bury(seat, child)

    def _bury(self, seat: _Seat, child: _Child) -> None:
        """Free what a dead worker had, before another one starts: else that one would run into the
        same message without knowing that it kills.

        On a thread of its own: a stopped worker may keep the store waiting, and only the
        supervisor's own thread can end it.
        """
        seat.burial = threading.Thread(
            target=self._take_over, args=(child.worker_id,), name="procession-burial", daemon=True
        )
        seat.burial.start()

    def _take_over(self, worker_id: str) -> None:
        pause_s = self._settings.pause_ms / 1000
        while True:
            try:
                registry = drive(self._store.workers())
                try:
                    consumers = drive(registry.take_over(worker_id, dead=True))
                finally:
                    drive(registry.close())
            except ProcessionError as error:
                _LOG.warning("dead worker %s cannot be taken over yet: %s", worker_id, error)
                if self._closing.wait(pause_s):
                    return
                pause_s = min(self._settings.pause_longest_ms / 1000, pause_s * 2)
            else:
                # None: it had left in good order.
                if consumers is not None:
                    self._instrument.emit(
                        Event.WORKER_TAKEN_OVER, {"worker": worker_id, "consumers": consumers}
                    )
                return

    # When it stops.

    def _stop(self) -> int:
        for seat in self._seats:
            if seat.child is not None:
                seat.child.process.terminate()
        patience_s = self._settings.stop_ms / 1000 + STOP_MARGIN_S
        deadline = time.monotonic() + patience_s
        clean = True
        while waiting := [seat for seat in self._seats if seat.child is not None]:
            self._looked_s = time.monotonic()
            late = self._looked_s > deadline
            for seat in waiting:
                if late or self._signals > 1:
                    seat.kill()
                clean &= self._ended_well(seat)
            time.sleep(TICK_S)
        self._closing.set()
        ends_s = time.monotonic() + BURIAL_S
        for seat in self._seats:
            if seat.burial is not None:
                seat.burial.join(max(0.0, ends_s - time.monotonic()))
        if self._refused:
            return EXIT_CONFIGURATION
        if self._signals > 1:
            return EXIT_ABORTED
        return EXIT_STOPPED if clean else EXIT_UNCLEAN

    def _ended_well(self, seat: _Seat) -> bool:
        """Take leave of a child that has ended; False where it did not end in good order."""
        child = seat.child
        if child is None:
            return True
        child.listen()
        code = child.process.poll()
        if code is None:
            return True
        seat.leave()
        if code in _ENDED_AS_ASKED:
            return True
        _LOG.warning(
            "worker process %d (pid %d) did not stop in good order (%s): what it had in hand was "
            "rolled back and runs again",
            seat.number,
            child.process.pid,
            _named(code),
        )
        self._bury(seat, child)
        return False


class _Seat:
    """One of the workers that there shall be, whichever process it is at the moment."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: _Child | None = None
        self.pause_s = 0.0
        self.due_s = 0.0
        self.burial: threading.Thread | None = None

    @property
    def is_burying(self) -> bool:
        return self.burial is not None and self.burial.is_alive()

    def kill(self) -> None:
        """Kill its process, if there is one."""
        if self.child is not None:
            self.child.process.kill()

    def leave(self) -> None:
        """Be without a process: it has ended."""
        if self.child is not None:
            self.child.close()
            self.child = None


class _Child:
    """One worker process.

    Attributes:
        worker_id: of its present incarnation, as far as it was heard.
        said: its health, as it said last.
        silent_s: how long nothing was heard, 0 until the first sign of life: an app may take its
            time to import.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.worker_id = new_id()
        self.said: dict[str, Any] = {"live": True, "ready": False, "why": "it starts"}
        self.started_s = time.monotonic()
        self.silent_s = 0.0
        self._looked_s: float | None = None
        self._pipe, theirs = os.pipe()
        os.set_blocking(self._pipe, False)
        line = ("--worker-id", self.worker_id, "--lifeline", str(theirs))
        try:
            self.process = subprocess.Popen([*command, *line], pass_fds=(theirs,))  # noqa: S603  this very program
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)

    def listen(self) -> bool:
        """Read what it said since the last call; return whether it said anything."""
        said = b""
        with contextlib.suppress(OSError):
            said = os.read(self._pipe, _READ_BYTES)
        now = time.monotonic()
        if lines := said.rpartition(b"\n")[0].splitlines():
            self.said = json.loads(lines[-1])
            self.worker_id = self.said["worker"]
            self._looked_s, self.silent_s = now, 0.0
            return True
        if self._looked_s is not None:
            # Time in which this process did not run itself (a suspended machine) is no silence.
            self.silent_s += min(now - self._looked_s, BEAT_S)
            self._looked_s = now
        return False

    def close(self) -> None:
        """Hear no more."""
        os.close(self._pipe)


def _said_by(number: int, child: _Child | None) -> dict[str, Any]:
    """Return a worker's health; of one that has gone, that another one comes."""
    if child is None:
        said = {"live": True, "ready": False, "why": "it ended; another one starts"}
    elif child.silent_s > SILENT_S:
        said = {"live": False, "ready": False, "why": f"silent for {child.silent_s:.0f} s"}
    else:
        said = child.said
    return {"number": number, "pid": None if child is None else child.process.pid, **said}


def _named(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
