"""`failures`: what failing messages cost the others. Reported, without a goal. The records of the
failures are written as at the default level, but nowhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from bench.measure import Figure, Options, Result, Timing, in_turn, rate, ratio
from bench.queued import Handler, Queued, pay
from bench.sqlite import EFFECT
from bench.workload import MESSAGES, Paid, expected, messages, row_names
from procession import Context, Reject

FAILING_EVERY = 500
REJECTED_EVERY = 20


def failures(options: Options) -> Result:
    logging.getLogger("procession").addHandler(logging.NullHandler())
    logging.getLogger("procession").propagate = False
    sent = messages(options.fewer(MESSAGES, MESSAGES // 2))
    ids = list({one.id: one for one in sent})
    failing, rejected = set(ids[::FAILING_EVERY]), set(ids[::REJECTED_EVERY])
    clash = "INSERT INTO orders (id) SELECT id FROM orders LIMIT 1"

    def raising(payment: Paid, ctx: Context) -> None:
        pay(payment, ctx)
        if ctx.message.id in failing:
            raise ValueError("the bench wants it to fail")

    def raising_late(payment: Paid, ctx: Context) -> None:
        ctx.execute(EFFECT, amount=payment.amount, seq=payment.seq, row=payment.row)
        if ctx.message.id in failing:
            raise ValueError("the bench wants it to fail")

    def writing_wrong(payment: Paid, ctx: Context) -> None:
        pay(payment, ctx)
        if ctx.message.id in failing:
            ctx.write(clash)

    def rejecting(payment: Paid, ctx: Context) -> None:
        if ctx.message.id in rejected:
            raise Reject("the bench wants it to be rejected")
        pay(payment, ctx)

    def queued(handler: Handler, without: Collection[str]) -> Callable[[Path], Timing]:
        wanted = expected(sent, without)
        dead = len(without)

        def measure(folder: Path) -> Timing:
            subject = Queued(folder, handler, rows=row_names())
            subject.fill(sent)
            timing = subject.work(len(sent))
            subject.check(wanted, dead=dead)
            subject.app.close()
            return timing

        return measure

    found = in_turn(
        options.runs,
        {
            "clean": queued(pay, ()),
            "raise": queued(raising, failing),
            "late": queued(raising_late, failing),
            "wrong": queued(writing_wrong, failing),
            "reject": queued(rejecting, rejected),
        },
    )
    clean = found["clean"]
    share = {name: ratio(timings, clean) for name, timings in found.items()}
    return Result(
        bench="failures",
        store=options.store,
        queue="table",
        per_s=rate(found["raise"]),
        runs=options.runs,
        figures=[
            Figure("clean", f"{rate(clean):,.0f}/s"),
            Figure("1 of 500 raises, of clean", f"{share['raise']:.2f}"),
            Figure("1 of 500 raises after ctx.execute", f"{share['late']:.2f}"),
            Figure("1 of 500 writes what the database refuses", f"{share['wrong']:.2f}"),
            Figure("1 of 20 is rejected at once", f"{share['reject']:.2f}"),
        ],
        fields={f"vs_clean_{name}": value for name, value in share.items() if name != "clean"},
    )
