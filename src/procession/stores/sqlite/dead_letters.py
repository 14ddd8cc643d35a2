"""Dead letters on SQLite: what operators do to them, each step a compare-and-set."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from procession.abc import DeadLetterFilter, DeadLetterRecord
from procession.abc.records import replaced_body
from procession.errors import OperatorError, Reason
from procession.stores.sqlite.connection import wall_now
from procession.stores.sqlite.sends import Sender, zone
from procession.stores.sqlite.transactions import Transactions


class SqliteDeadLetters(Transactions):
    """Implements `procession.abc.DeadLetters`."""

    async def find(self, wanted: DeadLetterFilter) -> list[DeadLetterRecord]:
        """See `DeadLetters.find`."""
        with self.read("reading dead letters") as connection:
            rows = connection.execute(
                self.sql["find_dead_letters"],
                {
                    "number": wanted.number,
                    "consumer": wanted.consumer,
                    "session": None if wanted.session is None else wanted.session.encode(),
                    "reason": wanted.reason,
                    "status": wanted.status,
                    "limit": wanted.limit,
                },
            ).fetchall()
        return [_record(row) for row in rows]

    async def edit(self, number: int, *, body: bytes, fingerprint: bytes, by: str) -> None:
        """See `DeadLetters.edit`."""
        with self.write(f"editing dead letter {number}") as connection:
            row = self._waiting(connection, number)
            try:
                connection.execute(
                    self.sql["edit_dead_letter"],
                    {
                        "number": number,
                        "body": body,
                        "fingerprint": fingerprint,
                        "entry": _entry("edited", by, **replaced_body(row["body"])),
                    },
                )
            except sqlite3.IntegrityError as error:
                raise OperatorError(
                    f"dead letter {number}: another dead letter of this key has this very payload; "
                    "replay that one, and discard this one"
                ) from error
            if row["reason"] != Reason.CONFLICT and row["key"] is not None:
                connection.execute(
                    self.sql["accept_fingerprint"],
                    {
                        "subscription": row["subscription"],
                        "key": row["key"],
                        "fingerprint": fingerprint,
                    },
                )

    async def replay(self, number: int, *, by: str, as_new: bytes | None = None) -> None:
        """See `DeadLetters.replay`."""
        with self.write(f"replaying dead letter {number}") as connection:
            row = self._waiting(connection, number)
            if row["reason"] == Reason.CONFLICT and as_new is None:
                raise OperatorError(
                    f"dead letter {number} is a conflict: its key {_text(row['key'])} took effect, "
                    "or died, with another payload. Discard it, or replay it under a key of its "
                    "own with --as-new KEY"
                )
            self._set(connection, number, "queued", _entry("replayed", by, as_new=_text(as_new)))
            self._queue(connection, number, row, as_new)

    async def discard(self, number: int, *, by: str, why: str) -> None:
        """See `DeadLetters.discard`."""
        with self.write(f"discarding dead letter {number}") as connection:
            row = self._waiting(connection, number)
            self._set(connection, number, "discarded", _entry("discarded", by, why=why))
            connection.execute(self.sql["count"], (row["subscription"], "discarded", "", 1))

    def _queue(
        self,
        connection: sqlite3.Connection,
        number: int,
        row: dict[str, Any],
        as_new: bytes | None,
    ) -> None:
        position = zone(row["subscription"])[0] + Sender(connection, self.sql).draw(1)
        connection.execute(
            self.sql["take_held"],
            (
                position,
                row["session"],
                row["message_id"] if as_new is None else as_new,
                row["type"],
                row["format"],
                row["body"],
                row["headers"],
                row["sent_ms"],
                None,
                0,
                None,
                number,
            ),
        )

    def _waiting(self, connection: sqlite3.Connection, number: int) -> dict[str, Any]:
        cursor = connection.execute(self.sql["dead_letter"], (number,))
        found = cursor.fetchone()
        if found is None:
            raise OperatorError(f"there is no dead letter {number}")
        row = {column[0]: value for column, value in zip(cursor.description, found, strict=True)}
        if row["status"] != "dead":
            said = {
                "queued": "is queued for a replay already; wait for its end",
                "replayed": "was replayed and took effect",
                "discarded": "was discarded",
            }[row["status"]]
            raise OperatorError(f"dead letter {number} {said}")
        return row

    def _set(self, connection: sqlite3.Connection, number: int, status: str, entry: str) -> None:
        connection.execute(
            self.sql["set_dead_letter"], {"number": number, "status": status, "entry": entry}
        )


def _entry(what: str, by: str, **more: str | None) -> str:
    kept = {name: value for name, value in more.items() if value is not None}
    return json.dumps({"at_ms": wall_now(), "what": what, "by": by, **kept})


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
