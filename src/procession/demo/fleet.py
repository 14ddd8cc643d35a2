"""The worker processes of the demo: starts them, kills them with SIGKILL, replaces them.

It touches only processes that it started itself, and all of them have ended when `stop` returns.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import IO, Any, Final

from procession import Event

FAILURES_MAX: Final = 5
STOP_S: Final = 10.0

_READ_BYTES: Final = 65_536
_ERROR_CHARS: Final = 2_000


class FleetError(Exception):
    """The workers end by themselves, one after another."""


@dataclass(slots=True)
class WorkerProcess:
    """A process that was started.

    Attributes:
        number: for people, from 1.
        ids: the names of its incarnations as a worker, once it has told them.
        killed_s: when it was killed, on the monotonic clock.
        taken_over: after that its lease has ended and another worker has freed what it held.
    """

    number: int
    process: subprocess.Popen[bytes]
    ids: list[str] = field(default_factory=list)
    killed_s: float | None = None
    taken_over: bool = False


class Fleet:
    """Keeps a number of workers running.

    Args:
        module, arguments: what each worker runs, as `python -m` would.

    Attributes:
        killed: those that were killed here, in order.
        failures: how many ended by themselves.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        self._command = (sys.executable, "-m", module, *map(str, arguments))
        self._running: list[WorkerProcess] = []
        self.killed: list[WorkerProcess] = []
        self.failures = 0
        self._numbers = 0
        self._rest = b""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        # As files, because a file may be closed twice: a number may be another file's by then.
        self._told = os.fdopen(read_end, "rb", buffering=0)
        self._tell = os.fdopen(write_end, "wb", buffering=0)

    def start(self) -> WorkerProcess:
        """Start one more worker."""
        self._numbers += 1
        process = subprocess.Popen(  # noqa: S603  this interpreter, our own module
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._tell,
            stderr=self._errors,
            process_group=0,  # Ctrl-C is the parent's: it ends the workers itself, in good order
        )
        worker = WorkerProcess(self._numbers, process)
        self._running.append(worker)
        return worker

    @property
    def ready(self) -> Sequence[WorkerProcess]:
        """The workers that have begun to work."""
        return [worker for worker in self._running if worker.ids]

    def kill(self, random: Random) -> WorkerProcess | None:
        """Kill one of those that work, drawn at random; None where none does yet."""
        ready = self.ready
        if not ready:
            return None
        victim = random.choice(ready)
        victim.process.kill()
        victim.process.wait()
        victim.killed_s = time.monotonic()
        self._running.remove(victim)
        self.killed.append(victim)
        return victim

    def poll(self) -> list[dict[str, Any]]:
        """Return what the workers have told since the last call; replace those that ended.

        Raises:
            FleetError: too many ended without being killed.
        """
        told = self._read()
        for event in told:
            self._note(event)
        for worker in list(self._running):
            if worker.process.poll() is not None:
                self._running.remove(worker)
                self._failed(worker)
                self.start()
        return told

    @property
    def begun(self) -> bool:
        """Whether any worker has begun to work yet."""
        return any(worker.ids for worker in (*self._running, *self.killed))

    def stop(self) -> None:
        """End all workers, in good order where they let it. Harmless twice."""
        for worker in self._running:
            worker.process.terminate()
        deadline = time.monotonic() + STOP_S
        try:
            for worker in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also at a second Ctrl-C
            for worker in self._running:
                worker.process.kill()
                worker.process.wait()
        self._running.clear()
        for file in (self._told, self._tell, self._errors):
            file.close()

    def _read(self) -> list[dict[str, Any]]:
        text = self._rest
        while chunk := self._told.read(_READ_BYTES):  # None where nothing waits
            text += chunk
        *lines, self._rest = text.split(b"\n")
        return [json.loads(line) for line in lines]

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == Event.WORKER_STARTED:
            for worker in self._running:
                if worker.process.pid == event["process"]:
                    worker.ids.append(event["worker"])

    def _failed(self, worker: WorkerProcess) -> None:
        self.failures += 1
        if self.failures < FAILURES_MAX:
            return
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")[-_ERROR_CHARS:].strip()
        raise FleetError(
            f"{self.failures} workers ended by themselves, the last with exit code "
            f"{worker.process.returncode}:\n{said}"
        )
