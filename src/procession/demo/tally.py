"""Counts what a consumer made of ledgers, beside what the files say: money, order, lines counted
twice or lost. What the files say is read by the check's own reader; it never writes.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from procession.demo.check import Line, Place, first_inversion, open_read_only


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The files' numbers and the tables', for some ledgers.

    Attributes:
        ledgers, orders, lines: how many the files have.
        true_total_thousandths: what all lines of the files add up to.
        counted_total_thousandths: what all lines that were applied add up to.
        orders_out_of_sequence: orders of which any two lines were first applied in another order
            than the files'. A line that a person replayed comes late by choice and does not count.
        lines_counted_twice: lines that were applied more than once.
        lines_lost: lines that were not applied.
    """

    ledgers: int
    orders: int
    lines: int
    true_total_thousandths: int
    counted_total_thousandths: int
    orders_out_of_sequence: int
    lines_counted_twice: int
    lines_lost: int

    @property
    def difference_thousandths(self) -> int:
        """How much too much was counted."""
        return self.counted_total_thousandths - self.true_total_thousandths

    @property
    def ok(self) -> bool:
        """Whether the tables say what the files say."""
        return not (
            self.difference_thousandths
            or self.orders_out_of_sequence
            or self.lines_counted_twice
            or self.lines_lost
        )

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return {**asdict(self), "difference_thousandths": self.difference_thousandths}


def tally(database: Path, files: Mapping[Place, Line], ledgers: Collection[str]) -> Tally:
    """Count the lines of these ledgers in the table `order_lines`.

    Args:
        database: a file that no process writes any more.
        files: what `check.read_folder` has read.
        ledgers: names of some of them.

    Raises:
        OSError: the database cannot be opened.
    """
    wanted = set(ledgers)
    lines = {place: line for place, line in files.items() if place[0] in wanted}
    places = {place: index for index, place in enumerate(lines)}
    counted = 0
    copies: Counter[Place] = Counter()
    firsts: defaultdict[str, list[Place]] = defaultdict(list)
    with closing(open_read_only(database)) as connection:
        for ledger, line_number, quantity, price, replayed in connection.execute(
            "SELECT ledger, line_number, quantity, unit_price_thousandths, replayed"
            " FROM order_lines"
            " ORDER BY applied"
        ):
            if ledger not in wanted:
                continue
            place = (ledger, line_number)
            counted += quantity * price
            copies[place] += 1
            if copies[place] == 1 and not replayed and place in lines:
                firsts[lines[place].invoice_no].append(place)
    return Tally(
        ledgers=len(wanted),
        orders=len({line.invoice_no for line in lines.values()}),
        lines=len(lines),
        true_total_thousandths=sum(
            line.quantity * line.unit_price_thousandths for line in lines.values()
        ),
        counted_total_thousandths=counted,
        orders_out_of_sequence=sum(
            first_inversion(sequence, places) is not None for sequence in firsts.values()
        ),
        lines_counted_twice=sum(number > 1 for number in copies.values()),
        lines_lost=len(lines.keys() - copies.keys()),
    )


def pounds(thousandths: int, *, signed: bool = False) -> str:
    """Return money in pounds, exactly: with pence, and a tenth of a penny where there is one.

    >>> pounds(58_635_560), pounds(-1_005, signed=True), pounds(2_000, signed=True)
    ('58,635.56', '-1.005', '+2.00')
    """
    whole, rest = divmod(abs(thousandths), 1_000)
    sign = "-" if thousandths < 0 else "+" if signed and thousandths else ""
    return f"{sign}{whole:,}.{str(rest).rjust(3, '0').removesuffix('0')}"
