"""Messages that came from a broker: judged by the inbox, taken into the held list in order, and
run from there once.
"""

from __future__ import annotations

import pytest

from procession.abc import Changes, DeadLetter, Entry, Hold, Lane
from procession.core.inbox import Verdict, judge
from procession.errors import DuplicateKey, Reason
from procession.message import BodyFormat, Delivery
from procession.outcome import InboxState
from procession.testing.conformance.stage import Stage, StoreHooks, body_of, ids, print_of


class Brokers(StoreHooks):
    """The store beside a broker: own, judge, hold, drain."""

    def test_a_brokers_message_is_recorded_and_not_removed_here(self, stage: Stage) -> None:
        lane = stage.lane()
        stage.run(lane.own({b"s"}))
        changes = Changes()
        delivery = _delivery("b1")
        changes.fence.add(b"s")
        changes.entries.append(Entry(b"b1", print_of(delivery.body)))
        changes.removed.append(delivery)
        stage.run(lane.begin())
        assert stage.run(lane.judge([b"b1"])) == {}
        assert stage.run(lane.waiting({b"s"})) == set()
        stage.commit(lane, changes)
        assert stage.state("b1") == InboxState.DONE

    def test_held_messages_run_from_the_store_in_their_order(self, stage: Stage) -> None:
        lane = stage.lane()
        _hold(stage, lane, "b1", after_ms=self.moment_ms)
        assert _waiting(stage, lane) == {b"s"}
        for name in ("b2", "b3"):
            _hold(stage, lane, name, after_ms=None)
        assert [stage.state(name) for name in ("b1", "b2", "b3")] == [InboxState.HELD] * 3
        assert stage.work(lane) == []
        self.pass_time(self.moment_ms + 20)
        fetched = stage.fetch(lane)
        assert ids(fetched.deliveries)[0] == "b1"
        first = fetched.deliveries[0]
        assert (first.held, first.lock, first.state) == (True, None, InboxState.HELD)
        assert (first.session, first.body, first.attempts) == (b"s", body_of("b1"), 1)
        assert dict(first.headers) == {"h": "v"}
        assert judge(first.state, first.fingerprint, print_of(first.body), own=True) == (
            Verdict.FRESH
        )
        stage.run(lane.rollback())
        assert stage.work(lane) == ["b1", "b2", "b3"]
        assert [stage.state(name) for name in ("b1", "b2", "b3")] == [InboxState.DONE] * 3
        assert _waiting(stage, lane) == set()
        assert stage.status().held == 0

    def test_a_hold_keeps_the_brokers_session_until_it_is_given_up(self, stage: Stage) -> None:
        lane, other = stage.lane(), stage.lane()
        stage.run(lane.own({b"s"}))
        for name in ("b1", "b2"):
            changes = _held(name, after_ms=self.moment_ms if name == "b1" else None)
            changes.release.clear()
            stage.run(lane.begin())
            stage.commit(lane, changes)
            assert stage.run(other.own({b"s"})) == set()
        self.pass_time(self.moment_ms + 20)
        assert stage.work(other) == []
        assert stage.work(lane) == ["b1", "b2"]

    def test_a_session_waits_for_its_held_messages_until_the_last_has_ended(
        self, stage: Stage
    ) -> None:
        lane = stage.lane()
        _hold(stage, lane, "b1", after_ms=0)
        _hold(stage, lane, "b2", after_ms=None)
        assert _waiting(stage, lane) == {b"s"}
        stage.finish(lane, stage.take(lane, 1)[:1])
        assert _waiting(stage, lane) == {b"s"}
        assert stage.work(lane) == ["b2"]
        assert _waiting(stage, lane) == set()

    def test_a_redelivery_of_a_held_message_is_known(self, stage: Stage) -> None:
        lane = stage.lane()
        _hold(stage, lane, "b1", after_ms=self.moment_ms)
        stage.run(lane.begin())
        row = stage.run(lane.judge([b"b1", b"b2"]))[b"b1"]
        stage.run(lane.rollback())
        assert judge(row.state, row.fingerprint, print_of(body_of("b1"))) == Verdict.HELD
        with pytest.raises(DuplicateKey):
            _hold(stage, lane, "b1", after_ms=None)
        stage.run(lane.rollback())
        self.pass_time(self.moment_ms + 20)
        assert stage.work(lane) == ["b1"]

    def test_a_hold_that_rolled_back_was_never_there(self, stage: Stage) -> None:
        lane = stage.lane()
        before = stage.picture("b1")
        stage.run(lane.own({b"s"}))
        stage.run(lane.begin())
        stage.run(lane.flush(_held("b1", after_ms=0)))
        stage.run(lane.rollback())
        assert stage.picture("b1") == before
        assert _waiting(stage, lane) == set()

    def test_a_redelivery_without_a_key_is_folded_into_its_dead_letter(self, stage: Stage) -> None:
        lane = stage.lane()
        for name in ("b1", "b2", "b1"):
            delivery = _delivery(name, None)
            changes = Changes()
            changes.dead_letters.append(DeadLetter(delivery, None, None, Reason.NO_KEY, "no id"))
            changes.removed.append(delivery)
            stage.run(lane.begin())
            stage.commit(lane, changes)
        letters = {letter.message_id: letter.copies for letter in stage.letters()}
        assert letters == {b"b1": 2, b"b2": 1}

    def test_held_messages_without_a_session_wait_each_alone(self, stage: Stage) -> None:
        lane = stage.lane()
        _hold(stage, lane, "b1", session=None, after_ms=self.moment_ms)
        _hold(stage, lane, "b2", session=None, after_ms=0)
        assert stage.work(lane) == ["b2"]
        self.pass_time(self.moment_ms + 20)
        assert stage.work(lane) == ["b1"]


def _held(name: str, *, after_ms: int | None, session: bytes | None = b"s") -> Changes:
    delivery = _delivery(name, session)
    changes = Changes()
    changes.holds.append(
        Hold(delivery, after_ms=after_ms, attempts=0 if after_ms is None else 1, take=True)
    )
    changes.entries.append(
        Entry(delivery.message_id, print_of(delivery.body), InboxState.HELD, None)
    )
    changes.removed.append(delivery)
    if session is not None:
        changes.fence.add(session)
        changes.release.add(session)
    return changes


def _hold(
    stage: Stage,
    lane: Lane,
    name: str,
    *,
    after_ms: int | None,
    session: bytes | None = b"s",
) -> None:
    if session is not None:
        assert stage.run(lane.own({session})) == {session}
    stage.run(lane.begin())
    stage.commit(lane, _held(name, after_ms=after_ms, session=session))


def _waiting(stage: Stage, lane: Lane) -> set[bytes]:
    stage.run(lane.begin())
    found = stage.run(lane.waiting({b"s", b"t"}))
    stage.run(lane.rollback())
    return found


def _delivery(name: str, session: bytes | None = b"s") -> Delivery:
    return Delivery(
        int.from_bytes(name.encode(), "big"),
        session,
        name.encode(),
        "conformance",
        int(BodyFormat.RAW),
        body_of(name),
        {"h": "v"},
        1_700_000_000_000,
        delivery_count=2,
        lock=object(),
    )
