"""`latency`: how long a message takes that comes alone, from the return of its send to its commit.

A worker that sleeps looks for work every 10 ms, so the goal is three commits, as the disk takes
them, and that wait. The raw commits are measured between the sends.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from contextlib import closing
from typing import Any

from bench.measure import Figure, Options, Result, fresh_folder
from bench.queued import QUEUE, Queued
from bench.sqlite import EFFECT, INBOX, connect, make_inbox, make_rows
from bench.workload import expected, messages, row_names
from procession import Event

A_SECOND = 10
COMMITS = 3


class Clocked:
    """Notes when the message whose handler ran last was committed; one is in flight at a time."""

    def __init__(self) -> None:
        self.committed_s = 0.0
        self.done = threading.Event()

    def emit(self, event: Event, _fields: dict[str, Any]) -> None:
        if event is Event.BATCH_COMMITTED:
            self.committed_s = time.perf_counter()
            self.done.set()


def latency(options: Options) -> Result:
    seconds = options.fewer(15, 4)
    sent = list({one.id: one for one in messages(A_SECOND * seconds * 2)}.values())
    sent = sent[: A_SECOND * seconds]
    clocked = Clocked()
    draw = random.Random(5)
    waits_ms, raw_ms = [], []
    with fresh_folder() as folder:
        subject = Queued(folder, rows=row_names(), instruments=[clocked])
        with closing(connect(folder / "raw.db")) as raw:
            make_rows(raw, row_names())
            make_inbox(raw)
            worker = subject.app.worker()
            worker.start()
            time.sleep(0.2)
            for one in sent:
                begun = time.perf_counter()
                clocked.done.clear()
                subject.app.send(QUEUE, one.payload, message_id=one.id)
                returned = time.perf_counter()
                assert clocked.done.wait(10.0)
                waits_ms.append((clocked.committed_s - returned) * 1e3)
                # The phase against the worker's looks must be by chance.
                time.sleep(0.02 + draw.random() * 0.02)
                again = time.perf_counter()
                for part in range(COMMITS):
                    raw.execute("BEGIN IMMEDIATE")
                    raw.execute(INBOX, (f"{one.id}/{part}", 0)).fetchone()
                    raw.execute(EFFECT, {"amount": 1, "seq": 1, "row": one.row})
                    raw.execute("COMMIT")
                raw_ms.append((time.perf_counter() - again) * 1e3)
                time.sleep(max(0.0, begun + 1 / A_SECOND - time.perf_counter()))
            worker.stop()
            worker.join()
        subject.check(expected(sent))
        idle_ms = subject.app.settings.idle_ms
        subject.app.close()
    p50, raw_p50 = statistics.median(waits_ms), statistics.median(raw_ms)
    p99 = sorted(waits_ms)[int(len(waits_ms) * 0.99)]
    limit = raw_p50 + idle_ms
    return Result(
        bench="latency",
        store=options.store,
        queue="table",
        per_s=A_SECOND,
        runs=len(sent),
        figures=[
            Figure(
                "send's return to commit, p50", f"{p50:.1f} ms", f"< {limit:.1f} ms", p50 < limit
            ),
            Figure("the same, p99", f"{p99:.1f} ms"),
            Figure(f"{COMMITS} raw commits, p50", f"{raw_p50:.1f} ms"),
        ],
        fields={"p50_ms": p50, "p99_ms": p99, "raw_commits_ms": raw_p50, "idle_ms": idle_ms},
    )
