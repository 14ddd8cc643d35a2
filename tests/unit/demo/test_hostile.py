"""Promises that the demo's hostile plan is the same for a seed, and takes what there is."""

import pytest

from procession.demo.hostile import Plan, damage, plan_hostility
from procession.demo.ledgers import RawLine, split_lines

HEADER = "InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country\n"


def ledger(name: str, lines: int, *, per_invoice: int = 4) -> list[RawLine]:
    rows = "".join(
        f"{name}{index // per_invoice},item{index},,{index % 9},2010-12-01 08:26:00,2.55,,France\n"
        for index in range(lines)
    )
    return split_lines(name, HEADER + rows)


def ledgers(days: int, lines: int) -> dict[str, list[RawLine]]:
    return {f"day{day}": ledger(f"day{day}", lines) for day in range(days)}


def again(plan: Plan) -> list[RawLine]:
    return [line for lines in plan.again.values() for line in lines]


def place(line: RawLine) -> tuple[str, int]:
    return line.ledger, line.line_number


def test_one_seed_gives_one_plan_and_another_seed_another() -> None:
    assert plan_hostility(ledgers(9, 50), seed=3, kills=3) == plan_hostility(
        ledgers(9, 50), seed=3, kills=3
    )
    assert plan_hostility(ledgers(9, 50), seed=3, kills=3) != plan_hostility(
        ledgers(9, 50), seed=4, kills=3
    )


@pytest.mark.parametrize("seed", range(5))
def test_every_third_ledger_and_every_tenth_transaction_are_chosen(seed: int) -> None:
    plan = plan_hostility(ledgers(9, 50), seed=seed, kills=3)

    assert len(plan.twice) == 3
    assert len(again(plan)) == 45
    assert set(plan.again) <= set(ledgers(9, 50))
    assert all(line.ledger == name for name, lines in plan.again.items() for line in lines)


@pytest.mark.parametrize("seed", range(5))
def test_exactly_one_copy_differs_and_it_is_the_conflict(seed: int) -> None:
    days = ledgers(9, 50)
    plan = plan_hostility(days, seed=seed, kills=3)

    differing = [line for line in again(plan) if line != days[line.ledger][line.line_number - 1]]
    assert differing == [plan.conflict]


@pytest.mark.parametrize("seed", range(20))
def test_the_damaged_line_is_sent_once_and_its_order_goes_on_after_it(seed: int) -> None:
    days = ledgers(3, 50)
    damaged = plan_hostility(days, seed=seed, kills=3).damaged

    assert damaged is not None
    assert place(damaged) not in map(place, again(plan_hostility(days, seed=seed, kills=3)))
    assert any(
        line.invoice_no == damaged.invoice_no and line.line_number > damaged.line_number
        for line in days[damaged.ledger]
    )


@pytest.mark.parametrize("kills", [0, 1, 3, 10])
def test_kills_are_spread_over_the_work_and_none_comes_at_its_end(kills: int) -> None:
    planned = plan_hostility(ledgers(3, 50), seed=1, kills=kills).kills

    assert len(planned) == kills
    assert list(planned) == sorted(planned)
    assert all(
        kill / kills * 0.95 <= share < (kill + 1) / kills * 0.95
        for kill, share in enumerate(planned)
    )


@pytest.mark.parametrize("seed", range(5))
def test_one_line_is_sent_again_and_not_damaged_too(seed: int) -> None:
    plan = plan_hostility({"day": ledger("day", 1)}, seed=seed, kills=3)

    assert plan.twice == {"day"}
    assert plan.damaged is None
    assert again(plan) == [plan.conflict]


def test_no_line_at_all_leaves_nothing_to_change() -> None:
    plan = plan_hostility({"day": []}, seed=1, kills=0)

    assert (plan.again, plan.conflict, plan.damaged, plan.kills) == ({}, None, None, ())


def test_damage_changes_one_quantity_and_nothing_else() -> None:
    text = HEADER + (
        '1,a,"TWO\nLINES, ""QUOTED""",6,2010-12-01,2.55,,France\r\n'
        "\r\n"
        "1,b,LÄMP,7,2010-12-01,2.55,,France\r\n"
        "1,c,,8,2010-12-01,2.55,,France"
    )

    before, after = split_lines("day", text), split_lines("day", damage(text, 2, "7?"))

    assert [line.quantity for line in after] == ["6", "7?", "8"]
    after[1].quantity = "7"
    assert after == before
