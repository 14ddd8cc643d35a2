"""What every source must do: hand messages out under a lock, in each session's order, until they
are settled. `SessionSourceSuite` adds what a source promises that locks whole sessions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from procession.abc import SessionSource, Settlement, Source
from procession.message import Delivery, Outgoing
from procession.runtime.drive import drive
from procession.testing.conformance.stage import body_of, ids, outgoing

Result = TypeVar("Result")
POLL_S = 0.005


class SourceHooks:
    """What an adapter's test says of its source: `place` (or, in its stead, the fixture
    `make_source`) and `put` are needed.

    Attributes:
        queue: the queue from which the sources receive.
        lock_ms: how long a message stays locked. With a real clock it must be far longer than a
            few calls; with a test clock any number will do.
        patience_s: how long to wait for a message that must come.
        prompt_s: how long a `receive` on an empty queue may take.
    """

    queue = "orders"
    lock_ms = 300
    patience_s = 5.0
    prompt_s = 1.0

    def place(self, folder: Path) -> Callable[[], Source]:
        """Override: return a function that makes another source of the one queue, which is empty
        at first. What it makes is closed by the suite."""
        raise NotImplementedError(f"a conformance test gives the hook place ({folder})")

    @pytest.fixture
    def make_source(self, tmp_path: Path) -> Callable[[], Source]:
        """Return `place`. Override it where the place needs other fixtures, or an end."""
        return self.place(tmp_path)

    def put(self, *messages: Outgoing) -> None:
        """Override: put messages at the end of the queue."""
        raise NotImplementedError("a conformance test gives the hook put")

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run one call of a protocol's method. A source that suspends gives its loop here."""
        return drive(coroutine)

    def pass_time(self, duration_ms: int) -> None:
        """Let this long pass on the broker's clock. A test clock is moved instead."""
        time.sleep(duration_ms / 1000)


class SourceSuite(SourceHooks):
    """Every promise of `procession.abc.Source`, a test each."""

    @pytest.fixture
    def another(self, make_source: Callable[[], Source]) -> Iterator[Callable[[], Source]]:
        """Return a function that makes a source, closed at the end."""
        made: list[Source] = []

        def make() -> Source:
            made.append(make_source())
            return made[-1]

        yield make
        for source in made:
            self.run(source.close())

    def send(self, *names: str, session: str | None = None) -> None:
        """Put messages into the queue."""
        self.put(*(outgoing(name, session, target=self.queue) for name in names))

    def receive(self, source: Source, number: int) -> list[Delivery]:
        """Return this many deliveries, or what has come of them when patience ends."""
        received: list[Delivery] = []
        give_up = time.monotonic() + self.patience_s
        while len(received) < number and time.monotonic() < give_up:
            received += self.run(source.receive(number - len(received)))
            if len(received) < number:
                time.sleep(POLL_S)
        return received

    def gets_nothing(self, source: Source) -> bool:
        """Whether two looks at the queue find nothing."""
        return not any(self.run(source.receive(10)) for _ in range(2))

    def settle(
        self,
        source: Source,
        deliveries: Iterable[Delivery],
        action: str = "complete",
        after_ms: int = 0,
    ) -> None:
        """Settle deliveries alike."""
        settlements = [Settlement(delivery, action, after_ms) for delivery in deliveries]  # type: ignore[arg-type]
        self.run(source.settle(settlements))

    # Receiving.

    def test_a_sessions_messages_come_in_its_order(self, another: Callable[[], Source]) -> None:
        source = another()
        for number in range(8):
            self.send(f"s{number}", session="s")
            self.send(f"t{number}", session="t")
        received: list[Delivery] = []
        while len(received) < 16 and (some := self.receive(source, 4)):
            received += some
        for session in "st":
            mine = [d for d in received if d.session == session.encode()]
            assert ids(mine) == [f"{session}{number}" for number in range(8)]
            positions = [delivery.position for delivery in mine]
            assert positions == sorted(positions)

    def test_a_delivery_is_the_message_that_was_sent(self, another: Callable[[], Source]) -> None:
        message = outgoing("m1", "s", target=self.queue)
        message.is_plain, message.headers = False, {"correlation-id": "c"}
        self.put(message, outgoing("k1", target=self.queue))
        deliveries = {d.message_id: d for d in self.receive(another(), 2)}
        first, second = deliveries[b"m1"], deliveries[b"k1"]
        assert (first.session, first.type, int(first.format)) == (b"s", "conformance", 0)
        assert first.body == body_of("m1")
        assert first.headers["correlation-id"] == "c"
        assert first.sent_at_ms > 0
        assert second.session is None
        for delivery in (first, second):
            assert delivery.lock is not None
            assert delivery.delivery_count == 1
            assert (delivery.attempts, delivery.held, delivery.state) == (0, False, None)

    def test_a_receive_returns_no_more_than_its_limit(self, another: Callable[[], Source]) -> None:
        source = another()
        self.send(*(f"m{number}" for number in range(5)), session="s")
        assert len(self.run(source.receive(2))) <= 2
        assert len(self.run(source.receive(1))) <= 1

    def test_an_empty_queue_answers_at_once(self, another: Callable[[], Source]) -> None:
        source = another()
        begun = time.monotonic()
        assert self.run(source.receive(10)) == []
        assert time.monotonic() - begun < self.prompt_s

    def test_a_message_in_hand_is_given_to_nobody(self, another: Callable[[], Source]) -> None:
        source, other = another(), another()
        self.send("m1", session="s")
        self.send("k1")
        assert len(self.receive(source, 2)) == 2
        assert self.gets_nothing(source)
        assert self.gets_nothing(other)

    def test_what_was_not_settled_comes_again_when_its_lock_has_ended(
        self, another: Callable[[], Source]
    ) -> None:
        source = another()
        self.send("m1", "m2", session="s")
        self.send("k1")
        first = self.receive(source, 3)
        assert sorted(ids(first)) == ["k1", "m1", "m2"]
        self.settle(source, [d for d in first if d.message_id == b"m1"])
        self.pass_time(self.lock_ms + 20)
        again = self.receive(source, 2)
        assert sorted(ids(again)) == ["k1", "m2"]
        assert all(delivery.delivery_count > 1 for delivery in again)

    def test_close_gives_back_at_once_and_in_order(self, another: Callable[[], Source]) -> None:
        source, other = another(), another()
        self.send("m1", "m2", "m3", session="s")
        self.send("k1")
        received = self.receive(source, 4)
        self.settle(source, [d for d in received if d.message_id == b"m1"])
        self.run(source.close())
        again = self.receive(other, 3)
        assert sorted(ids(again)) == ["k1", "m2", "m3"]
        assert [name for name in ids(again) if name != "k1"] == ["m2", "m3"]
        assert all(delivery.delivery_count > 1 for delivery in again)
        self.run(source.close())

    # Settling.

    def test_a_completed_message_never_comes_again(self, another: Callable[[], Source]) -> None:
        source = another()
        self.send("m1", "m2", session="s")
        self.send("k1")
        self.settle(source, self.receive(source, 3))
        self.pass_time(self.lock_ms + 20)
        assert self.gets_nothing(source)
        self.run(source.close())
        assert self.gets_nothing(another())

    def test_an_abandoned_message_comes_again_in_its_place(
        self, another: Callable[[], Source]
    ) -> None:
        source = another()
        self.send("m1", "m2", "m3", session="s")
        first = self.receive(source, 2)
        assert ids(first) == ["m1", "m2"]
        self.settle(source, reversed(first), "abandon")
        again = self.receive(source, 3)
        assert ids(again) == ["m1", "m2", "m3"]
        assert [delivery.delivery_count > 1 for delivery in again] == [True, True, False]
        self.run(source.settle([Settlement(again[0]), Settlement(again[1], "abandon")]))
        assert ids(self.receive(source, 1)) == ["m2"]

    def test_an_abandoned_message_waits_as_long_as_it_was_told_and_its_session_behind_it(
        self, another: Callable[[], Source]
    ) -> None:
        source = another()
        self.send("m1", "m2", session="s")
        first = self.receive(source, 1)
        self.settle(source, first, "abandon", after_ms=self.lock_ms)
        self.send("x1", session="t")
        self.send("k1")
        free = self.receive(source, 2)
        assert sorted(ids(free)) == ["k1", "x1"]
        assert self.gets_nothing(source)
        self.settle(source, free)
        self.pass_time(self.lock_ms + 20)
        assert ids(self.receive(source, 2)) == ["m1", "m2"]

    def test_a_message_without_session_waits_alone(self, another: Callable[[], Source]) -> None:
        source = another()
        self.send("k1")
        self.settle(source, self.receive(source, 1), "abandon", after_ms=self.lock_ms)
        self.send("k2")
        assert ids(self.receive(source, 1)) == ["k2"]
        assert self.gets_nothing(source)

    def test_settling_twice_is_harmless(self, another: Callable[[], Source]) -> None:
        source = another()
        self.send("m1", "m2", session="s")
        first, second = self.receive(source, 2)
        for action in ("complete", "complete", "abandon"):
            self.settle(source, [first], action)
        self.settle(source, [second], "abandon")
        self.settle(source, [])
        (again,) = self.receive(source, 1)
        assert again.message_id == b"m2"
        # The first delivery's settlements are not the second one's.
        self.settle(source, [second])
        self.settle(source, [second], "abandon")
        assert self.gets_nothing(source)
        self.run(source.close())
        assert ids(self.receive(another(), 1)) == ["m2"]

    def test_a_stale_completion_is_passed_over(self, another: Callable[[], Source]) -> None:
        old, new = another(), another()
        self.send("m1", session="s")
        self.send("k1")
        stale = self.receive(old, 2)
        self.pass_time(self.lock_ms + 20)
        assert len(self.receive(new, 2)) == 2
        self.settle(old, stale)
        self.run(new.close())
        assert sorted(ids(self.receive(another(), 2))) == ["k1", "m1"]

    def test_a_stale_abandonment_is_passed_over(self, another: Callable[[], Source]) -> None:
        old, new = another(), another()
        self.send("m1", session="s")
        self.send("k1")
        stale = self.receive(old, 2)
        self.pass_time(self.lock_ms + 20)
        received = self.receive(new, 2)
        self.settle(old, stale, "abandon")
        assert self.gets_nothing(old)
        self.settle(new, received)
        self.run(new.close())
        assert self.gets_nothing(another())

    # Extending.

    def test_an_extended_lock_outlives_its_time(self, another: Callable[[], Source]) -> None:
        source, other = another(), another()
        self.send("m1", session="s")
        self.send("k1")
        received = self.receive(source, 2)
        for _ in range(3):
            self.pass_time(self.lock_ms * 2 // 3)
            assert self.run(source.extend(received)) == []
            assert self.gets_nothing(other)
        self.settle(source, received)
        self.pass_time(self.lock_ms + 20)
        assert self.gets_nothing(other)

    def test_extend_returns_what_is_lost(self, another: Callable[[], Source]) -> None:
        source, other = another(), another()
        self.send("m1", session="s")
        self.send("k1")
        received = self.receive(source, 2)
        self.pass_time(self.lock_ms + 20)
        assert len(self.receive(other, 2)) == 2
        assert self.run(source.extend(received)) == received
        assert self.run(source.extend([])) == []


class SessionSourceSuite(SourceSuite):
    """Every promise of `procession.abc.SessionSource`, a test each."""

    def place(self, folder: Path) -> Callable[[], SessionSource]:
        """Override, as in `SourceHooks`."""
        raise NotImplementedError(f"a conformance test gives the hook place ({folder})")

    @pytest.fixture
    def another(
        self, make_source: Callable[[], SessionSource]
    ) -> Iterator[Callable[[], SessionSource]]:
        """Return a function that makes a source, closed at the end."""
        made: list[SessionSource] = []

        def make() -> SessionSource:
            made.append(make_source())
            return made[-1]

        yield make
        for source in made:
            self.run(source.close())

    def test_a_session_in_hand_is_given_to_no_other_source(
        self, another: Callable[[], SessionSource]
    ) -> None:
        first, second = another(), another()
        self.send("m1", "m2", session="s")
        assert ids(self.receive(first, 1)) == ["m1"]
        self.send("m3", session="s")
        self.send("x1", session="t")
        assert ids(self.receive(second, 1)) == ["x1"]
        self.send("x2", session="t")
        assert self.gets_nothing(another())
        assert ids(self.receive(first, 2)) == ["m2", "m3"]
        assert ids(self.receive(second, 1)) == ["x2"]

    def test_released_sessions_come_again_first_and_in_order(
        self, another: Callable[[], SessionSource]
    ) -> None:
        first, second = another(), another()
        self.send("m1", "m2", "m3", session="s")
        self.send("x1", session="t")
        received = self.receive(first, 4)
        self.settle(first, [d for d in received if d.message_id == b"m1"])
        self.send("m4", session="s")
        self.run(first.release({b"s"}))
        again = self.receive(second, 3)
        assert ids(again) == ["m2", "m3", "m4"]
        assert [delivery.delivery_count > 1 for delivery in again] == [True, True, False]
        # What was received before the release is not settled by its old receiver.
        self.settle(first, [d for d in received if d.session == b"s"])
        self.run(second.release({b"s"}))
        assert ids(self.receive(second, 3)) == ["m2", "m3", "m4"]
        assert self.gets_nothing(second)

    def test_a_release_of_what_is_not_ours_does_nothing(
        self, another: Callable[[], SessionSource]
    ) -> None:
        first, second = another(), another()
        self.send("m1", session="s")
        received = self.receive(first, 1)
        self.run(second.release({b"s", b"unknown"}))
        assert self.gets_nothing(second)
        self.settle(first, received)
        self.run(first.release({b"s"}))
        self.run(first.release({b"s"}))
        assert self.gets_nothing(second)

    def test_a_session_whose_lock_has_ended_goes_to_another_source(
        self, another: Callable[[], SessionSource]
    ) -> None:
        first, second = another(), another()
        self.send("m1", "m2", session="s")
        assert ids(self.receive(first, 1)) == ["m1"]
        self.pass_time(self.lock_ms + 20)
        again = self.receive(second, 2)
        assert ids(again) == ["m1", "m2"]
        assert [delivery.delivery_count > 1 for delivery in again] == [True, False]
        assert self.gets_nothing(first)

    def test_an_extended_message_keeps_its_session(
        self, another: Callable[[], SessionSource]
    ) -> None:
        first, second = another(), another()
        self.send("m1", session="s")
        received = self.receive(first, 1)
        self.pass_time(self.lock_ms * 2 // 3)
        assert self.run(first.extend(received)) == []
        self.pass_time(self.lock_ms * 2 // 3)
        self.send("m2", session="s")
        assert self.gets_nothing(second)
        assert ids(self.receive(first, 1)) == ["m2"]
