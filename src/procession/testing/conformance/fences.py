"""One holder: after a session has gone to another one, the old holder commits nothing, and none of
its business writes is left.
"""

from __future__ import annotations

import threading
import time

import pytest

from procession.abc import Changes, Entry, Lane
from procession.errors import ProcessionError, SessionLost
from procession.testing.conformance.batches import ALIKE
from procession.testing.conformance.stage import Stage, StoreHooks, ids, print_of

SESSION = b"s"


class Fences(StoreHooks):
    """Owning sessions, and the fence."""

    def test_the_holder_of_a_session_commits(self, stage: Stage) -> None:
        lane = stage.lane()
        assert stage.run(lane.own({SESSION})) == {SESSION}
        _commits(stage, lane, "e1")
        _commits(stage, lane, "e2")

    def test_without_the_session_nothing_commits(self, stage: Stage) -> None:
        _is_refused(stage, stage.lane())

    def test_own_leaves_out_what_another_holder_owns(self, stage: Stage) -> None:
        first, second = stage.lane(), stage.lane()
        assert stage.run(first.own({b"s", b"t"})) == {b"s", b"t"}
        assert stage.run(second.own({b"t", b"u"})) == {b"u"}
        _commits(stage, first, "e1", session=b"t")
        _is_refused(stage, second, session=b"t")

    def test_sessions_are_owned_byte_by_byte(self, stage: Stage) -> None:
        first, second = stage.lane(), stage.lane()
        keys = {key.encode() for key in ALIKE}
        half = set(sorted(keys)[::2])
        assert stage.run(first.own(half)) == half
        assert stage.run(second.own(keys)) == keys - half

    def test_after_a_takeover_the_old_holder_commits_nothing(self, stage: Stage) -> None:
        worker = stage.worker(lease_ms=self.moment_ms)
        first, second = stage.lane(worker), stage.lane()
        assert stage.run(first.own({SESSION})) == {SESSION}
        stage.expire(worker)
        _is_refused(stage, first)
        assert stage.run(second.own({SESSION})) == {SESSION}
        _is_refused(stage, first)
        _commits(stage, second, "e2")
        stage.run(second.release({SESSION}))
        _is_refused(stage, first)

    def test_a_takeover_in_the_middle_of_a_batch_leaves_nothing_of_it(self, stage: Stage) -> None:
        if not stage.features.concurrent_batches:
            pytest.skip("a transaction of this store keeps everyone else out")
        worker = stage.worker()
        first, second = stage.lane(worker), stage.lane()
        stage.send("m1", session="s")
        taken = stage.take(first)
        stage.effect(first, "zombie")
        before = stage.picture("m1")
        assert stage.run(stage.workers.take_over(worker, dead=True)) is not None
        assert stage.run(second.own({SESSION})) == {SESSION}
        with pytest.raises(SessionLost):
            stage.finish(first, taken)
        stage.run(first.rollback())
        assert stage.picture("m1") == before
        assert stage.work(second) == ["m1"]

    def test_a_batch_commits_before_anyone_took_over_or_not_at_all(self, stage: Stage) -> None:
        if not stage.features.concurrent_batches:
            pytest.skip("a transaction of this store keeps everyone else out")
        worker = stage.worker()
        first, second = stage.lane(worker), stage.lane()
        stage.send("m1", session="s")
        taken = stage.take(first)
        stage.effect(first, "e1")
        stage.run(first.flush(stage.changes(taken)))

        def take_over() -> None:
            stage.run(stage.workers.take_over(worker, dead=True))
            stage.run(second.own({SESSION}))

        thread = threading.Thread(target=take_over)
        thread.start()
        time.sleep(0.05)
        try:
            stage.run(first.commit())
            expected = ["e1"]
        except SessionLost:
            stage.run(first.rollback())
            expected = []
        thread.join()
        assert stage.effects() == expected
        assert stage.work(second) == ([] if expected else ["m1"])

    def test_after_a_release_and_another_owner_the_old_holder_commits_nothing(
        self, stage: Stage
    ) -> None:
        first, second = stage.lane(), stage.lane()
        assert stage.run(first.own({SESSION})) == {SESSION}
        stage.run(first.release({SESSION}))
        _is_refused(stage, first)
        assert stage.run(second.own({SESSION})) == {SESSION}
        _is_refused(stage, first)
        stage.run(second.release({SESSION}))
        _is_refused(stage, first)

    def test_a_holder_is_never_used_again(self, stage: Stage) -> None:
        # A lane is made anew under its old name after a fault, while the old one may live on.
        worker = stage.worker()
        old, new = (stage.lane(worker, number=1) for _ in range(2))
        other = stage.lane()
        assert stage.run(old.own({SESSION})) == {SESSION}
        stage.run(old.release({SESSION}))
        assert stage.run(old.own({SESSION})) == {SESSION}
        _commits(stage, old, "e1")
        if stage.run(new.own({SESSION})):  # else the old one goes on to hold it
            _is_refused(stage, old)
            _commits(stage, new, "e2")
            stage.run(new.release({SESSION}))
            assert stage.run(other.own({SESSION})) == {SESSION}
            stage.run(other.release({SESSION}))
            assert stage.run(new.own({SESSION})) == {SESSION}
            _is_refused(stage, old)
            _commits(stage, new, "e3")

    def test_of_two_lanes_of_one_worker_one_holds_a_session(self, stage: Stage) -> None:
        worker = stage.worker()
        lanes = [stage.lane(worker) for _ in range(2)]
        for lane in lanes:
            stage.run(lane.own({SESSION}))
        able = [_can_commit(stage, lane, f"e{n}") for n, lane in enumerate(lanes)]
        assert sorted(able) == [False, True]

    def test_what_one_lane_accepted_no_other_lane_reads(self, stage: Stage) -> None:
        worker = stage.worker()
        for number in range(6):
            stage.send(f"m{number}", session=f"s{number}")
            stage.send(f"k{number}")
        if not stage.features.concurrent_batches:
            pytest.skip("the transaction is the acceptance")
        lanes = [stage.lane(worker), stage.lane(worker), stage.lane()]
        seen = [ids(stage.take(lane, 4)) for lane in lanes]
        assert all(len(names) == 4 for names in seen)
        assert len({name for names in seen for name in names}) == 12
        for lane in lanes:
            stage.run(lane.rollback())
        # What has no session may go to another lane after that; a session stays with its owner.
        for lane, names in zip(lanes, seen, strict=True):
            again = stage.look(lane)
            assert {n for n in again if n[0] == "m"} == {n for n in names if n[0] == "m"}

    def test_release_does_nothing_to_what_is_not_ours(self, stage: Stage) -> None:
        first, second = stage.lane(), stage.lane()
        assert stage.run(first.own({SESSION})) == {SESSION}
        stage.run(second.release({SESSION, b"of nobody"}))
        assert stage.run(second.own({SESSION})) == set()
        _commits(stage, first, "e1")

    def test_a_batch_may_give_its_session_up_with_its_commit(self, stage: Stage) -> None:
        first, second = stage.lane(), stage.lane()
        stage.run(first.own({SESSION}))
        changes = Changes()
        changes.fence.add(SESSION)
        changes.release.add(SESSION)
        stage.run(first.begin())
        stage.commit(first, changes)
        _is_refused(stage, first)
        assert stage.run(second.own({SESSION})) == {SESSION}

    def test_a_closed_lane_owns_nothing(self, stage: Stage) -> None:
        first, second = stage.lane(), stage.lane()
        stage.run(first.own({SESSION}))
        stage.run(first.close())
        assert stage.run(second.own({SESSION})) == {SESSION}

    def test_closing_the_lane_of_a_lost_worker_frees_nothing_of_its_successor(
        self, stage: Stage
    ) -> None:
        worker = stage.worker()
        first, second = stage.lane(worker), stage.lane()
        stage.run(first.own({SESSION}))
        stage.run(stage.workers.take_over(worker, dead=True))
        stage.run(second.own({SESSION}))
        stage.run(first.release({SESSION}))
        stage.run(first.close())
        stage.run(stage.workers.leave(worker))
        assert stage.run(stage.lane().own({SESSION})) == set()
        _commits(stage, second, "e1")

    def test_one_lost_session_refuses_the_whole_batch(self, stage: Stage) -> None:
        first, second = stage.lane(), stage.lane()
        stage.run(first.own({b"s", b"t"}))
        stage.run(first.release({b"t"}))
        stage.run(second.own({b"t"}))
        before = stage.picture("zombie")
        changes = Changes()
        changes.fence |= {b"s", b"t"}
        changes.entries.append(Entry(b"zombie", print_of(b"")))
        stage.run(first.begin())
        with pytest.raises(SessionLost, match="t"):
            stage.commit(first, changes)
        stage.run(first.rollback())
        assert stage.picture("zombie") == before
        _commits(stage, first, "e1")

    def test_messages_of_a_session_that_is_owned_elsewhere_are_not_read(self, stage: Stage) -> None:
        owner, other = stage.lane(), stage.lane()
        stage.run(owner.own({SESSION}))
        stage.send("m1", session="s")
        stage.send("x1", session="t")
        stage.send("m2", session="s")
        assert stage.work(other) == ["x1"]
        stage.run(owner.release({SESSION}))
        assert stage.work(other) == ["m1", "m2"]

    def test_the_owner_of_a_session_reads_it(self, stage: Stage) -> None:
        owner, other = stage.lane(), stage.lane()
        stage.run(owner.own({SESSION}))
        stage.send("m1", "m2", session="s")
        assert stage.work(other) == []
        taken = stage.take(owner)
        assert ids(taken) == ["m1", "m2"]
        stage.finish(owner, taken)


def _batch(stage: Stage, lane: Lane, name: str, session: bytes) -> None:
    changes = Changes()
    changes.fence.add(session)
    changes.entries.append(Entry(name.encode(), print_of(b"")))
    stage.run(lane.begin())
    stage.effect(lane, name)
    stage.commit(lane, changes)


def _commits(stage: Stage, lane: Lane, name: str, session: bytes = SESSION) -> None:
    """A batch of the lane, fenced on the session, commits."""
    _batch(stage, lane, name, session)
    assert name in stage.effects()
    assert stage.state(name) is not None


def _is_refused(stage: Stage, lane: Lane, session: bytes = SESSION) -> None:
    """A batch of the lane, fenced on the session, is refused, and nothing of it is left."""
    before = stage.picture("zombie")
    with pytest.raises(SessionLost):
        _batch(stage, lane, "zombie", session)
    stage.run(lane.rollback())
    assert stage.picture("zombie") == before


def _can_commit(stage: Stage, lane: Lane, name: str) -> bool:
    try:
        _batch(stage, lane, name, SESSION)
    except ProcessionError:
        stage.run(lane.rollback())
        return False
    return True
