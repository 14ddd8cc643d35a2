"""Promises that the ledgers' reader gives every line once, exactly, or refuses in words."""

import csv
import gzip
from decimal import Decimal
from pathlib import Path

import pytest

from procession.demo.ledgers import (
    Ledger,
    LedgerLine,
    find_ledgers,
    parse_line,
    read_text,
    split_lines,
)

EXAMPLES = Path(__file__).parents[3] / "examples" / "ledger"
HEADER = "InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country"
DATE = "2010-12-01 08:26:00"


def row(
    invoice_no: str = "536365",
    *,
    stock_code: str = "85123A",
    description: str = "LANTERN",
    quantity: str = "6",
    unit_price: str = "2.55",
) -> str:
    return f"{invoice_no},{stock_code},{description},{quantity},{DATE},{unit_price},,France"


def text(*rows: str, header: str = HEADER, end: str = "\n") -> str:
    return "".join(line + end for line in (header, *rows))


def line(number: int = 1, *, quantity: int = 6, unit_price_thousandths: int = 2550) -> LedgerLine:
    return LedgerLine(
        ledger="day",
        line_number=number,
        invoice_no="536365",
        stock_code="85123A",
        quantity=quantity,
        unit_price_thousandths=unit_price_thousandths,
    )


def parse_lines(name: str, content: str) -> list[LedgerLine]:
    return [parse_line(raw) for raw in split_lines(name, content)]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"")


def test_ledgers_come_in_order_of_their_names_whatever_their_suffix(tmp_path: Path) -> None:
    touch(tmp_path, "2010-12-02.csv", "2010-12-01.csv.gz", "2010-12-03.csv.gz")

    expected = [
        Ledger("2010-12-01", tmp_path / "2010-12-01.csv.gz"),
        Ledger("2010-12-02", tmp_path / "2010-12-02.csv"),
        Ledger("2010-12-03", tmp_path / "2010-12-03.csv.gz"),
    ]
    assert expected == find_ledgers(tmp_path)


def test_the_suffix_takes_no_part_in_the_order(tmp_path: Path) -> None:
    touch(tmp_path, "day-late.csv", "day.csv.gz")  # "-" is before "." and would come first

    expected = ["day", "day-late"]
    assert expected == [ledger.name for ledger in find_ledgers(tmp_path)]


def test_other_files_hidden_files_and_folders_are_no_ledgers(tmp_path: Path) -> None:
    touch(tmp_path, "day.csv", "LICENCE.txt", ".csv", "._day.csv", "day.csv.bak", "day.gz")
    (tmp_path / "folder.csv").mkdir()

    expected = ["day"]
    assert expected == [ledger.name for ledger in find_ledgers(tmp_path)]


def test_a_folder_without_ledgers_is_refused_in_words(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"no ledgers in .*\*\.csv or \*\.csv\.gz"):
            find_ledgers(folder)


def test_one_name_twice_is_refused_naming_both_files(tmp_path: Path) -> None:
    touch(tmp_path, "day.csv", "day.csv.gz")

    with pytest.raises(ValueError, match=r"'day' occurs twice .* day\.csv and as day\.csv\.gz"):
        find_ledgers(tmp_path)


def test_packed_and_plain_files_give_the_same_text(tmp_path: Path) -> None:
    content = text(row(description="CAFÉ"), end="\r\n")
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + content.encode())
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(content.encode()))

    assert [content, content] == [read_text(ledger) for ledger in find_ledgers(tmp_path)]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("day.csv", "£".encode("latin-1"), "'day' is not UTF-8"),
        ("day.csv.gz", b"plain text", "'day' is damaged"),
        ("day.csv.gz", gzip.compress(b"a longer text" * 100, mtime=0)[:-20], "'day' is damaged"),
        ("day.csv.gz", gzip.compress(b"text", mtime=0)[:10] + b"\xff" * 20, "'day' is damaged"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, fault: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ValueError, match=fault):
        read_text(find_ledgers(tmp_path)[0])


def test_lines_that_look_alike_are_each_a_line() -> None:
    assert [line(1), line(2)] == parse_lines("day", text(row(), row()))


def test_a_ledger_with_a_header_only_has_no_lines() -> None:
    assert not parse_lines("day", text())


def test_other_column_order_and_more_columns_make_no_difference() -> None:
    content = text("2.55,x,6,536365,85123A", header="UnitPrice,Extra,Quantity,InvoiceNo,StockCode")

    assert [line()] == parse_lines("day", content)


def test_a_byte_order_mark_belongs_to_no_column() -> None:
    assert [line()] == parse_lines("day", "\ufeff" + text(row()))


@pytest.mark.parametrize(
    "description",
    ['"LANTERN, WHITE"', '"DOOR MAT ""HOME"""', 'SET "A"', '"TWO\nLINES"', '"TWO\r\nLINES"', ""],
)
def test_a_description_may_hold_commas_quotes_and_line_ends(description: str) -> None:
    content = text(row(description=description), row())

    assert [line(1), line(2)] == parse_lines("day", content)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_and_empty_lines_change_no_number(end: str) -> None:
    content = text(row(), "", row(), "", end=end)

    assert [line(1), line(2)] == parse_lines("day", content)
    assert [line(1), line(2)] == parse_lines("day", content.rstrip())


@pytest.mark.parametrize(
    ("unit_price", "thousandths"),
    [
        ("2.55", 2550),
        ("0.001", 1),
        ("1.005", 1005),  # as a binary float, times 1000: 1004.9999999999999
        ("4.35", 4350),
        ("12", 12000),
        ("0", 0),
        ("-0.5", -500),
        ("-11062.06", -11062060),
        ("999999.999", 999999999),
    ],
)
def test_money_is_exact_to_the_thousandth(unit_price: str, thousandths: int) -> None:
    expected = [line(unit_price_thousandths=thousandths)]

    assert expected == parse_lines("day", text(row(unit_price=unit_price)))


def test_a_cancellation_has_a_negative_quantity() -> None:
    assert [line(quantity=-24)] == parse_lines("day", text(row(quantity="-24")))


@pytest.mark.parametrize(
    "unit_price",
    [
        *("", "2.5555", "2.5550", "2.", ".5", "1e3", "NaN", "inf", "1_000", " 1", "1\n"),
        *("£1", "٣", "1,5", "+1", "--1", "1000000", "9" * 5000),
    ],
)
def test_a_price_that_is_not_exact_is_refused_by_ledger_and_line(unit_price: str) -> None:
    content = text(row(), row(unit_price=f'"{unit_price}"'))

    with pytest.raises(ValueError, match="'day', line 2: UnitPrice ") as refusal:
        parse_lines("day", content)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "quantity", ["", "6.0", "1e3", "1_000", " 6", "six", "٣", "+6", "10000000"]
)
def test_a_quantity_that_is_no_whole_number_is_refused_by_ledger_and_line(quantity: str) -> None:
    content = text(row(), row(quantity=quantity))

    with pytest.raises(ValueError, match="'day', line 2: Quantity "):
        parse_lines("day", content)


def test_a_line_whose_numbers_are_none_is_a_line_with_a_number_all_the_same() -> None:
    content = text(row(), row(quantity="six", unit_price="?"), row())

    expected = [(1, "6", "2.55"), (2, "six", "?"), (3, "6", "2.55")]
    raw = split_lines("day", content)
    assert expected == [(each.line_number, each.quantity, each.unit_price) for each in raw]


@pytest.mark.parametrize(
    ("bad_row", "fault"),
    [
        (row() + ",more", "9 fields where the header has 8"),
        ("536365,85123A", "2 fields where the header has 8"),
        (" ", "1 fields where the header has 8"),
        (row(""), "InvoiceNo is empty"),
        (row(" "), "InvoiceNo is empty"),
        (row(stock_code=""), "StockCode is empty"),
        (row(description='"NEVER CLOSED'), "unexpected end of data"),
        (row(description='"CLOSED" TOO EARLY'), "expected after"),
        (row(description="X" * 200_000), "field larger than field limit"),
    ],
)
def test_a_bad_row_is_refused_by_ledger_and_line(bad_row: str, fault: str) -> None:
    with pytest.raises(ValueError, match=f"'day', line 2: .*{fault}"):
        split_lines("day", text(row(), bad_row, row()))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "column InvoiceNo is missing, .*, column UnitPrice is missing"),
        ("\n" + text(row()), "column InvoiceNo is missing"),
        (text(header=HEADER.replace("UnitPrice", "Price")), "column UnitPrice is missing"),
        (text(header=HEADER + ",Quantity"), "column Quantity is there twice"),
        ('"InvoiceNo', "unexpected end of data"),
    ],
)
def test_a_header_that_does_not_name_the_columns_is_refused(content: str, fault: str) -> None:
    with pytest.raises(ValueError, match=f"'day', header: .*{fault}"):
        split_lines("day", content)


def test_the_example_ledgers_are_read_whole_and_exactly() -> None:
    ledgers = find_ledgers(EXAMPLES)
    texts = {ledger.name: read_text(ledger) for ledger in ledgers}
    lines = [each for name, content in texts.items() for each in parse_lines(name, content)]

    assert len(ledgers) == 20
    assert len(lines) == len({(each.ledger, each.line_number) for each in lines}) == 42_481
    assert len({each.invoice_no for each in lines}) == 2_025
    by_decimals = sum(
        Decimal(fields["UnitPrice"]) * Decimal(fields["Quantity"])
        for content in texts.values()
        for fields in csv.DictReader(content.splitlines())
    )
    by_thousandths = sum(each.quantity * each.unit_price_thousandths for each in lines)
    assert by_decimals * 1000 == by_thousandths
