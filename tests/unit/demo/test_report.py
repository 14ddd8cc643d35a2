"""Promises that the demo's report counts every message and hides no difference."""

import io
from collections.abc import Mapping

import pytest
from rich.console import Console

from procession import Cause, End
from procession.demo.check import Check, Report
from procession.demo.report import ConsumerNumbers, Result, Stage, one_end_each, show


def numbers(
    *, sent: int = 10, replayed: int = 0, unfinished: int = 0, ends: Mapping[str, int] | None = None
) -> ConsumerNumbers:
    return ConsumerNumbers(
        sent=sent,
        ends={End.PROCESSED: 10} if ends is None else ends,
        duplicates={Cause.RESENT: 4_000},
        replayed=replayed,
        unfinished=unfinished,
        reruns=0,
    )


def result(*checks: Check) -> Result:
    return Result(
        hostility={},
        consumers={
            "split": numbers(),
            "apply": numbers(sent=1_000_000, ends={End.CONFLICT: 1}),
            "audit": numbers(sent=1_000_000),
        },
        kills=3,
        takeovers=3,
        serial=Stage(messages=1_000_000, seconds=1.5),
        parallel=Stage(messages=1_000_000, seconds=0.0),
        seconds=2.0,
        comparison=Report(checks),
    )


RIGHT = Check("number of lines", 42_481, 42_481, 0, ())
WRONG = Check("stock per item", 9, 9, 7, ("stock of item 'a': 1 expected, 2 found",))


def shown(what: Result, *, width: int = 80, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(what, Console(file=stream, width=width, highlight=False, markup=False))
    stream.flush()
    return stream.buffer.getvalue().decode()


@pytest.mark.parametrize(
    ("ends", "replayed", "unfinished"),
    [
        ({End.PROCESSED: 9}, 0, 0),  # lost
        ({End.PROCESSED: 11}, 0, 0),  # twice
        ({End.PROCESSED: 10, End.DUPLICATE: 1}, 0, 0),  # two ends
        ({End.PROCESSED: 10}, 1, 0),  # a replay without an end
        ({End.PROCESSED: 10}, 0, 1),  # one of which nobody knows
    ],
)
def test_a_message_without_exactly_one_end_is_a_difference(
    ends: Mapping[str, int], replayed: int, unfinished: int
) -> None:
    checked = one_end_each(
        {"apply": numbers(ends=ends, replayed=replayed, unfinished=unfinished), "audit": numbers()}
    )

    assert checked.differing == 1
    assert checked.examples[0].startswith("apply: 10 sent")


def test_a_replay_is_a_second_end_and_no_difference() -> None:
    replayed = numbers(replayed=1, ends={End.PROCESSED: 10, End.DEAD_LETTERED: 1})

    assert one_end_each({"apply": replayed}).ok


def test_every_check_is_shown_with_its_verdict_and_each_difference_in_words() -> None:
    text = shown(result(RIGHT, WRONG))

    assert "✓ number of lines" in text
    assert "✗ stock per item" in text
    assert "7 differ" in text
    assert "stock per item: stock of item 'a': 1 expected, 2 found" in text
    assert "stock per item: and 6 more" in text


def test_forty_columns_are_enough_for_a_million_messages() -> None:
    text = shown(result(RIGHT), width=40)

    assert max(map(len, text.splitlines())) <= 40
    assert "1,000,000" in text
    assert "…" not in text


def test_an_encoding_without_ticks_gets_words() -> None:
    text = shown(result(RIGHT, WRONG), encoding="ascii")

    assert "ok  number of lines" in text
    assert "NOT stock per item" in text


def test_a_stage_without_time_has_no_rate() -> None:
    assert Stage(messages=5, seconds=0.0).rate == 0.0
    assert Stage(messages=5, seconds=2.0).rate == 2.5
