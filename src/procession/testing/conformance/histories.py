"""Whole histories drawn from a seed: whatever meets whatever, each message takes effect once, each
session in its order, and nothing is lost.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict

import pytest

from procession.abc import Changes, Hold, Lane
from procession.errors import ProcessionError
from procession.outcome import End, InboxState
from procession.testing.conformance.stage import Stage, StoreHooks, ids, together

STEPS = 120
SESSIONS = ("a", "b", "c", None)
LANES = 3
IDLE_LOOKS = 20


class Histories(StoreHooks):
    """Many lanes, many sessions, one seed."""

    @pytest.mark.parametrize("seed", range(6))
    def test_whatever_happens_each_session_keeps_its_order_and_nothing_is_lost(
        self, stage: Stage, seed: int
    ) -> None:
        history = _History(stage, random.Random(seed))  # noqa: S311  a seed, not a secret
        for _ in range(STEPS):
            history.step()
        self.pass_time(self.moment_ms + 20)
        history.finish()
        history.check()

    def test_lanes_that_work_at_the_same_moment_keep_each_session_in_order(
        self, stage: Stage
    ) -> None:
        sent = {session: [f"{session}{number:02}" for number in range(30)] for session in "abcd"}
        for number in range(30):
            for session, names in sent.items():
                stage.send(names[number], session=session)
        # In the order of the flushes: a flush has made sure of its sessions, and nobody else can
        # flush a batch of them before the commit has ended this one.
        batches: list[_Batch] = []

        def work(lane: Lane) -> None:
            idle = 0
            while idle < IDLE_LOOKS:
                try:
                    taken = stage.take(lane, 7)
                    idle = 0 if taken else idle + 1
                    for delivery in taken:
                        stage.effect(lane, delivery.message_id.decode())
                    stage.run(lane.flush(stage.changes(taken)))
                    batch = _Batch(ids(taken))
                    batches.append(batch)
                    stage.run(lane.commit())
                    batch.committed = True
                except ProcessionError:
                    stage.run(lane.rollback())

        outcomes = together(*(functools.partial(work, stage.lane()) for _ in range(LANES)))
        assert outcomes == [None] * LANES
        ended = [name for batch in batches if batch.committed for name in batch.names]
        for session, names in sent.items():
            assert [name for name in ended if name[0] == session] == names
        assert stage.effects() == sorted(name for names in sent.values() for name in names)


class _Batch:
    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.committed = False


class _History:
    def __init__(self, stage: Stage, draw: random.Random) -> None:
        self.stage = stage
        self.draw = draw
        self.sent: dict[str | None, list[str]] = defaultdict(list)
        self.number = 0
        self.workers: list[tuple[str, Lane]] = []
        self.ended: list[str] = []
        for _ in range(LANES):
            self._add_worker()

    def _add_worker(self) -> None:
        worker = self.stage.worker()
        self.workers.append((worker, self.stage.lane(worker)))

    def step(self) -> None:
        action = self.draw.choices(
            (
                self.send,
                self.work,
                self.roll_back,
                self.hold,
                self.attempt,
                self.own,
                self.vanish,
                self.reopen,
            ),
            weights=(7, 8, 3, 2, 2, 1, 1, 1),
        )[0]
        action()

    def send(self) -> None:
        session = self.draw.choice(SESSIONS)
        self.number += 1
        name = f"m{self.number:03}"
        after_ms = 0 if session is not None or self.draw.random() < 0.8 else 1
        self.stage.send(name, session=session, after_ms=after_ms)
        self.sent[session].append(name)

    def work(self) -> None:
        _, lane = self.draw.choice(self.workers)
        self.batch(lane, self.draw.randint(1, 8))

    def batch(self, lane: Lane, limit: int) -> bool:
        """Process some of what can be fetched, each session's first ones."""
        stage = self.stage
        fetched = stage.fetch(lane, limit)
        taken = list(fetched.deliveries)
        if not taken:
            stage.leave(lane, fetched)
            return False
        if fetched.alone or taken[0].attempts:
            stage.run(lane.rollback())
            fresh = stage.begin_alone(lane, taken[0])
            stage.effect(lane, fresh.message_id.decode())
            stage.commit(lane, stage.alone(fresh, stage.changes([fresh])))
            self.ended += ids([fresh])
            return True
        chosen = taken[: self.draw.randint(1, len(taken))]
        for delivery in chosen:
            stage.effect(lane, delivery.message_id.decode())
        changes = stage.changes(chosen)
        stage.fenced(changes, taken)
        stage.commit(lane, changes)
        self.ended += ids(chosen)
        return True

    def roll_back(self) -> None:
        _, lane = self.draw.choice(self.workers)
        taken = self.stage.take(lane, self.draw.randint(1, 8))
        for delivery in taken:
            self.stage.effect(lane, delivery.message_id.decode())
        if self.draw.random() < 0.5:
            self.stage.run(lane.flush(self.stage.changes(taken)))
        self.stage.run(lane.rollback())

    def hold(self) -> None:
        _, lane = self.draw.choice(self.workers)
        taken = self.stage.take(lane, self.draw.randint(1, 8))
        if not taken:
            self.stage.run(lane.rollback())
            return
        changes = self.stage.fenced(Changes(), taken)
        changes.holds.append(
            Hold(taken[0], after_ms=self.draw.choice((0, 5, 20)), attempts=taken[0].attempts + 1)
        )
        self.stage.commit(lane, changes)

    def attempt(self) -> None:
        """Begin a lone run; it ends, or not."""
        _, lane = self.draw.choice(self.workers)
        taken = self.stage.take(lane, 5)
        self.stage.run(lane.rollback())
        if not taken:
            return
        fresh = self.stage.begin_alone(lane, taken[0])
        self.stage.effect(lane, fresh.message_id.decode())
        if self.draw.random() < 0.5:
            self.stage.commit(lane, self.stage.alone(fresh, self.stage.changes([fresh])))
            self.ended += ids([fresh])
        else:
            self.stage.run(lane.rollback())

    def own(self) -> None:
        """Own a session, or give it up."""
        _, lane = self.draw.choice(self.workers)
        session = {self.draw.choice("abc").encode()}
        self.stage.run(lane.own(session) if self.draw.random() < 0.5 else lane.release(session))

    def vanish(self) -> None:
        worker, lane = self.workers.pop(self.draw.randrange(len(self.workers)))
        if self.draw.random() < 0.5:
            for delivery in self.stage.take(lane):
                self.stage.effect(lane, delivery.message_id.decode())
        self.stage.vanish(lane, worker)
        self._add_worker()

    def reopen(self) -> None:
        worker, lane = self.workers.pop(self.draw.randrange(len(self.workers)))
        self.stage.run(lane.close())
        self.stage.run(self.stage.workers.leave(worker))
        self._add_worker()

    def finish(self) -> None:
        """Let the living lanes finish what is left, in turn."""
        worked = True
        while worked:
            worked = False
            for _, lane in self.workers:
                while self.batch(lane, 50):
                    worked = True
                self.stage.run(lane.close())  # what it read and left is free for the others
            self.workers = [(worker, self.stage.lane(worker)) for worker, _ in self.workers]

    def check(self) -> None:
        names = [name for sent in self.sent.values() for name in sent]
        assert self.stage.effects() == sorted(names)
        for session, sent in self.sent.items():
            if session is not None:
                assert [name for name in self.ended if name in sent] == sent
        states = {name: self.stage.state(name) for name in names}
        assert set(states.values()) <= {InboxState.DONE}, states
        status = self.stage.status()
        assert (status.waiting, status.held, status.scheduled) == (0, 0, 0)
        assert status.counts == {(End.PROCESSED.value, ""): len(names)}
