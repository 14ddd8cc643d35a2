"""All that reaches the app from outside: the ledgers, and what goes wrong with messages on the way.

Each method sends what is due and remembers that it did; what the consumers have done by then it
reads from the database. The act that ends the work can be held back, so that whatever else must
happen in mid-run has happened by then.
"""

import sqlite3
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Final

from procession import App, MessageError, Reason
from procession.abc import DeadLetterFilter, DeadLetterRecord
from procession.demo.app import PARALLEL, SERIAL, LedgerText, line_id
from procession.demo.hostile import Plan, damage
from procession.demo.ledgers import RawLine, find_ledgers, parse_line, read_text, split_lines
from procession.outcome import InboxState

OPERATOR: Final = "demo"


class Books:
    """The ledgers of a folder, as the files have them.

    Attributes:
        texts: each ledger's text by its name, in order of date.
        ledgers: its lines, likewise.
        lines: the lines of all.

    Raises:
        ValueError: something in the folder cannot be read as a ledger; names it.
        OSError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.texts = {ledger.name: read_text(ledger) for ledger in find_ledgers(folder)}
        self.ledgers = {name: split_lines(name, text) for name, text in self.texts.items()}
        self.lines = list(chain.from_iterable(self.ledgers.values()))

    @property
    def invoices(self) -> set[str]:
        """The numbers of all invoices."""
        return {line.invoice_no for line in self.lines}

    def check(self, app: App) -> None:
        """Refuse at once what the consumers could not take: else it would come to light midway.

        Raises:
            ValueError: a line's numbers are none, or its keys are out of bounds; names the line.
        """
        for line in self.lines:
            parse_line(line)
            try:
                app.outgoing("transactions", line, message_id=line_id(line))
            except MessageError as error:
                raise ValueError(
                    f"ledger {line.ledger!r}, line {line.line_number}: {error.detail}"
                ) from error


class Producer:
    """Sends the books by the plan, and says so.

    Attributes:
        sent: how many messages each consumer is sent in all.
        ends: how many ends that makes: a message that is replayed comes to a second one.
        ends_before_last: the same, before the last act.
    """

    def __init__(self, app: App, books: Books, plan: Plan, say: Callable[[str], None]) -> None:
        self._app = app
        self._books = books
        self._plan = plan
        self._say = say
        self._again = deque(plan.again.items())
        self._sent_again = 0
        self._to_replay = plan.damaged
        transactions = len(books.lines) + sum(map(len, plan.again.values()))
        self.sent: Mapping[str, int] = {
            SERIAL: len(books.ledgers) + len(plan.twice),
            **dict.fromkeys(PARALLEL, transactions),
        }
        replays = 0 if plan.damaged is None else 1
        self.ends = {**self.sent, "apply": transactions + replays}
        last = len(self._again[-1][1]) if self._again and not replays else 0
        self.ends_before_last = {
            SERIAL: self.sent[SERIAL],
            **dict.fromkeys(PARALLEL, transactions - last),
        }

    @property
    def done(self) -> bool:
        """Whether all is sent."""
        return not self._again and self._to_replay is None

    def send_ledgers(self) -> None:
        """Send each ledger as one message, in order of date."""
        plan, texts = self._plan, self._books.texts
        for name, text in texts.items():
            sent = text
            if plan.damaged is not None and plan.damaged.ledger == name:
                sent = damage(text, plan.damaged.line_number, plan.damaged_quantity)
            for _ in range(1 + (name in plan.twice)):
                self._app.send("ledger", LedgerText(name, sent), message_id=name)
        self._say(
            f"sent {counted(len(texts), 'ledger')} in order of date, "
            f"every third of them twice ({len(plan.twice)})"
        )
        if plan.damaged is not None:
            self._say(
                f"a bad wire damaged line {line_id(plan.damaged)} (order "
                f"{plan.damaged.invoice_no}) inside its ledger's message: quantity "
                f"{plan.damaged.quantity!r} arrives as {plan.damaged_quantity!r}"
            )

    def send_again(self, *, may_end: bool) -> None:
        """Send the planned lines of the next ledger again, once its split has committed.

        The inbox says so: the splitter's row and the lines that it sent are one transaction.
        """
        if not self._again:
            return
        ledger, lines = self._again[0]
        ends = len(self._again) == 1 and self._to_replay is None
        row = self._app.recorded(SERIAL, ledger)
        if row is None or row.state != InboxState.DONE or (ends and not may_end):
            return
        self._app.publish(
            self._app.outgoing("transactions", line, message_id=line_id(line)) for line in lines
        )
        self._again.popleft()
        self._sent_again += len(lines)
        if self._sent_again == len(lines) or not self._again:
            self._say(
                f"ledger {ledger} is split and committed: sent every tenth transaction of it "
                f"again from outside, {self._sent_again:,} by now"
            )
        conflict = self._plan.conflict
        if conflict is not None and conflict.ledger == ledger:
            right = self._books.ledgers[ledger][conflict.line_number - 1]
            self._say(
                f"the copy of {line_id(conflict)} has the same id and another payload: quantity "
                f"{conflict.quantity!r} instead of {right.quantity!r}"
            )

    def replay(self, *, may_end: bool) -> None:
        """Mend the damaged line's dead letter and replay it, once its order has gone on."""
        line = self._to_replay
        if line is None or self._again or not may_end:
            return
        letter = self._dead_letter(line)
        others = sum(each.invoice_no == line.invoice_no for each in self._books.lines) - 1
        if letter is None or self._lines_of(line.invoice_no) != others:
            return
        self._app.edit_dead_letter(letter.number, line, by=OPERATOR)
        self._app.replay_dead_letters([letter.number], by=OPERATOR)
        self._to_replay = None
        self._say(
            f"order {line.invoice_no} has gone on without line {line_id(line)}, "
            f"{others} of {others + 1} lines are in: edited the dead letter back to quantity "
            f"{line.quantity!r} and replayed it into its session"
        )

    def _dead_letter(self, line: RawLine) -> DeadLetterRecord | None:
        wanted = DeadLetterFilter(
            consumer="apply", session=line.invoice_no, reason=Reason.INVALID_PAYLOAD
        )
        found = self._app.dead_letters(wanted)
        return next((each for each in found if each.message_id.decode() == line_id(line)), None)

    def _lines_of(self, invoice_no: str) -> int:
        database = self._app.database
        if database is None:
            raise ValueError("the demo needs a store in a file")
        uri = f"{database.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            row = connection.execute(
                "SELECT lines FROM orders WHERE invoice_no = ?", (invoice_no,)
            ).fetchone()
        return 0 if row is None else int(row[0])


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun.

    >>> counted(1, "ledger"), counted(2_025, "invoice")
    ('1 ledger', '2,025 invoices')
    """
    return f"{number:,} {noun}{'' if number == 1 else plural}"
