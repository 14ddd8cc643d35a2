"""What a message is (its content, which never changes) and what a delivery is (one in hand).

Values only. `Message` is what users see; `Outgoing` is a message on its way into a queue;
`Delivery` is the row or broker message that a lane works on. None of them is shared between runs.
"""

from __future__ import annotations

import enum
import json
import os
import random
import time
from collections.abc import Mapping
from types import MappingProxyType

KEYLESS = b"\x00"
"""First byte of the session that a message without one gets when it must wait. Users' keys never
hold NUL, so it cannot clash."""


NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class BodyFormat(enum.IntEnum):
    """How a body was written. The numbers are stored; they never change."""

    RAW = 0
    CANONICAL_JSON = 1
    JSON = 2


class Message:
    """The immutable content of a message, as a handler sees it in `ctx.message`."""

    __slots__ = ("_delivery", "_headers")

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._headers: Mapping[str, str] | None = None

    @property
    def id(self) -> str:
        """The producer's message id."""
        return self._delivery.message_id.decode()

    @property
    def session(self) -> str | None:
        """The session key, or None."""
        key = self._delivery.session
        return None if key is None or key.startswith(KEYLESS) else key.decode()

    @property
    def type(self) -> str:
        """The message type, or ""."""
        return self._delivery.type

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, read-only."""
        if self._headers is None:
            self._headers = MappingProxyType(dict(self._delivery.headers))
        return self._headers

    def header(self, name: str) -> str | None:
        """Return a header's text; None where there is none, or where another program wrote headers
        that nobody can read, at which `headers` raises.
        """
        return self._delivery.header(name)

    @property
    def body(self) -> bytes:
        """The body as it was sent."""
        return self._delivery.body

    @property
    def sent_at_ms(self) -> int:
        """When it was sent, milliseconds since 1970 UTC."""
        return self._delivery.sent_at_ms

    @property
    def replayed(self) -> bool:
        """Whether it is a replayed dead letter, which comes out of its order."""
        return self._delivery.replay_of is not None

    @property
    def attempt(self) -> int:
        """The number of this lone run, 0 in company."""
        return self._delivery.attempts

    def __repr__(self) -> str:
        return f"<Message {self.id!r} session={self.session!r} type={self.type!r}>"


class Outgoing:
    """A message on its way: everything a queue keeps, already encoded and checked.

    Attributes:
        format: a `BodyFormat`, as a plain int: drivers bind one faster than an enum.
        is_plain: it has none of the options below; who sets one makes this False.
        headers: text by name, or None.
        after_ms: not before this long after the send, by the store's clock; or None.
        due_ms: not before this moment, milliseconds since 1970 UTC; or None.
        lifetime_ms: worth nothing this long after the send; or None.
    """

    __slots__ = (
        "after_ms",
        "body",
        "due_ms",
        "format",
        "headers",
        "is_plain",
        "lifetime_ms",
        "message_id",
        "session",
        "target",
        "type",
    )

    def __init__(
        self,
        target: str,
        message_id: bytes,
        session: bytes | None,
        type: str,  # noqa: A002  the field's own word
        format: int,  # noqa: A002
        body: bytes,
    ) -> None:
        self.target = target
        self.message_id = message_id
        self.session = session
        self.type = type
        self.format = format
        self.body = body
        self.is_plain = True
        self.headers: Mapping[str, str] | None = None
        self.after_ms: int | None = None
        self.due_ms: int | None = None
        self.lifetime_ms: int | None = None


class Delivery:
    """One message in a lane's hand, with what the inbox already says of its key.

    Attributes:
        position: the queue's own order; opaque, comparable within one queue.
        lock: what the source needs to settle it (a table queue needs nothing more).
        delivery_count: the broker's own count, a hint; 1 where there is none.
        lock_expired: it comes again because the lock of an earlier delivery ended.
        attempts: runs begun alone, this one included once it has begun.
        held: it lies in the store's list of held messages.
        state, fingerprint: the inbox row of its key as read with the fetch, or None.
    """

    __slots__ = (
        "attempts",
        "body",
        "delivery_count",
        "errors",
        "expires_ms",
        "fingerprint",
        "format",
        "held",
        "lock",
        "lock_expired",
        "message_id",
        "position",
        "raw_headers",
        "replay_of",
        "sent_at_ms",
        "session",
        "state",
        "type",
    )

    def __init__(  # noqa: PLR0913, PLR0917  a row's columns
        self,
        position: int,
        session: bytes | None,
        message_id: bytes,
        type: str,  # noqa: A002
        format: int,  # noqa: A002
        body: bytes,
        raw_headers: str | Mapping[str, str] | None,
        sent_at_ms: int,
        expires_ms: int | None = None,
        attempts: int = 0,
        errors: str | None = None,
        replay_of: int | None = None,
        state: int | None = None,
        fingerprint: bytes | None = None,
        held: bool = False,  # noqa: FBT001, FBT002  as above
        delivery_count: int = 1,
        lock: object = None,
        lock_expired: bool = False,  # noqa: FBT001, FBT002  as above
    ) -> None:
        self.position = position
        self.session = session
        self.message_id = message_id
        self.type = type
        self.format = format
        self.body = body
        self.raw_headers = raw_headers
        self.sent_at_ms = sent_at_ms
        self.expires_ms = expires_ms
        self.attempts = attempts
        self.errors = errors
        self.replay_of = replay_of
        self.state = state
        self.fingerprint = fingerprint
        self.held = held
        self.delivery_count = delivery_count
        self.lock = lock
        self.lock_expired = lock_expired

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers; stores keep them as JSON text, which is read when they are asked for."""
        raw = self.raw_headers
        if raw is None:
            return NO_HEADERS
        if isinstance(raw, str):
            found = json.loads(raw)
            if not isinstance(found, dict):
                msg = f"headers of message {self.message_id!r} are no JSON object: {raw[:100]!r}"
                raise ValueError(msg)  # noqa: TRY004  as of text that is no JSON at all
            raw = self.raw_headers = found
        return raw

    def header(self, name: str) -> str | None:
        """Return a header's text; None where there is none, or where another program wrote headers
        that nobody can read.
        """
        if self.raw_headers is None:
            return None
        try:
            value = self.headers.get(name)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, str) else None


_random = random.Random()  # noqa: S311  ids are unique, not secret
# A forked child must not draw its parent's ids.
os.register_at_fork(after_in_child=_random.seed)


def new_id() -> str:
    """Return a fresh UUIDv7 (RFC 9562, section 5.7): unique, and in order of time.

    Time-ordered ids keep the inbox's index growing at its end, where that is cheap.

    Example:
        >>> len(new_id())
        36
    """
    value = (
        (time.time_ns() // 1_000_000) << 80
        | 0x7 << 76
        | _random.getrandbits(12) << 64
        | 0x2 << 62
        | _random.getrandbits(62)
    )
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
