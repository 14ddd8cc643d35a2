"""The sums of each kind of consumer side by side: as a table for people, as values for programs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from procession.demo.report import Result
from procession.demo.tally import Tally, pounds

# The label and three columns of money; what is narrower gets one below the other.
_BESIDE_COLUMNS: Final = 56


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one kind of consumer made of the first ledgers.

    Attributes:
        processes: how many worked at a time.
        kills: how many of them were killed.
        seconds: of its whole run.
    """

    tally: Tally
    processes: int
    kills: int
    seconds: float

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            **self.tally.as_json(),
            "processes": self.processes,
            "kills": self.kills,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """What the framework made of all ledgers; `tally` counts them all."""

    result: Result
    tally: Tally

    @property
    def ok(self) -> bool:
        """Whether nothing differs from the files."""
        return self.result.comparison.ok and self.tally.ok


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that the demo reports at its end.

    Attributes:
        input: what was processed, and by how many.
        modes: each kind of consumer that ran, by its name, on the same ledgers.
        ours: where it is among them.
        seconds: of the whole demo.
    """

    input: Mapping[str, int]
    modes: Mapping[str, Counted]
    ours: Ours | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether ours counted right: that the others do not is what they are there to show."""
        return self.ours is None or self.ours.ok

    def as_json(self) -> dict[str, object]:
        """Return plain values for `json.dumps`."""
        modes: dict[str, dict[str, object]] = {
            name: mode.as_json() for name, mode in self.modes.items()
        }
        told: dict[str, object] = {"ok": self.ok, "input": dict(self.input)}
        if self.ours is not None:
            modes["convoy"]["all_ledgers"] = self.ours.tally.as_json()
            told |= self.ours.result.as_json()
        return {**told, "seconds": round(self.seconds, 3), "modes": modes}


def show_sums(outcome: Outcome, console: Console) -> None:
    """Print the sums side by side, or one below the other where there is no room."""
    modes = outcome.modes
    first = next(iter(modes.values())).tally.ledgers
    console.print()
    which = "The first ledger" if first == 1 else f"The first {first} ledgers"
    console.print(f"{which}, in pounds and orders:")
    console.print()
    if console.width >= _BESIDE_COLUMNS:
        _print_beside(modes, console)
    else:
        _print_below(modes, console)
    if outcome.ours is not None and outcome.ours.tally.ledgers > first:
        every = outcome.ours.tally
        console.print()
        console.print(
            f"convoy, all {every.ledgers} ledgers: {pounds(every.true_total_thousandths)} pounds "
            f"in the files, {pounds(every.counted_total_thousandths)} counted"
        )


def _print_beside(modes: Mapping[str, Counted], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2))
    table.add_column("", no_wrap=True)
    for name in modes:
        table.add_column(name, justify="right", overflow="fold")
    columns = [_rows(mode) for mode in modes.values()]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    console.print(table)


def _print_below(modes: Mapping[str, Counted], console: Console) -> None:
    for name, mode in modes.items():
        table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2))
        table.add_column(name, no_wrap=True)
        table.add_column("", justify="right", overflow="fold")
        for label, value in _rows(mode).items():
            table.add_row(label, value)
        console.print(table)


def _rows(mode: Counted) -> dict[str, str]:
    tally = mode.tally
    return {
        "in the files": pounds(tally.true_total_thousandths),
        "counted": pounds(tally.counted_total_thousandths),
        "difference": pounds(tally.difference_thousandths, signed=True),
        "orders": f"{tally.orders:,}",
        "  out of sequence": f"{tally.orders_out_of_sequence:,}",
        "lines": f"{tally.lines:,}",
        "  counted twice": f"{tally.lines_counted_twice:,}",
        "  lost": f"{tally.lines_lost:,}",
        "workers killed": f"{mode.kills:,}",
    }
