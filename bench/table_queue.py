"""The candidate: an app on a file with table queues, driven by a worker of this process."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.measure import Timing, quiet
from bench.sqlite import (
    NAMED_EFFECT,
    NAMED_SHARED_EFFECT,
    check_rows,
    connect,
    make_rows,
)
from bench.workload import Expected, Paid, Sent
from procession import App, Context, Event, RetryPolicy
from procession.abc import WorkerRecord
from procession.flows.batch import LaneMemory
from procession.flows.consume import Consume
from procession.runtime.clock import HostClock
from procession.runtime.drive import drive

QUEUE = "payments"
PATIENCE_S = 300.0


class Handled:
    """An instrument that says when so many messages have ended, without anyone asking."""

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
        assert self._reached.wait(PATIENCE_S), f"{self.number} of {self._wanted} after {PATIENCE_S} s"


class Subject:
    """An app whose one consumer runs the workload's effect.

    Attributes:
        fail: ids of messages whose handler raises after its statement.
        reject: ids of messages that it rejects before any.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self.path = folder / "queue.db"
        self.shared = shared
        self.handled = Handled()
        self.fail: frozenset[str] = frozenset()
        self.reject: frozenset[str] = frozenset()
        self.app = App(
            "bench",
            store=f"sqlite:///{self.path}",
            instruments=[self.handled],
            retry=RetryPolicy(max_attempts=1),
        )
"""
