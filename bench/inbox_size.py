"""`inbox-size`: workload W with ten million keys in the inbox, against none: keys in order of time
(UUIDv7, as ours are by default), and random ones beside it. It takes minutes, so it runs only when
named or with --full.

Each large file is filled once, by SQLite itself, and goes through all rounds; a round adds a
five-hundredth.
"""

from __future__ import annotations

import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from bench.measure import Figure, Options, Result, Timing, fresh_folder, in_turn, rate, ratio
from bench.queued import Queued
from bench.sqlite import check_rows, connect
from bench.workload import MESSAGES, Sent, expected, messages, row_names
from procession.message import new_id

INBOX_ROWS = 10_000_000
RATIO_GOAL = 1.5
# Two files with their indexes, and what SQLite needs to make one.
DISK_BYTES_A_ROW = 700
STEP = 1_000_000
ROWS_A_MS = 40
ORDERED = (
    "printf('%08x-%04x-7%03x-8%03x-%012x', (:ms + i / 40) >> 16, (:ms + i / 40) & 65535, "
    "random() & 4095, random() & 4095, random() & 281474976710655)"
)
RANDOM = "lower(hex(randomblob(16)))"


def inbox_size(options: Options) -> Result:
    rows = options.fewer(INBOX_ROWS, INBOX_ROWS // 10)
    with fresh_folder() as folder:
        _check_disk(folder, rows)
        ordered, random = folder / "ordered", folder / "random"
        found = in_turn(
            options.runs,
            {
                "empty": _empty_round,
                "ordered": _rounds(_filled(ordered, rows, ORDERED), new_id),
                "random": _rounds(_filled(random, rows, RANDOM), random_id),
            },
        )
    times = {name: 1 / ratio(found[name], found["empty"]) for name in ("ordered", "random")}
    return Result(
        bench="inbox-size",
        store=options.store,
        queue="table",
        per_s=rate(found["ordered"]),
        runs=options.runs,
        figures=[
            Figure("empty inbox", f"{rate(found['empty']):,.0f}/s"),
            Figure(f"{rows:,} keys in order of time", f"{rate(found['ordered']):,.0f}/s"),
            Figure(
                "time a message, to that with an empty one",
                f"{times['ordered']:.2f}",
                f"≤ {RATIO_GOAL}",
                times["ordered"] <= RATIO_GOAL,
            ),
            Figure(f"{rows:,} random keys", f"{rate(found['random']):,.0f}/s"),
            Figure("time a message, to that with an empty one", f"{times['random']:.2f}"),
        ],
        fields={
            "inbox_rows": rows,
            "vs_empty_inbox": times["ordered"],
            "vs_empty_inbox_random": times["random"],
        },
    )


def _check_disk(folder: Path, rows: int) -> None:
    free, needed = shutil.disk_usage(folder).free, rows * DISK_BYTES_A_ROW
    if free < needed:
        raise SystemExit(
            f"inbox-size needs {needed / 1e9:.1f} GB for a while, and {folder} has "
            f"{free / 1e9:.1f} GB free: make room, or run it with --quick"
        )


def _subject(folder: Path) -> Queued:
    folder.mkdir(exist_ok=True)
    return Queued(folder, rows=row_names())


def _filled(folder: Path, rows: int, key: str) -> Queued:
    """Return an app whose inbox has the rows already."""
    subject = _subject(folder)
    with closing(connect(subject.path)) as connection:
        fill_inbox(connection, rows, key, what=folder.name)
    return subject


def fill_inbox(
    connection: sqlite3.Connection, rows: int, key: str, *, what: str, age_ms: int = 0
) -> None:
    """Append rows whose key is an SQL expression, the last one recorded `age_ms` ago."""
    began = time.monotonic()
    first_ms = int(time.time() * 1000) - age_ms - rows // ROWS_A_MS
    # Row by row into an index in no order would take an hour: then it is made afterwards.
    name = "procession_inbox_key"
    (index,) = connection.execute(
        "SELECT sql FROM sqlite_master WHERE name = ?", (name,)
    ).fetchone()
    afterwards = key != ORDERED
    if afterwards:
        connection.execute(f"DROP INDEX {name}")
    for start in range(0, rows, STEP):
        end = min(start + STEP, rows)
        connection.execute(
            "WITH RECURSIVE n (i) AS (SELECT :start UNION ALL SELECT i + 1 FROM n "
            "WHERE i < :end - 1) "
            "INSERT INTO procession_inbox (subscription, key, state, fingerprint, recorded_ms) "
            f"SELECT 1, CAST({key} AS BLOB), 3, randomblob(32), :ms + i / {ROWS_A_MS} FROM n",
            {"start": start, "end": end, "ms": first_ms},
        )
        print(f"  {what}: {end:,} of {rows:,} rows, {time.monotonic() - began:.0f} s", flush=True)
    if afterwards:
        connection.execute(index)
        print(f"  {what}: indexed, {time.monotonic() - began:.0f} s", flush=True)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _empty_round(folder: Path) -> Timing:
    subject = _subject(folder)
    timing = _round(subject, new_id)
    subject.app.close()
    return timing


def _rounds(subject: Queued, fresh: Callable[[], str]) -> Callable[[Path], Timing]:
    return lambda _folder: _round(subject, fresh)


def _round(subject: Queued, fresh: Callable[[], str]) -> Timing:
    """Send the workload under fresh ids, and handle it."""
    sent = renamed(messages(MESSAGES), fresh)
    with closing(connect(subject.path)) as connection:
        connection.execute("UPDATE orders SET balance = 0, n = 0, last_seq = 0")
        subject.fill(sent)
        timing = subject.work(len(sent))
        check_rows(connection, expected(sent))
    return timing


def renamed(sent: Sequence[Sent], fresh: Callable[[], str]) -> list[Sent]:
    """Return the messages under fresh ids, a copy under that of its first."""
    ids = {one.id: "" for one in sent}
    for old in ids:
        ids[old] = fresh()
    return [one._replace(id=ids[one.id]) for one in sent]


def random_id() -> str:
    return secrets.token_hex(16)
