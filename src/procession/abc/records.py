"""What stores are told at start and what they report to people. Values only."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from procession.message import Delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDeclaration:
    """A queue (its messages go to one consumer) or a topic (each subscriber gets its own copy).

    Attributes:
        duplicate_window_ms: a message id sent again within it is not stored again; 0 is off.
            A first layer that lowers the number of duplicates, never a replacement for the inbox.
    """

    name: str
    kind: Literal["queue", "topic"]
    duplicate_window_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All queues, and who reads them: (queue, consumer)."""

    queues: tuple[QueueDeclaration, ...]
    consumers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One incarnation of a worker process; its id is never used again."""

    id: str
    lease_ms: int
    host: str
    process: int
    consumers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What `Lane.fetch` read.

    Attributes:
        deliveries: in the order in which they may run; a session's own in its order, and its
            oldest waiting one first.
        alone: every one of them is a suspect: run each alone.
        changed: the fetch wrote something, so an empty batch is committed, not rolled back.
    """

    deliveries: Sequence[Delivery]
    alone: bool = False
    changed: bool = False


@dataclass(frozen=True, slots=True)
class InboxRow:
    """What the inbox says of one key: its `InboxState` number, and 32 bytes a fingerprint."""

    state: int
    fingerprint: bytes
    end: str | None = None
    recorded_ms: int | None = None
    out_of_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Which dead letters; None means any."""

    number: int | None = None
    consumer: str | None = None
    session: str | None = None
    reason: str | None = None
    status: str | None = "dead"
    limit: int = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRecord:
    """A dead letter with all that was kept of its message.

    Attributes:
        number: names it in commands.
        status: `dead` (waits for a decision), `queued` (a replay is under way), `replayed`,
            `discarded`.
        errors: one text for each attempt that failed, oldest first.
        copies: how often the same message came to the same end.
    """

    number: int
    consumer: str
    queue: str
    status: str
    reason: str
    detail: str
    key: bytes | None
    fingerprint: bytes | None
    message_id: bytes
    session: bytes | None
    type: str
    format: int
    body: bytes
    headers: Mapping[str, str]
    position: int
    attempts: int
    errors: tuple[str, ...]
    copies: int
    sent_at_ms: int
    died_at_ms: int
    history: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatus:
    """A session with messages waiting; `session` is None for those without a key together.

    Attributes:
        backlog: messages that wait, all of them; `held`: those set aside behind a retry.
        head_age_ms: how long ago its oldest waiting message was sent.
        holder: who owns it beyond a transaction, or None.
        dead_letters: how many wait for a decision.
    """

    consumer: str
    session: bytes | None
    backlog: int
    head_age_ms: int
    held: int
    holder: str | None
    retrying: bool
    dead_letters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """How many rows a purge erased."""

    messages: int
    inbox: int
    dead_letters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatus:
    """A consumer's numbers, as of one moment.

    Attributes:
        queue: "" for a consumer of the library, which reads none of ours.
        waiting: messages that may run now; `scheduled`: not due yet; `held`: behind a retry.
        head_age_ms: how long ago the oldest of those that wait or are held was sent; None where
            there is none.
        counts: (end, cause or "") to number, since the store was made.
    """

    queue: str
    consumer: str | None
    waiting: int
    scheduled: int
    held: int
    retrying_sessions: int
    owned_sessions: int
    dead_letters: int
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    reruns: int = 0
    head_age_ms: int | None = None


def replaced_body(body: bytes) -> dict[str, str]:
    r"""Return a body that an edit replaces as a dead letter's history keeps it: its text, or Base64
    where it is none (a zero is no text to PostgreSQL).

    Example:
        >>> replaced_body(b"{}"), replaced_body(b"\xff")
        ({'was': '{}'}, {'was_base64': '/w=='})
    """
    try:
        if b"\0" not in body:
            return {"was": body.decode()}
    except UnicodeDecodeError:
        pass
    return {"was_base64": base64.b64encode(body).decode()}
