"""Upkeep forgets what nothing can ask for any more, and nothing else; a purge erases all of it."""

from __future__ import annotations

import pytest

from procession.abc import Changes, Entry, Purged, Upkeep
from procession.errors import OperatorError, Reason
from procession.outcome import End, InboxState
from procession.testing.conformance.stage import CONSUMER, Stage, StoreHooks, print_of

WALK_STEPS_MAX = 100


class Keeping(StoreHooks):
    """Pruning, purging, and the list of sessions."""

    # Pruning.

    def test_a_key_is_remembered_for_its_retention_and_then_forgotten(self, stage: Stage) -> None:
        _record(stage, "old")
        self.pass_time(self.moment_ms + 20)
        _record(stage, "young")
        upkeep = stage.upkeep()
        assert stage.run(upkeep.prunable(retention_ms=self.moment_ms)) == 1
        assert _prune(stage, upkeep, self.moment_ms) == 1
        assert stage.state("old") is None
        assert stage.state("young") == InboxState.DONE
        assert _prune(stage, upkeep, self.moment_ms) == 0
        # A copy that comes later than every promise runs again.
        stage.send("old")
        assert stage.work(stage.lane()) == ["old"]

    def test_keys_whose_message_has_not_ended_are_never_forgotten(self, stage: Stage) -> None:
        _record(stage, "held", InboxState.HELD, None)
        _record(stage, "busy", InboxState.IN_PROGRESS, None)
        _record(stage, "dead", InboxState.DEAD, End.DEAD_LETTERED)
        self.pass_time(self.moment_ms + 20)
        assert _prune(stage, stage.upkeep(), self.moment_ms) == 0
        assert stage.state("held") == InboxState.HELD
        assert stage.state("busy") == InboxState.IN_PROGRESS
        assert stage.state("dead") == InboxState.DEAD

    def test_a_key_stays_while_a_dead_letter_of_it_waits_for_a_decision(self, stage: Stage) -> None:
        stage.send("m1", "m1", session="s")
        lane = stage.lane()
        stage.finish(lane, stage.take(lane, 1))
        other = print_of(b"another payload")
        stage.kill(lane, stage.take(lane)[0], reason=Reason.CONFLICT, fingerprint=other)
        self.pass_time(self.moment_ms + 20)
        upkeep = stage.upkeep()
        assert _prune(stage, upkeep, self.moment_ms) == 0
        assert stage.state("m1") == InboxState.DONE
        assert len(stage.letters()) == 1
        number = stage.letters()[0].number
        stage.run(stage.dead_letters.discard(number, by="the test", why="it is one"))
        self.pass_time(self.moment_ms + 20)
        assert _prune(stage, upkeep, self.moment_ms) >= 1
        assert stage.state("m1") is None

    def test_a_key_stays_while_an_older_message_of_its_queue_waits(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0], after_ms=self.moment_ms * 1_000)
        _record(stage, "k")
        self.pass_time(self.moment_ms * 3)
        upkeep = stage.upkeep()
        # What waits was sent before the key was recorded: its producer may send the key again.
        assert _prune(stage, upkeep, self.moment_ms) == 0
        assert stage.state("k") == InboxState.DONE
        stage.run(stage.store.skip_waits())
        assert stage.work(lane) == ["m1"]
        assert _prune(stage, upkeep, self.moment_ms) >= 1
        assert stage.state("k") is None

    def test_a_walk_goes_in_steps_and_begins_again(self, stage: Stage) -> None:
        for number in range(5):
            _record(stage, f"k{number}")
        self.pass_time(self.moment_ms + 20)
        upkeep, other = stage.upkeep(), stage.upkeep()
        first = _step(stage, upkeep, self.moment_ms, limit=2)
        assert first is not None
        assert first + _prune(stage, other, self.moment_ms) == 5
        assert _prune(stage, upkeep, self.moment_ms) == 0
        _record(stage, "k5")
        self.pass_time(self.moment_ms + 20)
        assert _prune(stage, upkeep, self.moment_ms) == 1

    # Purging.

    def test_a_purged_key_is_gone_with_all_of_its_kind(self, stage: Stage) -> None:
        stage.send("m1", "m1", "m2", session="s")
        lane = stage.lane()
        stage.kill(lane, stage.take(lane)[0])
        stage.hold(lane, stage.take(lane)[0], after_ms=self.moment_ms * 1_000)
        assert stage.work(lane) == []
        upkeep = stage.upkeep()
        assert stage.run(upkeep.purge_key(CONSUMER, b"m1")) == Purged(
            messages=1, inbox=1, dead_letters=1
        )
        assert stage.run(upkeep.purge_key(CONSUMER, b"m1")) == Purged(
            messages=0, inbox=0, dead_letters=0
        )
        assert stage.state("m1") is None
        assert stage.letters(status=None) == []
        stage.run(stage.store.skip_waits())
        assert stage.work(lane) == ["m2"]
        assert stage.status().held == 0

    def test_a_purged_session_is_gone_and_others_are_not(self, stage: Stage) -> None:
        stage.send("m1", "m2", "m3", session="s")
        stage.send("x1", "x2", session="t")
        lane = stage.lane()
        stage.kill(lane, stage.take(lane)[0])
        stage.hold(lane, stage.take(lane)[0], after_ms=self.moment_ms * 1_000)
        purged = stage.run(stage.upkeep().purge_session(CONSUMER, b"s"))
        assert purged == Purged(messages=2, inbox=1, dead_letters=1)
        assert stage.letters(status=None) == []
        assert stage.state("m1") is None
        stage.send("m4", session="s")
        assert stage.work(lane) == ["x1", "x2", "m4"]
        assert stage.status().held == 0

    def test_a_purge_of_an_unknown_consumer_is_refused(self, stage: Stage) -> None:
        upkeep = stage.upkeep()
        with pytest.raises(OperatorError, match="nobody"):
            stage.run(upkeep.purge_key("nobody", b"m1"))
        with pytest.raises(OperatorError, match="nobody"):
            stage.run(upkeep.purge_session("nobody", b"s"))

    # Looking.

    def test_sessions_with_a_backlog_are_listed_the_longest_first(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        stage.send("x1", "x2", "x3", session="t")
        stage.send("k1", "k2")
        lane, owner = stage.lane(), stage.lane()
        taken = {delivery.message_id: delivery for delivery in stage.take(lane)}
        stage.run(lane.rollback())
        stage.run(lane.close())
        stage.run(owner.own({b"s"}))
        upkeep = stage.upkeep()
        listed = stage.run(upkeep.sessions())
        assert [(row.session, row.backlog) for row in listed] == [(b"t", 3), (None, 2), (b"s", 1)]
        assert [row.holder is not None for row in listed] == [False, False, True]
        assert all(row.consumer == CONSUMER for row in listed)
        assert [row.backlog for row in stage.run(upkeep.sessions(limit=1))] == [3]
        assert [row.session for row in stage.run(upkeep.sessions(session=b"s"))] == [b"s"]
        assert stage.run(upkeep.sessions(consumer="nobody")) == []
        lane = stage.lane()
        stage.take(lane)
        stage.hold(lane, taken[b"x1"], after_ms=self.moment_ms * 1_000)
        (row,) = stage.run(upkeep.sessions(session=b"t"))
        assert row.retrying
        assert row.backlog == 3
        assert row.dead_letters == 0


def _record(
    stage: Stage,
    name: str,
    state: InboxState = InboxState.DONE,
    end: End | None = End.PROCESSED,
) -> None:
    """Record a key, without a message."""
    lane = stage.lane()
    changes = Changes()
    changes.entries.append(Entry(name.encode(), print_of(b""), state, end))
    stage.run(lane.begin())
    stage.commit(lane, changes)
    stage.run(lane.close())


def _step(stage: Stage, upkeep: Upkeep, kept_ms: int, *, limit: int = 100) -> int | None:
    """Prune once, with the same retention and resend horizon."""
    return stage.run(upkeep.prune(retention_ms=kept_ms, resend_horizon_ms=kept_ms, limit=limit))


def _prune(stage: Stage, upkeep: Upkeep, kept_ms: int) -> int:
    """Prune until the end of a walk; return how many keys were forgotten."""
    removed = 0
    for _ in range(WALK_STEPS_MAX):
        step = _step(stage, upkeep, kept_ms)
        if step is None:
            return removed
        removed += step
    raise AssertionError("the walk has no end")
