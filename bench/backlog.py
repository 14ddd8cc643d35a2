"""`backlog`: a million messages waiting in 100,000 sessions, against 10,000 in 500, and how much
memory that takes.

It runs in a process of its own (`python -m bench.backlog`), which sends all messages with
`send_many` and handles them, so that its peak of memory covers both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from bench.measure import (
    Figure,
    Options,
    Result,
    Timing,
    fresh_folder,
    in_turn,
    rate,
    ratio,
)
from bench.queued import QUEUE, Handler, Queued
from bench.sqlite import SHARED_EFFECT, connect
from bench.workload import KEYS, Paid, row_names
from procession import Context

STEP = 10_000
SMALL_SESSIONS = 500
MESSAGES_A_SESSION = 10
RATIO_GOAL, MEMORY_GOAL_MB = 1.3, 200.0


class Backlog:
    """A queue that always has a number of messages waiting before it is measured, of all sessions
    in turn. Effects go to 500 rows, so that only the backlog differs by size."""

    def __init__(self, folder: Path, waiting: int, sessions: int) -> None:
        folder.mkdir()
        self._waiting = waiting
        self._sessions = sessions
        self._last: Counter[str] = Counter()
        self._sent = 0
        self._subject = Queued(folder, self._handler(), rows=row_names())
        self.fill()

    def _handler(self) -> Handler:
        last = self._last

        def pay(payment: Paid, ctx: Context) -> None:
            assert payment.seq == last[payment.order_id] + 1, "out of order"
            last[payment.order_id] += 1
            ctx.write(SHARED_EFFECT, amount=payment.amount, row=payment.row)

        return pay

    def fill(self) -> None:
        """Send what was handled again."""
        first = self._sent
        self._sent = self._subject.handled.number + self._waiting
        self._subject.app.send_many(QUEUE, self._payloads(first, self._sent))
        with closing(connect(self._subject.path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _payloads(self, first: int, end: int) -> Iterator[Paid]:
        for place in range(first, end):
            sequence, session = divmod(place, self._sessions)
            yield Paid(f"s{session:06d}", f"order-{session % KEYS:04d}", 1, sequence + 1)

    def handle(self, _folder: Path) -> Timing:
        """Handle the next messages."""
        timing = self._subject.work(STEP)
        with closing(connect(self._subject.path)) as connection:
            effects, keys, waiting = connection.execute(
                "SELECT (SELECT sum(n) FROM orders), (SELECT count(*) FROM procession_inbox), "
                "(SELECT count(*) FROM procession_messages)"
            ).fetchone()
        assert effects == keys == self._subject.handled.number
        assert waiting == self._sent - keys
        self.fill()
        return timing

    def close(self) -> None:
        self._subject.app.close()


def main(waiting: int, runs: int) -> None:
    """Measure, and print it as one JSON object."""
    with fresh_folder() as folder:
        small = Backlog(folder / "small", STEP, SMALL_SESSIONS)
        began = time.perf_counter()
        large = Backlog(folder / "large", waiting, waiting // MESSAGES_A_SESSION)
        sent_per_s = waiting / (time.perf_counter() - began)
        found = in_turn(runs, {"small": small.handle, "large": large.handle})
        small.close()
        large.close()
    print(
        json.dumps(
            {
                "per_s": rate(found["large"]),
                "times": 1 / ratio(found["large"], found["small"]),
                "peak_mb": peak_mb(),
                "sent_per_s": sent_per_s,
            }
        )
    )


def peak_mb() -> float:
    """Return the most memory that this process has had resident. The rusage of a child would count
    what its parent had when it was started."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def backlog(options: Options) -> Result:
    waiting = options.fewer(1_000_000, 200_000)
    command = [sys.executable, "-m", "bench.backlog", str(waiting), str(options.runs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    times, peak = found["times"], found["peak_mb"]
    label = f"{waiting:,} waiting in {waiting // MESSAGES_A_SESSION:,} sessions"
    return Result(
        bench="backlog",
        store=options.store,
        queue="table",
        per_s=found["per_s"],
        runs=options.runs,
        figures=[
            Figure(label, f"{found['per_s']:,.0f}/s"),
            Figure(
                f"time a message, to that with {STEP:,} waiting in {SMALL_SESSIONS}",
                f"{times:.2f}",
                f"≤ {RATIO_GOAL}",
                times <= RATIO_GOAL,
            ),
            Figure(
                "peak memory, sending and handling",
                f"{peak:.0f} MB",
                f"< {MEMORY_GOAL_MB:g} MB",
                peak < MEMORY_GOAL_MB,
            ),
            Figure("sent with send_many", f"{found['sent_per_s']:,.0f}/s"),
        ],
        fields={
            "waiting": waiting,
            "vs_small_backlog": times,
            "peak_mb": peak,
            "sent_per_s": found["sent_per_s"],
        },
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
