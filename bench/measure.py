"""Times, ratios of neighbours, and where they are written: a table on the screen, a line of JSON a
bench in bench/results.jsonl."""

from __future__ import annotations

import datetime as dt
import gc
import json
import os
import platform
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
OUT = FOLDER / "out"  # on the disk that holds the project, never in memory
RESULTS = FOLDER / "results.jsonl"


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    store: str = "sqlite"
    runs: int = 7
    quick: bool = False

    def fewer(self, usual: int, quick: int) -> int:
        """Return a number of messages."""
        return quick if self.quick else usual


class Timing:
    """Wall time and this process's CPU time, of all its threads, for a number of messages."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._cpu = time.process_time()
        self.began_s = time.perf_counter()
        self.wall_s = self.cpu_s = 0.0

    def stop(self) -> None:
        self.wall_s = time.perf_counter() - self.began_s
        self.cpu_s = time.process_time() - self._cpu

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.number / self.wall_s

    @property
    def wall_us(self) -> float:
        """Microseconds a message."""
        return self.wall_s / self.number * 1e6

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU a message."""
        return self.cpu_s / self.number * 1e6


def quiet() -> None:
    """Before a measurement: what earlier runs left is none of its business."""
    gc.collect()
    gc.freeze()


@contextmanager
def fresh_folder() -> Iterator[Path]:
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        yield Path(folder)


def in_turn(runs: int, measures: Mapping[str, Callable[[Path], Timing]]) -> dict[str, list[Timing]]:
    """Run each measure in turn, the whole round `runs` times, each on files of its own; the first
    one once more at the end.

    Neighbours share the machine's mood, so only their ratios are quoted.
    """
    found: dict[str, list[Timing]] = {name: [] for name in measures}
    first = next(iter(measures))
    for name in [*[*measures] * runs, first]:
        with fresh_folder() as folder:
            found[name].append(measures[name](folder))
    return found


def rate(timings: Sequence[Timing]) -> float:
    """Return the median rate, messages a second."""
    return statistics.median(timing.rate for timing in timings)


def ratio(timings: Sequence[Timing], references: Sequence[Timing]) -> float:
    """Return the median of the rates' ratios, each timing to the references around it."""
    return statistics.median(
        statistics.mean(near.wall_us for near in around(timing, references)) / timing.wall_us
        for timing in timings
    )


def more_cpu_us(timings: Sequence[Timing], references: Sequence[Timing]) -> float:
    """Return the median of the CPU that the timings took beyond the references, a message."""
    return statistics.median(
        timing.cpu_us - statistics.mean(near.cpu_us for near in around(timing, references))
        for timing in timings
    )


def around(timing: Timing, references: Sequence[Timing]) -> list[Timing]:
    """Return the last reference before the timing and the first one after it, where there are
    such."""
    before = [one for one in references if one.began_s < timing.began_s]
    after = [one for one in references if one.began_s > timing.began_s]
    return before[-1:] + after[:1]


@dataclass(frozen=True)
class Figure:
    """One line of the table: `value` as text, with its goal and whether it is met."""

    what: str
    value: str
    goal: str = ""
    met: bool | None = None


@dataclass
class Result:
    """One bench.

    Attributes:
        per_s: messages a second, the median.
        fields: more fields of the line in results.jsonl.
    """

    bench: str
    store: str
    queue: str
    per_s: float
    runs: int
    figures: list[Figure]
    vs_raw_batched: float | None = None
    vs_one_transaction: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "store": self.store,
            "queue": self.queue,
            "messages_per_s": round(self.per_s),
            "runs": self.runs,
            "vs_raw_batched": _rounded(self.vs_raw_batched),
            "vs_one_transaction": _rounded(self.vs_one_transaction),
            **{name: _rounded(value) for name, value in self.fields.items()},
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "cores": os.cpu_count(),
        }

    def keep(self) -> None:
        """Append the line to results.jsonl."""
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.line()) + "\n")


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


def show(results: Sequence[Result]) -> None:
    """Print the table, with rich where it is installed."""
    rows = [
        (result.bench if number == 0 else "", one.what, one.value, one.goal, verdict(one.met))
        for result in results
        for number, one in enumerate(result.figures)
    ]
    head = ("bench", "what (median)", "value", "goal", "")
    try:
        from rich.console import Console  # noqa: PLC0415  an extra
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        for row in [head, *rows]:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
        return
    table = Table()
    for number, text in enumerate(head):
        table.add_column(text, justify="right" if number == 2 else "left", no_wrap=number != 1)
    for row in rows:
        if row[0]:
            table.add_section()
        table.add_row(*row)
    Console().print(table)


def verdict(met: bool | None) -> str:  # noqa: FBT001
    return "" if met is None else "met" if met else "MISSED"
