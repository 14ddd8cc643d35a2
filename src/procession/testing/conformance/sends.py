"""What is sent leaves with the transaction or not at all, reaches every subscriber, and is refused
where nobody could ever read it.
"""

from __future__ import annotations

import pytest

from procession.errors import ConfigurationError
from procession.testing.conformance.stage import (
    OTHER_CONSUMER,
    OTHER_QUEUE,
    SILENT_TOPIC,
    SUBSCRIBERS,
    TOPIC,
    WINDOW_QUEUE,
    Stage,
    StoreHooks,
    outgoing,
)

NOWHERE = "nowhere"


class Sends(StoreHooks):
    """Sends of batches and of publishers."""

    def test_what_a_rolled_back_batch_sent_is_never_seen(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        lane = stage.lane()
        changes = stage.changes(stage.take(lane))
        changes.sends.append(outgoing("r1", target=OTHER_QUEUE))
        stage.run(lane.flush(changes))
        stage.run(lane.rollback())
        assert stage.work(stage.lane(consumer=OTHER_CONSUMER)) == []

    def test_a_topic_gives_each_subscriber_a_copy_of_its_own(self, stage: Stage) -> None:
        stage.send("t1", "t2", session="s", target=TOPIC)
        audit, mail = (stage.lane(consumer=name) for name in SUBSCRIBERS)
        taken = stage.take(audit)
        stage.hold(audit, taken[0])
        assert stage.work(audit) == []
        assert stage.work(mail) == ["t1", "t2"]
        self.pass_time(self.moment_ms + 20)
        assert stage.work(audit) == ["t1", "t2"]
        assert all(stage.state("t1", name) is not None for name in SUBSCRIBERS)

    def test_a_batch_sends_to_every_subscriber_of_a_topic(self, stage: Stage) -> None:
        stage.send("m1")
        lane = stage.lane()
        changes = stage.changes(stage.take(lane))
        changes.sends += [outgoing(f"t{number}", "s", target=TOPIC) for number in range(3)]
        stage.commit(lane, changes)
        for name in SUBSCRIBERS:
            assert stage.work(stage.lane(consumer=name)) == ["t0", "t1", "t2"]

    @pytest.mark.parametrize("target", [NOWHERE, SILENT_TOPIC])
    def test_a_send_that_nobody_could_read_is_refused_and_stores_nothing(
        self, stage: Stage, target: str
    ) -> None:
        before = stage.picture()
        messages = [outgoing("r1", target=OTHER_QUEUE), outgoing("x1", target=target)]
        with pytest.raises(ConfigurationError, match=target):
            stage.run(stage.publisher.publish(messages))
        assert stage.picture() == before
        stage.send("m1", session="s")
        before = stage.picture("m1")
        lane = stage.lane()
        changes = stage.changes(stage.take(lane))
        stage.effect(lane, "e1")
        changes.sends += messages
        with pytest.raises(ConfigurationError, match=target):
            stage.commit(lane, changes)
        stage.run(lane.rollback())
        assert stage.picture("m1") == before
        assert stage.work(lane) == ["m1"]

    def test_an_id_is_stored_once_within_the_duplicate_window(self, stage: Stage) -> None:
        first = stage.send("n1", "n2", target=WINDOW_QUEUE)
        assert [receipt.stored for receipt in first] == [True, True]
        again = stage.send("n1", "n3", "n3", target=WINDOW_QUEUE)
        assert [receipt.stored for receipt in again] == [False, True, False]
        assert [receipt.message_id for receipt in again] == [b"n1", b"n3", b"n3"]
        assert _waiting(stage, WINDOW_QUEUE) == 3
        self.pass_time(self.moment_ms + 20)
        assert [receipt.stored for receipt in stage.send("n1", target=WINDOW_QUEUE)] == [True]
        assert _waiting(stage, WINDOW_QUEUE) == 4

    def test_the_window_holds_for_sends_of_batches_and_for_its_queue_alone(
        self, stage: Stage
    ) -> None:
        stage.send("n1", target=WINDOW_QUEUE)
        stage.send("m1")
        lane = stage.lane()
        changes = stage.changes(stage.take(lane))
        changes.sends += [
            outgoing("n1", target=WINDOW_QUEUE),
            outgoing("n2", target=WINDOW_QUEUE),
            outgoing("n1", target=OTHER_QUEUE),
            outgoing("n1", target=OTHER_QUEUE),
        ]
        stage.commit(lane, changes)
        assert _waiting(stage, WINDOW_QUEUE) == 2
        assert _waiting(stage, OTHER_QUEUE) == 2

    def test_a_mark_is_kept_with_what_was_sent_or_not_at_all(self, stage: Stage) -> None:
        other = stage.run(stage.open().publisher())
        assert stage.run(stage.publisher.marked("load")) == 0
        for number, name in ((3, "m1"), (7, "m2")):
            receipts = stage.run(
                stage.publisher.publish_marked([outgoing(name)], mark="load", number=number)
            )
            assert [receipt.message_id for receipt in receipts] == [name.encode()]
            assert stage.run(other.marked("load")) == number
        assert stage.run(other.marked("another load")) == 0
        messages = [outgoing("m3"), outgoing("m4", target=NOWHERE)]
        with pytest.raises(ConfigurationError):
            stage.run(stage.publisher.publish_marked(messages, mark="load", number=9))
        stage.run(stage.publisher.publish_marked([], mark="empty", number=1))
        assert stage.run(other.marked("load")) == 7
        assert stage.run(other.marked("empty")) == 1
        stage.run(other.close())
        assert stage.work(stage.lane()) == ["m1", "m2"]

    def test_an_id_that_a_rolled_back_batch_sent_is_not_remembered(self, stage: Stage) -> None:
        stage.send("m1")
        lane = stage.lane()
        changes = stage.changes(stage.take(lane))
        changes.sends.append(outgoing("n1", target=WINDOW_QUEUE))
        stage.run(lane.flush(changes))
        stage.run(lane.rollback())
        assert [receipt.stored for receipt in stage.send("n1", target=WINDOW_QUEUE)] == [True]


def _waiting(stage: Stage, queue: str) -> int:
    rows = stage.run(stage.store.status())
    return sum(row.waiting for row in rows if row.queue == queue)
