"""The worker's end of the pipe to its supervisor: it says each second that this process runs, and
how it is, and stops the worker when the supervisor is gone.

A thread of its own, which waits for nothing but the second: what silences it (a handler that never
gives the interpreter back, a stopped process) stops the whole worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

BEAT_S = 1.0


class Lifeline(threading.Thread):
    """Beats until the process ends.

    Args:
        say: returns the line that each beat carries. A pipe takes up to 4,096 bytes whole or not at
            all (POSIX's PIPE_BUF is at least 512, Linux has 4,096), so keep it shorter.
        orphaned: called once, when the parent process is gone.
        pipe: the file descriptor to write to; without one, only the parent is watched.
    """

    def __init__(
        self, say: Callable[[], str], orphaned: Callable[[], None], pipe: int | None = None
    ) -> None:
        super().__init__(name="procession-lifeline", daemon=True)
        self._say = say
        self._orphaned = orphaned
        self._pipe = pipe
        self._parent = os.getppid()
        self._ended = threading.Event()
        if pipe is not None:
            # What a handler starts must not keep the line open, nor a full pipe hold the beat.
            os.set_inheritable(pipe, False)  # noqa: FBT003  takes it by position only
            os.set_blocking(pipe, False)

    def run(self) -> None:
        """Beat each second."""
        while os.getppid() == self._parent and self._beat():
            if self._ended.wait(BEAT_S):
                return
        self._orphaned()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def _beat(self) -> bool:
        """Write one line; return False if nobody is there to read it."""
        if self._pipe is None:
            return True
        try:
            os.write(self._pipe, self._say().encode() + b"\n")
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True
