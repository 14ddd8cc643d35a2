"""Promises that the sums stand side by side where there is room, and that ours alone decide."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from procession.demo.check import Check, Report
from procession.demo.report import Result, Stage
from procession.demo.sums import Counted, Ours, Outcome, show_sums
from procession.demo.tally import Tally

RIGHT = Tally(
    ledgers=3,
    orders=2_025,
    lines=1_042_481,
    true_total_thousandths=10_150_463_300,
    counted_total_thousandths=10_150_463_300,
    orders_out_of_sequence=0,
    lines_counted_twice=0,
    lines_lost=0,
)
WRONG = replace(
    RIGHT,
    counted_total_thousandths=10_213_062_605,
    orders_out_of_sequence=34,
    lines_counted_twice=2_640,
)
EVERY = replace(RIGHT, ledgers=20, true_total_thousandths=7_000, counted_total_thousandths=7_000)


def ours(*, tally: Tally = EVERY, differing: int = 0) -> Ours:
    result = Result(
        hostility={},
        consumers={},
        kills=3,
        takeovers=3,
        serial=Stage(messages=1, seconds=1.0),
        parallel=Stage(messages=1, seconds=1.0),
        seconds=2.0,
        comparison=Report((Check("stock per item", 1, 1, differing, ()),)),
    )
    return Ours(result=result, tally=tally)


def outcome(mine: Ours | None) -> Outcome:
    tallies = {"naive": WRONG, "single": WRONG} | ({} if mine is None else {"convoy": RIGHT})
    return Outcome(
        input={"ledgers": 20},
        modes={
            name: Counted(tally=tally, processes=2, kills=3, seconds=1.5)
            for name, tally in tallies.items()
        },
        ours=mine,
        seconds=9.0,
    )


def shown(what: Outcome, *, width: int = 80, encoding: str = "ascii") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show_sums(what, Console(file=stream, width=width, highlight=False, markup=False))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line]


def test_the_sums_stand_side_by_side() -> None:
    lines = words(shown(outcome(ours())))

    assert ["naive", "single", "convoy"] in lines
    assert ["counted", "10,213,062.605", "10,213,062.605", "10,150,463.30"] in lines
    assert ["difference", "+62,599.305", "+62,599.305", "0.00"] in lines
    assert ["out", "of", "sequence", "34", "34", "0"] in lines
    assert ["counted", "twice", "2,640", "2,640", "0"] in lines


def test_forty_columns_get_them_one_below_the_other() -> None:
    text = shown(outcome(ours()), width=40)
    lines = words(text)

    assert max(map(len, text.splitlines())) <= 40
    assert lines.index(["naive"]) < lines.index(["single"]) < lines.index(["convoy"])
    assert ["difference", "+62,599.305"] in lines
    assert ["difference", "0.00"] in lines


def test_the_sums_of_all_ledgers_follow_where_there_are_more() -> None:
    assert "convoy, all 20 ledgers: 7.00 pounds" in shown(outcome(ours()))
    assert "all 3 ledgers" not in shown(outcome(ours(tally=RIGHT)))


def test_the_others_being_wrong_is_no_failure() -> None:
    assert outcome(None).ok
    assert outcome(ours()).ok


@pytest.mark.parametrize("mine", [ours(differing=1), ours(tally=WRONG)])
def test_ours_being_wrong_is_one(mine: Ours) -> None:
    assert not outcome(mine).ok


def test_the_outcome_is_plain_json() -> None:
    plain = json.loads(json.dumps(outcome(ours()).as_json()))

    assert plain["ok"] is True
    assert plain["seconds"] == 9.0
    assert plain["modes"]["naive"]["difference_thousandths"] == 62_599_305
    assert plain["modes"]["convoy"]["all_ledgers"]["ledgers"] == 20
    assert plain["comparison"]["ok"] is True
    assert "comparison" not in json.loads(json.dumps(outcome(None).as_json()))
