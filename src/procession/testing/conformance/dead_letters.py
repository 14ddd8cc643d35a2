"""A dead letter keeps its message; what operators do to it is compare-and-set, harmless twice."""

from __future__ import annotations

import functools
import json

import pytest

from procession.abc import Changes, DeadLetter, DeadLetterFilter, DeadLetterRecord, Entry
from procession.abc.records import replaced_body
from procession.core.inbox import Verdict, judge
from procession.errors import OperatorError, Reason
from procession.message import Delivery
from procession.outcome import End, InboxState
from procession.testing.conformance.stage import (
    CONSUMER,
    OTHER_CONSUMER,
    OTHER_QUEUE,
    QUEUE,
    Stage,
    StoreHooks,
    body_of,
    ids,
    outgoing,
    print_of,
    together,
)

BY = "an operator"


class DeadLetterKeeping(StoreHooks):
    """Dead letters, from the batch to the end of their replay."""

    def test_a_dead_letter_keeps_all_of_its_message(self, stage: Stage) -> None:
        message = outgoing("m1", "s")
        message.is_plain, message.headers = False, {"correlation-id": "c"}
        stage.run(stage.publisher.publish([message]))
        lane = stage.lane()
        delivery = stage.take(lane)[0]
        delivery.attempts, delivery.errors = 2, json.dumps(["first", "second"])
        stage.kill(lane, delivery)
        (letter,) = stage.letters()
        assert (letter.consumer, letter.queue, letter.status) == (CONSUMER, QUEUE, "dead")
        assert (letter.reason, letter.detail) == ("failed", "as the test wants it")
        assert (letter.key, letter.message_id) == (b"m1", b"m1")
        assert letter.fingerprint == print_of(body_of("m1"))
        assert (letter.session, letter.type, letter.format) == (b"s", "conformance", 0)
        assert letter.body == body_of("m1")
        assert letter.headers == {"correlation-id": "c"}
        assert letter.position == delivery.position
        assert (letter.attempts, letter.errors) == (2, ("first", "second"))
        assert letter.copies == 1
        assert letter.sent_at_ms == delivery.sent_at_ms
        assert letter.died_at_ms >= letter.sent_at_ms
        assert stage.state("m1") == InboxState.DEAD
        assert stage.status().dead_letters == 1
        assert stage.status().counts == {("dead-lettered", ""): 1}

    def test_a_message_without_session_has_none_as_a_dead_letter(self, stage: Stage) -> None:
        stage.send("k1")
        lane = stage.lane()
        delivery = stage.take(lane)[0]
        stage.hold(lane, delivery, after_ms=0)
        delivery = stage.take(lane)[0]
        stage.kill(lane, delivery)
        assert stage.letters()[0].session is None

    def test_the_session_goes_on_after_a_dead_letter(self, stage: Stage) -> None:
        stage.send("m1", "m2", session="s")
        lane = stage.lane()
        stage.kill(lane, stage.take(lane)[0])
        assert stage.work(lane) == ["m2"]

    def test_copies_are_folded_and_another_payload_is_a_letter_of_its_own(
        self, stage: Stage
    ) -> None:
        stage.send("m1", "m1", "m1", session="s")
        lane = stage.lane()
        for _ in range(2):
            stage.kill(lane, stage.take(lane)[0])
        other = print_of(b"another payload")
        stage.kill(lane, stage.take(lane)[0], reason=Reason.CONFLICT, fingerprint=other)
        letters = stage.letters()
        assert [letter.copies for letter in letters] == [2, 1]
        assert [letter.reason for letter in letters] == ["failed", "conflict"]
        assert stage.status().counts == {("dead-lettered", ""): 3}

    def test_a_copy_of_an_edited_letter_is_counted_on_it(self, stage: Stage) -> None:
        letter = _dead(stage)
        mended = print_of(b"mended")
        edit = stage.dead_letters.edit(letter.number, body=b"mended", fingerprint=mended, by=BY)
        stage.run(edit)
        _die_again(stage, is_copy=True)
        (again,) = stage.letters()
        assert (again.number, again.copies, again.body) == (letter.number, 2, b"mended")

    def test_a_new_death_opens_a_decided_letter_again_and_a_copy_does_not(
        self, stage: Stage
    ) -> None:
        letter = _dead(stage)
        stage.run(stage.dead_letters.discard(letter.number, by=BY, why="enough"))
        _die_again(stage, is_copy=True)
        assert [(found.status, found.copies) for found in stage.letters(status=None)] == [
            ("discarded", 2)
        ]
        _die_again(stage, is_copy=False)
        (again,) = stage.letters()
        assert (again.number, again.copies) == (letter.number, 3)
        assert stage.status().dead_letters == 1

    def test_a_conflict_that_was_decided_on_stays_so(self, stage: Stage) -> None:
        stage.send("m1", "m1", "m1", session="s")
        lane = stage.lane()
        stage.finish(lane, stage.take(lane, 1))
        other = print_of(b"another payload")
        stage.kill(lane, stage.take(lane)[0], reason=Reason.CONFLICT, fingerprint=other)
        number = stage.letters()[0].number
        stage.run(stage.dead_letters.discard(number, by=BY, why="enough"))
        stage.kill(lane, stage.take(lane)[0], reason=Reason.CONFLICT, fingerprint=other)
        assert stage.letters() == []
        assert [found.copies for found in stage.letters(status=None)] == [2]

    def test_letters_without_a_key_are_never_folded(self, stage: Stage) -> None:
        stage.send("", "", session="s")
        lane = stage.lane()
        taken = stage.take(lane)
        changes = stage.fenced(Changes(), taken)
        changes.dead_letters += [
            DeadLetter(delivery, None, None, Reason.NO_KEY, "no id") for delivery in taken
        ]
        changes.removed += taken
        stage.commit(lane, changes)
        letters = stage.letters()
        assert [letter.position for letter in letters] == [d.position for d in taken]
        assert [letter.key for letter in letters] == [None, None]

    def test_a_rolled_back_dead_letter_was_never_there(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        before = stage.picture("m1")
        lane = stage.lane()
        delivery = stage.take(lane)[0]
        changes = stage.changes([delivery])
        changes.entries = [Entry(b"m1", print_of(b""), InboxState.DEAD, End.DEAD_LETTERED)]
        changes.dead_letters.append(
            DeadLetter(delivery, b"m1", print_of(b""), Reason.REJECTED, "no")
        )
        stage.run(lane.flush(changes))
        stage.run(lane.rollback())
        assert stage.picture("m1") == before

    def test_letters_are_found_by_each_of_their_sides_and_in_order(self, stage: Stage) -> None:
        for name, session in (("m1", "b"), ("m2", "a"), ("m3", "b"), ("m4", "a")):
            stage.send(name, session=session)
        stage.send("r1", session="a", target=OTHER_QUEUE)
        for lane in (stage.lane(), stage.lane(consumer=OTHER_CONSUMER)):
            while taken := stage.take(lane):
                rejected = ids(taken)[0] == "m2"
                stage.kill(lane, taken[0], reason=Reason.REJECTED if rejected else Reason.FAILED)
            stage.run(lane.rollback())

        def found(**wanted: object) -> list[str]:
            letters = stage.run(stage.dead_letters.find(DeadLetterFilter(**wanted)))  # type: ignore[arg-type]
            return [letter.message_id.decode() for letter in letters]

        assert found() == ["r1", "m2", "m4", "m1", "m3"]
        assert found(consumer=CONSUMER) == ["m2", "m4", "m1", "m3"]
        assert found(session="a") == ["r1", "m2", "m4"]
        assert found(session="A") == []
        assert found(reason="rejected") == ["m2"]
        assert found(consumer=CONSUMER, session="a", reason="failed") == ["m4"]
        assert found(limit=2) == ["r1", "m2"]
        assert found(status="replayed") == []
        (first,) = stage.run(stage.dead_letters.find(DeadLetterFilter(reason="rejected")))
        assert found(number=first.number) == ["m2"]

    # Edit.

    def test_after_an_edit_copies_of_the_old_and_the_new_payload_are_known(
        self, stage: Stage
    ) -> None:
        letter = _dead(stage)
        new = print_of(b"mended")
        stage.run(stage.dead_letters.edit(letter.number, body=b"mended", fingerprint=new, by=BY))
        (edited,) = stage.letters()
        assert (edited.body, edited.fingerprint) == (b"mended", new)
        assert edited.number == letter.number
        assert BY in str(edited.history)
        assert any(replaced_body(letter.body).items() <= e.items() for e in edited.history)
        row = stage.run(stage.store.inbox(CONSUMER, b"m1"))
        assert row is not None
        for fingerprint in (new, print_of(body_of("m1"))):
            assert judge(row.state, row.fingerprint, fingerprint) == Verdict.DEAD
        assert judge(row.state, row.fingerprint, print_of(b"other")) == Verdict.CONFLICT

    def test_an_edit_is_what_the_replay_runs(self, stage: Stage) -> None:
        letter = _dead(stage)
        new = print_of(b"mended")
        for _ in range(2):
            stage.run(
                stage.dead_letters.edit(letter.number, body=b"mended", fingerprint=new, by=BY)
            )
        stage.run(stage.dead_letters.replay(letter.number, by=BY))
        lane = stage.lane()
        taken = stage.take(lane)
        assert [delivery.body for delivery in taken] == [b"mended"]
        stage.finish(lane, taken)
        row = stage.run(stage.store.inbox(CONSUMER, b"m1"))
        assert row is not None
        for fingerprint in (new, print_of(body_of("m1"))):
            assert judge(row.state, row.fingerprint, fingerprint) == Verdict.DUPLICATE

    # Replay.

    def test_a_replay_runs_in_its_session_and_moves_the_key_on(self, stage: Stage) -> None:
        letter = _dead(stage)
        stage.send("m2", session="s")
        stage.run(stage.dead_letters.replay(letter.number, by=BY))
        assert stage.letters(status="queued")[0].number == letter.number
        lane = stage.lane()
        taken = {delivery.message_id: delivery for delivery in stage.take(lane)}
        replayed = taken[b"m1"]
        assert (replayed.session, replayed.replay_of) == (b"s", letter.number)
        assert (replayed.state, replayed.attempts) == (InboxState.DEAD, 0)
        assert replayed.body == letter.body
        assert replayed.sent_at_ms == letter.sent_at_ms
        stage.finish(lane, [replayed])
        row = stage.run(stage.store.inbox(CONSUMER, b"m1"))
        assert row is not None
        assert (InboxState(row.state), row.out_of_order) == (InboxState.DONE, True)
        (ended,) = stage.letters(status=None)
        assert (ended.status, ended.number) == ("replayed", letter.number)
        assert stage.status().dead_letters == 0

    def test_a_replay_is_queued_once_however_often_it_is_asked_for(self, stage: Stage) -> None:
        letter = _dead(stage)
        operators = [stage.run(stage.open().dead_letters()) for _ in range(4)]
        outcomes = together(
            *(
                functools.partial(stage.run, operator.replay(letter.number, by=BY))
                for operator in operators
            )
        )
        for operator in operators:
            stage.run(operator.close())
        assert outcomes.count(None) == 1, outcomes
        assert sum(isinstance(outcome, OperatorError) for outcome in outcomes) == 3, outcomes
        with pytest.raises(OperatorError):
            stage.run(stage.dead_letters.replay(letter.number, by=BY))
        assert stage.work(stage.lane()) == ["m1"]
        with pytest.raises(OperatorError):
            stage.run(stage.dead_letters.replay(letter.number, by=BY))

    def test_a_replay_that_dies_again_waits_for_a_decision_again(self, stage: Stage) -> None:
        letter = _dead(stage)
        lane = stage.lane()
        for _ in range(2):
            stage.run(stage.dead_letters.replay(letter.number, by=BY))
            delivery = stage.take(lane)[0]
            delivery.attempts, delivery.errors = 5, json.dumps(["again"])
            stage.kill(lane, delivery)
            (again,) = stage.letters()
            assert (again.number, again.attempts, again.errors) == (letter.number, 5, ("again",))
            assert again.copies == 1
            assert stage.state("m1") == InboxState.DEAD
        stage.run(stage.dead_letters.replay(letter.number, by=BY))
        assert stage.work(lane) == ["m1"]

    def test_a_replay_that_waits_for_a_retry_is_still_the_replay(self, stage: Stage) -> None:
        letter = _dead(stage)
        stage.run(stage.dead_letters.replay(letter.number, by=BY))
        lane = stage.lane()
        stage.hold(lane, stage.take(lane)[0], after_ms=0)
        (delivery,) = stage.take(lane)
        assert (delivery.replay_of, delivery.state) == (letter.number, InboxState.DEAD)
        stage.finish(lane, [delivery])
        assert stage.letters(status=None)[0].status == "replayed"

    def test_a_copy_of_a_letter_that_is_queued_for_replay_is_not_run(self, stage: Stage) -> None:
        letter = _dead(stage)
        stage.run(stage.dead_letters.replay(letter.number, by=BY))
        stage.send("m1", session="s")
        taken = stage.take(stage.lane())
        verdicts = {_verdict(delivery) for delivery in taken}
        assert verdicts == {Verdict.FRESH, Verdict.DEAD}

    def test_a_conflict_is_replayed_under_a_new_key_alone(self, stage: Stage) -> None:
        stage.send("m1", "m1", session="s")
        lane = stage.lane()
        stage.finish(lane, stage.take(lane, 1))
        other = print_of(b"another payload")
        stage.kill(lane, stage.take(lane)[0], reason=Reason.CONFLICT, fingerprint=other)
        (letter,) = stage.letters()
        before = stage.picture("m1")
        with pytest.raises(OperatorError):
            stage.run(stage.dead_letters.replay(letter.number, by=BY))
        assert stage.picture("m1") == before
        stage.run(stage.dead_letters.replay(letter.number, by=BY, as_new=b"m1-b"))
        taken = stage.take(lane)
        assert ids(taken) == ["m1-b"]
        assert taken[0].state is None
        stage.finish(lane, taken)
        assert stage.state("m1") == stage.state("m1-b") == InboxState.DONE
        assert stage.letters(status=None)[0].status == "replayed"

    def test_an_edit_of_a_conflict_leaves_the_key_alone(self, stage: Stage) -> None:
        stage.send("m1", "m1", session="s")
        lane = stage.lane()
        stage.finish(lane, stage.take(lane, 1))
        before = stage.run(stage.store.inbox(CONSUMER, b"m1"))
        other = print_of(b"another payload")
        stage.kill(lane, stage.take(lane)[0], reason=Reason.CONFLICT, fingerprint=other)
        number = stage.letters()[0].number
        mended = print_of(b"mended")
        stage.run(stage.dead_letters.edit(number, body=b"mended", fingerprint=mended, by=BY))
        assert stage.run(stage.store.inbox(CONSUMER, b"m1")) == before

    # Discard.

    def test_a_discarded_letter_has_ended_for_good(self, stage: Stage) -> None:
        letter = _dead(stage)
        stage.run(stage.dead_letters.discard(letter.number, by=BY, why="it was a test"))
        (ended,) = stage.letters(status=None)
        assert ended.status == "discarded"
        assert "it was a test" in str(ended.history)
        assert stage.status().counts["discarded", ""] == 1
        assert stage.status().dead_letters == 0
        assert stage.state("m1") == InboxState.DEAD
        for attempt in (
            stage.dead_letters.replay(letter.number, by=BY),
            stage.dead_letters.discard(letter.number, by=BY, why="again"),
            stage.dead_letters.edit(letter.number, body=b"", fingerprint=print_of(b""), by=BY),
        ):
            with pytest.raises(OperatorError):
                stage.run(attempt)
        assert stage.letters(status=None) == [ended]
        assert stage.work(stage.lane()) == []

    def test_a_letter_that_is_not_there_is_refused_in_words(self, stage: Stage) -> None:
        for attempt in (
            stage.dead_letters.replay(987, by=BY),
            stage.dead_letters.discard(987, by=BY, why="no reason"),
            stage.dead_letters.edit(987, body=b"", fingerprint=print_of(b""), by=BY),
        ):
            with pytest.raises(OperatorError, match="987"):
                stage.run(attempt)


def _dead(stage: Stage) -> DeadLetterRecord:
    stage.send("m1", session="s")
    lane = stage.lane()
    stage.kill(lane, stage.take(lane)[0])
    stage.run(lane.close())
    (letter,) = stage.letters()
    return letter


def _die_again(stage: Stage, *, is_copy: bool) -> None:
    """Let another message of the key `m1` end as a dead letter."""
    stage.send("m1", session="s")
    lane = stage.lane()
    (delivery,) = stage.take(lane)
    changes = stage.fenced(Changes(), [delivery])
    printed = print_of(delivery.body)
    changes.dead_letters.append(
        DeadLetter(delivery, b"m1", printed, Reason.FAILED, "again", is_copy=is_copy)
    )
    changes.removed.append(delivery)
    stage.commit(lane, changes)
    stage.run(lane.close())


def _verdict(delivery: Delivery) -> Verdict:
    return judge(
        delivery.state,
        delivery.fingerprint,
        print_of(delivery.body),
        own=delivery.replay_of is not None,
    )
