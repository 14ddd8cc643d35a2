"""Writes messages into the queues' table, inside an open transaction of its caller.

Numbers are drawn here, under the write lock, so their order is the order of commits.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from procession.errors import ConfigurationError
from procession.message import Delivery, Outgoing
from procession.stores.sqlite.connection import wall_now
from procession.stores.sqlite.statements import insert_rows

NUMBER_BITS = 43


def zone(subscription: int) -> tuple[int, int]:
    """Return the ids between which the messages of a subscription lie, both excluded."""
    return subscription << NUMBER_BITS, (subscription + 1) << NUMBER_BITS


def headers_of(delivery: Delivery) -> str | None:
    """Return a delivery's headers as they are stored."""
    raw = delivery.raw_headers
    return raw if raw is None or isinstance(raw, str) else json.dumps(dict(raw))


class Sender:
    """Sends on one connection."""

    def __init__(self, connection: sqlite3.Connection, sql: dict[str, str]) -> None:
        self._connection = connection
        self._sql = sql

    def draw(self, number: int) -> int:
        """Draw numbers; return the first of them."""
        row = self._connection.execute(self._sql["draw_numbers"], (number,)).fetchone()
        return int(row[0]) - number + 1

    def send(self, messages: Sequence[Outgoing]) -> list[bool]:
        """Write the messages in order; return for each whether it was stored.

        Raises:
            ConfigurationError: a queue or topic is unknown, or a topic has no subscriber.
        """
        now = wall_now()
        readers: dict[str, tuple[tuple[int, ...], int]] = {}
        number = self.draw(len(messages))
        plain: list[Any] = []
        others: list[Any] = []
        stored = []
        for message in messages:
            target = message.target
            found = readers.get(target)
            if found is None:
                found = readers[target] = self._readers(target, now)
            subscriptions, window_ms = found
            fresh = not window_ms or self._remember(message, now, window_ms)
            stored.append(fresh)
            if not fresh:
                continue
            if message.is_plain:
                for subscription in subscriptions:
                    plain += (
                        subscription + number,
                        _blob(message.session),
                        bytearray(message.message_id),
                        message.type,
                        message.format,
                        bytearray(message.body),
                        now,
                    )
            else:
                for subscription in subscriptions:
                    others += _row(message, subscription + number, now)
            number += 1
        insert_rows(self._connection, self._sql["send_plain"], plain, width=7)
        insert_rows(self._connection, self._sql["send"], others, width=10)
        return stored

    def _readers(self, target: str, now: int) -> tuple[tuple[int, ...], int]:
        rows = self._connection.execute(self._sql["readers"], (target,)).fetchall()
        if not rows:
            raise ConfigurationError(
                f"queue or topic {target!r} is not declared: declare it with app.queue or "
                "app.topic and run the app, or `procession migrate`, once"
            )
        window_ms = max(row[3] for row in rows)
        if window_ms:
            self._connection.execute(
                self._sql["forget_ids"], {"queue": target, "now": now, "window": window_ms}
            )
        if rows[0][1] == "queue":
            return (zone(rows[0][0])[0],), window_ms
        subscribers = tuple(zone(row[0])[0] for row in rows if row[2] is not None)
        if not subscribers:
            raise ConfigurationError(
                f"topic {target!r} has no subscriber: what is sent to it now would reach nobody; "
                "start a consumer of it once, or run `procession migrate`"
            )
        return subscribers, window_ms

    def _remember(self, message: Outgoing, now: int, window_ms: int) -> bool:
        row = self._connection.execute(
            self._sql["remember_id"],
            {
                "queue": message.target,
                "message_id": message.message_id,
                "now": now,
                "window": window_ms,
                "body_hash": sha256(message.body).digest(),
            },
        ).fetchone()
        return row is not None


def _blob(value: bytes | None) -> bytearray | None:
    return None if value is None else bytearray(value)


def _row(message: Outgoing, place: int, now: int) -> tuple[Any, ...]:
    due_ms = message.due_ms if message.after_ms is None else now + message.after_ms
    later = due_ms is not None and due_ms > now
    return (
        -place if later else place,
        _blob(message.session),
        bytearray(message.message_id),
        message.type,
        message.format,
        bytearray(message.body),
        now,
        json.dumps(message.headers) if message.headers else None,
        None if message.lifetime_ms is None else now + message.lifetime_ms,
        due_ms if later else None,
    )
