"""The rules of queues and topics, and how a payload becomes a message by them.

A rule stands on the queue and holds for whoever sends and whoever consumes; a consumer's own
`session=` and `key=` are shorthand for the same declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from procession.abc import QueueDeclaration
from procession.codecs.json import JsonCodec
from procession.config import Settings
from procession.core.keys import (
    KeyPolicy,
    KeySpec,
    encode_key,
    key_policy,
    session_policy,
)
from procession.errors import ConfigurationError, MessageError, Reason
from procession.message import NO_HEADERS, BodyFormat, Outgoing, new_id

NAME_CHARS_MAX = 200
HEADERS_BYTES_MAX = 64 * 1024
SendHook = Callable[[], Mapping[str, str]]


def check_name(name: object, what: str) -> str:
    """Return a name that is fit for tables and commands.

    Raises:
        ConfigurationError: it is no text, empty, too long, or has blanks at an end or controls.
    """
    if not isinstance(name, str) or not name or name != name.strip() or not name.isprintable():
        raise ConfigurationError(f"{what} {name!r}: give a printable name without outer blanks")
    if len(name) > NAME_CHARS_MAX:
        raise ConfigurationError(f"{what} {name[:40]!r}…: at most {NAME_CHARS_MAX} characters")
    return name


class Queue:
    """A declared queue or topic with its rules."""

    def __init__(
        self, name: str, kind: Literal["queue", "topic"], *, duplicate_window_ms: int = 0
    ) -> None:
        self.name = name
        self.kind: Literal["queue", "topic"] = kind
        self.id_what = f"message id for {name!r}"
        self.duplicate_window_ms = duplicate_window_ms
        self.session: KeyPolicy | None = None
        self.key: KeyPolicy | None = None

    def rule(self, what: str, *, session: KeySpec | None, key: KeySpec | None) -> None:
        """Add rules; the same again is welcome, another one is not.

        Raises:
            ConfigurationError: a rule differs from one given before.
        """
        if session is not None:
            self.session = self._same(what, "session", self.session, session_policy(session))
        if key is not None:
            self.key = self._same(what, "key", self.key, key_policy(key))

    def _same(self, what: str, rule: str, old: KeyPolicy | None, new: KeyPolicy) -> KeyPolicy:
        if old is not None and old != new:
            raise ConfigurationError(
                f"{what} declares {rule} as {new.description}, but {self.kind} {self.name!r} has "
                f"{old.description}: a rule holds for all who send and consume, so keep one"
            )
        return new

    @property
    def declaration(self) -> QueueDeclaration:
        """What the store is told."""
        return QueueDeclaration(
            name=self.name, kind=self.kind, duplicate_window_ms=self.duplicate_window_ms
        )


class Queues:
    """All queues of an app, and the types of its messages.

    Attributes:
        send_hooks: each returns headers for the message that is being made.
    """

    def __init__(self, settings: Settings) -> None:
        self.send_hooks: list[SendHook] = []
        self._queues: dict[str, Queue] = {}
        self._type_names: dict[type, str] = {}
        self._codec = JsonCodec()
        self._settings = settings

    def __iter__(self) -> Iterator[Queue]:
        return iter(self._queues.values())

    def declare(
        self,
        name: str,
        kind: Literal["queue", "topic"],
        *,
        duplicate_window: timedelta | None = None,
    ) -> Queue:
        """Add a queue or topic, or return the one that is there.

        Raises:
            ConfigurationError: it is there as the other kind, or with another window.
        """
        check_name(name, kind)
        window_ms = 0 if duplicate_window is None else int(duplicate_window.total_seconds() * 1000)
        queue = self._queues.get(name)
        if queue is None:
            if window_ms < 0:
                raise ConfigurationError(f"{kind} {name!r}: duplicate_window must not be negative")
            queue = self._queues[name] = Queue(name, kind, duplicate_window_ms=window_ms)
        elif queue.kind != kind or (
            duplicate_window is not None and queue.duplicate_window_ms != window_ms
        ):
            raise ConfigurationError(
                f"{kind} {name!r} is declared already, as a {queue.kind} with a duplicate window "
                f"of {queue.duplicate_window_ms} ms"
            )
        return queue

    def get(self, name: str) -> Queue:
        """Return a declared queue or topic.

        Raises:
            ConfigurationError: there is none of that name.
        """
        queue = self._queues.get(name)
        if queue is None:
            known = ", ".join(sorted(self._queues)) or "none"
            raise ConfigurationError(
                f"queue or topic {name!r} is not declared (declared: {known}): declare it with "
                "app.queue or app.topic, or give it a consumer"
            )
        return queue

    def name_type(self, type_: type, name: str) -> None:
        """Give a payload class its message type."""
        check_name(name, "message type")
        taken = next((known for known, used in self._type_names.items() if used == name), None)
        if taken is not None and taken is not type_:
            raise ConfigurationError(
                f"message type {name!r} names {taken.__qualname__} already, and now "
                f"{type_.__qualname__}"
            )
        self._type_names[type_] = name

    def type_name(self, type_: type) -> str:
        """Return the message type of a payload class: its own name unless it was given one;
        "" for mappings, bytes and other plain values.
        """
        named = self._type_names.get(type_)
        if named is not None:
            return named
        return "" if type_.__module__ == "builtins" else type_.__name__

    def outgoing(  # noqa: PLR0913  the parameters of a send
        self,
        target: str,
        payload: Any,
        *,
        message_id: str | None = None,
        session: str | None = None,
        after: timedelta | None = None,
        due: datetime | None = None,
        expires: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Outgoing:
        """Return the payload as a message for a queue or topic, encoded and checked.

        Raises:
            ConfigurationError: the queue is not declared, or times contradict each other.
            MessageError: the payload cannot be serialized or is too large, or a key is not valid
                or not what the queue's rule says.
        """
        queue = self._queues.get(target) or self.get(target)
        if self.send_hooks:
            headers = self._with_hooks(headers or NO_HEADERS)
        if message_id is None:
            key = new_id().encode()
        else:
            key = encode_key(message_id, what=queue.id_what, reason=Reason.BAD_KEY)
        kind = type(payload)
        if kind is bytes:
            body, body_format = payload, int(BodyFormat.RAW)
        else:
            body, body_format = self._codec.encode(payload), int(BodyFormat.CANONICAL_JSON)
        if len(body) > self._settings.payload_max:
            raise MessageError(
                Reason.TOO_LARGE,
                f"message {message_id or ''!r} for {target!r} has {len(body)} bytes, the limit is "
                f"{self._settings.payload_max} (settings.payload_max): send a reference instead",
            )
        session_key = None
        if queue.session is not None:
            session_key = queue.session.key(payload, key, headers or NO_HEADERS)
        if session is not None:
            session_key = _given(queue, session, session_key)
        outgoing = Outgoing(
            target,
            key,
            session_key,
            self.type_name(kind),
            body_format,
            body,
        )
        if headers or after is not None or due is not None or expires is not None:
            _add_options(outgoing, after=after, due=due, expires=expires, headers=headers)
        return outgoing

    def _with_hooks(self, given: Mapping[str, str]) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        for hook in self.send_hooks:
            headers.update(hook())
        headers.update(given)
        return headers


def _given(queue: Queue, session: str, ruled: bytes | None) -> bytes:
    """Return a session that the sender named; where the queue has a rule, the two must agree."""
    given = encode_key(session, what=f"session for {queue.name!r}", reason=Reason.BAD_SESSION)
    if queue.session is not None and given != ruled:
        raise MessageError(
            Reason.SESSION_MISMATCH,
            f"session {session!r} was given for {queue.name!r}, but its rule "
            f"({queue.session.description}) yields {(ruled or b'').decode()!r}",
        )
    return given


def _add_options(
    outgoing: Outgoing,
    *,
    after: timedelta | None,
    due: datetime | None,
    expires: timedelta | None,
    headers: Mapping[str, str] | None,
) -> None:
    outgoing.is_plain = False
    if after is not None and due is not None:
        raise ConfigurationError("give after or due, not both")
    if after is not None:
        outgoing.after_ms = _milliseconds(after, "after")
    if due is not None:
        if due.tzinfo is None:
            raise ConfigurationError(f"due={due!r} has no zone: which moment is it?")
        outgoing.due_ms = int(due.astimezone(UTC).timestamp() * 1000)
    if expires is not None:
        outgoing.lifetime_ms = _milliseconds(expires, "expires")
    if headers:
        wrong = [
            name
            for name, value in headers.items()
            if type(name) is not str or type(value) is not str
        ]
        if wrong:
            raise ConfigurationError(f"headers {wrong!r}: names and values are text")
        try:
            size = sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"headers that are no text: {error.reason}") from error
        if size > HEADERS_BYTES_MAX:
            raise MessageError(
                Reason.TOO_LARGE, f"headers of {size} bytes, the limit is {HEADERS_BYTES_MAX}"
            )
        outgoing.headers = dict(headers)


def _milliseconds(duration: timedelta, what: str) -> int:
    milliseconds = int(duration.total_seconds() * 1000)
    if milliseconds < 0:
        raise ConfigurationError(f"{what}={duration!r} must not be negative")
    return milliseconds
