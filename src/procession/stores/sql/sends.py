"""Plans the rows of messages that are sent, for table queues on servers: who reads them, their
numbers, and the tokens that tell which sessions have work.

Numbers are drawn here, in the transaction that sends: number = block * 65,536 + place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from procession.errors import ConfigurationError
from procession.message import Delivery, Outgoing

PLACE_BITS = 16
BLOCK_SIZE = 1 << PLACE_BITS
KEYLESS_SESSION = b""


class Found(Protocol):
    """What a statement returned."""

    @property
    def count(self) -> int | None: ...

    def rows(self) -> list[tuple[Any, ...]]: ...


class Run(Protocol):
    """Runs a named statement now, inside the caller's transaction."""

    def __call__(self, name: str, **values: Any) -> Found: ...


class Readers(NamedTuple):
    """Who reads a target: numbers of subscriptions, and the duplicate window."""

    subscriptions: tuple[int, ...]
    window_ms: int


class Plan(NamedTuple):
    """What to write.

    Attributes:
        rows: subscription, session, number (negative while scheduled), message id, type, format,
            body, headers, sent, expires, due; times in milliseconds since 1970 UTC.
        tokens: subscription, session, its lowest number here.
        stored: for each message whether it was stored.
        spare: numbers that were drawn beside.
    """

    rows: list[tuple[Any, ...]]
    tokens: list[tuple[int, bytes, int]]
    stored: list[bool]
    spare: list[int]


class Sender:
    """Plans the sends of one transaction after another.

    Args:
        run: runs a statement of that transaction.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def plan(self, messages: Sequence[Outgoing], *, also: int = 0) -> Plan:
        """Draw numbers and return the rows in order.

        Args:
            messages: at most 65,536 rows with all their readers.
            also: numbers to draw beside, for other rows.

        Raises:
            ConfigurationError: a queue or topic is unknown, or a topic has no subscriber.
        """
        readers = {
            target: self._readers(target) for target in dict.fromkeys(m.target for m in messages)
        }
        ((block, now),) = self._run("draw_block").rows()
        number, last = block << PLACE_BITS, (block + 1) << PLACE_BITS
        rows: list[tuple[Any, ...]] = []
        tokens: dict[tuple[int, bytes], int] = {}
        stored = []
        for message in messages:
            subscriptions, window_ms = readers[message.target]
            fresh = not window_ms or self._remember(message, window_ms)
            stored.append(fresh)
            if not fresh:
                continue
            session = message.session or KEYLESS_SESSION
            if message.is_plain:
                headers = expires = due = None
            else:
                headers, expires, due = _options(message, now)
            for subscription in subscriptions:
                if number >= last:
                    ((block, _),) = self._run("draw_block").rows()
                    number, last = block << PLACE_BITS, (block + 1) << PLACE_BITS
                rows.append(
                    (
                        subscription,
                        session,
                        number if due is None else -number,
                        message.message_id,
                        message.type,
                        message.format,
                        message.body,
                        headers,
                        now,
                        expires,
                        due,
                    )
                )
                if session and due is None:
                    tokens.setdefault((subscription, session), number)
                number += 1
        spare = list(range(number, number + also))
        if number + also > last:
            ((block, _),) = self._run("draw_block").rows()
            spare = list(range(block << PLACE_BITS, (block << PLACE_BITS) + also))
        return Plan(rows, [(*key, low) for key, low in tokens.items()], stored, spare)

    def _readers(self, target: str) -> Readers:
        rows = self._run("readers", queue=target).rows()
        if not rows:
            raise ConfigurationError(
                f"queue or topic {target!r} is not declared: declare it with app.queue or "
                "app.topic and run the app, or `procession migrate`, once"
            )
        window_ms = max(row[3] for row in rows)
        if window_ms:
            self._run("forget_ids", queue=target, window=window_ms)
        if rows[0][1] == "queue":
            return Readers((rows[0][0],), window_ms)
        subscribers = tuple(row[0] for row in rows if row[2] is not None)
        if not subscribers:
            raise ConfigurationError(
                f"topic {target!r} has no subscriber: what is sent to it now would reach nobody; "
                "start a consumer of it once, or run `procession migrate`"
            )
        return Readers(subscribers, window_ms)

    def _remember(self, message: Outgoing, window_ms: int) -> bool:
        found = self._run(
            "remember_id",
            queue=message.target,
            message_id=message.message_id,
            window=window_ms,
            body_hash=sha256(message.body).digest(),
        )
        return bool(found.count)


def _options(message: Outgoing, now: int) -> tuple[str | None, int | None, int | None]:
    due_ms = message.due_ms if message.after_ms is None else now + message.after_ms
    return (
        json.dumps(message.headers) if message.headers else None,
        None if message.lifetime_ms is None else now + message.lifetime_ms,
        due_ms if due_ms is not None and due_ms > now else None,
    )


def headers_of(delivery: Delivery) -> str | None:
    """Return a delivery's headers as they are stored."""
    raw = delivery.raw_headers
    return raw if raw is None or isinstance(raw, str) else json.dumps(dict(raw))
