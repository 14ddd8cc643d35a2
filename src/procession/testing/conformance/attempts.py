"""An attempt is a run begun alone: counted before it begins, durable, and for its message alone."""

from __future__ import annotations

import pytest

from procession.abc import Changes, DeadLetter, Hold
from procession.errors import MessageGone, Reason, SessionLost
from procession.testing.conformance.stage import Stage, StoreHooks


class Attempts(StoreHooks):
    """Lone runs."""

    def test_an_attempt_is_counted_before_its_run_and_for_its_message_alone(
        self, stage: Stage
    ) -> None:
        stage.send("m1", "m2", session="s")
        stage.send("x1", session="t")
        stage.send("k1")
        seen = stage.seen()
        assert _counts(stage) == {"m1": 0, "m2": 0, "x1": 0, "k1": 0}
        worker = stage.worker()
        lane = stage.lane(worker)
        assert stage.run(lane.begin_attempt(seen["m1"])) == 1
        assert seen["m1"].attempts == 1
        stage.vanish(lane, worker)  # the run never ended
        assert _counts(stage) == {"m1": 1, "m2": 0, "x1": 0, "k1": 0}

    def test_each_lone_run_counts_one(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        stage.send("k1")
        lane = stage.lane()
        for number in (1, 2, 3):
            for delivery in stage.seen().values():
                assert stage.run(lane.begin_attempt(delivery)) == number
                stage.run(lane.begin())
                fresh = stage.run(lane.fetch_one(delivery.position))
                assert fresh is not None
                assert fresh.attempts == number
                stage.run(lane.rollback())
            stage.run(lane.close())
            lane = stage.lane()

    def test_an_attempt_that_the_store_cut_short_is_not_counted_anew(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        delivery = stage.seen()["m1"]
        lane = stage.lane()
        assert stage.run(lane.begin_attempt(delivery)) == 1
        assert stage.run(lane.begin_attempt(delivery, again=True)) == 1
        assert stage.run(lane.begin_attempt(delivery)) == 2
        stage.run(lane.close())
        assert _counts(stage) == {"m1": 2}

    def test_a_lone_run_that_rolled_back_keeps_its_attempt(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        lane = stage.lane()
        fresh = stage.begin_alone(lane, stage.seen()["m1"])
        stage.run(lane.flush(stage.alone(fresh, stage.changes([fresh]))))
        stage.run(lane.rollback())
        stage.run(lane.close())
        assert _counts(stage) == {"m1": 1, "m2": 0}

    def test_an_attempt_at_a_message_that_is_gone_is_refused(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        delivery = stage.seen()["m1"]
        worker = stage.lane()
        assert stage.work(worker) == ["m1"]
        lane = stage.lane()
        with pytest.raises(MessageGone):
            stage.run(lane.begin_attempt(delivery))
        stage.run(lane.rollback())
        stage.run(lane.begin())
        assert stage.run(lane.fetch_one(delivery.position)) is None
        stage.run(lane.rollback())
        assert stage.run(worker.own({b"s"})) == {b"s"}

    def test_an_attempt_in_a_session_of_another_holder_is_refused(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        seen = stage.seen()
        first, second = stage.lane(), stage.lane()
        stage.run(first.own({b"s"}))
        with pytest.raises(SessionLost):
            stage.run(second.begin_attempt(seen["m1"]))
        stage.run(second.rollback())
        stage.run(first.close())
        assert _counts(stage) == {"m1": 0, "m2": 0}

    def test_a_message_of_another_holder_is_not_read_again(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        position = stage.seen()["m1"].position
        first, second = stage.lane(), stage.lane()
        stage.run(first.own({b"s"}))
        for lane, is_read in ((second, False), (first, True)):
            stage.run(lane.begin())
            assert (stage.run(lane.fetch_one(position)) is not None) == is_read
            stage.run(lane.rollback())

    def test_a_lone_run_keeps_its_session_from_others_and_nothing_else(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        stage.send("k1")
        stage.send("x1", session="t")
        stage.send("k2")
        seen = stage.seen()
        first, second = stage.lane(), stage.lane()
        stage.run(first.begin_attempt(seen["m1"]))
        stage.run(first.begin_attempt(seen["k1"]))
        assert stage.work(second) == ["x1", "k2"]
        assert stage.run(second.own({b"s"})) == set()

    def test_the_commit_of_a_lone_run_frees_its_session(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        stage.send("k1")
        seen = stage.seen()
        first, second = stage.lane(), stage.lane()
        for name in ("m1", "k1"):
            fresh = stage.begin_alone(first, seen[name])
            stage.effect(first, name)
            stage.commit(first, stage.alone(fresh, stage.changes([fresh])))
        assert stage.effects() == ["k1", "m1"]
        assert stage.status().owned_sessions == 0
        assert stage.work(second) == ["m2"]

    def test_a_lone_run_that_failed_waits_with_its_session(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        stage.send("k1")
        seen = stage.seen()
        first, second = stage.lane(), stage.lane()
        for name in ("m1", "k1"):
            fresh = stage.begin_alone(first, seen[name])
            changes = stage.alone(fresh, Changes())
            changes.holds.append(Hold(fresh, after_ms=self.moment_ms, attempts=fresh.attempts))
            stage.commit(first, changes)
        assert stage.work(second) == []
        self.pass_time(self.moment_ms + 20)
        counts = _counts(stage)
        assert (counts["m1"], counts["k1"], counts.get("m2", 0)) == (1, 1, 0)
        assert sorted(stage.work(second)) == ["k1", "m1", "m2"]

    def test_a_lone_run_of_a_waiting_message_keeps_its_followers_behind_it(
        self, stage: Stage
    ) -> None:
        stage.send("m1", "m2", "m3", session="s")
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0], after_ms=0)
        stage.run(lane.close())
        first, second = stage.lane(), stage.lane()
        stage.run(first.begin_attempt(stage.seen()["m1"]))
        assert stage.work(second) == []
        stage.run(first.close())
        assert stage.work(second) == ["m1", "m2", "m3"]

    def test_after_a_lone_run_that_ended_as_a_dead_letter_its_followers_come(
        self, stage: Stage
    ) -> None:
        stage.send("m1", "m2", "m3", session="s")
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0], after_ms=0)
        taken = stage.take(lane)
        stage.run(lane.rollback())
        fresh = stage.begin_alone(lane, taken[0])
        changes = stage.alone(fresh, Changes())
        changes.dead_letters.append(DeadLetter(fresh, None, None, Reason.FAILED, "it failed"))
        changes.removed.append(fresh)
        stage.commit(lane, changes)
        assert stage.letters()[0].attempts == 1
        assert stage.work(stage.lane()) == ["m2", "m3"]

    def test_a_lone_run_whose_worker_was_taken_over_commits_nothing(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        stage.send("k1")
        seen = stage.seen()
        worker = stage.worker()
        first, second = stage.lane(worker), stage.lane()
        for delivery in seen.values():
            stage.run(first.begin_attempt(delivery))
        stage.run(stage.workers.take_over(worker, dead=True))
        with pytest.raises(SessionLost):
            stage.run(first.begin())
        stage.run(first.rollback())
        assert sorted(stage.work(second)) == ["k1", "m1"]
        assert stage.effects() == []


def _counts(stage: Stage) -> dict[str, int]:
    return {name: delivery.attempts for name, delivery in stage.seen().items()}
