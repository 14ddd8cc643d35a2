"""Reads daily ledgers: finds the files, splits a text into numbered lines, and reads their numbers.

Splitting and reading are two steps, because two consumers do them: a line whose quantity is no
number is still a line with a number of its own. Nothing is skipped, guessed or repaired, so a
line's number, which is part of its message's id, stays the same however often a ledger is split.
Money becomes whole thousandths by exact conversion of the text, never by way of a binary float.
"""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".csv", ".csv.gz")

# The limits keep sums inside SQLite's 64-bit integers: a line is below 10**16 thousandths, so an
# order has room for 922 lines of the greatest size. Real lines stay a thousand times below.
QUANTITY_DIGITS_MAX: Final = 7
UNIT_PRICE_DIGITS_MAX: Final = 6
UNIT_PRICE_DECIMALS_MAX: Final = 3

_SHOWN_CHARACTERS_MAX: Final = 40
_COLUMNS: Final = ("InvoiceNo", "StockCode", "Quantity", "UnitPrice")
# [0-9], not \d, and no int() or float() on raw text: those also take "1_000", " 7 " and "٣".
_QUANTITY: Final = re.compile(rf"-?[0-9]{{1,{QUANTITY_DIGITS_MAX}}}")
_UNIT_PRICE: Final = re.compile(
    rf"(-?)([0-9]{{1,{UNIT_PRICE_DIGITS_MAX}}})(?:\.([0-9]{{1,{UNIT_PRICE_DECIMALS_MAX}}}))?"
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """One file of transactions; its name is the file's name without the suffix."""

    name: str
    path: Path


# Not frozen: some 40,000 are made a run, and a frozen one costs several times a plain one.
@dataclass(slots=True, kw_only=True)
class RawLine:
    """One transaction of a ledger as the text has it: its quantity and price are not read yet.

    `line_number` counts transactions from 1: the header has no number, nor has an empty line,
    and a description that spans two lines of text is still one transaction. Two lines may look
    alike in everything but their number: both are real.
    """

    ledger: str
    line_number: int
    invoice_no: str
    stock_code: str
    quantity: str
    unit_price: str


@dataclass(slots=True, kw_only=True)
class LedgerLine:
    """One transaction with its numbers."""

    ledger: str
    line_number: int
    invoice_no: str
    stock_code: str
    quantity: int
    unit_price_thousandths: int


def find_ledgers(folder: Path) -> list[Ledger]:
    """List the ledgers of a folder (`*.csv`, `*.csv.gz`) by name, which is their order of date.

    Hidden files and folders below it are left out. Raises `ValueError` where there is no ledger,
    or where two files would have the same name, for then their lines would share message ids.
    """
    paths: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = _ledger_name(path)
        if name is None:
            continue
        if name in paths:
            raise ValueError(
                f"ledger {name!r} occurs twice in {folder}: as {paths[name].name} and as "
                f"{path.name}; remove one of them"
            )
        paths[name] = path
    if not paths:
        raise ValueError(f"no ledgers in {folder}: expected a folder with *.csv or *.csv.gz files")
    # By name, not by file name: "a.csv" is before "a-b.csv" though "." is after "-".
    return [Ledger(name, paths[name]) for name in sorted(paths)]


def read_text(ledger: Ledger) -> str:
    """Return a ledger's whole text, decompressed, without a byte order mark.

    Line ends are kept as they are. Raises `ValueError` naming the ledger where the file is not
    UTF-8 or its compression is damaged, and `OSError` where it cannot be read at all.
    """
    raw = ledger.path.read_bytes()
    try:
        if ledger.path.name.endswith(".gz"):
            raw = gzip.decompress(raw)
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"ledger {ledger.name!r} is not UTF-8 ({error}): convert {ledger.path} first"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"ledger {ledger.name!r} is damaged ({error}): {ledger.path} does not decompress"
        ) from error


def split_lines(name: str, text: str) -> list[RawLine]:
    r"""Split the text of the ledger `name` into its lines, in order.

    The first line names the columns: `InvoiceNo`, `StockCode`, `Quantity` and `UnitPrice`, in any
    order and among any others. The same text always gives the same lines with the same numbers.
    Raises `ValueError` naming ledger and line for a missing or repeated column, a row of another
    length than the header, an empty invoice number or stock code, and quotes that do not match.

    >>> split_lines("day", "InvoiceNo,StockCode,Quantity,UnitPrice\n536365,85123A,6,2.55\n")
    ... # doctest: +NORMALIZE_WHITESPACE
    [RawLine(ledger='day', line_number=1, invoice_no='536365', stock_code='85123A',
             quantity='6', unit_price='2.55')]
    """
    rows = _rows(name, text.removeprefix("\ufeff"))
    header = next(rows, [])
    places = _places(name, header)
    return [
        _line(name, number, row, width=len(header), places=places)
        for number, row in enumerate(filter(None, rows), start=1)
    ]


def parse_line(raw: RawLine) -> LedgerLine:
    """Read the numbers of a line, exactly.

    Raises `ValueError` naming ledger and line for a number that is no number or too large, and
    for more than three decimals.

    >>> parse_line(
    ...     RawLine(
    ...         ledger="day",
    ...         line_number=1,
    ...         invoice_no="536365",
    ...         stock_code="85123A",
    ...         quantity="6",
    ...         unit_price="2.55",
    ...     )
    ... ).unit_price_thousandths
    2550
    """
    try:
        return LedgerLine(
            ledger=raw.ledger,
            line_number=raw.line_number,
            invoice_no=raw.invoice_no,
            stock_code=raw.stock_code,
            quantity=_quantity(raw.quantity),
            unit_price_thousandths=_thousandths(raw.unit_price),
        )
    except ValueError as error:
        raise ValueError(f"ledger {raw.ledger!r}, line {raw.line_number}: {error}") from error


def _ledger_name(path: Path) -> str | None:
    if path.name.startswith(".") or not path.is_file():
        return None
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return None


def _rows(name: str, text: str) -> Iterator[list[str]]:
    """Yield every row, the header first; an empty line is an empty row."""
    # strict: without it a quote that is never closed silently swallows the rest of the ledger.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    count = 0
    try:
        for row in reader:
            yield row
            count += bool(row)
    except csv.Error as error:
        where = f"line {count}" if count else "header"
        raise ValueError(f"ledger {name!r}, {where}: {error}") from error


def _places(name: str, header: list[str]) -> tuple[int, ...]:
    """Return where the needed columns stand, in the order of `_COLUMNS`."""
    faults = [
        f"column {column} is {'missing' if column not in header else 'there twice'}"
        for column in _COLUMNS
        if header.count(column) != 1
    ]
    if faults:
        raise ValueError(f"ledger {name!r}, header: {', '.join(faults)}")
    return tuple(header.index(column) for column in _COLUMNS)


def _line(
    name: str, number: int, row: list[str], *, width: int, places: tuple[int, ...]
) -> RawLine:
    try:
        invoice_no, stock_code, quantity, unit_price = _fields(row, width=width, places=places)
        return RawLine(
            ledger=name,
            line_number=number,
            invoice_no=_present("InvoiceNo", invoice_no),
            stock_code=_present("StockCode", stock_code),
            quantity=quantity,
            unit_price=unit_price,
        )
    except ValueError as error:
        raise ValueError(f"ledger {name!r}, line {number}: {error}") from error


def _fields(row: list[str], *, width: int, places: tuple[int, ...]) -> Iterator[str]:
    if len(row) != width:
        raise ValueError(f"{len(row)} fields where the header has {width}")
    return (row[place] for place in places)


def _present(column: str, text: str) -> str:
    if not text.strip():
        raise ValueError(f"{column} is empty")
    return text


def _quantity(text: str) -> int:
    if _QUANTITY.fullmatch(text) is None:
        raise ValueError(
            f"Quantity {text[:_SHOWN_CHARACTERS_MAX]!r} is not a whole number of at most "
            f"{QUANTITY_DIGITS_MAX} digits"
        )
    return int(text)


def _thousandths(text: str) -> int:
    parts = _UNIT_PRICE.fullmatch(text)
    if parts is None:
        raise ValueError(
            f"UnitPrice {text[:_SHOWN_CHARACTERS_MAX]!r} is not a decimal number of at most "
            f"{UNIT_PRICE_DIGITS_MAX} digits and {UNIT_PRICE_DECIMALS_MAX} decimals"
        )
    sign, whole, decimals = parts.groups(default="")
    # Digits are moved, not multiplied: "2.5" becomes 2500 because "2" + "500" reads so.
    return int(sign + whole + decimals.ljust(UNIT_PRICE_DECIMALS_MAX, "0"))
