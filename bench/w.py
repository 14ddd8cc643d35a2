"""`w` and `w-shared`: the whole way of a message, against the same work without a queue."""

from __future__ import annotations

from pathlib import Path

from bench.measure import Figure, Options, Result, Timing, in_turn, more_cpu_us, rate, ratio
from bench.queued import Queued, pay, pay_shared
from bench.sqlite import RAW_BATCH, raw
from bench.workload import MESSAGES, expected, messages, row_names

ONE_BY_ONE = 1_000
BATCHED_GOAL, SINGLE_GOAL, CPU_GOAL_US = 0.4, 12.0, 15.0


def w(options: Options) -> Result:
    return _measure("w", options, shared=False)


def w_shared(options: Options) -> Result:
    return _measure("w-shared", options, shared=True)


def _measure(name: str, options: Options, *, shared: bool) -> Result:
    sent = messages(options.fewer(MESSAGES, MESSAGES // 2), shared=shared)
    wanted = expected(sent)
    few = sent[: options.fewer(ONE_BY_ONE, ONE_BY_ONE // 2)]
    few_wanted = expected(few)

    def queued(folder: Path) -> Timing:
        handler = pay_shared if shared else pay
        subject = Queued(folder, handler, rows=row_names(shared=shared))
        subject.fill(sent)
        timing = subject.work(len(sent))
        subject.check(wanted, shared=shared)
        subject.app.close()
        return timing

    found = in_turn(
        options.runs,
        {
            "batched": lambda f: raw(f / "raw.db", sent, wanted, batch=RAW_BATCH, shared=shared),
            "queue": queued,
            "single": lambda f: raw(f / "raw.db", few, few_wanted, batch=1, shared=shared),
        },
    )
    queue, batched, single = found["queue"], found["batched"], found["single"]
    of_batched, of_single = ratio(queue, batched), ratio(queue, single)
    own_us = more_cpu_us(queue, batched)
    figures = [
        Figure("table queue, one worker", f"{rate(queue):,.0f}/s"),
        Figure(f"raw, {RAW_BATCH:,} a transaction", f"{rate(batched):,.0f}/s"),
        Figure("raw, one transaction a message", f"{rate(single):,.0f}/s"),
        Figure(
            "of raw batched", f"{of_batched:.3f}", f"≥ {BATCHED_GOAL}", of_batched >= BATCHED_GOAL
        ),
        Figure(
            "times one a transaction",
            f"{of_single:.1f}",
            f"≥ {SINGLE_GOAL:g}",
            of_single >= SINGLE_GOAL,
        ),
        Figure(
            "own CPU a message", f"{own_us:.1f} µs", f"< {CPU_GOAL_US:g} µs", own_us < CPU_GOAL_US
        ),
    ]
    return Result(
        bench=name,
        store=options.store,
        queue="table",
        per_s=rate(queue),
        runs=options.runs,
        figures=figures,
        vs_raw_batched=of_batched,
        vs_one_transaction=of_single,
        fields={
            "own_cpu_us": own_us,
            "raw_batched_per_s": round(rate(batched)),
            "one_transaction_per_s": round(rate(single)),
        },
    )
