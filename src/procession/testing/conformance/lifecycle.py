"""Opening, declaring, counting, closing: each harmless twice, each refused in words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from procession.abc import Changes, QueueDeclaration, Store, Topology
from procession.errors import ConfigurationError
from procession.testing.conformance.stage import (
    CONSUMER,
    OTHER_CONSUMER,
    QUEUE,
    TOPIC,
    Stage,
    StoreHooks,
    together,
    topology,
)


class Lifecycle(StoreHooks):
    """The store itself."""

    # Opening.

    def test_opening_again_changes_nothing(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        before = stage.picture("m1")
        stage.open()
        assert stage.picture("m1") == before
        assert stage.work(stage.lane()) == ["m1"]

    def test_a_store_may_be_opened_by_many_at_the_same_moment(
        self, make_store: Callable[[], Store]
    ) -> None:
        stores = [make_store() for _ in range(4)]
        outcomes = together(
            *(functools.partial(self.run, store.open(migrate="auto")) for store in stores)
        )
        assert outcomes == [None] * 4
        for store in stores:
            self.run(store.declare(topology(window_ms=1)))
            assert len(self.run(store.status())) == 5
            self.run(store.close())

    def test_a_missing_schema_is_refused_where_it_is_only_to_be_checked(
        self, make_store: Callable[[], Store]
    ) -> None:
        store = make_store()
        if not store.features.durable:
            pytest.skip("there is no schema")
        with pytest.raises(ConfigurationError, match="migrate"):
            self.run(store.open(migrate="check"))
        self.run(store.open(migrate="auto"))
        checked = make_store()
        self.run(checked.open(migrate="check"))
        self.run(checked.close())
        self.run(store.close())

    def test_a_newer_schema_is_refused(self, stage: Stage, make_store: Callable[[], Store]) -> None:
        if not self.make_schema_newer(stage.store):
            pytest.skip("no way was given to make the schema newer")
        for migrate in ("auto", "check"):
            store = make_store()
            with pytest.raises(ConfigurationError, match="newer"):
                self.run(store.open(migrate=migrate))

    # Declaring.

    def test_declaring_again_changes_nothing(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        before = stage.picture("m1")
        stage.run(stage.store.declare(topology(window_ms=self.moment_ms)))
        assert stage.picture("m1") == before
        assert stage.work(stage.lane()) == ["m1"]

    @pytest.mark.parametrize(
        ("queue", "kind", "consumer"),
        [
            (QUEUE, "queue", "a-second-name"),  # a queue has one consumer
            ("elsewhere", "queue", CONSUMER),  # a consumer reads one queue
            (TOPIC, "queue", None),  # a topic is no queue
            (QUEUE, "topic", None),
        ],
    )
    def test_a_declaration_that_contradicts_the_store_is_refused_and_changes_nothing(
        self, stage: Stage, queue: str, kind: str, consumer: str | None
    ) -> None:
        before = stage.picture()
        contradiction = Topology(
            queues=(
                QueueDeclaration(name="new", kind="queue"),
                QueueDeclaration(name=queue, kind=kind),  # type: ignore[arg-type]
            ),
            consumers=((queue, consumer),) if consumer else (),
        )
        with pytest.raises(ConfigurationError):
            stage.run(stage.store.declare(contradiction))
        assert stage.picture() == before
        stage.send("m1")
        assert stage.work(stage.lane()) == ["m1"]

    def test_a_lane_of_an_unknown_consumer_is_refused(self, stage: Stage) -> None:
        with pytest.raises(ConfigurationError, match="nobody"):
            stage.run(stage.store.lane("nobody", worker=stage.worker(), number=1))

    # Numbers.

    def test_every_standing_is_counted(self, stage: Stage) -> None:
        stage.send("m1", "m2", "m3", session="s")
        stage.send("x1", session="t")
        stage.send("y1", session="u")
        stage.send("z1", after_ms=self.moment_ms * 100)
        status = stage.status()
        assert (status.queue, status.consumer) == (QUEUE, CONSUMER)
        assert (status.waiting, status.scheduled, status.held) == (5, 1, 0)
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0], after_ms=self.moment_ms * 100)
        fetched = stage.fetch(lane)
        stage.leave(lane, fetched)
        status = stage.status()
        assert (status.waiting, status.scheduled, status.held) == (2, 1, 3)
        assert status.retrying_sessions == 1
        taken = stage.take(lane)
        stage.finish(lane, taken[:1])
        stage.kill(lane, stage.take(lane)[0])
        status = stage.status()
        assert (status.waiting, status.scheduled, status.held) == (0, 1, 3)
        assert status.counts == {("processed", ""): 1, ("dead-lettered", ""): 1}
        assert status.dead_letters == 1
        assert stage.status(OTHER_CONSUMER).waiting == 0
        owner = stage.lane()
        stage.run(owner.own({b"a", b"b"}))
        assert stage.status().owned_sessions == 2
        stage.run(owner.release({b"a", b"b"}))
        assert stage.status().owned_sessions == 0

    def test_the_age_of_the_oldest_message_is_told(self, stage: Stage) -> None:
        assert stage.status().head_age_ms is None
        stage.send("m1", session="s")
        self.pass_time(self.moment_ms)
        stage.send("x1", session="t")
        stage.send("k1", after_ms=self.moment_ms * 100)
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0], after_ms=self.moment_ms * 100)
        age_ms = stage.status().head_age_ms
        assert age_ms is not None
        assert age_ms >= self.moment_ms - 1
        assert stage.work(lane) == ["x1"]
        assert (stage.status().head_age_ms or 0) >= self.moment_ms - 1

    def test_counts_add_up(self, stage: Stage) -> None:
        lane = stage.lane()
        for _ in range(2):
            stage.run(lane.begin())
            changes = Changes()
            changes.reruns = 2
            stage.commit(lane, changes)
        assert stage.status().reruns == 4
        assert stage.status(OTHER_CONSUMER).reruns == 0

    def test_passing_sessions_leave_nothing(self, stage: Stage) -> None:
        lane = stage.lane()
        for number in range(5):
            stage.send(f"m{number}", session=f"s{number}")
        stage.hold(lane, stage.take(lane)[0], after_ms=0)
        assert len(stage.work(lane)) == 5
        stage.run(lane.own({b"s7"}))
        stage.run(lane.release({b"s7"}))
        status = stage.status()
        assert (status.owned_sessions, status.retrying_sessions, status.held) == (0, 0, 0)

    # Ending.

    def test_a_rollback_is_harmless_twice_and_without_a_transaction(self, stage: Stage) -> None:
        lane = stage.lane()
        stage.run(lane.rollback())
        stage.run(lane.begin())
        stage.run(lane.rollback())
        stage.run(lane.rollback())
        stage.send("m1")
        assert stage.work(lane) == ["m1"]

    def test_closing_is_harmless_twice(self, stage: Stage) -> None:
        store = stage.open()
        closed: list[Any] = [
            stage.lane(),
            stage.run(store.publisher()),
            stage.run(store.workers()),
            stage.run(store.dead_letters()),
            store,
        ]
        for thing in (*closed, *closed):
            stage.run(thing.close())
        interrupted = stage.lane()
        interrupted.interrupt()
        interrupted.interrupt()
        stage.run(interrupted.rollback())
        stage.run(interrupted.close())
        stage.run(interrupted.close())
