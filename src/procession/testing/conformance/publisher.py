"""What every publisher must do: store in order, durably, all it was given or none of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from procession.abc import Publisher
from procession.errors import ConfigurationError
from procession.message import Delivery, Outgoing
from procession.runtime.drive import drive
from procession.testing.conformance.stage import body_of, ids, outgoing, together

Result = TypeVar("Result")
MANY = 237  # more than one statement of many rows, and a rest
UNKNOWN = "nowhere"


class PublisherHooks:
    """What an adapter's test says of its publisher: `place` (or the fixture `make_publisher` in its
    stead) and `waiting` are needed.

    Attributes:
        queue: a declared queue, empty at first, without a duplicate detection window.
        atomic: one call stores all or none.
    """

    queue = "orders"
    atomic = True

    def place(self, folder: Path) -> Callable[[], Publisher]:
        """Override: return a function that makes another publisher of the one place. What it makes
        is closed by the suite."""
        raise NotImplementedError(f"a conformance test gives the hook place ({folder})")

    @pytest.fixture
    def make_publisher(self, tmp_path: Path) -> Callable[[], Publisher]:
        """Return `place`. Override it where the place needs other fixtures, or an end."""
        return self.place(tmp_path)

    def waiting(self) -> list[Delivery]:
        """Override: return all that waits in the queue, in its order, read by somebody else than
        the publisher."""
        raise NotImplementedError("a conformance test gives the hook waiting")

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run one call of a protocol's method. A publisher that suspends gives its loop here."""
        return drive(coroutine)


class PublisherSuite(PublisherHooks):
    """Every promise of `procession.abc.Publisher`, a test each."""

    @pytest.fixture
    def another(self, make_publisher: Callable[[], Publisher]) -> Iterator[Callable[[], Publisher]]:
        """Return a function that makes a publisher, closed at the end."""
        made: list[Publisher] = []

        def make() -> Publisher:
            made.append(make_publisher())
            return made[-1]

        yield make
        for publisher in made:
            self.run(publisher.close())

    def message(self, name: str, session: str | None = None) -> Outgoing:
        """Return a message for the queue."""
        return outgoing(name, session, target=self.queue)

    def test_what_was_published_is_there_on_return(self, another: Callable[[], Publisher]) -> None:
        publisher = another()
        receipts = self.run(publisher.publish([self.message("m1"), self.message("m2")]))
        assert [(receipt.message_id, receipt.stored) for receipt in receipts] == [
            (b"m1", True),
            (b"m2", True),
        ]
        assert ids(self.waiting()) == ["m1", "m2"]

    def test_what_was_published_comes_as_it_was_given(
        self, another: Callable[[], Publisher]
    ) -> None:
        message = self.message("m1", "s")
        message.is_plain, message.headers = False, {"correlation-id": "c", "ü": "\n"}
        plain = self.message("m2")
        plain.body = b""
        self.run(another().publish([message, plain]))
        first, second = self.waiting()
        assert (first.message_id, first.session, first.type) == (b"m1", b"s", "conformance")
        assert (int(first.format), first.body) == (0, body_of("m1"))
        assert {name: first.headers[name] for name in message.headers} == message.headers
        assert (second.session, second.body) == (None, b"")

    def test_the_order_is_that_of_the_calls_and_within_a_call_of_the_sequence(
        self, another: Callable[[], Publisher]
    ) -> None:
        first, second = another(), another()
        names = [f"m{number:02}" for number in range(12)]
        for start, publisher in ((0, first), (3, second), (6, first), (9, second)):
            self.run(
                publisher.publish(
                    [
                        self.message(name, "st"[number % 2])
                        for number, name in enumerate(names[start : start + 3])
                    ]
                )
            )
        waiting = self.waiting()
        for session in (b"s", b"t"):
            mine = ids(d for d in waiting if d.session == session)
            assert mine == sorted(mine)
        assert sorted(ids(waiting)) == names

    def test_many_at_once_are_all_there_and_in_order(
        self, another: Callable[[], Publisher]
    ) -> None:
        names = [f"m{number:04}" for number in range(MANY)]
        receipts = self.run(another().publish([self.message(name, "s") for name in names]))
        assert [receipt.message_id.decode() for receipt in receipts] == names
        assert ids(self.waiting()) == names

    def test_publishers_at_the_same_moment_lose_nothing_and_keep_their_order(
        self, another: Callable[[], Publisher]
    ) -> None:
        rounds = range(10)

        def publish(publisher: Publisher, session: str) -> None:
            for number in rounds:
                messages = [self.message(f"{session}{number}{part}", session) for part in "ab"]
                self.run(publisher.publish(messages))

        outcomes = together(*(functools.partial(publish, another(), name) for name in "stu"))
        assert outcomes == [None] * 3
        waiting = self.waiting()
        for session in "stu":
            mine = ids(d for d in waiting if d.session == session.encode())
            assert mine == [f"{session}{number}{part}" for number in rounds for part in "ab"]

    def test_the_same_message_again_is_stored_again_or_folded_in_the_open(
        self, another: Callable[[], Publisher]
    ) -> None:
        publisher = another()
        receipts = [
            receipt
            for _ in range(3)
            for receipt in self.run(publisher.publish([self.message("m1", "s")]))
        ]
        assert [receipt.message_id for receipt in receipts] == [b"m1"] * 3
        assert receipts[0].stored
        assert ids(self.waiting()) == ["m1"] * sum(receipt.stored for receipt in receipts)

    def test_nothing_to_publish_is_harmless(self, another: Callable[[], Publisher]) -> None:
        assert list(self.run(another().publish([]))) == []
        assert self.waiting() == []

    def test_an_unknown_queue_is_refused_and_named(self, another: Callable[[], Publisher]) -> None:
        publisher = another()
        with pytest.raises(ConfigurationError, match=UNKNOWN):
            self.run(publisher.publish([outgoing("m1", target=UNKNOWN)]))
        self.run(publisher.publish([self.message("m2")]))
        assert ids(self.waiting()) == ["m2"]

    def test_of_a_call_that_fails_all_is_stored_or_nothing(
        self, another: Callable[[], Publisher]
    ) -> None:
        if not self.atomic:
            pytest.skip("the transport stores one message at a time")
        messages = [self.message("m1"), outgoing("m2", target=UNKNOWN), self.message("m3")]
        with pytest.raises(ConfigurationError):
            self.run(another().publish(messages))
        assert self.waiting() == []

    def test_closing_is_harmless_twice_and_loses_nothing(
        self, another: Callable[[], Publisher]
    ) -> None:
        publisher = another()
        self.run(publisher.publish([self.message("m1")]))
        self.run(publisher.close())
        self.run(publisher.close())
        assert ids(self.waiting()) == ["m1"]
