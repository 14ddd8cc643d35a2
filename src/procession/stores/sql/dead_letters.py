"""Dead letters on servers: what operators do to them, each step a compare-and-set."""

from __future__ import annotations

import json
from typing import Any

from procession.abc import DeadLetterFilter, DeadLetterRecord
from procession.abc.records import replaced_body
from procession.errors import OperatorError, Reason
from procession.stores.sql.sends import KEYLESS_SESSION, Run, Sender
from procession.stores.sql.transactions import Transactions

_COLUMNS = (
    "subscription",
    "status",
    "reason",
    "key",
    "fingerprint",
    "message_id",
    "session",
    "type",
    "format",
    "body",
    "headers",
    "sent_ms",
)


class SqlDeadLetters:
    """Implements `procession.abc.DeadLetters`."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    async def find(self, wanted: DeadLetterFilter) -> list[DeadLetterRecord]:
        """See `DeadLetters.find`."""
        with self._transactions.read("reading dead letters") as run:
            rows = run(
                "find_dead_letters",
                number=wanted.number,
                consumer=wanted.consumer,
                session=None if wanted.session is None else wanted.session.encode(),
                reason=wanted.reason,
                status=wanted.status,
                limit=wanted.limit,
            ).rows()
        return [_record(row) for row in rows]

    async def edit(self, number: int, *, body: bytes, fingerprint: bytes, by: str) -> None:
        """See `DeadLetters.edit`."""
        with self._transactions.write(f"editing dead letter {number}") as run:
            row = self._waiting(run, number)
            edited = run(
                "edit_dead_letter",
                number=number,
                body=body,
                fingerprint=fingerprint,
                entry=_entry("edited", by, **replaced_body(row["body"])),
            )
            if edited.count != 1:
                raise OperatorError(
                    f"dead letter {number}: another dead letter of this key has this very payload; "
                    "replay that one, and discard this one"
                )
            if row["reason"] != Reason.CONFLICT and row["key"] is not None:
                run(
                    "accept_fingerprint",
                    subscription=row["subscription"],
                    key=row["key"],
                    fingerprint=fingerprint,
                )

    async def replay(self, number: int, *, by: str, as_new: bytes | None = None) -> None:
        """See `DeadLetters.replay`."""
        with self._transactions.write(f"replaying dead letter {number}") as run:
            row = self._waiting(run, number)
            if row["reason"] == Reason.CONFLICT and as_new is None:
                raise OperatorError(
                    f"dead letter {number} is a conflict: its key {_text(row['key'])} took effect, "
                    "or died, with another payload. Discard it, or replay it under a key of its "
                    "own with --as-new KEY"
                )
            self._set(run, number, "queued", _entry("replayed", by, as_new=_text(as_new)))
            self._queue(run, number, row, as_new)

    async def discard(self, number: int, *, by: str, why: str) -> None:
        """See `DeadLetters.discard`."""
        with self._transactions.write(f"discarding dead letter {number}") as run:
            row = self._waiting(run, number)
            self._set(run, number, "discarded", _entry("discarded", by, why=why))
            run("count_one", subscription=row["subscription"], ended="discarded")

    async def close(self) -> None:
        """See `DeadLetters.close`."""
        self._transactions.close()

    def _queue(self, run: Run, number: int, row: dict[str, Any], as_new: bytes | None) -> None:
        (place,) = Sender(run).plan([], also=1).spare
        session = row["session"] or KEYLESS_SESSION
        run(
            "take_held",
            subscription=row["subscription"],
            session=session,
            number=place,
            message_id=row["message_id"] if as_new is None else as_new,
            type=row["type"],
            format=row["format"],
            body=row["body"],
            headers=row["headers"],
            sent_ms=row["sent_ms"],
            expires_ms=None,
            attempts=0,
            errors=None,
            replay_of=number,
        )
        if session:
            run(
                "send_tokens",
                subscriptions=[row["subscription"]],
                sessions=[session],
                lows=[place],
            )

    def _waiting(self, run: Run, number: int) -> dict[str, Any]:
        rows = run("dead_letter", number=number).rows()
        if not rows:
            raise OperatorError(f"there is no dead letter {number}")
        row: dict[str, Any] = dict(zip(_COLUMNS, rows[0], strict=True))
        if row["status"] != "dead":
            said = {
                "queued": "is queued for a replay already; wait for its end",
                "replayed": "was replayed and took effect",
                "discarded": "was discarded",
            }[row["status"]]
            raise OperatorError(f"dead letter {number} {said}")
        return row

    def _set(self, run: Run, number: int, status: str, entry: str) -> None:
        run("set_dead_letter", number=number, status=status, entry=entry)


def _entry(what: str, by: str, **more: str | None) -> str:
    kept = {name: value for name, value in more.items() if value is not None}
    return json.dumps({"what": what, "by": by, **kept})


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode(errors="replace")


def _record(row: tuple[Any, ...]) -> DeadLetterRecord:
    return DeadLetterRecord(
        number=row[0],
        consumer=row[1] or "",
        queue=row[2],
        status=row[3],
        reason=row[4],
        detail=row[5],
        key=row[6],
        fingerprint=row[7],
        message_id=row[8],
        session=row[9],
        type=row[10],
        format=row[11],
        body=row[12],
        headers=_headers(row[13]),
        position=row[14],
        attempts=row[15],
        errors=_errors(row[16]),
        copies=row[17],
        sent_at_ms=row[18],
        died_at_ms=row[19],
        history=tuple(json.loads(row[20])),
    )


def _headers(text: str | None) -> dict[str, str]:
    """Read headers, whoever wrote them: a list of dead letters must not fail on one of them."""
    if not text:
        return {}
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        return {"unreadable": text}


def _errors(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(json.loads(text)) if text else ()
    except (TypeError, ValueError):
        return (text or "",)
