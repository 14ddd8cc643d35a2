"""A lease decides who may take over, by compare-and-set; after a takeover what the vanished worker
may have held is suspect, and runs in small batches, then alone, until it has been passed.
"""

from __future__ import annotations

import functools

import pytest

from procession.config import Settings
from procession.errors import ProcessionError, WorkerLost
from procession.testing.conformance.stage import CONSUMER, Stage, StoreHooks, ids, together

SUSPECT_BATCH = Settings().suspect_batch


class Leases(StoreHooks):
    """Workers, takeover and suspicion. The store has the default settings."""

    # Takeover.

    def test_a_worker_whose_lease_lasts_is_left_alone(self, stage: Stage) -> None:
        worker = stage.worker()
        lane = stage.lane(worker)
        stage.run(lane.own({b"s"}))
        assert worker not in stage.run(stage.workers.expired())
        assert stage.run(stage.workers.take_over(worker)) is None
        stage.run(stage.workers.renew(worker))
        assert stage.run(stage.lane().own({b"s"})) == set()

    def test_a_worker_whose_lease_has_ended_is_taken_over_once(self, stage: Stage) -> None:
        worker = stage.worker(lease_ms=self.moment_ms)
        other = stage.worker()
        self.pass_time(self.moment_ms + 20)
        assert stage.run(stage.workers.expired()) == [worker]
        consumers = stage.run(stage.workers.take_over(worker))
        assert consumers is not None
        assert CONSUMER in consumers
        assert stage.run(stage.workers.expired()) == []
        assert stage.run(stage.workers.take_over(worker)) is None
        assert stage.run(stage.workers.take_over(worker, dead=True)) is None
        stage.run(stage.workers.renew(other))

    def test_a_worker_that_renewed_meanwhile_is_left_alone(self, stage: Stage) -> None:
        worker = stage.worker(lease_ms=self.moment_ms)
        lane = stage.lane(worker)
        stage.run(lane.own({b"s"}))
        self.pass_time(self.moment_ms + 20)
        assert stage.run(stage.workers.expired()) == [worker]
        stage.run(stage.workers.renew(worker))
        assert stage.run(stage.workers.take_over(worker)) is None
        assert stage.run(stage.workers.expired()) == []
        assert stage.run(stage.lane().own({b"s"})) == set()

    def test_workers_are_known_until_they_leave_or_are_taken_over(self, stage: Stage) -> None:
        workers = [stage.worker() for _ in range(3)]
        known = stage.run(stage.workers.known())
        assert set(workers) <= set(known)
        stage.run(stage.workers.leave(workers[0]))
        stage.run(stage.workers.take_over(workers[1], dead=True))
        assert set(stage.run(stage.workers.known())) == set(known) - set(workers[:2])

    def test_of_two_takeovers_at_once_one_succeeds(self, stage: Stage) -> None:
        worker = stage.worker(lease_ms=self.moment_ms)
        rivals = [stage.run(stage.open().workers()) for _ in range(3)]
        self.pass_time(self.moment_ms + 20)
        outcomes = together(
            *(functools.partial(stage.run, rival.take_over(worker)) for rival in rivals)
        )
        for rival in rivals:
            stage.run(rival.close())
        assert sorted(outcome is not None for outcome in outcomes) == [False, False, True]
        assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes

    def test_a_worker_that_was_seen_to_end_is_taken_over_at_once(self, stage: Stage) -> None:
        worker = stage.worker()
        lane = stage.lane(worker)
        stage.run(lane.own({b"s"}))
        assert stage.run(stage.workers.take_over(worker, dead=True)) is not None
        assert stage.run(stage.lane().own({b"s"})) == {b"s"}

    def test_a_worker_that_was_taken_over_hears_of_it(self, stage: Stage) -> None:
        worker = stage.worker(lease_ms=self.moment_ms)
        lane = stage.lane(worker)
        stage.expire(worker)
        with pytest.raises(WorkerLost):
            stage.run(stage.workers.renew(worker))
        with pytest.raises(WorkerLost):
            stage.run(lane.begin())
        stage.run(lane.rollback())
        with pytest.raises(WorkerLost):
            stage.run(lane.own({b"s"}))
        stage.run(lane.rollback())

    def test_an_expired_lease_alone_refuses_nothing(self, stage: Stage) -> None:
        worker = stage.worker(lease_ms=self.moment_ms)
        lane = stage.lane(worker)
        stage.run(lane.own({b"s"}))
        stage.send("m1", session="s")
        self.pass_time(self.moment_ms + 20)
        assert stage.run(stage.workers.expired()) == [worker]
        changes = stage.changes(stage.take(lane))
        changes.fence.add(b"s")
        stage.effect(lane, "e1")
        stage.commit(lane, changes)
        assert stage.effects() == ["e1"]
        stage.run(stage.workers.renew(worker))
        assert stage.run(stage.workers.expired()) == []

    def test_a_worker_that_leaves_makes_nothing_suspect(self, stage: Stage) -> None:
        worker = stage.worker()
        lane, other = stage.lane(worker), stage.lane()
        names = [f"m{number:03}" for number in range(SUSPECT_BATCH * 2)]
        for name in names:
            stage.send(name, session=name)
        stage.run(lane.own({b"s"}))
        assert stage.look(lane) == names
        stage.run(lane.close())
        stage.run(stage.workers.leave(worker))
        assert stage.run(other.own({b"s"})) == {b"s"}
        fetched = stage.fetch(other)
        assert not fetched.alone
        assert ids(fetched.deliveries) == names

    def test_a_session_that_waits_goes_on_waiting_after_a_takeover(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        worker = stage.worker()
        lane = stage.lane(worker)
        stage.hold(lane, stage.take(lane)[0])
        stage.vanish(lane, worker)
        other = stage.lane()
        assert stage.work(other) == []
        self.pass_time(self.moment_ms + 20)
        assert stage.work(other) == ["m1", "m2"]

    # Suspicion.

    def test_what_a_vanished_worker_held_comes_in_small_batches(self, stage: Stage) -> None:
        names = _send_many(stage, SUSPECT_BATCH * 2 + 3)
        _vanish_with(stage, names)
        lane = stage.lane()
        ended: list[str] = []
        while len(ended) < len(names):
            fetched = stage.fetch(lane)
            assert not fetched.alone
            assert 1 <= len(fetched.deliveries) <= SUSPECT_BATCH
            stage.finish(lane, fetched.deliveries)
            ended += ids(fetched.deliveries)
        assert ended == names
        _is_trusted(stage)

    def test_after_a_second_disappearance_they_run_alone(self, stage: Stage) -> None:
        names = _send_many(stage, SUSPECT_BATCH + 3)
        _vanish_with(stage, names)
        second = stage.worker()
        lane = stage.lane(second)
        suspects = stage.look(lane)
        stage.vanish(lane, second)
        lane = stage.lane()
        alone: list[str] = []
        while (fetched := stage.fetch(lane)).alone:
            stage.leave(lane, fetched)
            fresh = stage.begin_alone(lane, fetched.deliveries[0])
            assert fresh.attempts == 1
            stage.commit(lane, stage.alone(fresh, stage.changes([fresh])))
            alone += ids([fresh])
        stage.leave(lane, fetched)
        assert set(suspects) <= set(alone)
        assert sorted(alone + stage.work(lane)) == names
        _is_trusted(stage)

    def test_a_message_that_ends_processes_is_counted_and_its_neighbours_are_not(
        self, stage: Stage
    ) -> None:
        names = _send_many(stage, 6)
        killer = names[2]
        for _ in range(8):
            worker = stage.worker()
            lane = stage.lane(worker)
            while True:
                fetched = stage.fetch(lane)
                deliveries = list(fetched.deliveries)
                if not fetched.alone:
                    break
                stage.leave(lane, fetched)
                fresh = stage.begin_alone(lane, deliveries[0])
                deliveries = [fresh]
                if ids([fresh]) == [killer]:
                    break
                stage.commit(lane, stage.alone(fresh, stage.changes([fresh])))
            if killer not in ids(deliveries):
                raise AssertionError("the killer was lost")
            if deliveries[0].attempts == 3:
                break
            stage.vanish(lane, worker)
        else:
            raise AssertionError("the killer was never counted")
        assert ids(deliveries) == [killer]
        stage.commit(lane, stage.alone(deliveries[0], stage.changes(deliveries)))
        while (fetched := stage.fetch(lane)).deliveries:
            assert [delivery.attempts for delivery in fetched.deliveries] == [0] * len(
                fetched.deliveries
            )
            stage.finish(lane, fetched.deliveries)
        stage.leave(lane, fetched)
        assert all(stage.state(name) is not None for name in names)


def _send_many(stage: Stage, number: int) -> list[str]:
    names = [f"m{index:03}" for index in range(number)]
    for name in names:
        stage.send(name, session=name)
    return names


def _vanish_with(stage: Stage, names: list[str]) -> None:
    worker = stage.worker()
    lane = stage.lane(worker)
    assert ids(stage.take(lane)) == names
    stage.vanish(lane, worker)
    with pytest.raises(ProcessionError):
        stage.run(lane.commit())


def _is_trusted(stage: Stage) -> None:
    """What comes now runs in whole batches again."""
    lane = stage.lane()
    stage.rest(lane)
    names = [f"n{index:03}" for index in range(SUSPECT_BATCH * 2)]
    for name in names:
        stage.send(name, session=name)
    fetched = stage.fetch(lane)
    assert not fetched.alone
    assert ids(fetched.deliveries) == names
