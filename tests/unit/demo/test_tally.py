"""Promises that the tally counts money, order, double and lost lines as they are."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from procession.demo.app import EFFECT, effect_values, make_tables
from procession.demo.check import read_folder
from procession.demo.ledgers import LedgerLine, parse_line, split_lines
from procession.demo.tally import Tally, pounds, tally

HEADER = "InvoiceNo,StockCode,Quantity,UnitPrice\n"
FILES = {
    "2010-12-01": "536365,A,6,2.55\n536366,B,2,0.001\n536365,B,1,3\n",
    "2010-12-02": "536365,A,6,2.55\nC536367,A,-1,2.55\n",
}
LINES = [
    parse_line(raw) for name, rows in FILES.items() for raw in split_lines(name, HEADER + rows)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ledgers"
    folder.mkdir()
    for name, rows in FILES.items():
        (folder / f"{name}.csv").write_text(HEADER + rows)
    return folder


def tally_of(
    folder: Path, lines: Sequence[LedgerLine], *, ledgers: Sequence[str] = tuple(FILES)
) -> Tally:
    """Apply these lines in this order, and count them."""
    database = folder.parent / "demo.db"
    make_tables(database)
    with closing(sqlite3.connect(database)) as connection, connection:
        for line in lines:
            for statement in EFFECT:
                connection.execute(statement, effect_values(line, replayed=False))
    return tally(database, read_folder(folder), ledgers)


def test_what_was_applied_once_and_in_order_has_no_difference(folder: Path) -> None:
    counted = tally_of(folder, LINES)

    assert counted.ok
    assert counted == Tally(
        ledgers=2,
        orders=3,
        lines=5,
        true_total_thousandths=31_052,
        counted_total_thousandths=31_052,
        orders_out_of_sequence=0,
        lines_counted_twice=0,
        lines_lost=0,
    )


def test_a_line_applied_twice_is_counted_in_money_and_breaks_no_sequence(folder: Path) -> None:
    counted = tally_of(folder, [*LINES, LINES[0], LINES[0], LINES[2]])

    assert not counted.ok
    assert counted.difference_thousandths == 2 * 15_300 + 3_000
    assert counted.lines_counted_twice == 2
    assert counted.orders_out_of_sequence == 0


def test_each_order_with_an_inversion_is_out_of_sequence_once(folder: Path) -> None:
    counted = tally_of(folder, LINES[::-1])

    assert not counted.ok
    assert counted.orders_out_of_sequence == 1
    assert counted.difference_thousandths == 0


def test_orders_may_interleave_in_any_way(folder: Path) -> None:
    assert tally_of(folder, [LINES[place] for place in (4, 0, 2, 3, 1)]).ok


def test_a_line_that_was_not_applied_is_lost(folder: Path) -> None:
    counted = tally_of(folder, LINES[1:])

    assert not counted.ok
    assert counted.lines_lost == 1
    assert counted.difference_thousandths == -15_300


def test_other_ledgers_are_left_out(folder: Path) -> None:
    counted = tally_of(folder, [*LINES, LINES[4]], ledgers=["2010-12-01"])

    assert counted.ok
    assert (counted.ledgers, counted.lines, counted.orders) == (1, 3, 2)
    assert counted.counted_total_thousandths == 18_302 + 0


@pytest.mark.parametrize(
    ("thousandths", "text"),
    [
        (0, "0.00"),
        (1, "0.001"),
        (10, "0.01"),
        (-990, "-0.99"),
        (150_463_300, "150,463.30"),
        (-1_000_005, "-1,000.005"),
    ],
)
def test_money_is_shown_exactly(thousandths: int, text: str) -> None:
    assert pounds(thousandths) == text


def test_a_difference_shows_its_sign_and_nothing_has_none() -> None:
    assert [pounds(each, signed=True) for each in (5_000, 0, -5_000)] == ["+5.00", "0.00", "-5.00"]
