"""The same benches on PostgreSQL: against R1, the inbox that people write by hand (psycopg async,
16 connections, one transaction a message), and R2, raw batches of 500 on one connection.

The server is that of `scripts/services`, with the settings it was installed with.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from tests.services import postgres_schema

from bench.measure import Figure, Options, Result, Timing, in_turn, more_cpu_us, quiet, rate, ratio
from bench.queued import QUEUE, Handled
from bench.workload import (
    MESSAGES,
    Expected,
    Paid,
    Sent,
    expected,
    messages,
    row_names,
)
from procession import App, Context, RetryPolicy

CONNECTIONS = 16
RAW_BATCH = 500
LANES = 8
SHARED_EFFECT = "UPDATE orders SET balance = balance + :amount, n = n + 1 WHERE id = :row"
EFFECT = (
    "UPDATE orders SET balance = balance + :amount, n = n + 1, disorder = disorder + "
    "CASE WHEN last_seq + 1 <> :seq THEN 1 ELSE 0 END, last_seq = :seq WHERE id = :row"
)
READ = "SELECT balance FROM orders WHERE id = :row"
INBOX = "INSERT INTO inbox (id) VALUES (%s) ON CONFLICT DO NOTHING"
TABLES = """
CREATE TABLE orders (
    id text PRIMARY KEY, balance bigint NOT NULL DEFAULT 0, n int NOT NULL DEFAULT 0,
    last_seq int NOT NULL DEFAULT 0, disorder int NOT NULL DEFAULT 0
);
CREATE TABLE inbox (id text PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())
"""


def for_driver(statement: str) -> str:
    """Return the statement with `%(name)s` for each `:name`."""
    return re.sub(r":(\w+)", r"%(\1)s", statement)


@contextmanager
def place(rows: Sequence[str]) -> Iterator[str]:
    """Make a schema with the business rows; yield its address."""
    with postgres_schema() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(TABLES)
            with connection.cursor().copy("COPY orders (id) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row((row,))
            connection.execute("VACUUM ANALYZE orders")
            connection.execute("CHECKPOINT") if _may_checkpoint(connection) else None
        yield url


def _may_checkpoint(connection: psycopg.Connection[Any]) -> bool:
    row = connection.execute("SELECT pg_has_role('pg_checkpoint', 'MEMBER')").fetchone()
    return bool(row and row[0])


def check(url: str, wanted: Expected, *, shared: bool) -> None:
    """Stop the benchmark where a sum, a count or an order is not exactly as it must be."""
    with psycopg.connect(url) as connection:
        found = {
            row: (balance, n)
            for row, balance, n in connection.execute(
                "SELECT id, balance, n FROM orders WHERE n > 0"
            )
        }
        gaps = connection.execute("SELECT sum(disorder) FROM orders").fetchone()
    assert found == wanted.rows, "sums or counts are wrong"
    assert shared or gaps == (wanted.gaps,), f"{gaps} gaps, not {wanted.gaps}"


def parameters(one: Sent) -> dict[str, Any]:
    return {"amount": one.amount, "seq": one.seq, "row": one.row}


def raw_batches(url: str, sent: Sequence[Sent], *, shared: bool) -> Timing:
    """R2: an INSERT for the marks and an UPDATE for the effects of each 500 messages."""
    effect = for_driver(SHARED_EFFECT if shared else EFFECT)
    with psycopg.connect(url) as connection:
        cursor = connection.cursor()
        quiet()
        timing = Timing(len(sent))
        for start in range(0, len(sent), RAW_BATCH):
            batch = sent[start : start + RAW_BATCH]
            cursor.execute(
                "INSERT INTO inbox (id) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING "
                "RETURNING id",
                ([one.id for one in batch],),
            )
            fresh = {row[0] for row in cursor.fetchall()}
            todo = []
            for one in batch:
                if one.id in fresh:
                    fresh.discard(one.id)
                    todo.append(parameters(one))
            cursor.executemany(effect, todo)
            connection.commit()
        timing.stop()
    return timing


def by_hand(url: str, sent: Sequence[Sent], *, shared: bool, reads: bool = False) -> Timing:
    """R1. Each key's messages go to one connection, in order, as they must."""
    effect, read = for_driver(SHARED_EFFECT if shared else EFFECT), for_driver(READ)

    async def work(mine: list[Sent]) -> None:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            for one in mine:
                async with connection.transaction():
                    cursor = await connection.execute(INBOX, (one.id,))
                    if cursor.rowcount == 0:
                        continue
                    if reads:
                        found = await connection.execute(read, {"row": one.row})
                        await found.fetchone()
                    await connection.execute(effect, parameters(one))

    async def work_all() -> None:
        shares: list[list[Sent]] = [[] for _ in range(CONNECTIONS)]
        for one in sent:
            shares[hash(one.key) % CONNECTIONS].append(one)
        await asyncio.gather(*(work(share) for share in shares))

    quiet()
    timing = Timing(len(sent))
    asyncio.run(work_all())
    timing.stop()
    return timing


def pay(payment: Paid, ctx: Context) -> None:
    ctx.write(EFFECT, amount=payment.amount, seq=payment.seq, row=payment.row)


def pay_shared(payment: Paid, ctx: Context) -> None:
    ctx.write(SHARED_EFFECT, amount=payment.amount, row=payment.row)


def read_and_pay(payment: Paid, ctx: Context) -> None:
    assert ctx.execute(READ, row=payment.row).fetchone() is not None
    ctx.write(EFFECT, amount=payment.amount, seq=payment.seq, row=payment.row)


def queued(
    url: str, sent: Sequence[Sent], handler: Callable[[Paid, Context], None], lanes: int
) -> Timing:
    """The candidate: an app with a table queue, one process; starting it counts."""
    handled = Handled()
    app = App("bench", store=url, retry=RetryPolicy(max_attempts=1), instruments=[handled])
    app.consumer(QUEUE, name=QUEUE, session="order_id", concurrency=lanes)(handler)
    app.open()
    app.publish(app.outgoing(QUEUE, one.payload, message_id=one.id) for one in sent)
    worker = app.worker()
    handled.expect(len(sent))
    quiet()
    timing = Timing(len(sent))
    worker.start()
    handled.wait()
    timing.stop()
    worker.stop()
    worker.join()
    (status,) = app.status()
    assert status.waiting == status.held == 0
    app.close()
    return timing


def _measure(  # noqa: PLR0913  a bench in one line each
    name: str,
    options: Options,
    handler: Callable[[Paid, Context], None],
    *,
    lanes: Sequence[int],
    goals: dict[str, float],
    shared: bool = False,
    reads: bool = False,
) -> Result:
    sent = messages(options.fewer(MESSAGES, MESSAGES // 4), shared=shared)
    few = sent[: options.fewer(5_000, 2_000)]
    wanted, few_wanted = expected(sent), expected(few)
    rows = row_names(shared=shared)

    def with_place(measure: Callable[[str], Timing], right: Expected) -> Callable[[Path], Timing]:
        def run(_folder: Path) -> Timing:
            with place(rows) as url:
                timing = measure(url)
                check(url, right, shared=shared)
            return timing

        return run

    measures = {"R2": with_place(lambda u: raw_batches(u, sent, shared=shared), wanted)}
    for number in lanes:
        measures[f"{number}"] = with_place(
            lambda u, number=number: queued(u, sent, handler, number), wanted
        )
    measures["R1"] = with_place(lambda u: by_hand(u, few, shared=shared, reads=reads), few_wanted)
    found = in_turn(options.runs, measures)
    best = max(lanes, key=lambda number: rate(found[f"{number}"]))
    figures = [
        Figure("R1: the inbox by hand, 16 connections", f"{rate(found['R1']):,.0f}/s"),
        Figure("R2: raw batches of 500", f"{rate(found['R2']):,.0f}/s"),
    ]
    fields: dict[str, Any] = {"lanes": best}
    for number in lanes:
        ours = found[f"{number}"]
        of_r2, of_r1 = ratio(ours, found["R2"]), ratio(ours, found["R1"])
        figures += [
            Figure(f"table queue, lanes: {number}", f"{rate(ours):,.0f}/s"),
            _goal("of R2", of_r2, goals.get("R2"), counts=number == best),
            _goal("times R1", of_r1, goals.get("R1"), counts=number == best),
        ]
        fields |= {f"of_r2_{number}": of_r2, f"times_r1_{number}": of_r1}
    own_us = more_cpu_us(found[f"{lanes[0]}"], found["R2"])
    figures.append(Figure("CPU a message beyond R2's", f"{own_us:.1f} µs"))
    ours = found[f"{best}"]
    return Result(
        bench=name,
        store="postgres",
        queue="table",
        per_s=rate(ours),
        runs=options.runs,
        figures=figures,
        vs_raw_batched=ratio(ours, found["R2"]),
        vs_one_transaction=ratio(ours, found["R1"]),
        fields=fields | {"more_cpu_us": own_us},
    )


def _goal(what: str, value: float, goal: float | None, *, counts: bool) -> Figure:
    if goal is None or not counts:
        return Figure(what, f"{value:.2f}")
    return Figure(what, f"{value:.2f}", f"≥ {goal:g}", value >= goal)


def w(options: Options) -> Result:
    return _measure("w", options, pay, lanes=(1, 2), goals={"R2": 0.5, "R1": 6})


def w_execute(options: Options) -> Result:
    lanes = (1, 4, LANES)
    return _measure("w-execute", options, read_and_pay, lanes=lanes, goals={"R1": 4}, reads=True)


def w_shared(options: Options) -> Result:
    return _measure("w-shared", options, pay_shared, lanes=(1, LANES), goals={"R1": 3}, shared=True)


def send_many(options: Options) -> Result:
    """`send_many`, 1,000 messages a transaction, against a bare COPY of the same rows."""
    sent = messages(options.fewer(MESSAGES, MESSAGES // 4))
    payloads = [one.payload for one in sent]

    def ours(_folder: Path) -> Timing:
        with place([]) as url:
            app = App("bench", store=url)
            app.consumer(QUEUE, name=QUEUE, session="order_id")(pay)
            app.open()
            quiet()
            timing = Timing(len(sent))
            app.send_many(QUEUE, payloads)
            timing.stop()
            app.close()
        return timing

    def bare(_folder: Path) -> Timing:
        with place([]) as url, psycopg.connect(url) as connection:
            app = App("bench", store=url)
            app.consumer(QUEUE, name=QUEUE, session="order_id")(pay)
            app.open()
            rows = [
                (1, out.session, number, out.message_id, out.type, out.format, out.body, 0)
                for number, out in enumerate(app.outgoing(QUEUE, payload) for payload in payloads)
            ]
            app.close()
            quiet()
            timing = Timing(len(sent))
            for start in range(0, len(rows), 1_000):
                with connection.cursor().copy(
                    "COPY procession_messages (subscription, session, number, message_id, type, "
                    "format, body, sent_ms) FROM STDIN (FORMAT BINARY)"
                ) as copy:
                    copy.set_types(
                        ["int8", "bytea", "int8", "bytea", "text", "int2", "bytea", "int8"]
                    )
                    for row in rows[start : start + 1_000]:
                        copy.write_row(row)
                connection.commit()
            timing.stop()
        return timing

    found = in_turn(options.runs, {"bare": bare, "ours": ours})
    of_bare = ratio(found["ours"], found["bare"])
    return Result(
        bench="send-many",
        store="postgres",
        queue="table",
        per_s=rate(found["ours"]),
        runs=options.runs,
        figures=[
            Figure("send_many", f"{rate(found['ours']):,.0f}/s"),
            Figure("a bare COPY of the same rows", f"{rate(found['bare']):,.0f}/s"),
            _goal("of it", of_bare, 0.5, counts=True),
        ],
        fields={"of_bare_copy": of_bare},
    )


BENCHES: dict[str, Callable[[Options], Result]] = {
    "w": w,
    "w-execute": w_execute,
    "w-shared": w_shared,
    "send-many": send_many,
}
