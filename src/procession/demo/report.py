"""What came of our own run: the numbers, as a table for people and as plain values for programs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from procession import App, Cause, End, Reason
from procession.abc import ConsumerStatus, DeadLetterFilter
from procession.demo import check

_CAUSES: Final = tuple(cause.value for cause in Cause)
# A conflict has its own line in the table, whichever end it was given.
_OTHER_ENDS: Final = (End.STALE, End.EXPIRED, End.DISCARDED, End.SKIPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerNumbers:
    """One consumer's messages and how they ended.

    Attributes:
        sent: messages that it was sent; a replay queues one of them once more.
        ends: by end; a dead letter of a conflict counts as `conflict`.
        duplicates: by cause.
        replayed: dead letters that were replayed; they are among `processed`, too.
        unfinished: messages without an end.
        reruns: runs of handlers that were rolled back and repeated.
    """

    sent: int
    ends: Mapping[str, int]
    duplicates: Mapping[str, int]
    replayed: int
    unfinished: int
    reruns: int

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "sent": self.sent,
            **{end.value.replace("-", "_"): self.ends.get(end, 0) for end in End},
            "duplicates_by_cause": {cause: self.duplicates.get(cause, 0) for cause in _CAUSES},
            "replayed": self.replayed,
            "unfinished": self.unfinished,
            "reruns": self.reruns,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How much a stage did in how many seconds; the two stages overlap."""

    messages: int
    seconds: float

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "messages": self.messages,
            "seconds": round(self.seconds, 3),
            "messages_per_s": round(self.rate, 1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that is reported of it at its end.

    Attributes:
        hostility: what was done to it.
        takeovers: workers whose lease another one ended.
        seconds: of the whole run.
    """

    hostility: Mapping[str, object]
    consumers: Mapping[str, ConsumerNumbers]
    kills: int
    takeovers: int
    serial: Stage
    parallel: Stage
    seconds: float
    comparison: check.Report

    def as_json(self) -> dict[str, object]:
        """Return the result as plain values for `json.dumps`."""
        return {
            "hostility": dict(self.hostility),
            "consumers": {name: numbers.as_json() for name, numbers in self.consumers.items()},
            "kills": self.kills,
            "takeovers": self.takeovers,
            "serial_stage": self.serial.as_json(),
            "parallel_stage": self.parallel.as_json(),
            "comparison": self.comparison.as_json(),
        }


def numbers_of(app: App, sent: Mapping[str, int]) -> dict[str, ConsumerNumbers]:
    """Read from the app what became of all that each consumer was sent."""
    conflicts = _letters(app, DeadLetterFilter(reason=Reason.CONFLICT))
    replayed = _letters(app, DeadLetterFilter(status="replayed"))
    statuses = {status.consumer: status for status in app.status()}
    return {
        name: _numbers_of(
            statuses[name], number, conflicts=conflicts[name], replayed=replayed[name]
        )
        for name, number in sent.items()
    }


def _letters(app: App, wanted: DeadLetterFilter) -> Counter[str]:
    return Counter(letter.consumer for letter in app.dead_letters(wanted))


def _numbers_of(
    status: ConsumerStatus, sent: int, *, conflicts: int, replayed: int
) -> ConsumerNumbers:
    ends: Counter[str] = Counter()
    duplicates: Counter[str] = Counter()
    for (end, cause), number in status.counts.items():
        ends[end] += number
        if end == End.DUPLICATE:
            duplicates[cause] += number
    # A conflict ends as a dead letter by default; people look for it under its own name.
    ends[End.DEAD_LETTERED] -= conflicts
    ends[End.CONFLICT] += conflicts
    return ConsumerNumbers(
        sent=sent,
        ends=ends,
        duplicates=duplicates,
        replayed=replayed,
        unfinished=status.waiting + status.scheduled + status.held,
        reruns=status.reruns,
    )


def one_end_each(consumers: Mapping[str, ConsumerNumbers]) -> check.Check:
    """Compare what was sent, and what was replayed, with what has ended: nothing may be missing
    and nothing may end twice.
    """
    differences = [
        f"{name}: {numbers.sent} sent and {numbers.replayed} replayed, {ended} ended, "
        f"{numbers.unfinished} unfinished"
        for name, numbers in consumers.items()
        if (ended := sum(numbers.ends.values())) != numbers.sent + numbers.replayed
        or numbers.unfinished
    ]
    return check.Check(
        "one end for each message",
        expected=sum(each.sent + each.replayed for each in consumers.values()),
        found=sum(sum(each.ends.values()) for each in consumers.values()),
        differing=len(differences),
        examples=tuple(differences),
    )


def show(result: Result, console: Console) -> None:
    """Print the result: the numbers, the rates, each check, and every difference."""
    console.print()
    console.print(_numbers(result.consumers))
    console.print()
    for text in _sentences(result):
        console.print(text)
    console.print()
    console.print(_checks(result.comparison, ascii_only=console.options.ascii_only))
    for difference in result.comparison.differences:
        console.print(f"  {difference}")


def _numbers(consumers: Mapping[str, ConsumerNumbers]) -> Table:
    # Without lines, for a narrow terminal; a number that is too wide all the same is never cut.
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("messages", no_wrap=True)
    for name in consumers:
        table.add_column(name, justify="right", overflow="fold")
    every = list(consumers.values())

    def row(label: str, values: list[int]) -> None:
        table.add_row(label, *(f"{value:,}" for value in values))

    row("sent", [each.sent for each in every])
    row("processed", [each.ends.get(End.PROCESSED, 0) for each in every])
    row("  by replay", [each.replayed for each in every])
    row("duplicate", [each.ends.get(End.DUPLICATE, 0) for each in every])
    for cause in _CAUSES:
        row(f"  {cause}", [each.duplicates.get(cause, 0) for each in every])
    row("conflict", [each.ends.get(End.CONFLICT, 0) for each in every])
    row("dead-lettered", [each.ends.get(End.DEAD_LETTERED, 0) for each in every])
    for end in _OTHER_ENDS:
        row(end.value, [each.ends.get(end, 0) for each in every])
    row("reruns", [each.reruns for each in every])
    return table


def _sentences(result: Result) -> list[str]:
    sentences = [
        f"kills survived: {result.kills}; workers taken over: {result.takeovers}",
        _rate("serial stage", result.serial),
        _rate("parallel stage", result.parallel),
    ]
    conflicts = sum(each.ends.get(End.CONFLICT, 0) for each in result.consumers.values())
    if conflicts:
        sentences.append(
            f"{conflicts} conflicts stay as dead letters: a person must say which payload was meant"
        )
    return sentences


def _rate(name: str, stage: Stage) -> str:
    return f"{name}: {stage.rate:,.0f} messages/s ({stage.messages:,} in {stage.seconds:.1f} s)"


def _checks(report: check.Report, *, ascii_only: bool) -> Table:
    right, wrong = ("ok", "NOT") if ascii_only else ("✓", "✗")
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for each in report.checks:
        verdict = f"{each.found:,}" if each.ok else f"{each.differing:,} differ"
        table.add_row(right if each.ok else wrong, each.name, verdict)
    return table
