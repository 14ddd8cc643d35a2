"""Workload W: 20,000 messages of 500 keys, 5% of them copies of one of the last 200. The same at
each call.

The effect adds the amount to a business row, and counts there how often the key's sequence came out
of order. What must stand in the tables at the end is computed here, from the messages alone.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

KEYS = 500
MESSAGES = 20_000
SHARED_ROWS = 3_000
NOTE = "x" * 150  # a body of some 240 bytes, as small orders have


class Paid(msgspec.Struct):
    order_id: str
    row: str
    amount: int
    seq: int
    note: str = NOTE


class Sent(NamedTuple):
    """One message as it is sent; `row` is the business row that its effect changes."""

    id: str
    key: str
    row: str
    amount: int
    seq: int

    @property
    def payload(self) -> Paid:
        return Paid(*self[1:])


def messages(number: int = MESSAGES, *, shared: bool = False) -> list[Sent]:
    """Return workload W; `shared` lets the effects meet on 3,000 rows, some far more often than
    others (the n-th row 1/n as often as the first)."""
    draw = random.Random(7)
    rows = random.Random(11)
    weights = list(itertools.accumulate(1 / n for n in range(1, SHARED_ROWS + 1)))
    sent: list[Sent] = []
    sequence: Counter[str] = Counter()
    for place in range(number):
        if sent and draw.random() < 0.05:
            sent.append(sent[draw.randrange(max(0, len(sent) - 200), len(sent))])
            continue
        key = f"order-{draw.randrange(KEYS):04d}"
        sequence[key] += 1
        row = key
        if shared:
            row = f"item-{bisect.bisect_left(weights, rows.random() * weights[-1]):04d}"
        sent.append(Sent(f"m{place:08d}", key, row, draw.randrange(1, 100), sequence[key]))
    return sent


def row_names(*, shared: bool = False) -> list[str]:
    """Return the names of all business rows."""
    if shared:
        return [f"item-{n:04d}" for n in range(SHARED_ROWS)]
    return [f"order-{n:04d}" for n in range(KEYS)]


@dataclass(frozen=True)
class Expected:
    """What the tables must hold.

    Attributes:
        rows: sum of the amounts and number of the effects by row, where there were any.
        gaps: effects whose sequence did not follow the key's last effect.
        keys: dedup keys in the inbox.
    """

    rows: dict[str, tuple[int, int]]
    gaps: int
    keys: int

    @property
    def effects(self) -> int:
        return sum(effects for _, effects in self.rows.values())


def expected(sent: Sequence[Sent], without: Collection[str] = ()) -> Expected:
    """Return what must stand at the end if the messages with the ids in `without` never succeed."""
    unique = {message.id: message for message in sent}
    rows: dict[str, tuple[int, int]] = {}
    last: Counter[str] = Counter()
    gaps = 0
    for message in unique.values():
        if message.id in without:
            continue
        amount, effects = rows.get(message.row, (0, 0))
        rows[message.row] = amount + message.amount, effects + 1
        gaps += last[message.key] + 1 != message.seq
        last[message.key] = message.seq
    return Expected(rows, gaps, len(unique))
