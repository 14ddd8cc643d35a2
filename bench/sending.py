"""`send-many`: many messages, against a bare INSERT of the same rows into the same table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.measure import Figure, Options, Result, Timing, in_turn, quiet, rate, ratio
from bench.queued import QUEUE, Queued
from bench.sqlite import connect
from bench.workload import messages
from procession import App

TRANSACTION = 1_000
ROWS_A_STATEMENT = 100  # of 1 to 500 the quickest here
GOAL = 0.4
COLUMNS = "id, session, message_id, type, format, body, sent_ms"


def send_many(options: Options) -> Result:
    number = options.fewer(50_000, 20_000)
    sent = messages(number)
    payloads = [one.payload for one in sent]
    ids = {id(payload): one.id for payload, one in zip(payloads, sent, strict=True)}
    rows: list[tuple[Any, ...]] = []

    def sending(send: Callable[[App], int]) -> Callable[[Path], Timing]:
        def measure(folder: Path) -> Timing:
            subject = Queued(folder, rows=())
            quiet()
            timing = Timing(number)
            assert send(subject.app) == number
            timing.stop()
            with closing(connect(subject.path)) as connection:
                stored = connection.execute(
                    f"SELECT {COLUMNS} FROM procession_messages ORDER BY id"
                ).fetchall()
            assert [row[2].decode() for row in stored] == [one.id for one in sent]
            rows[:] = stored
            subject.app.close()
            return timing

        return measure

    def bare(folder: Path) -> Timing:
        subject = Queued(folder, rows=())
        with closing(connect(subject.path)) as connection:
            insert = f"INSERT INTO procession_messages ({COLUMNS}) VALUES " + ", ".join(
                ["(?, ?, ?, ?, ?, ?, ?)"] * ROWS_A_STATEMENT
            )
            values = [
                [value for row in rows[start : start + ROWS_A_STATEMENT] for value in row]
                for start in range(0, number, ROWS_A_STATEMENT)
            ]
            quiet()
            timing = Timing(number)
            for start in range(0, len(values), TRANSACTION // ROWS_A_STATEMENT):
                connection.execute("BEGIN IMMEDIATE")
                for parameters in values[start : start + TRANSACTION // ROWS_A_STATEMENT]:
                    connection.execute(insert, parameters)
                connection.execute("COMMIT")
            timing.stop()
            (stored,) = connection.execute("SELECT count(*) FROM procession_messages").fetchone()
            assert stored == number
        subject.app.close()
        return timing

    found = in_turn(
        options.runs,
        {
            "many": sending(
                lambda app: app.send_many(QUEUE, payloads, identify=lambda p: ids[id(p)])
            ),
            "publish": sending(
                lambda app: app.publish(
                    app.outgoing(QUEUE, payload, message_id=one.id)
                    for one, payload in zip(sent, payloads, strict=True)
                )
            ),
            "bare": bare,
        },
    )
    many, of_bare = found["many"], ratio(found["many"], found["bare"])
    return Result(
        bench="send-many",
        store=options.store,
        queue="table",
        per_s=rate(many),
        runs=options.runs,
        figures=[
            Figure("app.send_many", f"{rate(many):,.0f}/s"),
            Figure("app.publish(app.outgoing(…) …)", f"{rate(found['publish']):,.0f}/s"),
            Figure("bare INSERT of the same rows", f"{rate(found['bare']):,.0f}/s"),
            Figure("of the bare INSERT", f"{of_bare:.3f}", f"≥ {GOAL}", of_bare >= GOAL),
        ],
        fields={
            "vs_bare_insert": of_bare,
            "publish_per_s": round(rate(found["publish"])),
            "bare_per_s": round(rate(found["bare"])),
        },
    )
