"""Promises that the check passes right tables and finds every kind of difference."""

import ast
import gzip
import json
import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import pytest

from procession.demo import check
from procession.demo.check import EXAMPLES_PER_CHECK_MAX, Report, compare
from procession.demo.ledgers import LedgerLine, find_ledgers, parse_line, read_text, split_lines

EXAMPLES = Path(__file__).parents[3] / "examples" / "ledger"
HEADER = "InvoiceNo,StockCode,Quantity,UnitPrice\n"
FILES = {
    "2010-12-01": "536365,A,6,2.55\n536366,B,2,0.001\n536365,B,1,3\n",
    "2010-12-02": "536365,A,6,2.55\nC536367,A,-1,2.55\n536365,C,-2,-11062.06\n",
}
# Without the primary keys, so that a line or total can be there twice.
TABLES = """
    CREATE TABLE order_lines (ledger, line_number, invoice_no, stock_code, quantity,
                              unit_price_thousandths, applied, replayed);
    CREATE TABLE orders (invoice_no, lines, total_thousandths);
    CREATE TABLE stock (stock_code, quantity);
    CREATE TABLE audit_lines (ledger, line_number, copies);
"""
TOTALS = """
    INSERT INTO orders
    SELECT invoice_no, COUNT(*), SUM(quantity * unit_price_thousandths)
    FROM order_lines GROUP BY invoice_no;
    INSERT INTO stock SELECT stock_code, SUM(quantity) FROM order_lines GROUP BY stock_code;
    INSERT INTO audit_lines SELECT ledger, line_number, 1 FROM order_lines;
"""
FIRST = "WHERE ledger = '2010-12-01' AND line_number = 1"
SWAP = """
    UPDATE order_lines SET applied = CASE line_number WHEN 1 THEN 3 ELSE 1 END
    WHERE ledger = '2010-12-01' AND line_number IN (1, 3)
"""


def fill(database: Path, lines: Collection[LedgerLine]) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript(TABLES)
        connection.executemany(
            "INSERT INTO order_lines VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
            [
                (
                    line.ledger,
                    line.line_number,
                    line.invoice_no,
                    line.stock_code,
                    line.quantity,
                    line.unit_price_thousandths,
                    applied,
                )
                for applied, line in enumerate(lines, start=1)
            ],
        )
        connection.executescript(TOTALS)


def damage(database: Path, statements: str) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(statements)


def failed(report: Report) -> list[str]:
    return [each.name for each in report.checks if not each.ok]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ledgers"
    folder.mkdir()
    (folder / "2010-12-01.csv").write_text(HEADER + FILES["2010-12-01"])
    (folder / "2010-12-02.csv.gz").write_bytes(
        gzip.compress((HEADER + FILES["2010-12-02"]).encode())
    )
    return folder


@pytest.fixture
def database(tmp_path: Path) -> Path:
    database = tmp_path / "what? a #1 demo.db"  # a name that a careless URI misreads
    lines = [
        parse_line(raw) for name, rows in FILES.items() for raw in split_lines(name, HEADER + rows)
    ]
    fill(database, lines)
    return database


def test_right_tables_pass_every_check(database: Path, folder: Path) -> None:
    report = compare(database, folder, replayed=())

    expected = [
        ("number of lines", 6, 6),
        ("content of each line", 6, 6),
        ("lines per invoice", 3, 3),
        ("total per invoice", 3, 3),
        ("stock per item", 3, 3),
        ("order of application per invoice", 3, 3),
        ("numbers of application", 6, 6),
        ("lines marked replayed", 0, 0),
        ("audit once per line", 6, 6),
        ("numbers stored as integers", 51, 51),
    ]
    assert expected == [(each.name, each.expected, each.found) for each in report.checks]
    assert report.ok
    assert not report.differences


def test_invoices_may_interleave_in_any_way(database: Path, folder: Path) -> None:
    damage(database, "UPDATE order_lines SET applied = 7 - applied WHERE applied IN (2, 5)")

    assert compare(database, folder, replayed=()).ok


@pytest.mark.parametrize(
    ("statement", "names", "difference"),
    [
        pytest.param(
            f"INSERT INTO order_lines SELECT * FROM order_lines {FIRST}",
            ["number of lines", "content of each line", "numbers of application"],
            "number of lines: rows of line 2010-12-01/1: 1 expected, 2 found",
            id="double line",
        ),
        pytest.param(
            "INSERT INTO order_lines VALUES ('2010-12-01', 4, '536365', 'A', 6, 2550, 7, 0)",
            ["number of lines", "content of each line"],
            "number of lines: rows of line 2010-12-01/4: nothing expected, 1 found",
            id="double line under a new number",
        ),
        pytest.param(
            f"DELETE FROM order_lines {FIRST}",
            ["number of lines", "content of each line", "numbers of application"],
            "number of lines: rows of line 2010-12-01/1: 1 expected, nothing found",
            id="missing line",
        ),
        pytest.param(
            f"UPDATE order_lines SET unit_price_thousandths = 2551 {FIRST}",
            ["content of each line"],
            "content of each line: line 2010-12-01/1: "
            "Line(invoice_no='536365', stock_code='A', quantity=6, unit_price_thousandths=2550)"
            " expected, "
            "Line(invoice_no='536365', stock_code='A', quantity=6, unit_price_thousandths=2551)"
            " found",
            id="changed line",
        ),
        pytest.param(
            "UPDATE orders SET total_thousandths = total_thousandths + 1"
            " WHERE invoice_no = '536366'",
            ["total per invoice"],
            "total per invoice: total in thousandths of invoice '536366': 2 expected, 3 found",
            id="total wrong by a thousandth",
        ),
        pytest.param(
            "UPDATE orders SET lines = lines + 1 WHERE invoice_no = '536365'",
            ["lines per invoice"],
            "lines per invoice: lines of invoice '536365': 4 expected, 5 found",
            id="lines wrong by one",
        ),
        pytest.param(
            "DELETE FROM orders WHERE invoice_no = 'C536367'",
            ["lines per invoice", "total per invoice"],
            "lines per invoice: lines of invoice 'C536367': 1 expected, nothing found",
            id="missing order",
        ),
        pytest.param(
            "INSERT INTO orders VALUES ('C536367', 1, -2550)",
            ["lines per invoice", "total per invoice"],
            "lines per invoice: lines of invoice 'C536367': 1 expected, 1 and 1 found",
            id="order twice",
        ),
        pytest.param(
            "UPDATE stock SET quantity = quantity - 1 WHERE stock_code = 'A'",
            ["stock per item"],
            "stock per item: stock of item 'A': 11 expected, 10 found",
            id="stock off by one",
        ),
        pytest.param(
            "INSERT INTO stock VALUES ('Z', 0)",
            ["stock per item"],
            "stock per item: stock of item 'Z': nothing expected, 0 found",
            id="stock of an unknown item",
        ),
        pytest.param(
            SWAP,
            ["order of application per invoice"],
            "order of application per invoice: invoice '536365': "
            "line 2010-12-01/3 was applied before 2010-12-01/1",
            id="swapped within an invoice and a ledger",
        ),
        pytest.param(
            "UPDATE order_lines SET applied = 7 - applied WHERE applied IN (3, 4)",
            ["order of application per invoice"],
            "order of application per invoice: invoice '536365': "
            "line 2010-12-02/1 was applied before 2010-12-01/3",
            id="swapped across ledgers",
        ),
        pytest.param(
            "UPDATE order_lines SET applied = 7 WHERE applied = 6",
            ["numbers of application"],
            "numbers of application: times of application number 6: 1 expected, nothing found",
            id="gap in the order of application",
        ),
        pytest.param(
            f"UPDATE order_lines SET replayed = 1 {FIRST}",
            ["lines marked replayed"],
            "lines marked replayed: line 2010-12-01/1 is marked but was not replayed",
            id="wrongly marked replay",
        ),
        pytest.param(
            f"UPDATE audit_lines SET copies = 2 {FIRST}",
            ["audit once per line"],
            "audit once per line: copies of line 2010-12-01/1: 1 expected, 2 found",
            id="audited twice",
        ),
        pytest.param(
            f"DELETE FROM audit_lines {FIRST}",
            ["audit once per line"],
            "audit once per line: copies of line 2010-12-01/1: 1 expected, nothing found",
            id="not audited",
        ),
        pytest.param(
            "UPDATE orders SET total_thousandths = 2.0 WHERE invoice_no = '536366'",
            ["numbers stored as integers"],
            "numbers stored as integers: orders.total_thousandths is stored as real in 1 rows",
            id="binary float",
        ),
        pytest.param(
            f"UPDATE order_lines SET applied = NULL {FIRST}",
            ["numbers of application", "numbers stored as integers"],
            "numbers stored as integers: order_lines.applied is stored as null in 1 rows",
            id="no number of application",
        ),
    ],
)
def test_each_kind_of_difference_is_found(
    database: Path, folder: Path, statement: str, names: list[str], difference: str
) -> None:
    damage(database, statement)

    report = compare(database, folder, replayed=())

    assert not report.ok
    assert names == failed(report)
    assert difference in report.differences


def test_a_replayed_line_may_be_out_of_order_and_only_that_one(
    database: Path, folder: Path
) -> None:
    damage(database, SWAP)
    damage(database, f"UPDATE order_lines SET replayed = 1 {FIRST}")

    assert compare(database, folder, replayed={("2010-12-01", 1)}).ok
    expected = ["lines marked replayed"]
    assert expected == failed(compare(database, folder, replayed=()))


def test_a_replayed_line_that_is_not_marked_is_found(database: Path, folder: Path) -> None:
    report = compare(database, folder, replayed=[("2010-12-02", 3)])

    expected = ("lines marked replayed: line 2010-12-02/3 was replayed but is not marked",)
    assert expected == report.differences


def test_many_differences_are_counted_and_a_few_shown(database: Path, folder: Path) -> None:
    damage(database, "DELETE FROM audit_lines")

    report = compare(database, folder, replayed=())

    shown = ("2010-12-01/1", "2010-12-01/2", "2010-12-01/3", "2010-12-02/1", "2010-12-02/2")
    expected = [
        *(
            f"audit once per line: copies of line {line}: 1 expected, nothing found"
            for line in shown
        ),
        "audit once per line: and 1 more",
    ]
    assert expected == list(report.differences)
    assert sum(each.differing for each in report.checks) == EXAMPLES_PER_CHECK_MAX + 1


def test_the_report_is_plain_json(database: Path, folder: Path) -> None:
    damage(database, "DELETE FROM stock WHERE stock_code = 'C'")

    plain = json.loads(json.dumps(compare(database, folder, replayed=()).as_json()))

    expected_check = {
        "name": "stock per item",
        "expected": 3,
        "found": 2,
        "differing": 1,
        "ok": False,
    }
    expected_differences = ["stock per item: stock of item 'C': -2 expected, nothing found"]
    assert plain["ok"] is False
    assert expected_check in plain["checks"]
    assert expected_differences == plain["differences"]


def test_a_writer_at_work_neither_stops_the_check_nor_shows_in_it(
    database: Path, folder: Path
) -> None:
    damage(database, "PRAGMA journal_mode = WAL")
    with closing(sqlite3.connect(database)) as writer:
        writer.execute("DELETE FROM stock")

        assert compare(database, folder, replayed=()).ok


def test_the_check_never_creates_a_database(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(OSError, match=r"absent\.db cannot be opened"):
        compare(tmp_path / "absent.db", folder, replayed=())

    assert not (tmp_path / "absent.db").exists()


def test_a_missing_table_and_a_file_of_another_kind_are_refused_in_words(
    database: Path, folder: Path
) -> None:
    damage(database, "DROP TABLE stock")

    for path, fault in ((database, "no such table: stock"), (Path(__file__), "not a database")):
        with pytest.raises(ValueError, match=f"does not hold the demo's business tables.*{fault}"):
            compare(path, folder, replayed=())


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("InvoiceNo,StockCode,Quantity\n", "after 0 lines: expected each of"),
        (HEADER + "536365,A,6,1\n536365,A,6,2.5555\n", "after 1 lines: UnitPrice '2.5555'"),
        (HEADER + "536365,A,6,inf\n", "after 0 lines: UnitPrice 'inf'"),
        (HEADER + "536365,A,6,0.0000000000000000000000000001\n", "after 0 lines: UnitPrice"),
        (HEADER + "536365,A,6\n", "after 0 lines: the next row has another length"),
        (HEADER + "536365,A,6,1,1\n", "after 0 lines: the next row has another length"),
        (HEADER + '536365,A,6,"1\n', "after 0 lines: unexpected end of data"),
    ],
)
def test_a_file_the_check_cannot_read_is_refused_by_name(
    database: Path, folder: Path, content: str, fault: str
) -> None:
    (folder / "2010-12-03.csv").write_text(content)

    with pytest.raises(ValueError, match=f"ledger '2010-12-03' .*{fault}"):
        compare(database, folder, replayed=())


def test_a_damaged_file_is_refused_by_name(database: Path, folder: Path) -> None:
    packed = folder / "2010-12-02.csv.gz"
    for content in (packed.read_bytes()[:-10], b"plain text"):
        packed.write_bytes(content)

        with pytest.raises(ValueError, match="ledger '2010-12-02' "):
            compare(database, folder, replayed=())


def test_no_ledgers_and_a_name_twice_are_refused(
    database: Path, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"no \*\.csv or \*\.csv\.gz files"):
        compare(database, tmp_path, replayed=())

    (folder / "2010-12-02.csv").write_text(HEADER)
    with pytest.raises(ValueError, match="ledger '2010-12-02' twice"):
        compare(database, folder, replayed=())


def test_the_check_shares_no_code_with_the_reader_it_checks() -> None:
    tree = ast.parse(Path(check.__file__).read_text(encoding="utf-8"))
    imports = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else ["." * node.level + (node.module or "")]
        )
    }

    assert not {name for name in imports if name.startswith((".", "procession"))}


def test_reader_and_check_agree_on_the_example_ledgers(tmp_path: Path) -> None:
    database = tmp_path / "demo.db"
    fill(
        database,
        [
            parse_line(raw)
            for ledger in find_ledgers(EXAMPLES)
            for raw in split_lines(ledger.name, read_text(ledger))
        ],
    )

    report = compare(database, EXAMPLES, replayed=())

    expected = [42_481, 42_481, 2_025, 2_025]
    assert not report.differences
    assert expected == [each.expected for each in report.checks[:4]]
