"""`parts`: where a message's time goes, by step of the flow. It is driven without threads, and the
clock stands around each step of a batch, so that it costs next to nothing."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

from bench.measure import Figure, Options, Result, fresh_folder
from bench.queued import Queued, pay
from bench.workload import MESSAGES, Paid, expected, messages, row_names
from procession import Context

STEPS = {
    "begin": "begin: turnstile, lease, gate",
    "fetch": "fetch: messages and what the inbox says of them",
    "flush": "flush: inbox rows, removal, counts",
    "commit": "commit: write and sync the log",
}


def nothing(_: Paid, _ctx: Context) -> None:
    """A handler without effect."""


def parts(options: Options) -> Result:
    sent = messages(options.fewer(MESSAGES, MESSAGES // 2))
    wanted = expected(sent)
    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.runs):
        for handler in (nothing, pay):
            with fresh_folder() as folder:
                subject = Queued(folder, handler, rows=row_names())
                subject.fill(sent)
                steps: dict[str, float] = defaultdict(float)
                timing = subject.work_without_thread(
                    len(sent), prepare=lambda lane, steps=steps: _clock(lane, steps)
                )
                if handler is pay:
                    subject.check(wanted)
                subject.app.close()
            name = handler.__name__
            rest = timing.wall_s - sum(steps.values())
            for step, seconds in {**steps, "rest": rest, "all": timing.wall_s}.items():
                spent[f"{name} {step}"].append(seconds / len(sent) * 1e6)
    cost = {name: statistics.median(values) for name, values in spent.items()}
    lines = {text: cost[f"pay {step}"] for step, text in STEPS.items()}
    lines["judge, decode, context, bookkeeping"] = cost["nothing rest"]
    lines["the handler with its statement"] = cost["pay rest"] - cost["nothing rest"]
    lines["together"] = cost["pay all"]
    return Result(
        bench="parts",
        store=options.store,
        queue="table",
        per_s=1e6 / cost["pay all"],
        runs=options.runs,
        figures=[Figure(what, f"{us:.2f} µs") for what, us in lines.items()],
        fields={
            **{f"{step}_us": cost[f"pay {step}"] for step in STEPS},
            "flow_us": cost["nothing rest"],
            "handler_us": cost["pay rest"] - cost["nothing rest"],
        },
    )


def _clock(lane: Any, steps: dict[str, float]) -> None:
    """Add up what each step of this one lane takes."""
    clock = time.perf_counter

    def timed(name: str) -> Any:
        step = getattr(lane, name)

        async def run(*arguments: Any) -> Any:
            began = clock()
            try:
                return await step(*arguments)
            finally:
                steps[name] += clock() - began

        return run

    for name in STEPS:
        setattr(lane, name, timed(name))
