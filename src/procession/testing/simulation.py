"""Runs the real consume flow in a simulated world: one seed decides everything that happens.

The store, the broker and the clock are the memory adapters; each step of theirs is a point at
which the scheduler may run another worker, let time pass, pause a worker past its lease, or crash
it. Afterwards the history is checked; a violation names its seed, which repeats it exactly.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field, replace
from types import coroutine
from typing import Any

from procession.abc import Lane, WorkerRecord
from procession.app import App
from procession.config import RetryPolicy, Settings
from procession.errors import ProcessionError, WorkerLost
from procession.flows.batch import LaneMemory
from procession.flows.consume import Consume
from procession.flows.context import Context
from procession.message import Outgoing
from procession.outcome import Reject
from procession.stores.memory import MemoryStore
from procession.testing.checkers import History, Sent, violations
from procession.testing.clock import ManualClock
from procession.transports.memory import MemoryBroker

CONSUMER = "apply"
STEPS_MAX = 200_000
LEASE_MS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a simulation does.

    Attributes:
        messages: how many different messages are sent.
        sessions: over how many sessions.
        keyless: share of messages without a session.
        workers: processes that run at once.
        broker: messages come from a broker instead of the table queue.
        duplicates: share of messages that are sent twice.
        failing: share that fails once or twice before it succeeds.
        poison: share that never succeeds.
        rejected: share that its handler rejects.
        crash, pause: chance at each step that the running worker dies, or stands still for longer
            than its lease.
        crash_at: crash the first worker at exactly this step, and nothing else.
    """

    messages: int = 12
    sessions: int = 3
    keyless: float = 0.1
    workers: int = 2
    broker: bool = False
    duplicates: float = 0.2
    failing: float = 0.15
    poison: float = 0.05
    rejected: float = 0.05
    crash: float = 0.01
    pause: float = 0.01
    crash_at: int | None = None


class ViolationError(AssertionError):
    """A guarantee does not hold; the text names the seed, the promise and what led to it."""


class _Quiet:
    """Events are not of interest here."""

    def emit(self, event: Any, fields: dict[str, Any]) -> None:
        """Drop an event."""


@coroutine
def _suspend(name: str) -> Generator[str, None, None]:
    yield name


@dataclass(slots=True)
class _Process:
    """A simulated worker process."""

    number: int
    tasks: list[Coroutine[Any, Any, None]] = field(default_factory=list)
    paused_until: int = 0


class Simulation:
    """One run of one seed.

    Args:
        seed: decides all.
        plan: what may happen.
        wrap_lane: puts something around each lane, such as a fault to be found.

    Attributes:
        steps: how many points were passed.
        trace: the last of them, for people.

    Example:
        >>> Simulation(7, Plan(messages=3)).run().effects["m0"]
        1
    """

    def __init__(
        self,
        seed: int,
        plan: Plan | None = None,
        *,
        wrap_lane: Callable[[Lane], Lane] | None = None,
    ) -> None:
        self.seed = seed
        self.plan = plan or Plan()
        self.steps = 0
        self.trace: list[str] = []
        self._wrap_lane = wrap_lane or (lambda lane: lane)
        self._random = random.Random(seed)  # noqa: S311  to be repeated, not to be secret
        self._clock = ManualClock()
        self._settings = Settings(
            lease_ms=LEASE_MS, batch_max=5, suspect_batch=2, sessions_max=4, batch_budget_ms=500
        )
        self._store = MemoryStore(settings=self._settings, clock=self._clock, point=self._point)
        self._broker = MemoryBroker(
            now_ms=self._clock.lease_ms, lock_ms=LEASE_MS, point=self._point
        )
        self._app = self._make_app()
        self._sent: list[Sent] = []
        self._copies = 0
        self._incarnations = 0
        self._calm = False
        self._crashed = False

    def run(self) -> History:
        """Run to the end and check.

        Raises:
            ViolationError: a guarantee does not hold.
        """
        self._drive(self._set_up())
        processes = [self._spawn() for _ in range(self.plan.workers)]
        budget = 40 * self.plan.messages * self.plan.workers
        while self.steps < STEPS_MAX:
            self._calm = self._calm or self.steps > budget
            if self._calm and self._idle():
                break
            processes = self._step(processes)
        for process in processes:
            self._crash(process)
        history = self._history()
        found = violations(history)
        if self.steps >= STEPS_MAX:
            found.append(f"it did not come to rest within {STEPS_MAX} steps")
        if found:
            raise ViolationError(self._report(found))
        return history

    # The world.

    def _make_app(self) -> App:
        app = App("simulation", store="memory://", settings=self._settings)
        app.topic("output")

        @app.consumer(
            "input",
            name=CONSUMER,
            retry=RetryPolicy(max_attempts=3, first_ms=50, factor=2, jitter=0),
        )
        def apply(payload: dict[str, Any], ctx: Context) -> None:
            key, session = ctx.message.id, payload["session"] or ""
            effects = ctx.connection
            effects.add(("effect", key))
            effects.append(("applied", session), key)
            ctx.send("output", payload, message_id=f"out-{key}", session=session or None)
            if payload["reject"]:
                raise Reject("as planned")
            if payload["poison"] or ctx.run + ctx.message.attempt <= payload["fails"]:
                raise ValueError("as planned")

        @app.consumer("output", name="sink")
        def sink(payload: dict[str, Any]) -> None:
            """Make somebody subscribe to the topic."""

        return app

    async def _set_up(self) -> None:
        await self._store.declare(self._app.topology)
        if self.plan.broker:
            self._broker.declare("input")
        publisher = self._broker.publisher() if self.plan.broker else await self._store.publisher()
        draw = self._random
        again: list[Outgoing] = []
        for number in range(self.plan.messages):
            key = f"m{number}"
            keyless = draw.random() < self.plan.keyless
            session = None if keyless else f"s{draw.randrange(self.plan.sessions)}"
            kind = draw.random()
            poison = kind < self.plan.poison
            reject = not poison and kind < self.plan.poison + self.plan.rejected
            fails = draw.randint(1, 2) if draw.random() < self.plan.failing else 0
            payload = {"session": session, "poison": poison, "reject": reject, "fails": fails}
            message = self._app.outgoing("input", payload, message_id=key, session=session)
            self._sent.append(Sent(key, session))
            await publisher.publish([message])
            if draw.random() < self.plan.duplicates:
                again.append(message)
            while again and draw.random() < 0.2:  # noqa: PLR2004  sooner or later
                self._copies += 1
                await publisher.publish([again.pop(0)])
        self._copies += self.plan.messages + len(again)
        await publisher.publish(again)

    def _spawn(self) -> _Process:
        self._incarnations += 1
        process = _Process(self._incarnations)
        identity = [f"w{self._incarnations}"]
        process.tasks = [self._work(process, identity), self._keep(identity)]
        return process

    async def _register(self, name: str) -> None:
        workers = await self._store.workers()
        await workers.register(
            WorkerRecord(
                id=name, lease_ms=LEASE_MS, host="simulated", process=0, consumers=(CONSUMER,)
            )
        )

    async def _work(self, process: _Process, identity: list[str]) -> None:
        """A worker's lane: build, step, begin again after a takeover."""
        await self._register(identity[0])
        memory = LaneMemory(
            settings=self._settings,
            clock=self._clock,
            instrument=_Quiet(),
            draw=self._random.random,
        )
        source = self._broker.source("input") if self.plan.broker else None
        generation = 0
        while True:
            lane = self._wrap_lane(
                await self._store.lane(CONSUMER, worker=identity[0], number=generation)
            )
            flow = Consume(
                self._app.consumers[CONSUMER],
                lane,
                memory,
                features=self._store.features,
                source=source,
            )
            try:
                while True:
                    if not await flow.step():
                        await self._point("idle")
            except WorkerLost:
                generation += 1
                await flow.close()
                identity[0] = f"w{process.number}.{generation}"
                await self._register(identity[0])
            except ProcessionError:
                generation += 1
                await flow.close()
                await lane.close()

    async def _keep(self, identity: list[str]) -> None:
        """A worker's keeper: renew, take over who vanished."""
        workers = await self._store.workers()
        while True:
            await self._point("keep")
            try:
                await workers.renew(identity[0])
            except WorkerLost:
                continue
            for name in await workers.expired():
                if name != identity[0]:
                    await workers.take_over(name)

    # The scheduler.

    async def _point(self, name: str) -> None:
        await _suspend(name)

    def _drive(self, task: Coroutine[Any, Any, None]) -> None:
        while True:
            try:
                task.send(None)
            except StopIteration:
                return

    def _step(self, processes: list[_Process]) -> list[_Process]:
        draw, now = self._random, self._clock.lease_ms()
        self.steps += 1
        self._clock.advance(draw.choice((0, 1, 5, 20)))
        ready = [process for process in processes if process.paused_until <= now]
        if not ready:
            self._clock.advance(LEASE_MS // 4)
            return processes
        process = draw.choice(ready)
        task = draw.choice(process.tasks)
        name = task.send(None)
        self.trace.append(f"{self.steps}: worker {process.number} at {name}")
        del self.trace[:-60]
        if self._dies():
            self.trace.append(f"{self.steps}: worker {process.number} crashes")
            self._crash(process)
            return [*(other for other in processes if other is not process), self._spawn()]
        if self._calm or self.plan.crash_at is not None:
            return processes
        if draw.random() < self.plan.pause:
            process.paused_until = now + LEASE_MS * 2
            self.trace.append(f"{self.steps}: worker {process.number} stands still")
        return processes

    def _dies(self) -> bool:
        if self.plan.crash_at is not None:
            if self.steps >= self.plan.crash_at and not self._crashed:
                self._crashed = True
                return True
            return False
        return not self._calm and self._random.random() < self.plan.crash

    def _crash(self, process: _Process) -> None:
        """Kill a worker where it stands: nothing of it runs any more, not even its cleanup."""
        for task in process.tasks:
            task.close()

    def _idle(self) -> bool:
        subscription = self._store.subscription(CONSUMER)
        waiting = len(subscription.rows) + len(self._broker.queues.get("input", ()))
        return waiting == 0

    # The end.

    def _history(self) -> History:
        subscription = self._store.subscription(CONSUMER)
        effects = self._store.effects
        output: dict[str, list[str]] = {}
        sink = self._store.subscription("sink")
        for position in sorted(sink.rows):
            row = sink.rows[position]
            session = (row.session or b"").decode()
            output.setdefault(session, []).append(
                row.message.message_id.decode().removeprefix("out-")
            )
        left = [row for row in subscription.rows.values() if not row.taken]
        waiting = {row.message.message_id.decode() for row in subscription.rows.values()}
        waiting |= {
            item.message.message_id.decode() for item in self._broker.queues.get("input", ())
        }
        ends: Counter[str] = Counter()
        for (end, _), number in subscription.counts.items():
            ends[end] += number
        return History(
            sent=self._sent,
            copies=self._copies,
            effects={
                name[1]: number
                for name, number in effects.items()
                if isinstance(name, tuple) and name[0] == "effect"
            },
            applied={
                name[1]: keys
                for name, keys in effects.items()
                if isinstance(name, tuple) and name[0] == "applied" and name[1]
            },
            output=output,
            dead=frozenset(letter.message_id.decode() for letter in self._store.letters.values()),
            waiting=frozenset(waiting),
            # A broker may deliver a message again after its end was counted.
            ends={} if self.plan.broker else ends,
            left=len(left),
        )

    def _report(self, found: list[str]) -> str:
        lines = [f"seed {self.seed}, {self.plan}:", *found, "The last steps:", *self.trace]
        return "\n".join(lines)


def crash_everywhere(plan: Plan, *, seed: int = 1) -> int:
    """Run a plan once for each of its steps, with a crash of the first worker exactly there.

    Returns:
        how many crash points there were.

    Raises:
        ViolationError: after a crash at some point a guarantee does not hold.
    """
    quiet = Simulation(seed, replace(plan, crash_at=STEPS_MAX))
    quiet.run()
    for step in range(1, quiet.steps + 1):
        Simulation(seed, replace(plan, crash_at=step)).run()
    return quiet.steps


__all__ = ["Plan", "Simulation", "ViolationError", "crash_everywhere"]
