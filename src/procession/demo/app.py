"""The application of the demo: two stages, three consumers, and the tables they write.

This is all that a user would write; everything else in this package sends, breaks and compares.
Nothing in the business tables refuses a second application of a line: only the inbox does.
"""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from procession import App, Context, Instrument, RetryPolicy, Settings
from procession.demo.ledgers import LedgerLine, RawLine, parse_line, split_lines

SERIAL: Final = "split"
PARALLEL: Final = ("apply", "audit")
LEASE_MS: Final = 2_000
ATTEMPTS: Final = 5

# `applied` is the order of application: SQLite numbers the rows 1, 2, 3… inside the transaction
# that writes them, and a number whose transaction did not commit is given again.
TABLES: Final = """
CREATE TABLE order_lines (
    applied                INTEGER PRIMARY KEY,
    ledger                 TEXT NOT NULL,
    line_number            INTEGER NOT NULL,
    invoice_no             TEXT NOT NULL,
    stock_code             TEXT NOT NULL,
    quantity               INTEGER NOT NULL,
    unit_price_thousandths INTEGER NOT NULL,
    replayed               INTEGER NOT NULL CHECK (replayed IN (0, 1))
) STRICT;
CREATE TABLE orders (
    invoice_no        TEXT PRIMARY KEY,
    lines             INTEGER NOT NULL,
    total_thousandths INTEGER NOT NULL
) STRICT;
CREATE TABLE stock (
    stock_code TEXT PRIMARY KEY,
    quantity   INTEGER NOT NULL
) STRICT;
CREATE TABLE audit_lines (
    ledger      TEXT NOT NULL,
    line_number INTEGER NOT NULL,
    copies      INTEGER NOT NULL,
    PRIMARY KEY (ledger, line_number)
) STRICT;
"""

# What a line's application writes, here and in the consumers without an inbox.
EFFECT: Final = (
    """
    INSERT INTO order_lines (ledger, line_number, invoice_no, stock_code, quantity,
                             unit_price_thousandths, replayed)
    VALUES (:ledger, :line_number, :invoice_no, :stock_code, :quantity, :price, :replayed)
    """,
    """
    INSERT INTO orders (invoice_no, lines, total_thousandths) VALUES (:invoice_no, 1, :total)
    ON CONFLICT (invoice_no) DO UPDATE
    SET lines = lines + 1, total_thousandths = total_thousandths + excluded.total_thousandths
    """,
    """
    INSERT INTO stock (stock_code, quantity) VALUES (:stock_code, :quantity)
    ON CONFLICT (stock_code) DO UPDATE SET quantity = quantity + excluded.quantity
    """,
)


@dataclass(slots=True)
class LedgerText:
    """A day's ledger on its way: its name and its CSV text."""

    name: str
    text: str


def make_tables(database: Path) -> None:
    """Make the business tables in a fresh file, as a user's migration would."""
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(TABLES)


def build_app(
    database: Path, *, attempts: int = ATTEMPTS, instruments: Iterable[Instrument] = ()
) -> App:
    """Return the app with its queue, its topic and its three consumers.

    Args:
        database: the one file of everything.
        attempts: lone runs before a message becomes a dead letter. A worker that is killed
            costs the message it ran alone an attempt, so who kills on purpose allows for it.
        instruments: receive every event.
    """
    app = App(
        "demo",
        store=f"sqlite:///{database}",
        settings=Settings(lease_ms=LEASE_MS),
        retry=RetryPolicy(max_attempts=attempts, first_ms=100, longest_ms=2_000),
        instruments=instruments,
    )
    app.queue("ledger", session=_one_for_all)
    app.topic("transactions", session="invoice_no")
    app.consumer("ledger", name="split")(split)
    app.consumer("transactions", name="apply", validators=[parse_line])(apply)
    app.consumer("transactions", name="audit")(audit)
    return app


def _one_for_all(_: LedgerText) -> str:
    """One session for all ledgers: they are split one at a time, in their order."""
    return "ledgers"


def split(ledger: LedgerText, ctx: Context) -> None:
    """Send every line of a ledger on, in order, under an id that a second split would give too."""
    for line in split_lines(ledger.name, ledger.text):
        ctx.send("transactions", line, message_id=line_id(line))


def line_id(line: RawLine) -> str:
    """Return the message id of a line: its place, for lines may be alike in all else."""
    return f"{line.ledger}/{line.line_number}"


def apply(raw: RawLine, ctx: Context) -> None:
    """Write a line, and add it to its order and to its item's stock.

    Its order's lines come one at a time and in order; the item is shared by many orders.
    """
    written = effect_values(parse_line(raw), replayed=ctx.message.replayed)
    for statement in EFFECT:
        ctx.write(statement, written)


def effect_values(line: LedgerLine, *, replayed: bool) -> dict[str, str | int]:
    """Return the parameters of `EFFECT` for a line."""
    return {
        "ledger": line.ledger,
        "line_number": line.line_number,
        "invoice_no": line.invoice_no,
        "stock_code": line.stock_code,
        "quantity": line.quantity,
        "price": line.unit_price_thousandths,
        "total": line.quantity * line.unit_price_thousandths,
        "replayed": int(replayed),
    }


def audit(line: RawLine, ctx: Context) -> None:
    """Count its own copy of every transaction, whatever its numbers say."""
    ctx.write(
        "INSERT INTO audit_lines (ledger, line_number, copies) VALUES (:ledger, :line_number, 1)"
        " ON CONFLICT (ledger, line_number) DO UPDATE SET copies = copies + 1",
        ledger=line.ledger,
        line_number=line.line_number,
    )
