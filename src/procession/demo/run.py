"""Our own run, from the folder of ledgers to the comparison with it.

Each round of its loop looks at the database, acts on what is due, and sleeps. If the process dies
in it, the workers stop by themselves, and the database holds what was committed.
"""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from textwrap import shorten
from typing import Final

from procession import App, End, Event
from procession.abc import ConsumerStatus, DeadLetterFilter
from procession.demo import check
from procession.demo.app import (
    ATTEMPTS,
    LEASE_MS,
    PARALLEL,
    SERIAL,
    build_app,
    line_id,
    make_tables,
)
from procession.demo.fleet import Fleet
from procession.demo.hostile import Plan, plan_hostility
from procession.demo.producer import Books, Producer
from procession.demo.report import Result, Stage, numbers_of, one_end_each
from procession.demo.voice import Voice
from procession.runtime.drive import drive

WORKER_MODULE = "procession.demo.worker"
TICK_S: Final = 0.05
# The longest that anything waits is a lease and a retry: what is slower has stopped.
STALL_S: Final = 60.0
TAKEOVERS_S: Final = 5 * LEASE_MS / 1000
DETAIL_CHARS: Final = 150


class StalledError(Exception):
    """Nothing has ended for `STALL_S`; the text says what is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is asked to do; see `--help`."""

    data: Path
    database: Path
    seed: int
    kills: int
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is to be done and what is to go wrong; nothing has begun."""

    app: App
    books: Books
    plan: Plan
    attempts: int


def prepare(options: Options) -> Prepared:
    """Read the ledgers and draw the plan; refuse what could not be done.

    Raises:
        ValueError: the folder cannot be read as ledgers, or the database's name does not do.
        OSError: a file cannot be read.
    """
    books = Books(options.data)
    attempts = ATTEMPTS + options.kills
    app = build_app(options.database, attempts=attempts)
    if app.database != options.database:
        raise ValueError(f"{options.database}: give the database's file a plainer name")
    books.check(app)
    plan = plan_hostility(books.ledgers, seed=options.seed, kills=options.kills)
    return Prepared(app=app, books=books, plan=plan, attempts=attempts)


def run(options: Options, prepared: Prepared, voice: Voice) -> Result:
    """Do the work on a new database and compare it with the files.

    Raises:
        ValueError: the ledgers have changed meanwhile, and can no longer be read.
        StalledError, FleetError: the work does not come to its end.
        ProcessionError: the database cannot be used, or a ledger cannot be sent.
    """
    began_s = time.monotonic()
    app, books, plan = prepared.app, prepared.books, prepared.plan
    make_tables(options.database)
    with ExitStack() as stack:
        stack.callback(app.close)
        app.open()
        fleet = Fleet(WORKER_MODULE, options.database, os.getpid(), prepared.attempts)
        stack.callback(fleet.stop)
        producer = Producer(app, books, plan, voice.say)
        loop = stack.enter_context(closing(Loop(app, fleet, producer, plan, voice)))
        for _ in range(options.processes):
            fleet.start()
        producer.send_ledgers()
        loop.work(Random(options.seed))  # noqa: S311  chooses victims
        voice.say("all has ended: comparing the tables with the files")
        loop.wait_for_takeovers()
        fleet.stop()
        consumers = numbers_of(app, producer.sent)
        compared = check.compare(options.database, options.data, replayed=_replayed(plan))
        return Result(
            hostility=_told(plan),
            consumers=consumers,
            kills=len(fleet.killed),
            takeovers=loop.takeovers,
            serial=loop.serial.measured(len(books.lines)),
            parallel=loop.parallel.measured(loop.parallel.goal),
            seconds=time.monotonic() - began_s,
            comparison=check.Report((one_end_each(consumers), *compared.checks)),
        )


class StageClock:
    """Measures a stage, to the exactness of a round: from its start to the end of its last message.

    Attributes:
        goal: how many messages that is.
    """

    def __init__(self, goal: int) -> None:
        self.goal = goal
        self._began_s = time.monotonic()
        self._ended_s: float | None = None

    def see(self, done: int, *, started: bool) -> None:
        """Take note of how many have ended by now, and whether the first could begin."""
        now = time.monotonic()
        if not started:
            self._began_s = now
        elif done >= self.goal and self._ended_s is None:
            self._ended_s = now

    def measured(self, messages: int) -> Stage:
        """Return the time that was measured, as that of so many messages."""
        ended_s = self._began_s if self._ended_s is None else self._ended_s
        return Stage(messages=messages, seconds=ended_s - self._began_s)


class Loop:
    """The rounds of one run.

    Attributes:
        takeovers: how many workers were taken over after their leases had ended.
    """

    def __init__(
        self, app: App, fleet: Fleet, producer: Producer, plan: Plan, voice: Voice
    ) -> None:
        self._app = app
        self._fleet = fleet
        self._producer = producer
        self._kills = list(reversed(plan.kills))
        self._voice = voice
        self._leases = drive(app.store.workers())
        self._dead = 0
        self._told: set[int] = set()
        self.takeovers = 0
        self.serial = StageClock(producer.sent[SERIAL])
        self.parallel = StageClock(_parallel(producer.ends_before_last))

    def work(self, random: Random) -> None:
        """Go on until every message has ended.

        Raises:
            StalledError: nothing ends any more.
            FleetError: the workers end by themselves.
        """
        before, changed_s = -1, time.monotonic()
        while True:
            self._look_at_workers()
            statuses = self._statuses()
            ended = {name: sum(status.counts.values()) for name, status in statuses.items()}
            self._look_at_dead_letters(statuses)
            self._look(ended)
            if self._producer.done and all(
                ended[name] >= number for name, number in self._producer.ends.items()
            ):
                return
            now, done = time.monotonic(), sum(ended.values())
            if done != before:
                before, changed_s = done, now
            elif now - changed_s > STALL_S:
                raise StalledError(self._stalled())
            self._kill_if_due(ended, random)
            self._producer.send_again(may_end=not self._kills)
            self._producer.replay(may_end=not self._kills)
            time.sleep(TICK_S)

    def wait_for_takeovers(self) -> None:
        """Let the leases of killed workers end and be taken over, too: it takes a lease's time."""
        deadline = time.monotonic() + TAKEOVERS_S
        while time.monotonic() < deadline:
            self._look_at_leases()
            if all(worker.taken_over for worker in self._fleet.killed):
                return
            time.sleep(TICK_S)
            self._fleet.poll()

    def close(self) -> None:
        """Close what the loop has opened."""
        drive(self._leases.close())

    def _statuses(self) -> dict[str, ConsumerStatus]:
        return {status.consumer: status for status in self._app.status() if status.consumer}

    def _look(self, ended: Mapping[str, int]) -> None:
        self.serial.see(ended[SERIAL], started=self._fleet.begun)
        self.parallel.see(_parallel(ended), started=ended[SERIAL] > 0)
        self._voice.show(
            {
                "serial": (ended[SERIAL], self._producer.ends[SERIAL]),
                "parallel": (_parallel(ended), _parallel(self._producer.ends)),
            }
        )

    def _kill_if_due(self, ended: Mapping[str, int], random: Random) -> None:
        """Kill a worker where the next share of the work is done.

        Each stage is half of the work, so that kills fall into both. The producer's last act,
        which waits for the last kill, is no part of it, so that each share is reached.
        """
        parallel = _parallel(ended) / self.parallel.goal if self.parallel.goal else 1.0
        share = (ended[SERIAL] / self.serial.goal + parallel) / 2
        if not self._kills or share < self._kills[-1]:
            return
        victim = self._fleet.kill(random)
        if victim is None:  # none has begun yet: the next round comes soon
            return
        self._kills.pop()
        fresh = self._fleet.start()
        done, all_ = sum(ended.values()), sum(self._producer.ends.values())
        self._voice.say(
            f"killed worker {victim.number} (process {victim.process.pid}) with SIGKILL after "
            f"{done:,} of {all_:,} messages; worker {fresh.number} starts in its place"
        )

    def _look_at_workers(self) -> None:
        """Tell what has become of workers: the database knows, whoever of them is still alive."""
        for event in self._fleet.poll():
            if event["event"] == Event.LANE_HUNG:
                self._voice.say(f"a handler of {event['consumer']} hangs: {event['key']}")
            elif event["event"] == Event.STORE_UNAVAILABLE:
                self._voice.say(f"a lane of {event['consumer']} pauses: {event['error']}")
            elif "instead_of" in event:
                self.takeovers += 1
                self._voice.say(
                    f"the worker of process {event['process']} was late with its lease, was taken "
                    "over, and goes on under another name"
                )
        self._look_at_leases()

    def _look_at_leases(self) -> None:
        now = time.monotonic()
        ended = [
            (worker, now - worker.killed_s)
            for worker in self._fleet.killed
            if not worker.taken_over
            and worker.killed_s is not None
            and now - worker.killed_s > LEASE_MS / 1000
        ]
        if not ended:
            return
        # Whose lease must have ended, and who is not listed as expired, was taken over.
        expired = drive(self._leases.expired())
        for worker, after_s in ended:
            if worker.ids[-1] not in expired:
                worker.taken_over = True
                self.takeovers += 1
                self._voice.say(
                    f"worker {worker.number} was taken over within {after_s:.1f} s of its death"
                )

    def _look_at_dead_letters(self, statuses: Mapping[str, ConsumerStatus]) -> None:
        dead = sum(
            number
            for status in statuses.values()
            for (end, _), number in status.counts.items()
            if end == End.DEAD_LETTERED
        )
        if dead == self._dead:
            return
        self._dead = dead
        for letter in self._app.dead_letters(DeadLetterFilter(status=None)):
            if letter.number not in self._told:
                self._told.add(letter.number)
                detail = shorten(letter.detail, DETAIL_CHARS, placeholder="...")
                self._voice.say(f"dead letter of {letter.consumer}, {letter.reason}: {detail}")

    def _stalled(self) -> str:
        return "\n".join(
            [
                f"nothing has ended for {STALL_S:g} s:",
                *(
                    f"  {name}: {status.waiting} waiting, {status.held} held, "
                    f"{status.dead_letters} dead letters, {sum(status.counts.values())} ended of "
                    f"{self._producer.ends[name]}"
                    for name, status in self._statuses().items()
                ),
            ]
        )


def _parallel(numbers: Mapping[str, int]) -> int:
    return sum(numbers[name] for name in PARALLEL)


def _replayed(plan: Plan) -> list[tuple[str, int]]:
    return [] if plan.damaged is None else [(plan.damaged.ledger, plan.damaged.line_number)]


def _told(plan: Plan) -> dict[str, object]:
    return {
        "ledgers_sent_twice": sorted(plan.twice),
        "transactions_sent_again": sum(map(len, plan.again.values())),
        "conflict": None if plan.conflict is None else line_id(plan.conflict),
        "corrupted": None if plan.damaged is None else line_id(plan.damaged),
    }
