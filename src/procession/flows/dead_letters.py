"""What an operator may do with a dead letter: everything the store cannot know is checked here, so
that a mended message is one that its consumer takes, under the key and in the session it had.

The store decides who was first: each change there is a compare-and-set, so a command given twice
takes effect once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from procession.abc import DeadLetterFilter, DeadLetterRecord, DeadLetters, InboxRow
from procession.core.canonical import canonical_json
from procession.core.fingerprints import fingerprint
from procession.core.keys import KeyPolicy, encode_key
from procession.errors import MessageError, OperatorError, Reason
from procession.flows.batch import Consumer
from procession.message import BodyFormat, Delivery
from procession.outcome import InboxState

DECIDED = {
    "queued": "is queued for a replay already: wait for its end",
    "replayed": "was replayed, and its replay has ended",
    "discarded": "was discarded",
}
Lookup = Callable[[str, bytes], Coroutine[Any, Any, InboxRow | None]]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the code at hand says of a dead letter's consumer.

    Attributes:
        consumer: reads, validates and fingerprints its messages.
        session: the session rule of its queue, or None.
    """

    consumer: Consumer
    session: KeyPolicy | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of one request for a replay.

    Attributes:
        number: of the dead letter.
        queued: it will run again, in its session.
        why: the reason where it is not queued, else "".
    """

    number: int
    queued: bool
    why: str = ""


async def show(letters: DeadLetters, number: int) -> DeadLetterRecord:
    """Return one dead letter, whatever became of it.

    Raises:
        OperatorError: there is none of that number.
    """
    found = await letters.find(DeadLetterFilter(number=number, status=None, limit=1))
    if not found:
        raise OperatorError(f"there is no dead letter {number}")
    return found[0]


def check_waits(record: DeadLetterRecord) -> None:
    """Refuse what was decided about already. The store decides again, by compare-and-set.

    Raises:
        OperatorError: it does not wait for a decision any more.
    """
    if record.status != "dead":
        raise OperatorError(f"dead letter {record.number} {DECIDED[record.status]}")


async def edit(
    letters: DeadLetters,
    number: int,
    body: bytes,
    *,
    by: str,
    rules: Rules | None = None,
    bytes_max: int,
) -> None:
    """Replace a dead letter's body. Durable on return; its replay then runs the new one.

    JSON is stored in its canonical form, so that the producer's own resend of the mended message is
    a duplicate and no conflict. An edit mends a message and never makes another one of it: its key
    and its session stay.

    Args:
        letters: where it is.
        number: of the dead letter.
        body: JSON text, or raw bytes for a consumer of bytes.
        by: who edits.
        rules: of its consumer, where this program has its code; without, the body is not validated.
        bytes_max: the longest body allowed.

    Raises:
        OperatorError: there is no such dead letter, it is decided, or the body is of another key
            or session.
        MessageError: the consumer would refuse the body: it is too large, does not decode, or a
            validator says no.
    """
    who = _named(by)
    record = await show(letters, number)
    check_waits(record)
    if len(body) > bytes_max:
        raise MessageError(
            Reason.TOO_LARGE,
            f"the new body has {len(body)} bytes, the limit is {bytes_max} (settings.payload_max)",
        )
    if rules is not None:
        delivery = _validated(record, body, rules)
        seal = rules.consumer.fingerprint_of(delivery)
    else:
        delivery = _delivery(record, body)
        if record.format != BodyFormat.RAW:
            delivery.body = canonical_json(body)
        seal = fingerprint(delivery.body, canonical=record.format != BodyFormat.JSON)
    await letters.edit(number, body=delivery.body, fingerprint=seal, by=who)


async def replay(
    letters: DeadLetters,
    numbers: Iterable[int],
    *,
    by: str,
    as_new: str | None = None,
    rules: Mapping[str, Rules] | None = None,
    lookup: Lookup | None = None,
) -> list[Replay]:
    """Queue dead letters again, each in its session; return what became of each request.

    They are queued in order of consumer, session and position, whatever the order of `numbers`, and
    one that is refused does not keep the others. A second call queues nothing twice.

    Args:
        letters: where they are.
        numbers: of the dead letters; one named twice counts once.
        by: who replays.
        as_new: the key for a conflict, which cannot run under its own; for one number only.
        rules: of the consumers whose code this program has, by name.
        lookup: asks the inbox whether the new key is known already.

    Raises:
        OperatorError: nobody is named, or a new key is given for several.
        MessageError: the new key is none.
        TransientError: the store failed; what was queued before stays queued.
    """
    who = _named(by)
    wanted = list(dict.fromkeys(numbers))
    key = None
    if as_new is not None:
        if len(wanted) != 1:
            raise OperatorError(
                f"the new key {as_new!r} is given for {len(wanted)} dead letters: a key names one "
                "message, so replay each under one of its own"
            )
        key = encode_key(as_new, what="new key", reason=Reason.BAD_KEY)
    found: list[DeadLetterRecord] = []
    outcomes: list[Replay] = []
    for number in wanted:
        try:
            found.append(await show(letters, number))
        except OperatorError as error:
            outcomes.append(Replay(number, queued=False, why=str(error)))
    for record in sorted(found, key=_place):
        try:
            check_waits(record)
            if key is not None:
                await _check_new_key(record, key, (rules or {}).get(record.consumer), lookup)
            elif record.reason == Reason.CONFLICT:
                raise OperatorError(  # noqa: TRY301  one of several refusals, all told alike
                    f"dead letter {record.number} is a conflict: its key {_text(record.key)!r} is "
                    "another payload's. Discard it, or replay it under a key of its own with "
                    "--as-new KEY"
                )
            await letters.replay(record.number, by=who, as_new=key)
        except (OperatorError, MessageError) as error:
            outcomes.append(Replay(record.number, queued=False, why=str(error)))
        else:
            outcomes.append(Replay(record.number, queued=True))
    return outcomes


async def discard(letters: DeadLetters, number: int, *, by: str, why: str) -> None:
    """End a dead letter for good. Durable on return; it stays readable, with who and why.

    Raises:
        OperatorError: it is decided already, there is none, or nobody or no reason is named.
    """
    who = _named(by)
    if not why.strip():
        raise OperatorError(
            "a discard needs a reason: whoever looks for this message later will ask why"
        )
    check_waits(await show(letters, number))
    await letters.discard(number, by=who, why=why.strip())


def _named(by: str) -> str:
    if not by.strip():
        raise OperatorError("who does this? Dead letters keep the name of whoever decides")
    return by.strip()


def _place(record: DeadLetterRecord) -> tuple[str, bytes, int, int]:
    return record.consumer, record.session or b"", record.position, record.number


def _delivery(record: DeadLetterRecord, body: bytes) -> Delivery:
    return Delivery(
        record.position,
        record.session,
        record.message_id,
        record.type,
        record.format,
        body,
        record.headers,
        record.sent_at_ms,
    )


def _validated(record: DeadLetterRecord, body: bytes, rules: Rules) -> Delivery:
    """Return the mended message as its consumer will see it, or refuse it."""
    delivery = _delivery(record, body)
    payload = rules.consumer.read(delivery)[1]
    if type(payload) is not bytes or record.format != BodyFormat.RAW:
        delivery.body = canonical_json(body)
    # A message that never had a key gets one by the edit; a conflict may be given one of its own.
    if record.key is not None and record.reason != Reason.CONFLICT:
        key = rules.consumer.key_of(delivery)
        if key != record.key:
            raise OperatorError(
                f"the new body has the key {_text(key)!r}, dead letter {record.number} the key "
                f"{_text(record.key)!r}: an edit cannot make another message of it. Send the new "
                "one as a message, and discard this"
            )
    session = _session(payload, record, rules.session)
    if session is not None and session != record.session:
        raise OperatorError(
            f"the new body belongs to session {_text(session)!r}, dead letter {record.number} came "
            f"in session {_text(record.session)!r}, and would run in the order of that. Send the "
            "new one as a message, and discard this"
        )
    return delivery


def _session(payload: Any, record: DeadLetterRecord, rule: KeyPolicy | None) -> bytes | None:
    """Return the session by the queue's rule; None where the rule cannot say."""
    if rule is None or record.session is None:
        return None
    try:
        return rule.key(payload, record.message_id, record.headers)
    except Exception:  # noqa: BLE001  a rule for the sender's type may not read the consumer's
        return None


async def _check_new_key(
    record: DeadLetterRecord, key: bytes, rules: Rules | None, lookup: Lookup | None
) -> None:
    """Refuse a new key that its run could not have; the run itself is judged by the inbox."""
    name = f"dead letter {record.number}"
    if record.key is not None and record.reason != Reason.CONFLICT:
        raise OperatorError(
            f"{name} needs no new key: nothing took effect under its own, {_text(record.key)!r}. "
            "Replay it without one"
        )
    if rules is not None and not rules.consumer.keyed_by_id:
        made = rules.consumer.key_of(_delivery(record, record.body))
        if made != key:
            raise OperatorError(
                f"the key of consumer {record.consumer!r} is made from the message, and of {name} "
                f"it is {_text(made)!r}: edit the body so that its key is {_text(key)!r}, then "
                "replay it under that key"
            )
    row = None if lookup is None else await lookup(record.consumer, key)
    if row is not None:
        state = InboxState(row.state).name.lower().replace("_", " ")
        raise OperatorError(
            f"the key {_text(key)!r} is known to consumer {record.consumer!r} already ({state}): "
            "give one that no message had"
        )


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode(errors="replace")
