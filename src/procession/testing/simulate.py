"""Runs a user's own handlers through duplicates, crashes and lost sessions, and compares.

Each seed decides one history. Whatever happens in it, the business tables and the messages sent
end as they do when every message comes once and nothing goes wrong; where they do not, the seed and
what led to it are told. Everything runs on this thread, on SQLite files that are thrown away.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from procession.abc import Lane, Workers
from procession.app import App
from procession.errors import ConfigurationError, ProcessionError, WorkerLost
from procession.flows.batch import LaneMemory
from procession.flows.consume import Consume
from procession.message import Outgoing, new_id
from procession.runtime.drive import drive
from procession.stores.sqlite import SqliteStore
from procession.testing.clock import ManualClock
from procession.testing.run import Setup, SimulatedCrash, prepare, register

STEPS_MAX = 20_000
TRACE_MAX = 40
DIFFERENCES_MAX = 10
ROWS_SHOWN_MAX = 5
CRASHES_ALLOWED = 50
ADVICE = (
    "A handler may run several times before its one commit: do everything through ctx, or in a "
    "way that is safe to repeat."
)


class ViolationError(AssertionError):
    """A handler's effects depend on what must not matter; the text says on what seed and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often things go wrong, as a chance each time.

    Attributes:
        duplicate: a message is sent twice.
        crash: the process dies at a step: any call of the store, any use of the context.
        fail: a handler raises after it has done its work.
        lose: a worker is taken over while it stands still.
        workers: processes that share the work.
    """

    duplicate: float = 0.3
    crash: float = 0.02
    fail: float = 0.1
    lose: float = 0.05
    workers: int = 2


@dataclass(slots=True)
class Report:
    """What a simulation did.

    Attributes:
        seeds: how many histories were run.
        crashes, failures, losses, duplicates: how often in all.
    """

    seeds: int = 0
    crashes: int = 0
    failures: int = 0
    losses: int = 0
    duplicates: int = 0


def simulate(
    app: App,
    send: Callable[[App], object] | Iterable[tuple[str, Any]],
    *,
    setup: Setup | Iterable[str] = (),
    seeds: Iterable[int] = range(100),
    faults: Faults | None = None,
    ignore: Iterable[str] = (),
) -> Report:
    """Run the app's handlers under many histories; each must end like the undisturbed one.

    Order is kept within each session and shuffled between sessions; a handler that depends on
    the order between sessions is told, too.

    Args:
        app: with its consumers; its own store is not touched.
        send: sends the messages through the app it is given (`app.send(...)`), or lists pairs of
            queue and payload.
        setup: makes the business tables, as in `testing.run`.
        seeds: each is one history.
        faults: how often things go wrong.
        ignore: columns (`"table.column"`) or tables that may differ, such as times.

    Returns:
        how much went wrong, and did no harm.

    Raises:
        ViolationError: names the first seed whose tables or messages differ, and its last steps.

    Example:
        >>> from procession import App, Context
        >>> from procession.testing import simulate
        >>> app = App("doc", store="sqlite:///doc.db")
        >>> @app.consumer("q", name="c", session="id")
        ... def add(payload: dict, ctx: Context) -> None:
        ...     ctx.write("UPDATE total SET n = n + :n", n=payload["n"])
        >>> setup = "CREATE TABLE total (n INTEGER); INSERT INTO total VALUES (0)"
        >>> simulate(
        ...     app, [("q", {"id": i, "n": 2}) for i in range(5)], setup=setup, seeds=[1]
        ... ).seeds
        1
    """
    tables = _Ignored(ignore)
    faults = faults or Faults()
    messages = _collect(app, send)
    if not messages:
        raise ConfigurationError("simulate: nothing was sent, so nothing can go wrong")
    undisturbed = _History(0, app, messages, setup, None)
    expected = undisturbed.run().state(tables)
    report = Report()
    for seed in seeds:
        history = _History(seed, app, messages, setup, faults)
        found = history.run().state(tables)
        differences = _differences(expected, found)
        if differences:
            raise ViolationError(_told(seed, differences, history.trace))
        report.seeds += 1
        report.crashes += history.counts["crash"]
        report.failures += history.counts["fail"]
        report.losses += history.counts["lose"]
        report.duplicates += history.counts["duplicate"]
    return report


# ---- one history ---------------------------------------------------------------------------------


class _History:
    """One seed's run on a database of its own; without faults it is the undisturbed one."""

    def __init__(
        self,
        seed: int,
        app: App,
        messages: Sequence[Outgoing],
        setup: Setup | Iterable[str],
        faults: Faults | None,
    ) -> None:
        self._app = app
        self._messages = messages
        self._setup = setup
        self._faults = faults
        self._random = random.Random(seed)  # noqa: S311  to be repeated, not to be secret
        self._clock = ManualClock()
        self._runner: asyncio.Runner | None = None
        self._registry: Workers | None = None
        self._calm = faults is None
        self._state: dict[str, Counter[tuple[Any, ...]]] = {}
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> _History:
        """Run to the end."""
        with tempfile.TemporaryDirectory(prefix="procession-simulate-") as folder, ExitStack() as s:
            store = SqliteStore(
                f"sqlite:///{folder}/simulated.db?synchronous=off", settings=self._app.settings
            )
            s.enter_context(self._app.with_store(store))
            prepare(self._app, self._setup)
            s.enter_context(self._app.ready_handlers())
            self._registry = drive(store.workers())
            s.callback(lambda: drive(self._close()))
            self._play()
            self._state = _read(store.path)
        return self

    def state(self, ignored: _Ignored) -> dict[str, Counter[tuple[Any, ...]]]:
        """Return the rows of each business table, and the messages that nobody consumes."""
        return ignored.without(self._state)

    async def _close(self) -> None:
        if self._registry is not None:
            await self._registry.close()
        if self._runner is not None:
            self._runner.close()

    def _play(self) -> None:
        self._send()
        number = 1 if self._faults is None else self._faults.workers
        workers = [_Worker(self) for _ in range(number)]
        steps = idle = 0
        while idle < len(workers) * 2:
            steps += 1
            if steps > STEPS_MAX:
                raise ViolationError(f"no end after {STEPS_MAX} steps: who sends for ever?")
            self._calm = self._calm or steps > 20 * (len(self._messages) + 10)
            worker = self._random.choice(workers)
            handled = self._step(workers, worker)
            skipped = self._app.skip_waits()
            idle = 0 if handled or skipped else idle + 1
        for worker in workers:
            worker.close()

    def _step(self, workers: list[_Worker], worker: _Worker) -> int:
        if self.goes("lose"):
            self.told(f"{worker.name} is taken over while it stands still")
            drive(self._take_over(worker.identity))
        try:
            return worker.step()
        except SimulatedCrash:
            worker.die()
            drive(self._take_over(worker.identity))
            workers[workers.index(worker)] = _Worker(self)
            return 1
        except WorkerLost:
            self.told(f"{worker.name} finds that it was taken over, and begins again")
            worker.close()
            workers[workers.index(worker)] = _Worker(self)
            return 1

    async def _take_over(self, identity: str) -> None:
        if self._registry is not None:
            await self._registry.take_over(identity, dead=True)

    def _send(self) -> None:
        order = list(self._messages)
        if self._faults is not None:
            order = _shuffled(order, self._random)
        publisher = self._app.publisher()
        again: list[Outgoing] = []
        for message in order:
            drive(publisher.publish([message]))
            if self.goes("duplicate"):
                again.append(message)
            while again and self._random.random() < 0.5:  # noqa: PLR2004  sooner or later
                drive(publisher.publish([again.pop(0)]))
        if again:
            drive(publisher.publish(again))

    # What the workers ask.

    @property
    def app(self) -> App:
        return self._app

    @property
    def clock(self) -> ManualClock:
        return self._clock

    def draw(self) -> float:
        return self._random.random()

    def goes(self, what: str) -> bool:
        """Whether a fault happens now."""
        if self._calm or self._faults is None:
            return False
        happens = self._random.random() < float(getattr(self._faults, what))
        self.counts[what] += happens
        return happens

    def told(self, what: str) -> None:
        """Remember what happened, for people."""
        self.trace.append(f"  {what}")
        del self.trace[:-TRACE_MAX]

    def drive_step(self, flow: Consume, *, is_async: bool) -> int:
        """Run one step, on a loop where the handlers need one."""
        if not is_async:
            return drive(flow.step())
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(flow.step())


class _Worker:
    """A simulated process: a lane for each consumer."""

    def __init__(self, history: _History) -> None:
        self._history = history
        self.identity = new_id()
        history.counts["workers"] += 1
        self.name = f"worker {history.counts['workers']}"
        self._flows: list[tuple[Consume, Lane, bool]] = []
        app = history.app
        register(app, self.identity)
        for number, consumer in enumerate(app.consumers.values()):
            lane = drive(app.store.lane(consumer.name, worker=self.identity, number=number))
            memory = LaneMemory(
                settings=app.settings,
                clock=history.clock,
                instrument=_Quiet(),
                draw=history.draw,
            )
            crashing: Any = _CrashingLane(lane, history, f"{self.name}, {consumer.name}")
            around: Any = _FailingConsumer(consumer, history, self.name)
            flow = Consume(around, crashing, memory, features=app.store.features)
            self._flows.append((flow, lane, consumer.is_async))

    def step(self) -> int:
        """Run one batch of each consumer, in any order."""
        handled = 0
        for place in sorted(range(len(self._flows)), key=lambda _: self._history.draw()):
            flow, _, is_async = self._flows[place]
            try:
                handled += self._history.drive_step(flow, is_async=is_async)
            except WorkerLost:
                raise
            except ProcessionError as error:
                self._history.told(f"{self.name}: {type(error).__name__}")
        return handled

    def die(self) -> None:
        """End as a killed process does: no commit, no release, no word."""
        for _, lane, _ in self._flows:
            lane.interrupt()
            drive(lane.close())

    def close(self) -> None:
        """End in good order."""
        for _, lane, _ in self._flows:
            try:
                drive(lane.close())
            except ProcessionError as error:
                self._history.told(f"{self.name}: {error}")


class _CrashingLane:
    """A lane whose process may die before or after each of its steps."""

    STEPS = frozenset({"begin", "fetch", "fetch_one", "begin_attempt", "flush", "commit", "undo"})

    def __init__(self, lane: Lane, history: _History, name: str) -> None:
        self._lane = lane
        self._history = history
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lane, name)
        if name not in self.STEPS:
            return found

        async def step(*arguments: Any, **named: Any) -> Any:
            self._crash(f"before {name}")
            result = await found(*arguments, **named)
            self._crash(f"after {name}")
            return result

        return step

    def _crash(self, where: str) -> None:
        if self._history.goes("crash"):
            self._history.told(f"{self._name}: dies {where}")
            raise SimulatedCrash


class _FailingConsumer:
    """A consumer whose handlers may fail after they have done their work, or die."""

    def __init__(self, consumer: Any, history: _History, name: str) -> None:
        self._consumer = consumer
        self._history = history
        self._name = name
        # Simulated crashes use up attempts, too, and must not end in a dead letter.
        policy = consumer.retry
        self.retry = replace(policy, max_attempts=policy.max_attempts + CRASHES_ALLOWED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def read(self, delivery: Any) -> tuple[Any, Any]:
        """Wrap the handler."""
        invoke, payload = self._consumer.read(delivery)
        what = f"{self._name}, {self._consumer.name}: {delivery.message_id.decode()}"
        return _Disturbed(invoke, self._history, what), payload


@dataclass(slots=True)
class _Disturbed:
    invoke: Any
    history: _History
    what: str

    @property
    def is_async(self) -> bool:
        return bool(self.invoke.is_async)

    def __call__(self, payload: Any, context: Any) -> Any:
        self.history.told(f"{self.what} runs")
        if self.is_async:
            return self._run_async(payload, context)
        result = self.invoke(payload, context)
        self._afterwards()
        return result

    async def _run_async(self, payload: Any, context: Any) -> Any:
        result = await self.invoke(payload, context)
        self._afterwards()
        return result

    def _afterwards(self) -> None:
        if self.history.goes("crash"):
            self.history.told(f"{self.what}: the process dies at the end of its handler")
            raise SimulatedCrash
        if self.history.goes("fail"):
            self.history.told(f"{self.what}: fails at the end of its handler")
            raise ConnectionError("simulated: a service did not answer")


class _Quiet:
    def emit(self, event: Any, fields: dict[str, Any]) -> None:
        """Events are not of interest here."""


# ---- messages and tables -------------------------------------------------------------------------


class _Collector:
    """Takes what `send` sends, instead of a store."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.messages: list[Outgoing] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    def send(self, queue: str, payload: Any, **options: Any) -> str:
        """As `App.send`."""
        outgoing = self._app.outgoing(queue, payload, **options)
        self.messages.append(outgoing)
        return outgoing.message_id.decode()


def _collect(app: App, send: Callable[[App], object] | Iterable[tuple[str, Any]]) -> list[Outgoing]:
    collector = _Collector(app)
    if callable(send):
        send(collector)  # type: ignore[arg-type]  # it passes everything else on
    else:
        for queue, payload in send:
            collector.send(queue, payload)
    return collector.messages


def _shuffled(messages: list[Outgoing], draw: random.Random) -> list[Outgoing]:
    """Shuffle between sessions, and keep the order within each."""
    lines: dict[Any, list[Outgoing]] = {}
    for number, message in enumerate(messages):
        lines.setdefault((message.target, message.session or number), []).append(message)
    places = [line for line, found in lines.items() for _ in found]
    draw.shuffle(places)
    return [lines[place].pop(0) for place in places]


def _read(path: Path) -> dict[str, Counter[tuple[Any, ...]]]:
    """Read all business tables, and what was sent to queues without a consumer."""
    connection = sqlite3.connect(path)
    try:
        names = [
            row[0]
            for row in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' "
                "AND name NOT LIKE 'procession\\_%' ESCAPE '\\' AND name NOT LIKE 'sqlite\\_%' "
                "ESCAPE '\\'"
            )
        ]
        state = {}
        for name in names:
            cursor = connection.execute(f'SELECT * FROM "{name}"')  # noqa: S608  a name of the schema
            columns = [column[0] for column in cursor.description]
            state[name] = Counter(
                tuple(zip(columns, row, strict=True)) for row in cursor.fetchall()
            )
        waiting = connection.execute(
            "SELECT s.queue, m.session, m.type, m.body FROM procession_messages m "
            "JOIN procession_subscriptions s ON s.id = abs(m.id) >> 43"
        ).fetchall()
        state["(messages in queues)"] = Counter(
            (("queue", queue), ("session", session), ("type", kind), ("body", body))
            for queue, session, kind, body in waiting
        )
        dead = connection.execute(
            "SELECT reason, message_id, detail FROM procession_dead_letters"
        ).fetchall()
        state["(dead letters)"] = Counter(
            (("reason", reason), ("message", key), ("detail", detail))
            for reason, key, detail in dead
        )
        return state
    finally:
        connection.close()


class _Ignored:
    """Tables and columns that may differ."""

    def __init__(self, names: Iterable[str]) -> None:
        found = set(names)
        self._tables = {name for name in found if "." not in name}
        self._columns = {tuple(name.split(".", 1)) for name in found if "." in name}

    def without(
        self, state: dict[str, Counter[tuple[Any, ...]]]
    ) -> dict[str, Counter[tuple[Any, ...]]]:
        """Return the state without them."""
        kept: dict[str, Counter[tuple[Any, ...]]] = {}
        for table, rows in state.items():
            if table in self._tables:
                continue
            kept[table] = Counter()
            for row, number in rows.items():
                cells = tuple(cell for cell in row if (table, cell[0]) not in self._columns)
                kept[table][cells] += number
        return kept


def _told(seed: int, differences: list[str], trace: list[str]) -> str:
    lines = [
        f"seed {seed}: the handlers' effects differ from those of an undisturbed run:",
        *differences,
        "What led to it:",
        *trace,
        ADVICE,
    ]
    return "\n".join(lines)


def _differences(
    expected: dict[str, Counter[tuple[Any, ...]]], found: dict[str, Counter[tuple[Any, ...]]]
) -> list[str]:
    told = []
    for table in sorted(expected.keys() | found.keys()):
        missing = expected.get(table, Counter()) - found.get(table, Counter())
        added = found.get(table, Counter()) - expected.get(table, Counter())
        for what, rows in (("missing", missing), ("not expected", added)):
            told += [
                f"  {table}: {what}, {number} times: {dict(row)!r}"
                for row, number in list(rows.items())[:ROWS_SHOWN_MAX]
            ]
    return told[:DIFFERENCES_MAX]
