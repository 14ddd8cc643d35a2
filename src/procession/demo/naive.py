"""Runs consumers without an inbox on the first ledgers: of these, the same are sent twice, the same
lines are sent again, and as many workers are killed as in ours. `tally` reads what they counted.

Nothing is damaged here: how a bad line is treated is another question than how often a line counts.
"""

import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from procession.demo.app import LedgerText, make_tables
from procession.demo.fleet import Fleet
from procession.demo.hostile import Plan
from procession.demo.ledgers import RawLine
from procession.demo.naive_queue import Queue, connect
from procession.demo.naive_worker import LEDGERS, TRANSACTIONS
from procession.demo.producer import Books, counted
from procession.demo.run import STALL_S, StalledError
from procession.demo.voice import Voice

NAIVE_WORKER_MODULE: Final = "procession.demo.naive_worker"
FIRST_LEDGERS: Final = 3
# These are quick: a round must fall between two kills of a small folder.
TICK_S: Final = 0.02


class NaiveRun:
    """The ledgers of the first days, sent to consumers of one kind.

    Args:
        name: what it is called on the way.
        processes: how many consumers; one alone takes no care of others.

    Attributes:
        ledgers: the names of those that are sent.
        kills: how many workers were killed.
        seconds: how long it took.
    """

    def __init__(self, name: str, books: Books, plan: Plan, *, processes: int) -> None:
        self._name = name
        self._books = books
        self._plan = plan
        self._processes = processes
        self.ledgers = first_ledgers(books)
        self.kills = 0
        self.seconds = 0.0

    def run(self, database: Path, voice: Voice, random: Random) -> None:
        """Work until the queue is empty; leave the business tables in a new file.

        Raises:
            StalledError, FleetError: the work does not come to its end.
        """
        began_s = time.monotonic()
        make_tables(database)
        with ExitStack() as stack:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="queue-", dir=database.parent)
            )
            queue = stack.enter_context(closing(Queue(Path(folder) / "queue.db")))
            # Open from the first to the last: it sets the file's mode, and tidies up at its end.
            stack.enter_context(closing(connect(database)))
            company = "alone" if self._processes == 1 else "others"
            fleet = Fleet(NAIVE_WORKER_MODULE, queue.file, database, os.getpid(), company)
            stack.callback(fleet.stop)
            for _ in range(self._processes):
                fleet.start()
            sender = Sender(queue, self._books, self._plan, self.ledgers)
            self._work(queue, fleet, sender, voice, random)
            self.kills = len(fleet.killed)
        self.seconds = time.monotonic() - began_s

    def _work(
        self, queue: Queue, fleet: Fleet, sender: "Sender", voice: Voice, random: Random
    ) -> None:
        """Send, kill where it is due, and wait for the queue to be empty."""
        kills = list(reversed(self._plan.kills))
        before, changed_s = -1, time.monotonic()
        while True:
            fleet.poll()
            sender.send_again(may_end=not kills)
            sent, waiting = queue.counts()
            done, all_ = sent - waiting, max(sent, sender.total)
            voice.show({self._name: (done, all_)})
            if sender.done and not waiting and not kills:
                return
            # Where the last resends wait for the last kill, nothing may be left to kill in.
            if kills and (done >= kills[-1] * all_ or not waiting):
                victim = fleet.kill(random)
                if victim is not None:
                    kills.pop()
                    fleet.start()
                    voice.say(
                        f"killed worker {victim.number} with SIGKILL after {done:,} of {all_:,} "
                        "messages; another starts in its place"
                    )
            now = time.monotonic()
            if done != before:
                before, changed_s = done, now
            elif now - changed_s > STALL_S:
                raise StalledError(
                    f"the {self._name} consumers have done nothing for {STALL_S:g} s: "
                    f"{counted(waiting, 'message')} still in the queue"
                )
            time.sleep(TICK_S)


class Sender:
    """Sends the first ledgers, and again what the plan sends again.

    Attributes:
        total: how many messages that makes, with the lines that come of the ledgers.
    """

    def __init__(self, queue: Queue, books: Books, plan: Plan, ledgers: Sequence[str]) -> None:
        self._queue = queue
        self._again = deque((name, plan.again[name]) for name in ledgers if name in plan.again)
        times = {name: 1 + (name in plan.twice) for name in ledgers}
        self.total = sum(
            (1 + len(books.ledgers[name])) * copies for name, copies in times.items()
        ) + sum(len(lines) for _, lines in self._again)
        self._messages = self._send_ledgers(books.texts, times)

    @property
    def done(self) -> bool:
        """Whether all is sent."""
        return not self._again

    def _send_ledgers(self, texts: Mapping[str, str], times: Mapping[str, int]) -> dict[str, int]:
        """Send the ledgers in order of date; return the message of each one's first copy."""
        messages: dict[str, int] = {}
        for name, copies in times.items():
            body = msgspec.json.encode(LedgerText(name, texts[name]))
            messages[name] = self._queue.send(LEDGERS, [body])
            if copies > 1:
                self._queue.send(LEDGERS, [body] * (copies - 1))
        return messages

    def send_again(self, *, may_end: bool) -> None:
        """Send the planned lines of the next ledger again, once its split has committed."""
        if not self._again or (len(self._again) == 1 and not may_end):
            return
        name, lines = self._again[0]
        if not self._queue.holds(self._messages[name]):
            self._queue.send(TRANSACTIONS, map(_encoded, lines))
            self._again.popleft()


def first_ledgers(books: Books) -> list[str]:
    """Return the names of the first ledgers, in order of date."""
    return list(islice(books.ledgers, FIRST_LEDGERS))


def _encoded(line: RawLine) -> bytes:
    return msgspec.json.encode(line)
