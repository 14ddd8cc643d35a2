"""One run of the demo, from the folder of ledgers to the comparison with it.

Each round of its loop looks at the database, acts on what is due, and sleeps. If the process dies
in it, the workers stop by themselves, and the database holds what was committed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from textwrap import shorten
from typing import Any, Final

from procession import App, Event
from procession.abc import ConsumerStatus
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
from procession.demo.producer import Books, Producer, counted
from procession.demo.report import Result, Stage, numbers_of, one_end_each
from procession.demo.voice import Voice

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


def run(options: Options, voice: Voice) -> Result:
    """Run the demo on a new database and compare it with the files.

    Raises:
        ValueError: the folder cannot be read as ledgers, or the database's name does not do.
        StalledError, FleetError: the work does not come to its end.
        ProcessionError: the database cannot be used, or a ledger cannot be sent.
    """
    began_s = time.monotonic()
    books = Books(options.data)
    plan = plan_hostility(books.ledgers, seed=options.seed, kills=options.kills)
    attempts = ATTEMPTS + options.kills
    app = build_app(options.database, attempts=attempts)
    if app.database != options.database:
        raise ValueError(f"{options.database}: give the database's file a plainer name")
    books.check(app)
    make_tables(options.database)
    fleet = Fleet(options.database, attempts=attempts)
    try:
        app.open()
        voice.say(
            f"{counted(len(books.ledgers), 'ledger')}, "
            f"{counted(len(books.lines), 'transaction')}, "
            f"{counted(len(books.invoices), 'invoice')}; seed {options.seed}; "
            f"{counted(options.processes, 'worker process', 'es')}, leases of {LEASE_MS / 1000:g} s"
        )
        producer = Producer(app, books, plan, voice.say)
        loop = Loop(app, fleet, producer, plan, voice)
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
            input={
                "ledgers": len(books.ledgers),
                "transactions": len(books.lines),
                "invoices": len(books.invoices),
                "processes": options.processes,
                "seed": options.seed,
            },
            hostility=_told(plan),
            consumers=consumers,
            kills=len(fleet.killed),
            takeovers=fleet.takeovers,
            serial=loop.serial.measured(len(books.lines)),
            parallel=loop.parallel.measured(loop.parallel.goal),
            seconds=time.monotonic() - began_s,
            comparison=check.Report((one_end_each(consumers), *compared.checks)),
        )
    finally:
        fleet.stop()
        app.close()


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
    """The rounds of one run."""

    def __init__(
        self, app: App, fleet: Fleet, producer: Producer, plan: Plan, voice: Voice
    ) -> None:
        self._app = app
        self._fleet = fleet
        self._producer = producer
        self._kills = list(reversed(plan.kills))
        self._voice = voice
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
            self._narrate(self._fleet.poll())
            ended = self._ended()
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
        while self._fleet.waits_for_takeover and time.monotonic() < deadline:
            time.sleep(TICK_S)
            self._narrate(self._fleet.poll())

    def _statuses(self) -> dict[str, ConsumerStatus]:
        return {status.consumer: status for status in self._app.status() if status.consumer}

    def _ended(self) -> dict[str, int]:
        return {name: sum(status.counts.values()) for name, status in self._statuses().items()}

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

        Both stages count for half of it, so that kills fall into both; and the producer's last
        act, which waits for the last kill, counts for nothing, so that each share is reached.
        """
        serial, parallel = self.serial.goal, self.parallel.goal
        share = (ended[SERIAL] / serial + (_parallel(ended) / parallel if parallel else 1.0)) / 2
        if not self._kills or share < self._kills[-1]:
            return
        victim = self._fleet.kill(random)
        if victim is None:
            return
        self._kills.pop()
        fresh = self._fleet.start()
        self._voice.say(
            f"killed worker {victim.number} (process {victim.process.pid}) with SIGKILL at "
            f"{share:.0%} of the work; worker {fresh.number} starts in its place"
        )

    def _narrate(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            match event["event"]:
                case Event.WORKER_TAKEN_OVER:
                    self._tell_takeover(event["worker"])
                case Event.MESSAGE_ENDED:
                    detail = shorten(event["detail"], DETAIL_CHARS, placeholder="…")
                    self._voice.say(f"dead letter of {event['consumer']}: {detail}")
                case Event.LANE_HUNG:
                    self._voice.say(f"a handler of {event['consumer']} hangs: {event['key']}")
                case _:
                    pass

    def _tell_takeover(self, worker_id: str) -> None:
        worker = self._fleet.worker(worker_id)
        if worker is None:
            return
        if worker.killed_s is None:
            self._voice.say(f"worker {worker.number} was late with its lease and taken over")
        else:
            after_s = time.monotonic() - worker.killed_s
            self._voice.say(
                f"worker {worker.number} was taken over {after_s:.1f} s after its death"
            )

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
