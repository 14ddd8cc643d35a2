"""The queue's order: within a session what was sent first comes first, whatever waits, fails,
comes late or is taken over; and what waits delays nobody else.
"""

from __future__ import annotations

import pytest

from procession.abc import Changes, Hold, Topology
from procession.abc import QueueDeclaration as Declaration
from procession.message import KEYLESS
from procession.testing.conformance.stage import (
    OTHER_CONSUMER,
    OTHER_QUEUE,
    QUEUE,
    Stage,
    StoreHooks,
    body_of,
    ids,
    outgoing,
)


class Order(StoreHooks):
    """What a fetch returns, and when."""

    def test_messages_come_in_the_order_in_which_they_were_sent(self, stage: Stage) -> None:
        names = [f"m{number:02}" for number in range(12)]
        for number, name in enumerate(names):
            stage.send(name, session=(None, "s", "t", "u")[number % 4])
        lane = stage.lane()
        taken = stage.take(lane)
        assert ids(taken) == names
        positions = [delivery.position for delivery in taken]
        assert positions == sorted(positions)

    def test_a_fetch_returns_no_more_than_its_limit_and_the_oldest_first(
        self, stage: Stage
    ) -> None:
        stage.send(*(f"m{number}" for number in range(9)), session="s")
        lane = stage.lane()
        assert stage.look(lane, 1) == ["m0"]
        for expected in (["m0", "m1", "m2"], ["m3", "m4", "m5"], ["m6", "m7", "m8"], []):
            taken = stage.take(lane, 3)
            assert ids(taken) == expected
            stage.finish(lane, taken)

    def test_a_message_comes_as_it_was_sent(self, stage: Stage) -> None:
        message = outgoing("m1", "s")
        message.is_plain = False
        message.headers = {"correlation-id": "c", "ü": "\U0001f9fe\n"}
        message.lifetime_ms = 60_000
        plain = outgoing("m2")
        plain.type, plain.format, plain.body = "", 2, b""
        stage.run(stage.publisher.publish([message, plain]))
        first, second = stage.take(stage.lane())
        assert (first.message_id, first.session, first.type) == (b"m1", b"s", "conformance")
        assert (int(first.format), bytes(first.body)) == (0, body_of("m1"))
        assert dict(first.headers) == message.headers
        assert first.expires_ms == first.sent_at_ms + 60_000
        assert (first.attempts, first.replay_of, first.lock) == (0, None, None)
        assert not first.held
        assert (second.session, second.type, int(second.format), second.body) == (None, "", 2, b"")
        assert dict(second.headers) == {}
        assert second.expires_ms is None

    def test_what_a_batch_left_comes_again_to_the_same_lane(self, stage: Stage) -> None:
        stage.send("m1", "m2", "m3", session="s")
        lane = stage.lane()
        stage.take(lane)
        stage.run(lane.rollback())
        taken = stage.take(lane)
        assert ids(taken) == ["m1", "m2", "m3"]
        stage.finish(lane, taken[:1])
        assert stage.work(lane) == ["m2", "m3"]

    def test_each_consumer_reads_its_own_queue(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        stage.send("r1", session="s", target=OTHER_QUEUE)
        first, second = stage.lane(), stage.lane(consumer=OTHER_CONSUMER)
        position = stage.seen()["m1"].position
        assert stage.run(first.own({b"s"})) == stage.run(second.own({b"s"})) == {b"s"}
        stage.run(second.begin())
        assert stage.run(second.fetch_one(position)) is None
        stage.run(second.rollback())
        stage.run(first.release({b"s"}))
        assert stage.work(first) == ["m1"]
        assert stage.work(second) == ["r1"]

    def test_a_queue_keeps_its_messages_until_it_has_a_consumer(self, stage: Stage) -> None:
        late = Declaration(name="late", kind="queue")
        stage.run(stage.store.declare(Topology(queues=(late,), consumers=())))
        stage.send("m1", "m2", session="s", target="late")
        stage.run(stage.store.declare(Topology(queues=(late,), consumers=(("late", "latecomer"),))))
        assert stage.work(stage.lane(consumer="latecomer")) == ["m1", "m2"]

    # Sessions that wait.

    def test_a_session_that_waits_keeps_its_order_and_delays_nobody(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        stage.send("x1", session="t")
        lane = stage.lane()
        taken = stage.take(lane)
        taken[0].attempts = 2
        taken[0].errors = '["it failed"]'
        stage.hold(lane, taken[0])
        stage.send("m3", session="s")
        assert stage.work(lane) == ["x1"]
        stage.send("m4", session="s")
        stage.send("x2", session="t")
        assert stage.work(lane) == ["x2"]
        assert stage.work(stage.lane()) == []
        self.pass_time(self.moment_ms + 20)
        taken = stage.take(lane)
        assert ids(taken)[0] == "m1"
        assert (taken[0].attempts, taken[0].errors) == (2, '["it failed"]')
        assert [delivery.attempts for delivery in taken[1:]] == [0] * (len(taken) - 1)
        stage.run(lane.rollback())
        assert stage.work(lane) == ["m1", "m2", "m3", "m4"]
        stage.send("m5", session="s")
        assert stage.work(lane) == ["m5"]

    def test_a_session_may_wait_again_and_again(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        lane = stage.lane()
        for attempts in range(3):
            taken = stage.take(lane)
            assert ids(taken)[0] == "m1"
            assert taken[0].attempts == attempts
            taken[0].attempts += 1
            stage.hold(lane, taken[0])
            assert stage.work(lane) == []
            self.pass_time(self.moment_ms + 20)
        assert stage.work(lane) == ["m1", "m2"]
        assert stage.status().retrying_sessions == 0

    def test_a_hold_without_delay_is_due_at_once(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0], after_ms=0)
        assert stage.work(lane) == ["m1", "m2"]

    def test_a_batch_may_end_one_message_of_a_session_and_hold_the_next(self, stage: Stage) -> None:
        stage.send("m1", "m2", "m3", session="s")
        stage.send("x1", session="t")
        lane = stage.lane()
        taken = stage.take(lane)
        assert ids(taken) == ["m1", "m2", "m3", "x1"]
        changes = stage.changes([taken[0], taken[3]])
        changes.holds.append(Hold(taken[1], after_ms=self.moment_ms, attempts=1))
        stage.commit(lane, changes)
        assert stage.work(lane) == []
        self.pass_time(self.moment_ms + 20)
        assert stage.work(lane) == ["m2", "m3"]

    def test_sessions_wait_each_for_itself(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        stage.send("x1", "x2", session="t")
        lane = stage.lane()
        taken = {delivery.message_id: delivery for delivery in stage.take(lane)}
        changes = stage.fenced(Changes(), taken.values())
        changes.holds += [
            Hold(taken[b"m1"], after_ms=self.moment_ms, attempts=1),
            Hold(taken[b"x1"], after_ms=self.moment_ms * 1_000, attempts=1),
        ]
        stage.commit(lane, changes)
        assert stage.work(lane) == []
        self.pass_time(self.moment_ms + 20)
        assert stage.work(lane) == ["m1", "m2"]
        assert stage.status().retrying_sessions == 1

    def test_a_message_without_session_waits_alone(self, stage: Stage) -> None:
        stage.send("k1", "k2")
        stage.send("m1", session="s")
        lane = stage.lane()
        taken = stage.take(lane)
        stage.hold(lane, taken[0])
        assert stage.work(lane) == ["k2", "m1"]
        stage.send("k3")
        assert stage.work(lane) == ["k3"]
        self.pass_time(self.moment_ms + 20)
        taken = stage.take(lane)
        assert ids(taken) == ["k1"]
        assert taken[0].session is None or taken[0].session.startswith(KEYLESS)
        stage.run(lane.rollback())
        assert stage.work(lane) == ["k1"]

    def test_a_long_line_behind_a_waiting_message_delays_nobody(self, stage: Stage) -> None:
        stage.send(*(f"m{number:03}" for number in range(200)), session="s")
        stage.send("x1", session="t")
        lane = stage.lane()
        stage.hold(lane, stage.take(lane, 5)[0])
        assert stage.work(lane, 5) == ["x1"]
        self.pass_time(self.moment_ms + 20)
        assert stage.work(lane, 5) == [f"m{number:03}" for number in range(200)]

    def test_many_sessions_may_wait_at_the_same_moment(self, stage: Stage) -> None:
        names = [f"m{number:02}" for number in range(40)]
        for name in names:
            stage.send(name, f"{name}b", session=name)
        lane = stage.lane()
        taken = stage.take(lane)
        changes = stage.fenced(Changes(), taken)
        changes.holds += [
            Hold(delivery, after_ms=self.moment_ms, attempts=0)
            for delivery in taken
            if not delivery.message_id.endswith(b"b")
        ]
        stage.commit(lane, changes)
        assert stage.work(lane) == []
        self.pass_time(self.moment_ms + 20)
        ended = stage.work(lane, 10)
        for name in names:
            assert [end for end in ended if end.startswith(name)] == [name, f"{name}b"]
        assert len(ended) == len(names) * 2

    def test_all_that_waits_can_be_made_due(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        stage.send("k1", after_ms=self.moment_ms * 1_000)
        stage.send("x1", session="t")
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0], after_ms=self.moment_ms * 1_000)
        assert stage.work(lane) == ["x1"]
        assert stage.run(stage.store.skip_waits()) >= 2
        assert stage.run(lane.changed())
        assert sorted(stage.work(lane)) == ["k1", "m1", "m2"]
        assert stage.run(stage.store.skip_waits()) == 0

    def test_a_waiting_session_is_not_forgotten_when_all_is_closed(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0])
        stage.run(lane.close())
        lane = stage.lane()
        assert stage.work(lane) == []
        self.pass_time(self.moment_ms + 20)
        assert stage.work(lane) == ["m1", "m2"]

    # Messages that come late.

    def test_a_scheduled_message_is_invisible_until_due_and_holds_nobody(
        self, stage: Stage
    ) -> None:
        stage.send("m1", session="s", after_ms=self.moment_ms)
        stage.send("m2", session="s")
        stage.send("k1", after_ms=self.moment_ms)
        lane = stage.lane()
        assert stage.work(lane) == ["m2"]
        assert stage.status().scheduled == 2
        self.pass_time(self.moment_ms + 20)
        # Their numbers are smaller than what the lane has consumed already: they still come.
        assert stage.work(lane) == ["m1", "k1"]
        assert stage.status().scheduled == 0

    def test_a_due_message_takes_its_place_by_number(self, stage: Stage) -> None:
        stage.send("m1", session="s", after_ms=self.moment_ms)
        stage.send("m2", "m3", session="s")
        lane = stage.lane()
        assert stage.look(lane) == ["m2", "m3"]
        self.pass_time(self.moment_ms + 20)
        assert stage.work(lane) == ["m1", "m2", "m3"]

    def test_a_message_whose_time_has_come_already_is_visible_at_once(self, stage: Stage) -> None:
        message = outgoing("m1")
        message.is_plain, message.due_ms = False, 1_000
        stage.run(stage.publisher.publish([message]))
        stage.send("m2", after_ms=0)
        assert stage.work(stage.lane()) == ["m1", "m2"]

    def test_a_message_that_becomes_due_behind_a_waiting_session_waits_too(
        self, stage: Stage
    ) -> None:
        stage.send("m1", session="s")
        stage.send("m2", session="s", after_ms=self.moment_ms)
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0], after_ms=self.moment_ms * 3)
        self.pass_time(self.moment_ms + 20)
        assert stage.work(lane) == []
        self.pass_time(self.moment_ms * 2)
        assert stage.work(lane) == ["m1", "m2"]

    def test_a_late_commit_with_a_smaller_number_is_not_lost(self, stage: Stage) -> None:
        if not stage.features.concurrent_batches:
            pytest.skip("numbers are drawn in the order of the commits; see the scheduled messages")
        stage.send("m1", session="s")
        slow, reader = stage.lane(), stage.lane(consumer=OTHER_CONSUMER)
        changes = stage.changes(stage.take(slow))
        changes.sends.append(outgoing("r1", "u", target=OTHER_QUEUE))
        stage.run(slow.flush(changes))  # the number is drawn
        stage.send("r2", session="u", target=OTHER_QUEUE)
        stage.send("r3", target=OTHER_QUEUE)
        assert stage.work(reader) == ["r2", "r3"]
        stage.run(slow.commit())
        assert stage.work(reader) == ["r1"]

    def test_what_committed_first_comes_first(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        lane, reader = stage.lane(), stage.lane(consumer=OTHER_CONSUMER)
        rival = stage.run(stage.store.publisher())
        stage.send("r1", session="u", target=OTHER_QUEUE)
        stage.run(rival.publish([outgoing("r2", "u", target=OTHER_QUEUE)]))
        changes = stage.changes(stage.take(lane))
        changes.sends += [outgoing(name, "u", target=OTHER_QUEUE) for name in ("r3", "r4", "r5")]
        stage.commit(lane, changes)
        stage.send("r6", "r7", session="u", target=OTHER_QUEUE)
        stage.run(rival.close())
        assert stage.work(reader) == [f"r{number}" for number in range(1, 8)]

    def test_messages_with_and_without_options_keep_their_order(self, stage: Stage) -> None:
        names = [f"r{number:03}" for number in range(120)]
        messages = [outgoing(name, "u", target=OTHER_QUEUE) for name in names]
        for message in messages[::3]:
            message.is_plain, message.headers = False, {"h": "v"}
        stage.send("m1")
        lane = stage.lane()
        changes = stage.changes(stage.take(lane))
        changes.sends += messages[:60]
        stage.commit(lane, changes)
        stage.run(stage.publisher.publish(messages[60:]))
        assert stage.work(stage.lane(consumer=OTHER_CONSUMER), 120) == names

    def test_what_a_message_was_read_from_keeps_its_place(self, stage: Stage) -> None:
        # A batch sends into its own queue: what it sent comes after what was there.
        stage.send("m1", "m2", session="s")
        lane = stage.lane()
        changes = stage.changes(stage.take(lane, 1))
        changes.sends.append(outgoing("m3", "s", target=QUEUE))
        stage.commit(lane, changes)
        stage.send("m4", session="s")
        assert stage.work(lane) == ["m2", "m3", "m4"]
