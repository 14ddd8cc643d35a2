"""Decides how the demo is hostile to itself: what is sent twice, changed, damaged, and when a
worker is killed. The same ledgers and seed always give the same plan; nothing here is carried out.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeVar

from procession.demo.ledgers import RawLine

LEDGER_TWICE_EACH: Final = 3
LINE_AGAIN_EACH: Final = 10
# No kill is planned for the very end: each falls while there is work for the others to do.
KILLS_END: Final = 0.95

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to go wrong.

    Attributes:
        twice: names of the ledgers that are sent twice.
        again: the lines that are sent again from outside, by ledger, in order.
        conflict: one of them that then carries another payload, as it then reads.
        damaged: a line whose quantity is no number when it arrives, as it should read.
        damaged_quantity: what its quantity reads instead.
        kills: shares of the work, ascending, at which a worker is killed.
    """

    twice: frozenset[str]
    again: Mapping[str, Sequence[RawLine]]
    conflict: RawLine | None
    damaged: RawLine | None
    damaged_quantity: str
    kills: tuple[float, ...]


def plan_hostility(ledgers: Mapping[str, Sequence[RawLine]], *, seed: int, kills: int) -> Plan:
    """Draw a plan for the ledgers in their order; small ones get what they have room for.

    One line alone is sent again (as the conflict) and is not damaged as well: the copy of a
    damaged line would be its second conflict.
    """
    random = Random(seed)  # noqa: S311  it must be the same again, not secret
    names, lines = list(ledgers), [line for each in ledgers.values() for line in each]
    chosen = _each(lines, LINE_AGAIN_EACH, random)
    conflict = random.choice(chosen) if chosen else None
    damaged = _choose_damaged(lines, chosen, random)
    return Plan(
        twice=frozenset(_each(names, LEDGER_TWICE_EACH, random)),
        again=_by_ledger(chosen, instead=conflict),
        conflict=None if conflict is None else _changed(conflict),
        damaged=damaged,
        damaged_quantity="" if damaged is None else damaged.quantity + "?",
        kills=tuple((kill + random.random()) / kills * KILLS_END for kill in range(kills)),
    )


def damage(text: str, line_number: int, quantity: str) -> str:
    """Return a ledger's text with another quantity in one line, as a bad wire would deliver it."""
    rows = list(csv.reader(io.StringIO(text, newline="")))
    numbered = [row for row in rows[1:] if row]
    numbered[line_number - 1][rows[0].index("Quantity")] = quantity
    damaged = io.StringIO(newline="")
    csv.writer(damaged, lineterminator="\n").writerows(rows)
    return damaged.getvalue()


def _each(items: Sequence[_Item], step: int, random: Random) -> list[_Item]:
    """Return each third, tenth, … item, beginning with one of the first step."""
    return list(items[random.randrange(min(step, len(items))) :: step]) if items else []


def _changed(line: RawLine) -> RawLine:
    return replace(line, quantity="7" if line.quantity != "7" else "8")


def _by_ledger(lines: Sequence[RawLine], *, instead: RawLine | None) -> dict[str, list[RawLine]]:
    again: dict[str, list[RawLine]] = {}
    for line in lines:
        again.setdefault(line.ledger, []).append(_changed(line) if line is instead else line)
    return again


def _choose_damaged(
    lines: Sequence[RawLine], again: Sequence[RawLine], random: Random
) -> RawLine | None:
    """Choose a line that is not sent again, if there is one: best one that others of its order
    follow, so that the order is seen to go on.
    """
    taken = {(line.ledger, line.line_number) for line in again}
    free, followed, later = [], [], Counter[str]()
    for line in reversed(lines):
        if (line.ledger, line.line_number) not in taken:
            free.append(line)
            if later[line.invoice_no]:
                followed.append(line)
        later[line.invoice_no] += 1
    candidates = followed or free
    return random.choice(candidates) if candidates else None
