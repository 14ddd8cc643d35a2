"""The rows of a batch: sent together, last before the commit, in the lock order, and checked."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

from procession.abc import Changes, DeadLetter, Entry, Hold
from procession.core.fences import check_fence
from procession.errors import DuplicateKey, MessageGone
from procession.message import Delivery
from procession.outcome import End
from procession.stores.postgres.guard import OURS
from procession.stores.postgres.owned import Reading, public_session, session_of
from procession.stores.postgres.reading import Reader
from procession.stores.postgres.wire import (
    Result,
    StatementFailed,
    bool_array,
    bytes_array,
    int_array,
    place_array,
    text_array,
)
from procession.stores.sql.sends import Plan, Sender, headers_of

UNIQUE_VIOLATION = "23505"


class Flush:
    """The rows of one batch, in the lock order, sent together and checked together."""

    def __init__(self, lane: Reader, changes: Changes) -> None:
        self._lane = lane
        self._changes = changes
        self._checks: list[Callable[[Result], None]] = []
        self._results: list[Result] = []

    def run(self) -> None:
        """Send all, wait once, check all."""
        lane, changes = self._lane, self._changes
        plan, numbers = self._draw()
        waits, takes = self._waits()
        give_up, lows = self._given_up(waits)
        fence = sorted(changes.fence - set(give_up))
        if fence:
            lane._send_fence(fence)
            self._check(lambda found: self._fenced(fence, found))
        lost = sorted(changes.fence - set(lane._owned))
        if lost:
            check_fence(lost, [], f"{lane._worker}.{lane._number}")
        if plan is not None:
            self._send_plan(plan)
        self._record()
        for dead in changes.dead_letters:
            self._kill(dead)
        for hold, number in zip(changes.holds, numbers, strict=True):
            self._hold(hold, number)
        self._remove()
        passed = self._ended_sessions()
        trusted = sorted(
            key
            for key in passed
            if key in lane._owned
            and key not in give_up
            and (lane._owned[key].suspicion or lane._owned[key].waits)
        )
        if trusted:
            lane._send_trust(trusted)
            self._check(None)
        for key, wait_ms in takes.items():
            lane._send("wait_in_hand", key=key, holder=lane._owned[key].holder, wait_ms=wait_ms)
            self._check(None)
        if give_up:
            lane._send_give_up(
                {key: lane._owned[key] for key in give_up}, waits, lows, passed | set(waits)
            )
            self._check(lambda found: self._fenced(sorted(give_up), found))
        self._count()
        self._finish(give_up, trusted, takes)

    def _check(self, check: Callable[[Result], None] | None) -> None:
        """Say what the result of the statement that was sent last must be."""
        self._checks.append(check or (lambda _: None))

    def drained(self, results: list[Result]) -> None:
        """Take in results that were read on the way."""
        self._results += results

    def _finish(
        self,
        give_up: Collection[bytes],
        trusted: list[bytes],
        takes: dict[bytes, int],
    ) -> None:
        lane = self._lane
        try:
            self._results += lane._wire.drain()
        except StatementFailed as failed:
            if failed.tag == OURS and failed.error.sqlstate == UNIQUE_VIOLATION:
                raise DuplicateKey(str(failed.error)) from failed.error
            raise
        for check, result in zip(self._checks, self._results, strict=True):
            check(result)
        removed = [d for d in self._changes.removed if d.lock is None]
        lane._after_commit.append(
            lambda: _committed(lane, removed, give_up, trusted, takes, self._changes.holds)
        )

    def _fenced(self, expected: Sequence[bytes], found: Result) -> None:
        lane = self._lane
        held = [row[0] for row in found.rows()]
        if len(held) != len(expected):
            for key in set(expected) - set(held):
                lane._forget(key)
        check_fence(expected, held, f"{lane._worker}.{lane._number}")

    # Numbers first: they are drawn once the business rows are locked.

    def _draw(self) -> tuple[Plan | None, list[int | None]]:
        lane, changes = self._lane, self._changes
        takes = sum(hold.take for hold in changes.holds)
        if not changes.sends and not takes:
            return None, [None] * len(changes.holds)
        sender = Sender(_Runner(lane))
        plan = sender.plan(changes.sends, also=takes)
        numbers = iter(plan.spare)
        return plan, [next(numbers) if hold.take else None for hold in changes.holds]

    def _send_plan(self, plan: Plan) -> None:
        lane = self._lane
        if plan.rows:
            columns = list(zip(*plan.rows, strict=True))
            lane._send("send", **send_values(columns))
            self._check(None)
        if plan.tokens:
            lane._send(
                "send_tokens",
                subscriptions=int_array([token[0] for token in plan.tokens]),
                sessions=bytes_array([token[1] for token in plan.tokens]),
                lows=int_array([token[2] for token in plan.tokens]),
            )
            self._check(None)
        lane._targets.update(row[0] for row in plan.rows)

    # Sessions.

    def _waits(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """Return the waits of sessions that are given up with it, and of those a broker keeps."""
        lane = self._lane
        waits: dict[bytes, int] = {}
        takes: dict[bytes, int] = {}
        for hold in self._changes.holds:
            session = session_of(hold.delivery)
            if hold.take:
                if hold.after_ms is not None and session in lane._owned:
                    takes[session] = hold.after_ms
            elif session in lane._owned:
                waits[session] = hold.after_ms or 0
        for session in set(takes) & self._changes.release:
            waits[session] = takes.pop(session)
        return waits, takes

    def _given_up(
        self, waits: dict[bytes, int]
    ) -> tuple[dict[bytes, None], dict[bytes, int | None]]:
        lane = self._lane
        give_up = dict.fromkeys(key for key in self._changes.release if key in lane._owned)
        give_up.update(dict.fromkeys(key for key in waits if not lane._owned[key].kept))
        give_up.update(dict.fromkeys(key for key in waits if key in self._changes.release))
        left = self._left()
        lows: dict[bytes, int | None] = {}
        for key in give_up:
            ended = key in lane._reading.drained and key not in left and not lane._owned[key].kept
            lows[key] = None if ended else left.get(key, 1)
        return give_up, lows

    def _left(self) -> dict[bytes, int]:
        """Return the first number that was read and does not end here, by session."""
        lane = self._lane
        ends = {d.position for d in self._changes.removed if d.lock is None}
        left: dict[bytes, int] = {}
        for number, (session, _) in lane._reads.items():
            if number not in ends and session:
                left[session] = min(number, left.get(session, number))
        return left

    def _ended_sessions(self) -> set[bytes]:
        lane = self._lane
        found = set()
        for delivery in self._changes.removed:
            if delivery.lock is None:
                read = lane._reads.get(delivery.position)
                if read is not None and read[0]:
                    found.add(read[0])
        return found

    # The rest.

    def _record(self) -> None:
        done: list[Entry] = []
        others: list[Entry] = []
        moves: list[Entry] = []
        for entry in self._changes.entries:
            if entry.expected is not None:
                moves.append(entry)
            elif entry.end is End.PROCESSED and not entry.out_of_order:
                done.append(entry)
            else:
                others.append(entry)
        lane = self._lane
        if done:
            lane._send(
                "record_done",
                keys=bytes_array([entry.key for entry in done]),
                fingerprints=bytes_array([entry.fingerprint for entry in done]),
            )
            self._check(lambda found: _all_new(found, len(done)))
        if others:
            lane._send(
                "record",
                keys=bytes_array([entry.key for entry in others]),
                fingerprints=bytes_array([entry.fingerprint for entry in others]),
                states=int_array([int(entry.state) for entry in others]),
                ends=text_array([_ended(entry.end) for entry in others]),
                late=bool_array([entry.out_of_order or None for entry in others]),
            )
            self._check(lambda found: _all_new(found, len(others)))
        for entry in moves:
            lane._send(
                "move_on",
                state=int(entry.state),
                ended=_ended(entry.end),
                late=entry.out_of_order or None,
                fingerprint=entry.fingerprint,
                key=entry.key,
                expected=int(cast("int", entry.expected)),
            )
            self._check(functools.partial(_moved, entry))

    def _kill(self, dead: DeadLetter) -> None:
        """Fold it into an earlier one, or write it. Rare: a round trip each."""
        lane, delivery = self._lane, dead.delivery
        run = _Runner(lane, self)
        if delivery.replay_of is not None:
            again = run(
                "died_again",
                number=delivery.replay_of,
                reason=str(dead.reason),
                detail=_text(dead.detail),
                attempts=delivery.attempts,
                errors=_text(delivery.errors),
                what="the replay failed",
            )
            if again.count == 1:
                return
        if dead.is_copy and run("fold_copy", key=dead.key).count == 1:
            return
        letter = {
            "reason": str(dead.reason),
            "detail": _text(dead.detail),
            "position": delivery.position,
            "message_id": delivery.message_id,
            "session": public_session(delivery),
            "type": delivery.type,
            "format": delivery.format,
            "body": delivery.body,
            "headers": _text(headers_of(delivery)),
            "sent_ms": delivery.sent_at_ms,
            "attempts": delivery.attempts,
            "errors": _text(delivery.errors),
        }
        if dead.key is None:
            run("kill_keyless", **letter)
        else:
            run("kill", **letter, key=dead.key, fingerprint=dead.fingerprint, what="died again")

    def _hold(self, hold: Hold, number: int | None) -> None:
        lane, delivery = self._lane, hold.delivery
        session = session_of(delivery)
        if number is not None:
            delivery.position = number
            session = session_of(delivery)
            lane._send(
                "take_held",
                session=session,
                number=number,
                message_id=delivery.message_id,
                type=delivery.type,
                format=delivery.format,
                body=delivery.body,
                headers=_text(headers_of(delivery)),
                sent_ms=delivery.sent_at_ms,
                expires_ms=delivery.expires_ms,
                attempts=hold.attempts,
                errors=_text(delivery.errors),
                replay_of=delivery.replay_of,
            )
            self._check(None)
        else:
            read = lane._reads.get(delivery.position)
            lane._send(
                "hold",
                own_session=session,
                attempts=hold.attempts,
                errors=_text(delivery.errors),
                session=read[0] if read else session,
                number=delivery.position,
            )
            self._check(functools.partial(_held, delivery))
        if session not in lane._owned and (hold.after_ms is not None or delivery.session is None):
            lane._send("wait_alone", key=session, wait_ms=hold.after_ms or 0)
            self._check(None)

    def _remove(self) -> None:
        lane = self._lane
        removed = [delivery for delivery in self._changes.removed if delivery.lock is None]
        if removed:
            reads = [lane._reads.get(delivery.position) for delivery in removed]
            lane._send(
                "remove",
                places=place_array([read[1] for read in reads if read is not None]),
                numbers=int_array([delivery.position for delivery in removed]),
            )
            self._check(lambda found: _all_removed(found, len(removed)))
            ended = {read[0] for read in reads if read is not None}
            tokens = [token for token in lane._reading.tokens if token[0] in ended]
            if tokens:
                lane._send_forget(tokens)
        self._end_replays()

    def _end_replays(self) -> None:
        died = {dead.delivery.replay_of for dead in self._changes.dead_letters}
        for delivery in self._changes.removed:
            if delivery.replay_of is not None and delivery.replay_of not in died:
                self._lane._send("replay_ended", number=delivery.replay_of, what="the replay ended")
                self._check(None)

    def _count(self) -> None:
        rows = [
            (end.value, cause.value if cause else "", number)
            for (end, cause), number in self._changes.counts.items()
        ]
        if self._changes.reruns:
            rows.append(("rerun", "", self._changes.reruns))
        if rows:
            self._lane._send(
                "count",
                ends=text_array([row[0] for row in rows]),
                causes=text_array([row[1] for row in rows]),
                numbers=int_array([row[2] for row in rows]),
            )
            self._check(None)


class _Runner:
    """Runs one statement now, in the batch's transaction, for what is rare or must be known."""

    def __init__(self, lane: Reader, flush: Flush | None = None) -> None:
        self._lane = lane
        self._flush = flush

    def __call__(self, name: str, **values: Any) -> Result:
        lane = self._lane
        lane._send(name, **values)
        results = lane._wire.drain()
        if self._flush is not None:
            self._flush.drained(results[:-1])
        return results[-1]


def _committed(
    lane: Reader,
    removed: list[Delivery],
    give_up: Collection[bytes],
    trusted: Iterable[bytes],
    takes: dict[bytes, int],
    holds: list[Hold],
) -> None:
    """Take in what a commit made so."""
    reading = lane._reading
    lane._reading = Reading([], [], [], set())
    ended: dict[bytes, int] = {}
    for delivery in removed:
        read = lane._reads.pop(delivery.position, None)
        if read is not None and read[0]:
            ended[read[0]] = max(ended.get(read[0], 0), delivery.position)
    for key in trusted:
        if key in lane._owned:
            lane._owned[key].suspicion = 0
            lane._owned[key].waits = False
    for key in give_up:
        lane._forget(key)
        # What was left of it has a token below those taken last.
        lane._full_look_s = 0.0
    left: dict[bytes, int] = {}
    for number, (session, _) in lane._reads.items():
        if session:
            left[session] = min(number, left.get(session, number))
    _advance(lane, reading, ended, left)
    for key in takes:
        lane._owned[key].waits = True
    for hold in holds:
        owned = lane._owned.get(session_of(hold.delivery))
        if owned is not None:
            owned.drained = False
    _reorder(lane, reading, left)


def _advance(
    lane: Reader, reading: Reading, ended: dict[bytes, int], left: dict[bytes, int]
) -> None:
    """Move the cursors of sessions of which something has ended."""
    now = time.monotonic()
    for key, number in ended.items():
        owned = lane._owned.get(key)
        if owned is None:
            continue
        first = left.get(key)
        owned.cursor = number if first is None else min(number, first - 1)
        owned.drained = key in reading.drained and first is None
        owned.idle_since = now


def _reorder(lane: Reader, reading: Reading, left: dict[bytes, int]) -> None:
    """First those of which something was left, then those not reached, then the others."""
    # Left twice in a row: most likely it must run alone, for which it must come first.
    front = [key for key in left if key in lane._owned and key in lane._left]
    lane._front, lane._left = set(front), set(left)
    if front or reading.keys:
        seen = set(front)
        read_keys = set(reading.keys)
        rest = [key for key in lane._order if key not in seen]
        lane._order = [
            *front,
            *(key for key in rest if key not in read_keys),
            *(key for key in rest if key in read_keys),
        ]


def send_values(columns: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the columns of planned rows as the arrays of `send`."""
    (subscriptions, sessions, numbers, ids, types, formats, bodies, headers, sent, expires,
     due) = columns  # fmt: skip
    return {
        "subscriptions": int_array(subscriptions),
        "sessions": bytes_array(sessions),
        "numbers": int_array(numbers),
        "ids": bytes_array(ids),
        "types": text_array(types),
        "formats": int_array(formats),
        "bodies": bytes_array(bodies),
        "headers": text_array(headers),
        "sent": int_array(sent),
        "expires": int_array(expires),
        "due": int_array(due),
    }


def _all_new(found: Result, expected: int) -> None:
    if found.count != expected:
        raise DuplicateKey("another transaction recorded one of these keys")


def _all_removed(found: Result, expected: int) -> None:
    if found.count != expected:
        raise MessageGone(
            f"{expected} messages were handled, {found.count} could be removed: another worker "
            "took some; nothing was committed"
        )


def _moved(entry: Entry, found: Result) -> None:
    if found.count != 1:
        raise DuplicateKey(f"key {entry.key!r} has moved on from {entry.expected!r}")


def _held(delivery: Delivery, found: Result) -> None:
    if found.count != 1:
        raise MessageGone(f"message {delivery.message_id!r} is not in the queue any more")


def _ended(end: End | None) -> str | None:
    """Return what is stored in `ended`: NULL for what nearly every row says."""
    return None if end is None or end is End.PROCESSED else end.value


def _text(value: str | None) -> str | None:
    """Return text that the server takes: it has no NUL."""
    return None if value is None else value.replace("\x00", "\N{SYMBOL FOR NULL}")
