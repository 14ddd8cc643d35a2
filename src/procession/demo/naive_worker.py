"""A consumer as people write it: take a message, commit its effect, then delete the message.

It is not written to fail: a message is taken by one process at a time, its effect is one
transaction, nothing is deleted before it is done, and what a dead process had in hand comes again.
It has no inbox, so what comes again counts again; and with others beside it no order.
"""

import os
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from procession import Event
from procession.demo.app import EFFECT, LedgerText, effect_values
from procession.demo.ledgers import RawLine, parse_line, split_lines
from procession.demo.naive_queue import Delivery, Queue, connect
from procession.demo.worker import ParentInstrument
from procession.runtime.lifeline import Lifeline

LEDGERS: Final = "ledgers"
TRANSACTIONS: Final = "transactions"
IDLE_S: Final = 0.01


def work(queue: Queue, database: sqlite3.Connection, *, alone: bool) -> None:
    """Consume until the process is ended."""
    while True:
        message = queue.peek() if alone else queue.take()
        if message is None:
            time.sleep(IDLE_S)
            continue
        handle(message, queue, database)
        # Whoever dies here has done the message, and the queue does not know.
        queue.delete(message.id)


def handle(message: Delivery, queue: Queue, database: sqlite3.Connection) -> None:
    """Split a ledger into its lines, or apply a line."""
    if message.topic == LEDGERS:
        ledger = msgspec.json.decode(message.body, type=LedgerText)
        lines = split_lines(ledger.name, ledger.text)
        queue.send(TRANSACTIONS, map(msgspec.json.encode, lines))
        return
    line = parse_line(msgspec.json.decode(message.body, type=RawLine))
    values = effect_values(line, replayed=False)
    with database:
        database.execute("BEGIN IMMEDIATE")
        for statement in EFFECT:
            database.execute(statement, values)


def main(arguments: Sequence[str]) -> None:
    """Work on QUEUE and DATABASE for the process PARENT, `alone` or among `others`."""
    file, database, parent, company = arguments
    Lifeline(lambda: "", lambda: os._exit(1)).start()
    # The parent may have died before its id could be read.
    if os.getppid() != int(parent):
        return
    with closing(Queue(Path(file))) as queue, closing(connect(Path(database))) as connection:
        ParentInstrument().emit(Event.WORKER_STARTED, {"worker": os.getpid()})
        work(queue, connection, alone=company == "alone")


if __name__ == "__main__":
    main(sys.argv[1:])
