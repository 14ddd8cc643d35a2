"""A batch is one transaction: marker, effects, sends, removal and counts, all or none; and a key is
recorded once, told apart from every other byte by byte.
"""

from __future__ import annotations

import functools
import os
import signal
import warnings

import pytest

from procession.abc import Changes, Entry, Lane
from procession.core.inbox import Verdict, judge
from procession.errors import DuplicateKey, ProcessionError, SessionLost
from procession.outcome import End, InboxState
from procession.testing.conformance.stage import (
    CONSUMER,
    OTHER_CONSUMER,
    OTHER_QUEUE,
    SUBSCRIBERS,
    Stage,
    StoreHooks,
    ids,
    outgoing,
    print_of,
    together,
)

KEY_BYTES = 512
MANY = 120  # more than one statement of many rows, and a rest
ALIKE = (
    "ABC",
    "abc",
    "Abc",
    "àbc",
    "abç",
    "abc ",
    "abc  ",
    " abc",
    "abc\t",
    "abc\n",
    "caf\u00e9",  # NFC
    "cafe\u0301",  # NFD
    "stra\u00dfe",
    "strasse",
    "\u200babc",
    "1",
    "1.0",
    "01",
    "a/b",
    "a%2Fb",
    "a_b",
    "a%b",
    "a\\b",
    "'; --",
    "\U0001f9fe",
    "x" * (KEY_BYTES - 1) + "1",
    "x" * (KEY_BYTES - 1) + "2",
    "\U0001f9fe" * (KEY_BYTES // 4),
)


class Batches(StoreHooks):
    """The batch transaction and the inbox."""

    # All or none.

    def test_marker_effects_sends_removal_and_counts_commit_together(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        lane = stage.lane()
        taken = stage.take(lane)
        stage.effect(lane, "e1")
        changes = stage.changes(taken)
        changes.sends.append(outgoing("r1", target=OTHER_QUEUE))
        changes.reruns = 3
        stage.commit(lane, changes)
        assert ids(taken) == ["m1", "m2"]
        assert [stage.state(name) for name in ("m1", "m2")] == [InboxState.DONE] * 2
        assert stage.effects() == ["e1"]
        status = stage.status()
        assert status.waiting == 0
        assert status.counts == {("processed", ""): 2}
        assert status.reruns == 3
        assert stage.status(OTHER_CONSUMER).waiting == 1
        assert stage.work(lane) == []

    def test_a_rollback_after_the_flush_leaves_nothing(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        before = stage.picture("m1")
        lane = _flushed(stage)
        stage.run(lane.rollback())
        assert stage.picture("m1") == before
        assert stage.work(lane) == ["m1"]

    def test_a_lane_that_ends_before_its_commit_leaves_nothing(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        before = stage.picture("m1")
        lane = _flushed(stage)
        stage.run(lane.close())
        assert stage.picture("m1") == before
        assert stage.work(stage.lane()) == ["m1"]

    def test_a_lane_that_is_interrupted_before_its_commit_leaves_nothing(
        self, stage: Stage
    ) -> None:
        stage.send("m1", session="s")
        before = stage.picture("m1")
        worker = stage.worker()
        lane = _flushed(stage, worker)
        stage.vanish(lane, worker)
        with pytest.raises(ProcessionError):
            stage.run(lane.commit())
        assert stage.picture("m1") == before
        assert stage.work(stage.lane()) == ["m1"]

    def test_a_process_that_dies_before_its_commit_leaves_nothing(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        before = stage.picture("m1")
        _die_in_a_batch(stage, commit=False)
        assert stage.picture("m1") == before
        assert stage.work(stage.lane()) == ["m1"]

    def test_a_process_that_dies_after_its_commit_leaves_all_of_it(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        _die_in_a_batch(stage, commit=True)
        assert stage.state("m1") == InboxState.DONE
        assert stage.effects() == ["e1"]
        assert stage.status().counts == {("processed", ""): 1}
        assert stage.status(OTHER_CONSUMER).waiting == 1
        assert stage.work(stage.lane()) == []

    def test_what_is_committed_is_seen_by_another_store_of_the_same_place(
        self, stage: Stage
    ) -> None:
        stage.send("m1", "m2")
        lane = stage.lane()
        stage.finish(lane, stage.take(lane, 1))
        other = stage.open()
        row = stage.run(other.inbox(CONSUMER, b"m1"))
        assert row is not None
        assert InboxState(row.state) == InboxState.DONE
        assert row.end == End.PROCESSED
        assert row.recorded_ms is not None
        assert stage.run(other.inbox(CONSUMER, b"m2")) is None

    def test_a_batch_of_many_ends_all_of_them(self, stage: Stage) -> None:
        names = [f"m{number:03}" for number in range(MANY)]
        stage.send(*names, session="s")
        lane = stage.lane()
        taken = stage.take(lane, MANY)
        assert ids(taken) == names
        stage.finish(lane, taken)
        assert {stage.state(name) for name in names} == {InboxState.DONE}
        assert stage.status().waiting == 0

    def test_of_a_batch_only_what_ended_is_removed(self, stage: Stage) -> None:
        names = [f"m{number}" for number in range(7)]
        for name in names:
            stage.send(name, session=name)
        lane = stage.lane()
        taken = stage.take(lane)
        stage.finish(lane, [taken[1], taken[2], taken[5]])
        taken = stage.take(lane)
        assert ids(taken) == ["m0", "m3", "m4", "m6"]
        stage.finish(lane, taken[:2])
        assert stage.work(lane) == ["m4", "m6"]

    # A key is recorded once.

    def test_a_key_is_recorded_once_and_nothing_of_the_second_batch_is_left(
        self, stage: Stage
    ) -> None:
        stage.send("m1", session="s")
        stage.send("m1", "m2", session="s")
        lane = stage.lane()
        stage.finish(lane, stage.take(lane, 1))
        before = stage.picture("m1", "m2")
        taken = stage.take(lane)
        stage.effect(lane, "twice")
        changes = stage.changes(taken)
        for entry in changes.entries:
            entry.expected = None
        with pytest.raises(DuplicateKey):
            stage.commit(lane, changes)
        stage.run(lane.rollback())
        assert stage.picture("m1", "m2") == before
        assert ids(stage.take(lane)) == ["m1", "m2"]

    def test_one_known_key_refuses_a_whole_batch_of_many(self, stage: Stage) -> None:
        names = [f"m{number:03}" for number in range(MANY)]
        lane = stage.lane()
        _record(stage, lane, Entry(names[MANY // 2].encode(), print_of(b"")))
        stage.send(*names, session="s")
        before = stage.picture(*names)
        changes = stage.changes(stage.take(lane, MANY))
        for entry in changes.entries:
            entry.expected = None
        with pytest.raises(DuplicateKey):
            stage.commit(lane, changes)
        stage.run(lane.rollback())
        assert stage.picture(*names) == before

    def test_of_copies_that_run_at_the_same_moment_one_commits(self, stage: Stage) -> None:
        lanes = [stage.lane() for _ in range(4)]
        for _ in lanes:
            stage.send("m1")

        def run_one(lane: Lane, name: str) -> str:
            taken = stage.take(lane, 1)
            if not taken:
                return "nothing left"
            stage.effect(lane, name)
            changes = stage.changes(taken)
            for entry in changes.entries:
                entry.expected = None
            try:
                stage.commit(lane, changes)
            except ProcessionError as error:
                stage.run(lane.rollback())
                return type(error).__name__
            return "committed"

        outcomes = together(
            *(functools.partial(run_one, lane, f"e{n}") for n, lane in enumerate(lanes))
        )
        assert outcomes.count("committed") == 1, outcomes
        assert len(stage.effects()) == 1
        assert stage.status().counts == {("processed", ""): 1}

    def test_a_key_moves_on_from_the_expected_state_alone(self, stage: Stage) -> None:
        first, second = print_of(b"first"), print_of(b"second")
        lane = stage.lane()
        _record(stage, lane, Entry(b"k", first, InboxState.DEAD, End.DEAD_LETTERED))
        for expected in (InboxState.HELD, InboxState.DONE):
            with pytest.raises(DuplicateKey):
                _record(stage, lane, Entry(b"k", second, expected=expected))
            stage.run(lane.rollback())
        assert stage.state("k") == InboxState.DEAD
        moved = Entry(b"k", second, expected=InboxState.DEAD, out_of_order=True)
        _record(stage, lane, moved)
        with pytest.raises(DuplicateKey):
            _record(stage, lane, moved)
        stage.run(lane.rollback())
        row = stage.run(stage.store.inbox(CONSUMER, b"k"))
        assert row is not None
        assert InboxState(row.state) == InboxState.DONE
        assert row.out_of_order
        # The body was edited in between: copies of the old and of the new one are duplicates.
        for fingerprint in (first, second):
            assert judge(row.state, row.fingerprint, fingerprint) == Verdict.DUPLICATE

    def test_each_consumer_has_an_inbox_of_its_own(self, stage: Stage) -> None:
        _record(stage, stage.lane(), Entry(b"k", print_of(b"k")))
        _record(stage, stage.lane(consumer=OTHER_CONSUMER), Entry(b"k", print_of(b"k")))
        assert stage.state("k") == stage.state("k", OTHER_CONSUMER) == InboxState.DONE
        assert stage.state("k", SUBSCRIBERS[0]) is None

    def test_keys_are_told_apart_byte_by_byte(self, stage: Stage) -> None:
        lane = stage.lane()
        keys = [key.encode() for key in ALIKE]
        for number, key in enumerate(keys):
            assert stage.state(key) is None, key
            _record(stage, lane, Entry(key, print_of(b"%d" % number)))
        stage.run(lane.begin())
        rows = stage.run(lane.judge([*keys, b"ABc"]))
        stage.run(lane.rollback())
        assert {key: row.fingerprint for key, row in rows.items()} == {
            key: print_of(b"%d" % number) for number, key in enumerate(keys)
        }
        for key in keys:
            with pytest.raises(DuplicateKey):
                _record(stage, lane, Entry(key, print_of(b"again")))
            stage.run(lane.rollback())

    def test_message_ids_and_sessions_come_back_byte_by_byte(self, stage: Stage) -> None:
        for name in ALIKE:
            stage.send(name, session=name)
        lane = stage.lane()
        taken = stage.take(lane)
        assert ids(taken) == list(ALIKE)
        assert [delivery.session for delivery in taken] == [name.encode() for name in ALIKE]
        stage.finish(lane, taken)
        assert all(stage.state(name) == InboxState.DONE for name in ALIKE)

    def test_the_verdict_of_the_fetch_is_the_verdict_of_the_inbox(self, stage: Stage) -> None:
        lane = stage.lane()
        done, dead, held = b"done", b"dead", b"held"
        _record(stage, lane, Entry(done, print_of(b"1")))
        _record(stage, lane, Entry(dead, print_of(b"2"), InboxState.DEAD, End.DEAD_LETTERED))
        _record(stage, lane, Entry(held, print_of(b"3"), InboxState.HELD, None))
        stage.send("done", "dead", "held", "new")
        taken = stage.take(lane)
        rows = stage.run(lane.judge([delivery.message_id for delivery in taken]))
        stage.run(lane.rollback())
        assert set(rows) == {done, dead, held}
        for delivery in taken:
            row = rows.get(delivery.message_id)
            expected = (None, None) if row is None else (row.state, row.fingerprint)
            assert (delivery.state, delivery.fingerprint) == expected

    def test_a_message_that_is_gone_cannot_be_removed_again(self, stage: Stage) -> None:
        stage.send("m1", "m2")
        first, second = stage.lane(), stage.lane()
        old = stage.take(first)
        stage.run(first.close())
        stage.finish(second, stage.take(second, 1))
        before = stage.picture("m1", "m2")
        third = stage.lane()
        stage.run(third.begin())
        stage.effect(third, "zombie")
        changes = Changes()
        changes.removed += old
        changes.entries.append(Entry(b"another key", print_of(b"")))
        with pytest.raises(SessionLost):  # or, more exactly, MessageGone
            stage.commit(third, changes)
        stage.run(third.rollback())
        assert stage.picture("m1", "m2") == before
        assert stage.state("another key") is None


def _flushed(stage: Stage, worker: str | None = None) -> Lane:
    """Return a lane with a batch of `m1` that is flushed and not committed."""
    lane = stage.lane(worker)
    _flush(stage, lane)
    return lane


def _flush(stage: Stage, lane: Lane) -> None:
    taken = stage.take(lane)
    stage.effect(lane, "e1")
    changes = stage.changes(taken)
    changes.sends.append(outgoing("r1", target=OTHER_QUEUE))
    changes.reruns = 1
    stage.run(lane.flush(changes))


def _record(stage: Stage, lane: Lane, entry: Entry) -> None:
    changes = Changes()
    changes.entries.append(entry)
    stage.run(lane.begin())
    stage.commit(lane, changes)


def _die_in_a_batch(stage: Stage, *, commit: bool) -> None:
    """Let a child process die in a batch, by a signal that nothing can catch."""
    if not stage.features.durable or not hasattr(os, "fork"):
        pytest.skip("nothing of this store survives a process")
    worker = stage.worker()
    with warnings.catch_warnings():
        # The child uses connections of its own alone, and never returns.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            store = stage.open()
            lane = stage.run(store.lane(CONSUMER, worker=worker, number=1))
            _flush(stage, lane)
            if commit:
                stage.run(lane.commit())
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child failed before it could die"
    assert stage.run(stage.workers.take_over(worker, dead=True)) is not None
