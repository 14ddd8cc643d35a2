"""No wake-up is lost: a lane that found nothing hears of all that may run later."""

from __future__ import annotations

from procession.abc import Lane
from procession.testing.conformance.stage import OTHER_CONSUMER, QUEUE, Stage, StoreHooks, outgoing


class Wakeups(StoreHooks):
    """`changed`, between two fetches."""

    def test_an_idle_lane_comes_to_rest(self, stage: Stage) -> None:
        lane = stage.lane()
        stage.send("m1")
        assert stage.work(lane) == ["m1"]
        assert not stage.run(lane.changed())
        assert not stage.run(lane.changed())

    def test_a_commit_between_an_empty_fetch_and_the_question_is_reported(
        self, stage: Stage
    ) -> None:
        lane = stage.lane()
        for name in ("m1", "m2", "m3"):
            fetched = stage.fetch(lane)
            assert not fetched.deliveries
            stage.leave(lane, fetched)
            stage.send(name)
            assert stage.run(lane.changed())
            assert stage.work(lane) == [name]
            stage.rest(lane)

    def test_a_commit_during_the_idle_time_is_reported(self, stage: Stage) -> None:
        lane, sender = stage.lane(), stage.lane(consumer=OTHER_CONSUMER)
        stage.rest(lane)
        stage.send("r1", target="receipts")
        stage.rest(lane)
        changes = stage.changes(stage.take(sender))
        changes.sends.append(outgoing("m1"))
        stage.commit(sender, changes)
        assert stage.run(lane.changed())
        assert stage.work(lane) == ["m1"]

    def test_a_commit_seen_by_a_fetch_is_not_forgotten_when_the_fetch_rolled_back(
        self, stage: Stage
    ) -> None:
        lane = stage.lane()
        stage.rest(lane)
        stage.send("m1")
        assert stage.run(lane.changed())
        assert stage.look(lane) == ["m1"]
        assert stage.work(lane) == ["m1"]

    def test_a_retry_that_another_lane_put_off_is_reported_when_due(self, stage: Stage) -> None:
        other, lane = stage.lane(), stage.lane()
        stage.send("m1", session="s")
        stage.hold(other, stage.take(other)[0])
        _falls_asleep(stage, lane)
        self.pass_time(self.moment_ms + 20)
        assert stage.run(lane.changed())
        assert stage.work(lane) == ["m1"]

    def test_a_retry_that_the_lane_itself_put_off_is_reported_when_due(self, stage: Stage) -> None:
        lane = stage.lane()
        stage.rest(lane)
        stage.send("m1", session="s")
        stage.hold(lane, stage.take(lane)[0])
        _falls_asleep(stage, lane)
        self.pass_time(self.moment_ms + 20)
        assert stage.run(lane.changed())
        assert stage.work(lane) == ["m1"]

    def test_a_scheduled_message_is_reported_when_due(self, stage: Stage) -> None:
        lane = stage.lane()
        stage.send("m1", after_ms=self.moment_ms)
        _falls_asleep(stage, lane)
        self.pass_time(self.moment_ms + 20)
        assert stage.run(lane.changed())
        assert stage.work(lane) == ["m1"]

    def test_a_message_that_the_lane_itself_scheduled_is_reported_when_due(
        self, stage: Stage
    ) -> None:
        lane = stage.lane()
        stage.send("m1")
        taken = stage.take(lane)
        later = outgoing("m2", target=QUEUE)
        later.is_plain, later.after_ms = False, self.moment_ms
        changes = stage.changes(taken)
        changes.sends.append(later)
        stage.commit(lane, changes)
        _falls_asleep(stage, lane)
        self.pass_time(self.moment_ms + 20)
        assert stage.run(lane.changed())
        assert stage.work(lane) == ["m2"]

    def test_a_session_that_its_owner_gives_up_is_reported(self, stage: Stage) -> None:
        owner, lane = stage.lane(), stage.lane()
        stage.send("m1", session="s")
        stage.run(owner.own({b"s"}))
        _falls_asleep(stage, lane)
        stage.run(owner.release({b"s"}))
        assert stage.run(lane.changed())
        assert stage.work(lane) == ["m1"]

    def test_a_session_that_is_taken_over_is_reported(self, stage: Stage) -> None:
        worker = stage.worker()
        owner, lane = stage.lane(worker), stage.lane()
        stage.send("m1", session="s")
        stage.run(owner.own({b"s"}))
        _falls_asleep(stage, lane)
        stage.vanish(owner, worker)
        assert stage.run(lane.changed())
        assert stage.work(lane) == ["m1"]

    def test_a_replayed_dead_letter_is_reported(self, stage: Stage) -> None:
        lane = stage.lane()
        stage.send("m1", session="s")
        stage.kill(lane, stage.take(lane)[0])
        _falls_asleep(stage, lane)
        stage.run(stage.dead_letters.replay(stage.letters()[0].number, by="the test"))
        assert stage.run(lane.changed())
        assert stage.work(lane) == ["m1"]


def _falls_asleep(stage: Stage, lane: Lane) -> None:
    """Bring the lane to the state in which only `changed` can wake it."""
    stage.rest(lane)
    assert not stage.run(lane.changed())
