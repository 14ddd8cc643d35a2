"""`python -m bench [--bench NAME] [--store NAME] [--runs N] [--quick] [--full]`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from bench import postgres
from bench.backlog import backlog
from bench.failures import failures
from bench.inbox_size import inbox_size
from bench.latency import latency
from bench.measure import Options, Result, show
from bench.parts import parts
from bench.pruning import pruning, pruning_random
from bench.seeing import seeing
from bench.sending import send_many
from bench.w import w, w_shared

BENCHES: dict[str, Callable[[Options], Result]] = {
    "w": w,
    "w-shared": w_shared,
    "parts": parts,
    "send-many": send_many,
    "latency": latency,
    "backlog": backlog,
    "failures": failures,
    "seeing": seeing,
    "inbox-size": inbox_size,
    "pruning": pruning,
    "pruning-random": pruning_random,
}
MINUTES = {"inbox-size", "pruning", "pruning-random"}
STORES = ("sqlite", "postgres")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--bench", help="only this one")
    parser.add_argument("--store", choices=STORES, default=STORES[0])
    parser.add_argument("--runs", type=int, default=0, help="rounds of each pair (7; quick: 3)")
    parser.add_argument("--quick", action="store_true", help="less of everything: about a minute")
    parser.add_argument("--full", action="store_true", help="also what takes minutes")
    given = parser.parse_args()
    options = Options(
        store=given.store, runs=given.runs or (3 if given.quick else 7), quick=given.quick
    )
    benches = BENCHES if given.store == "sqlite" else postgres.BENCHES
    if given.bench and given.bench not in benches:
        parser.error(f"--bench on {given.store} is one of {', '.join(benches)}")
    names = [given.bench] if given.bench else [n for n in benches if given.full or n not in MINUTES]
    began = time.monotonic()
    results = []
    for name in names:
        print(f"{name} …", flush=True)
        results.append(benches[name](options))
        results[-1].keep()
    show(results)
    print(f"{time.monotonic() - began:.0f} s; appended to bench/results.jsonl")


if __name__ == "__main__":
    main()
