"""`inbox-size`: workload W with ten million random keys in the inbox, against none. It takes
minutes, so it runs only when named or with --full."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from bench.measure import Figure, Options, Result, Timing, fresh_folder, in_turn, rate, ratio
from bench.queued import Queued
from bench.sqlite import check_rows, connect
from bench.workload import MESSAGES, Sent, expected, messages, row_names

INBOX_ROWS = 10_000_000


def inbox_size(options: Options) -> Result:
    rows = options.fewer(INBOX_ROWS, INBOX_ROWS // 10)
    with fresh_folder() as folder:
        empty, full = _subject(folder / "empty", 0), _subject(folder / "full", rows)
        found = in_turn(options.runs, {"empty": _rounds(empty), "full": _rounds(full)})
    times = 1 / ratio(found["full"], found["empty"])
    return Result(
        bench="inbox-size",
        store=options.store,
        queue="table",
        per_s=rate(found["full"]),
        runs=options.runs,
        figures=[
            Figure(f"{rows:,} random keys in the inbox", f"{rate(found['full']):,.0f}/s"),
            Figure("time a message, to that with an empty one", f"{times:.2f}"),
        ],
        fields={"inbox_rows": rows, "vs_empty_inbox": times},
    )


def _subject(folder: Path, keys: int) -> Queued:
    folder.mkdir()
    subject = Queued(folder, rows=row_names())
    with closing(connect(subject.path)) as connection:
        # Row by row into an index in no order would take an hour: it is made afterwards.
        name = "procession_inbox_key"
        (index,) = connection.execute(
            "SELECT sql FROM sqlite_master WHERE name = ?", (name,)
        ).fetchone()
        connection.execute("BEGIN")
        connection.execute(f"DROP INDEX {name}")
        connection.executemany(
            "INSERT INTO procession_inbox (subscription, key, state, fingerprint, recorded_ms) "
            "VALUES (1, ?, 3, ?, 0)",
            _old_keys(keys),
        )
        connection.execute(index)
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return subject


def _old_keys(number: int) -> Iterator[tuple[bytes, bytes]]:
    for place in range(number):
        digest = hashlib.sha256(b"%d" % place).digest()
        yield digest[:16].hex().encode(), digest


def _rounds(subject: Queued) -> Callable[[Path], Timing]:
    """Return a measure that sends and handles the workload under fresh random ids each time."""
    done = 0

    def measure(_folder: Path) -> Timing:
        nonlocal done
        done += 1
        sent = [_renamed(one, done) for one in messages(MESSAGES)]
        with closing(connect(subject.path)) as connection:
            connection.execute("UPDATE orders SET balance = 0, n = 0, last_seq = 0")
            subject.fill(sent)
            timing = subject.work(len(sent))
            check_rows(connection, expected(sent))
        return timing

    return measure


def _renamed(one: Sent, turn: int) -> Sent:
    return one._replace(id=hashlib.md5(f"{turn}/{one.id}".encode()).hexdigest())
