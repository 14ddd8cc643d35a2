"""`pruning`: workload W while the worker's keeper forgets a million old keys beside it, against the
same with nothing to forget at hand. `pruning-random`: the same where the old keys are random ones.
They take minutes, so they run only when named or with --full.

Both files begin with the same number of old keys; one app prunes all the time, the other does not
before the bench is over. Rounds go on until all old keys are gone, but where they are random: that
would take half an hour.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from bench.inbox_size import ORDERED, RANDOM, fill_inbox, renamed
from bench.measure import Figure, Options, Result, Timing, fresh_folder, rate, ratio
from bench.queued import Queued
from bench.sqlite import check_rows, connect
from bench.workload import MESSAGES, expected, messages, row_names
from procession import Settings
from procession.message import new_id

OLD_KEYS = 1_000_000
AGE_MS = 8 * 24 * 3_600_000  # the retention is seven days
NEVER_MS, AT_ONCE_MS = 24 * 3_600_000, 1
# Some seconds a round: a worker that starts and stops is no share of what is measured.
MESSAGES_A_ROUND = 5 * MESSAGES
ROUNDS_MAX = 100
GOAL = 0.8


class Aged:
    """Workload W on a file with old keys in its inbox."""

    def __init__(
        self, folder: Path, keys: int, key: str, *, prune_every_ms: int, number: int
    ) -> None:
        folder.mkdir()
        settings = Settings(prune_every_ms=prune_every_ms)
        self._subject = Queued(folder, rows=row_names(), settings=settings)
        self._number = number
        with closing(connect(self._subject.path)) as connection:
            fill_inbox(connection, keys, key, what=folder.name, age_ms=AGE_MS)

    def round(self) -> Timing:
        """Send the workload under fresh ids, and handle it."""
        sent = renamed(messages(self._number), new_id)
        with closing(connect(self._subject.path)) as connection:
            connection.execute("UPDATE orders SET balance = 0, n = 0, last_seq = 0")
            self._subject.fill(sent)
            timing = self._subject.work(len(sent))
            check_rows(connection, expected(sent))
        return timing

    def old_keys(self) -> int:
        young_ms = int(time.time() * 1000) - AGE_MS + 3_600_000
        with closing(connect(self._subject.path)) as connection:
            (number,) = connection.execute(
                "SELECT count(*) FROM procession_inbox WHERE recorded_ms < ?", (young_ms,)
            ).fetchone()
        return int(number)

    def close(self) -> None:
        self._subject.app.close()


def pruning(options: Options) -> Result:
    return _pruning(options, "pruning", ORDERED, rounds_max=ROUNDS_MAX, goal=GOAL)


def pruning_random(options: Options) -> Result:
    return _pruning(options, "pruning-random", RANDOM, rounds_max=options.runs)


def _pruning(
    options: Options, bench: str, key: str, *, rounds_max: int, goal: float | None = None
) -> Result:
    """Measure pairs until all old keys are gone, or `rounds_max` were made: too few with a goal."""
    keys = options.fewer(OLD_KEYS, OLD_KEYS // 20)
    number = options.fewer(MESSAGES_A_ROUND, MESSAGES)
    with fresh_folder() as folder:
        still = Aged(folder / "still", keys, key, prune_every_ms=NEVER_MS, number=number)
        beside = Aged(folder / "pruning", keys, key, prune_every_ms=AT_ONCE_MS, number=number)
        alone, together, pruned = [still.round()], [], []
        left = beside.old_keys()
        for _ in range(rounds_max):
            together.append(beside.round())
            before, left = left, beside.old_keys()
            pruned.append(before - left)
            print(f"  round {len(together)}: {left:,} of {keys:,} are left", flush=True)
            alone.append(still.round())
            if not left:
                break
        assert still.old_keys() == keys
        assert goal is None or not left, f"{left:,} old keys are left after {rounds_max} rounds"
        still.close()
        beside.close()
    # Where the walk ended within the last round, that does not count.
    whole = together if left else together[:-1] or together
    share = ratio(whole, alone)
    a_second = sum(pruned[: len(whole)]) / sum(timing.wall_s for timing in whole)
    return Result(
        bench=bench,
        store=options.store,
        queue="table",
        per_s=rate(whole),
        runs=len(whole),
        figures=[
            Figure("while nothing is pruned", f"{rate(alone):,.0f}/s"),
            Figure(f"while {keys:,} keys are pruned", f"{rate(whole):,.0f}/s"),
            Figure("of that", f"{share:.2f}")
            if goal is None
            else Figure("of that", f"{share:.2f}", f"≥ {goal}", share >= goal),
            Figure("pruned meanwhile", f"{a_second:,.0f}/s"),
        ],
        fields={"old_keys": keys, "vs_still": share, "pruned_per_s": a_second},
    )
