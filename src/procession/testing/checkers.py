"""Checks a recorded history against the guarantees. Pure: a history in, violations out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Sent:
    """A message as its producer first sent it; the order of the history is the queue's order."""

    key: str
    session: str | None


@dataclass(slots=True, kw_only=True)
class History:
    """What happened, as the database and the queues have it in the end.

    Attributes:
        sent: in order; each key once, however often it was sent.
        copies: how many messages were stored, copies included.
        effects: key to how often its effect is in the business data.
        applied: session to keys, in the order in which their effects were committed.
        output: session ("" for none) to keys, in the order in which they were published.
        late: keys whose effect came out of order by choice (a replay under `continue`).
        dead: keys that ended as a dead letter.
        waiting: keys that have not ended.
        ends: end to number of messages.
        left: messages that are still in a queue.
    """

    sent: list[Sent] = field(default_factory=list)
    copies: int = 0
    effects: Mapping[str, int] = field(default_factory=dict)
    applied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    output: Mapping[str, Sequence[str]] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    ends: Mapping[str, int] = field(default_factory=dict)
    left: int = 0


def violations(history: History) -> list[str]:
    """Return every promise that the history breaks, in words; empty where it keeps them all.

    Example:
        >>> violations(History(sent=[Sent("m1", None)], copies=1, effects={"m1": 2}))[0]
        "G1 effect once: 'm1' took effect 2 times"
    """
    return [
        *_effect_once(history),
        *_order(history, "G2 order", history.applied),
        *_consistent_output(history),
        *_nothing_lost(history),
    ]


def _effect_once(history: History) -> list[str]:
    return [
        f"G1 effect once: {key!r} took effect {number} times"
        for key, number in sorted(history.effects.items())
        if number > 1
    ]


def _order(history: History, promise: str, found: Mapping[str, Sequence[str]]) -> list[str]:
    place: dict[str, int] = {sent.key: number for number, sent in enumerate(history.sent)}
    broken = []
    for session, keys in sorted(found.items()):
        if not session:
            continue  # what has no session has no order
        in_order = [key for key in keys if key not in history.late]
        for earlier, later in pairwise(in_order):
            if place.get(earlier, -1) > place.get(later, -1):
                broken.append(f"{promise}: in session {session!r} {later!r} came after {earlier!r}")
    return broken


def _consistent_output(history: History) -> list[str]:
    published = Counter(key for keys in history.output.values() for key in keys)
    broken = [
        f"G4 consistent output: {key!r} was published {number} times"
        for key, number in sorted(published.items())
        if number > 1
    ]
    took_effect = {key for key, number in history.effects.items() if number}
    broken += [
        f"G4 consistent output: {key!r} was published and took no effect"
        for key in sorted(published.keys() - took_effect)
    ]
    if history.output:
        broken += [
            f"G4 consistent output: {key!r} took effect and was not published"
            for key in sorted(took_effect - published.keys())
        ]
    return broken + _order(history, "G4 consistent output", history.output)


def _nothing_lost(history: History) -> list[str]:
    broken = []
    ends: defaultdict[str, int] = defaultdict(int)
    for sent in history.sent:
        took = bool(history.effects.get(sent.key))
        dead, waiting = sent.key in history.dead, sent.key in history.waiting
        if not took and not dead and not waiting:
            broken.append(f"G6 nothing lost: {sent.key!r} has no end and waits nowhere")
        if took and dead:
            broken.append(f"G6 nothing lost: {sent.key!r} took effect and is a dead letter")
    for end, number in history.ends.items():
        ends[end] += number
    total = sum(ends.values())
    if history.ends and total + history.left != history.copies:
        broken.append(
            f"G6 nothing lost: {history.copies} messages were stored, {total} ended and "
            f"{history.left} wait"
        )
    return broken
