"""Compares the demo's business tables with totals computed straight from the CSV files.

It shares no code with the ledgers' reader, not even a constant: it reads the files and converts
the money in its own way, so that a mistake in either shows as a difference. It never writes: the
database is opened read-only and read as it was at one moment.
"""

import csv
import gzip
import sqlite3
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from decimal import Context, Inexact, InvalidOperation
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

EXAMPLES_PER_CHECK_MAX: Final = 5

_NUMBERS: Final = {
    "order_lines": (
        "line_number",
        "quantity",
        "unit_price_thousandths",
        "applied",
        "replayed",
    ),
    "orders": ("lines", "total_thousandths"),
    "stock": ("quantity",),
    "audit_lines": ("line_number", "copies"),
}
# What SQLite answers for a table or column that is not there, and for a file of another kind.
_NOT_OURS: Final = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_NOTADB)
_COLUMNS: Final = ("InvoiceNo", "StockCode", "Quantity", "UnitPrice")
# Any result that is not exact is an error here, instead of being rounded to the 28 digits.
_EXACT: Final = Context(prec=28, traps=[Inexact, InvalidOperation])

Place: TypeAlias = tuple[str, int]  # ledger and number of the line
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Line(NamedTuple):
    """What the files say of one line, or what the table holds of it."""

    invoice_no: str
    stock_code: str
    quantity: int
    unit_price_thousandths: int


@dataclass(frozen=True, slots=True)
class Check:
    """One thing compared.

    `expected` counts what the files ask for and `found` what the tables hold. The two may be
    equal while single values are not: `differing`, the number of all differences, decides.
    `examples` holds the first `EXAMPLES_PER_CHECK_MAX` of them in words.
    """

    name: str
    expected: int
    found: int
    differing: int
    examples: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return self.differing == 0


@dataclass(frozen=True, slots=True)
class Report:
    """What the comparison found, check by check."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check found a difference."""
        return all(check.ok for check in self.checks)

    @property
    def differences(self) -> tuple[str, ...]:
        """Every check's examples in words, and how many more there are of each."""
        return tuple(text for check in self.checks for text in _texts(check))

    def as_json(self) -> dict[str, object]:
        """Return the report as plain values for `json.dumps`."""
        return {
            "ok": self.ok,
            "checks": [
                {
                    "name": check.name,
                    "expected": check.expected,
                    "found": check.found,
                    "differing": check.differing,
                    "ok": check.ok,
                }
                for check in self.checks
            ],
            "differences": list(self.differences),
        }


def compare(database: Path, folder: Path, *, replayed: Collection[tuple[str, int]]) -> Report:
    """Compare the business tables of the SQLite file `database` with the CSV files of `folder`.

    `replayed` names the lines, by ledger and number, that were dead letters and were replayed:
    exactly these must be marked so, and only these are excused from the order of application.
    `stock` is expected to hold the sum of `Quantity` per item, cancellations being negative.

    Differences are reported, never raised. Raises `ValueError` where the files themselves cannot
    be read as ledgers (naming ledger and line) or a business table or column is missing,
    `OSError` where the database or a file cannot be opened, and `sqlite3.DatabaseError` where
    the database is locked for too long or damaged.
    """
    lines = read_folder(folder)
    invoices: dict[str, list[Line]] = defaultdict(list)
    stock: Counter[str] = Counter()
    for line in lines.values():
        invoices[line.invoice_no].append(line)
        stock[line.stock_code] += line.quantity
    with closing(open_read_only(database)) as connection:
        try:
            connection.execute("BEGIN")  # one moment for all the reads below
            return Report(
                (
                    _check_lines(connection, lines),
                    _check_contents(connection, lines),
                    _check_lines_per_invoice(connection, invoices),
                    _check_total_per_invoice(connection, invoices),
                    _check_stock(connection, stock),
                    _check_order(connection, lines),
                    _check_numbering(connection, lines),
                    _check_replayed(connection, replayed),
                    _check_audit(connection, lines),
                    _check_integers(connection),
                )
            )
        except sqlite3.DatabaseError as error:
            # The module's own errors, such as for a text that is not UTF-8, carry no code.
            if getattr(error, "sqlite_errorcode", None) not in _NOT_OURS:
                raise  # locked, damaged, unreadable: the error's own words say so
            raise ValueError(
                f"{database} does not hold the demo's business tables: {error}"
            ) from error


def _check_lines(connection: sqlite3.Connection, lines: Mapping[Place, Line]) -> Check:
    """Count the rows of each line; the table's own primary key is not trusted to do it."""
    rows = Counter(_pairs(connection, "SELECT ledger, line_number FROM order_lines"))
    return _check(
        "number of lines",
        expected=len(lines),
        found=rows.total(),
        differences=_per_key("rows of line", dict.fromkeys(lines, 1), rows.items()),
    )


def _check_contents(connection: sqlite3.Connection, lines: Mapping[Place, Line]) -> Check:
    rows = [
        ((ledger, line_number), Line(*values))
        for ledger, line_number, *values in connection.execute(
            "SELECT ledger, line_number, invoice_no, stock_code, quantity, unit_price_thousandths"
            " FROM order_lines"
        )
    ]
    return _check(
        "content of each line",
        expected=len(lines),
        found=len(rows),
        differences=_per_key("line", lines, rows),
    )


def _check_lines_per_invoice(
    connection: sqlite3.Connection, invoices: Mapping[str, list[Line]]
) -> Check:
    expected = {invoice_no: len(lines) for invoice_no, lines in invoices.items()}
    rows = _pairs(connection, "SELECT invoice_no, lines FROM orders")
    return _check(
        "lines per invoice",
        expected=len(expected),
        found=len(rows),
        differences=_per_key("lines of invoice", expected, rows),
    )


def _check_total_per_invoice(
    connection: sqlite3.Connection, invoices: Mapping[str, list[Line]]
) -> Check:
    expected = {
        invoice_no: sum(line.quantity * line.unit_price_thousandths for line in lines)
        for invoice_no, lines in invoices.items()
    }
    rows = _pairs(connection, "SELECT invoice_no, total_thousandths FROM orders")
    return _check(
        "total per invoice",
        expected=len(expected),
        found=len(rows),
        differences=_per_key("total in thousandths of invoice", expected, rows),
    )


def _check_stock(connection: sqlite3.Connection, stock: Mapping[str, int]) -> Check:
    rows = _pairs(connection, "SELECT stock_code, quantity FROM stock")
    return _check(
        "stock per item",
        expected=len(stock),
        found=len(rows),
        differences=_per_key("stock of item", stock, rows),
    )


def _check_order(connection: sqlite3.Connection, lines: Mapping[Place, Line]) -> Check:
    """Count, of the invoices in the tables, those applied in another order than the files'."""
    places = {place: index for index, place in enumerate(lines)}
    applied: dict[str, list[Place]] = defaultdict(list)
    for invoice_no, ledger, line_number in connection.execute(
        "SELECT invoice_no, ledger, line_number FROM order_lines"
        " WHERE replayed = 0"
        " ORDER BY applied"
    ):
        if (ledger, line_number) in places:  # a line of no file is a difference of its own
            applied[invoice_no].append((ledger, line_number))
    inversions = {
        invoice_no: inversion
        for invoice_no, sequence in applied.items()
        if (inversion := first_inversion(sequence, places)) is not None
    }
    return _check(
        "order of application per invoice",
        expected=len(applied),
        found=len(applied) - len(inversions),
        differences=(
            f"invoice {invoice_no!r}: line {_name(later)} was applied before {_name(earlier)}"
            for invoice_no, (later, earlier) in inversions.items()
        ),
    )


def _check_numbering(connection: sqlite3.Connection, lines: Mapping[Place, Line]) -> Check:
    """Expect 1, 2, 3… without gap or repeat: a gap is a line that was applied and then lost."""
    rows = Counter(applied for (applied,) in connection.execute("SELECT applied FROM order_lines"))
    numbers = range(1, rows.total() + 1)
    return _check(
        "numbers of application",
        expected=len(lines),
        found=rows.total(),
        differences=_per_key(
            "times of application number", dict.fromkeys(numbers, 1), rows.items()
        ),
    )


def _check_replayed(connection: sqlite3.Connection, replayed: Collection[Place]) -> Check:
    marked = _pairs(connection, "SELECT ledger, line_number FROM order_lines WHERE replayed <> 0")
    asked = dict.fromkeys(replayed)
    seen = dict.fromkeys(marked)
    return _check(
        "lines marked replayed",
        expected=len(asked),
        found=len(marked),
        differences=[
            *(f"line {_name(at)} was replayed but is not marked" for at in asked if at not in seen),
            *(f"line {_name(at)} is marked but was not replayed" for at in seen if at not in asked),
        ],
    )


def _check_audit(connection: sqlite3.Connection, lines: Mapping[Place, Line]) -> Check:
    rows = [
        ((ledger, line_number), copies)
        for ledger, line_number, copies in connection.execute(
            "SELECT ledger, line_number, copies FROM audit_lines"
        )
    ]
    return _check(
        "audit once per line",
        expected=len(lines),
        found=sum(copies for _, copies in rows if isinstance(copies, int)),
        differences=_per_key("copies of line", dict.fromkeys(lines, 1), rows),
    )


def _check_integers(connection: sqlite3.Connection) -> Check:
    """Expect integers: in Python 2.0 equals 2, so no other check notices a binary float."""
    kinds = {
        (f"{table}.{column}", kind): rows
        for table, columns in _NUMBERS.items()
        for column in columns
        for kind, rows in connection.execute(
            # Table and column are constants of this module.
            f"SELECT typeof({column}), COUNT(*) FROM {table} GROUP BY 1"  # noqa: S608
        )
    }
    return _check(
        "numbers stored as integers",
        expected=sum(kinds.values()),
        found=sum(rows for (_, kind), rows in kinds.items() if kind == "integer"),
        differences=[
            f"{column} is stored as {kind} in {rows} rows"
            for (column, kind), rows in kinds.items()
            if kind != "integer"
        ],
    )


def _check(name: str, *, expected: int, found: int, differences: Iterable[str]) -> Check:
    every = iter(differences)
    examples = tuple(islice(every, EXAMPLES_PER_CHECK_MAX))
    return Check(name, expected, found, len(examples) + sum(1 for _ in every), examples)


def _per_key(
    noun: str, expected: Mapping[_Key, _Value], rows: Iterable[tuple[_Key, _Value]]
) -> Iterator[str]:
    """Describe every key that has not exactly one row, with exactly the expected value."""
    found: dict[_Key, list[_Value]] = defaultdict(list)
    for key, value in rows:
        found[key].append(value)
    for key, value in expected.items():
        if found[key] != [value]:
            yield f"{noun} {_name(key)}: {value} expected, {_listed(found[key])} found"
    for key, values in found.items():
        if key not in expected:
            yield f"{noun} {_name(key)}: nothing expected, {_listed(values)} found"


def first_inversion(
    sequence: Iterable[Place], places: Mapping[Place, int]
) -> tuple[Place, Place] | None:
    """Return the first two neighbours of which the files have the second one earlier."""
    return next((pair for pair in pairwise(sequence) if places[pair[0]] > places[pair[1]]), None)


def _name(key: object) -> str:
    """Return `ledger/number` for a line, and a text in quotes so that blanks in it show."""
    return "/".join(map(str, key)) if isinstance(key, tuple) else repr(key)


def _listed(values: list[_Value]) -> str:
    return " and ".join(map(str, values)) or "nothing"


def _texts(check: Check) -> Iterator[str]:
    for example in check.examples:
        yield f"{check.name}: {example}"
    if check.differing > len(check.examples):
        yield f"{check.name}: and {check.differing - len(check.examples)} more"


def _pairs(connection: sqlite3.Connection, query: str) -> list[tuple[Any, Any]]:
    return connection.execute(query).fetchall()


def open_read_only(database: Path) -> sqlite3.Connection:
    """Return a connection that cannot write; raise `OSError` where the file cannot be opened."""
    # as_uri quotes what a URI would misread in a file's name, such as "?" and "#".
    uri = f"{database.resolve().as_uri()}?mode=ro"
    try:
        return sqlite3.connect(uri, uri=True, isolation_level=None)
    except sqlite3.OperationalError as error:
        raise OSError(f"{database} cannot be opened for reading: {error}") from error


def read_folder(folder: Path) -> dict[Place, Line]:
    """Return every line of every file, in the order the lines must be applied per invoice.

    Raises `ValueError`, naming ledger and line, where a file cannot be read as a ledger.
    """
    files: dict[str, Path] = {}
    for suffix in (".csv", ".csv.gz"):
        for path in filter(Path.is_file, folder.glob(f"[!.]*{suffix}")):
            name = path.name[: -len(suffix)]
            if name in files:
                raise ValueError(
                    f"{folder} has ledger {name!r} twice: {files[name].name}, {path.name}"
                )
            files[name] = path
    if not files:
        raise ValueError(f"{folder} has no *.csv or *.csv.gz files to compare with")
    return {
        (name, number): line
        for name in sorted(files)
        for number, line in enumerate(_read_file(name, files[name]), start=1)
    }


def _read_file(name: str, path: Path) -> list[Line]:
    unpack = gzip.open if path.suffix == ".gz" else open
    lines: list[Line] = []
    with unpack(path, "rt", encoding="utf-8-sig", newline="") as file:
        try:
            # strict: a quote never closed must not swallow lines here and in the reader alike.
            rows = csv.DictReader(file, strict=True)
            _require_columns(list(rows.fieldnames or ()))
            lines.extend(map(_read_row, rows))
        except (ValueError, EOFError, csv.Error, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"ledger {name!r} in {path}, after {len(lines)} lines: {error}"
            ) from error
    return lines


def _require_columns(header: list[str]) -> None:
    if any(header.count(column) != 1 for column in _COLUMNS):
        raise ValueError(f"expected each of {', '.join(_COLUMNS)} once in the header")


def _read_row(row: dict[str | Any, str | Any]) -> Line:
    # DictReader gives the key None to what is beyond the header, the value None to what lacks.
    if None in row or None in row.values():
        raise ValueError("the next row has another length than the header")
    return Line(
        row["InvoiceNo"],
        row["StockCode"],
        int(row["Quantity"]),
        _whole_thousandths(row["UnitPrice"]),
    )


def _whole_thousandths(text: str) -> int:
    try:
        price = _EXACT.create_decimal(text)
        return int(_EXACT.to_integral_exact(_EXACT.multiply(price, 1000)))
    except ArithmeticError as error:
        raise ValueError(f"UnitPrice {text!r} is not a whole number of thousandths") from error
