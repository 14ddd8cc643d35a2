"""Every protocol: what an adapter promises. The docstrings are the contract, in the words of the
guarantees: what is durable on return, what a second call means, what is raised.

All protocols of stores and sources are `async def`. A blocking adapter says `blocking = True` and
never suspends: its methods are driven by one `send(None)` on the thread that owns it. No method
may be called concurrently on one object, unless it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from procession.abc.changes import Changes, DeadLetter, Entry, Hold
from procession.abc.records import (
    ConsumerStatus,
    DeadLetterFilter,
    DeadLetterRecord,
    Fetched,
    InboxRow,
    Purged,
    QueueDeclaration,
    SessionStatus,
    Topology,
    WorkerRecord,
)
from procession.errors import TransientError
from procession.message import Delivery, Outgoing

__all__ = [
    "Changes",
    "Clock",
    "Codec",
    "ConsumerStatus",
    "DeadLetter",
    "DeadLetterFilter",
    "DeadLetterRecord",
    "DeadLetters",
    "Entry",
    "Features",
    "Fetched",
    "Hold",
    "InboxRow",
    "Lane",
    "MarkingPublisher",
    "Publisher",
    "Purged",
    "QueueDeclaration",
    "Receipt",
    "Rows",
    "SessionSource",
    "SessionStatus",
    "Settlement",
    "Source",
    "Sql",
    "Store",
    "Topology",
    "Upkeep",
    "WorkerRecord",
    "Workers",
]


class Clock(Protocol):
    """Where time comes from. `monotonic_s` measures; `wall_ms` is written; neither decides a lease:
    that is the store's own clock.
    """

    def monotonic_s(self) -> float: ...

    def wall_ms(self) -> int: ...


class Codec(Protocol):
    """Turns payloads into bodies and back."""

    content_type: str

    def encode(self, payload: object) -> bytes:
        """Return canonical bytes: equal payloads give equal bytes. Raises `MessageError`."""
        ...

    def decoder(self, type_: Any) -> Callable[[bytes], Any]:
        """Return a function that makes a fresh payload of the type at each call; it raises
        `MessageError`. Cached, cheap to ask for.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What differs between stores, so that no flow asks for a dialect.

    Attributes:
        blocking: its methods never suspend.
        savepoints: `Lane.undo` takes back one handler and keeps the batch.
        concurrent_batches: transactions of several lanes overlap, so a session must be accepted
            before its messages are read. Where it is False, the transaction is the acceptance:
            nobody else reads or writes between `begin` and `commit`.
        durable: what is committed survives the process.
        sql: handlers may use `ctx.execute` and `ctx.write`.
    """

    blocking: bool
    savepoints: bool
    concurrent_batches: bool
    durable: bool
    sql: bool


class Rows(Protocol):
    """What a statement returned: its rows as tuples, and how many rows it touched."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class Sql(Protocol):
    """What a handler may do inside the batch transaction. Plain calls in every colour.

    Attributes:
        doomed: the current handler's first database error outside of a savepoint, or None.
        lost: an error that ended the whole transaction, or None.

    Each call first checks that the lane's transaction is still open, so nothing ever runs outside
    of it. After an error that was not caught inside `savepoint()` the handler's run has failed,
    whatever the handler does with the error.

    Raises:
        TransactionMisuse: for anything that would end the transaction, change the schema, or
            touch this package's own tables.
    """

    @property
    def doomed(self) -> BaseException | None: ...

    @property
    def lost(self) -> TransientError | None: ...

    def execute(self, statement: str, parameters: Mapping[str, Any]) -> Rows: ...

    def write(self, statement: str, parameters: Mapping[str, Any]) -> None: ...

    def savepoint(self) -> AbstractContextManager[None]: ...

    @property
    def connection(self) -> Any: ...


class Lane(Protocol):
    """One working connection of one consumer: one transaction at a time.

    `interrupt` alone may be called from another thread.
    """

    @property
    def sql(self) -> Sql: ...

    async def accept(self, limit: int) -> None:
        """Own sessions that have work, up to `limit` messages' worth, in a transaction of its own.

        Skips what others lock and never waits for them. Does nothing where the transaction is the
        acceptance. Durable on return; a second call adds to what is owned.
        """
        ...

    async def own(self, sessions: Collection[bytes]) -> set[bytes]:
        """Own these sessions, in a transaction of its own; return those that are ours now.

        A session that another live holder owns is left out. The holder that is written names this
        one acceptance: it is never used again, not even by this lane. Durable on return.
        """
        ...

    async def release(self, sessions: Collection[bytes]) -> None:
        """Give these sessions up, in a transaction of its own. Does nothing to a session that is
        not ours any more. Durable on return.
        """
        ...

    async def begin(self) -> None:
        """Open the transaction.

        Raises:
            WorkerLost: this worker was taken over; it must register again under a new id.
            StoreUnavailable: the store cannot be reached, or stayed locked.
        """
        ...

    async def fetch(self, limit: int) -> Fetched:
        """Read up to `limit` messages that may run now, inside the transaction.

        Never returns a message whose session is owned by another holder, waits for a retry, or
        has an older message waiting. Costs the same however many messages wait.
        """
        ...

    async def fetch_one(self, position: int) -> Delivery | None:
        """Read one message again, inside the transaction: None if it is gone or not ours."""
        ...

    async def waiting(self, sessions: Collection[bytes]) -> set[bytes]:
        """Return which of these sessions have held messages, inside the transaction: a later
        message of them must go behind those.
        """
        ...

    async def judge(self, keys: Sequence[bytes]) -> dict[bytes, InboxRow]:
        """Return the inbox rows of these keys, as other transactions committed them."""
        ...

    async def begin_attempt(self, delivery: Delivery, *, again: bool = False) -> int:
        """Count a lone run before it begins, in a transaction of its own; return its number.

        Own the message's session (a message without one becomes a session of its own) until
        `flush` releases it, so a run that never ends is counted for this message and no other.

        Args:
            again: the run that was counted last was cut short by the store, not by the message:
                it is the same attempt, which is not counted anew.

        Raises:
            MessageGone: it is not there any more.
            SessionLost: somebody else owns its session.
        """
        ...

    def mark(self) -> None:
        """Say that the next statement belongs to another handler than the last one."""
        ...

    async def undo(self) -> bool:
        """Take back what the handler since the last `mark` wrote; return False where the whole
        transaction is lost with it and must be rolled back.
        """
        ...

    async def flush(self, changes: Changes) -> None:
        """Write the batch's own rows, last before the commit, in the lock order: fence, sends,
        inbox, dead letters, messages, counts.

        Raises:
            SessionLost: the fence did not hold.
            DuplicateKey: another transaction recorded one of the keys.
            MessageGone: fewer messages could be removed than were handled.
        """
        ...

    async def commit(self) -> None:
        """Commit. On return all of it is durable; after an error none of it is.

        Raises:
            TransactionMisuse: the transaction was no longer ours to commit.
        """
        ...

    async def rollback(self) -> None:
        """Roll back. Harmless twice, and without a transaction."""
        ...

    async def changed(self) -> bool:
        """Return whether there may be work since the last call; cheap, and without a lock."""
        ...

    async def doze(self) -> bool:
        """Wait for a short while for a sign of work, where the store gives signs; return False at
        once where it gives none: then whoever waits looks again by itself.

        Called after `changed` has said no. A sign may come for nothing, or be missed: `changed`
        alone knows.
        """
        ...

    def interrupt(self) -> None:
        """Take the connection away from a handler that hangs, from another thread.

        On return the transaction is rolled back, or will be as soon as its statement returns, and
        no later statement of the handler can run, in autocommit or otherwise.
        """
        ...

    async def close(self) -> None:
        """Release what is owned and close. Harmless twice."""
        ...


class Workers(Protocol):
    """The leases of worker processes. Each method is one transaction, durable on return."""

    async def register(self, worker: WorkerRecord) -> None:
        """Begin a lease for an incarnation that never existed before."""
        ...

    async def renew(self, worker: str) -> None:
        """Extend the lease by its length from now.

        Raises:
            WorkerLost: it was taken over. An expired lease alone is renewed.
        """
        ...

    async def expired(self) -> list[str]:
        """Return the workers whose lease has ended, by the store's clock."""
        ...

    async def known(self) -> list[str]:
        """Return all workers that have neither left nor been taken over."""
        ...

    async def take_over(self, worker: str, *, dead: bool = False) -> list[str] | None:
        """End an expired worker: free all it owned, and make suspects of what it may have held.

        Compare-and-set: a worker that renewed meanwhile is left alone, and None is returned.
        `dead` says that the caller saw the process end, so its lease does not matter. Otherwise
        return the consumers it served. A second call returns None.
        """
        ...

    async def leave(self, worker: str) -> None:
        """End a worker that stopped in good order: nothing of it is suspect."""
        ...

    async def close(self) -> None: ...


class DeadLetters(Protocol):
    """What operators do with dead letters. Each method is one transaction, durable on return."""

    async def find(self, wanted: DeadLetterFilter) -> list[DeadLetterRecord]:
        """Return dead letters in order of consumer, session and position."""
        ...

    async def edit(self, number: int, *, body: bytes, fingerprint: bytes, by: str) -> None:
        """Replace the body; the old one stays in the history, as `replaced_body` writes it. The
        inbox then accepts the old and the new fingerprint.

        Raises:
            OperatorError: it is not waiting for a decision any more.
        """
        ...

    async def replay(self, number: int, *, by: str, as_new: bytes | None = None) -> None:
        """Queue it again, in its session; only this run may move the key on from `dead`.

        Compare-and-set: of several calls one queues it, the others raise.

        Raises:
            OperatorError: it is queued, replayed or discarded already, or it is a conflict and
                no new key was given.
        """
        ...

    async def discard(self, number: int, *, by: str, why: str) -> None:
        """End it for good. Raises `OperatorError` as `replay` does."""
        ...

    async def close(self) -> None: ...


class Upkeep(Protocol):
    """What keeps a store small, and what people ask of it. Each method is one transaction."""

    async def prune(self, *, retention_ms: int, resend_horizon_ms: int, limit: int) -> int | None:
        """Look at the next `limit` keys and forget those that nothing can ask for any more; return
        how many, or None at the end of the walk, which then begins again.

        A key stays while it is held, dead or running, while a dead letter of it waits for a
        decision, while it is younger than the retention, and while it is younger than the oldest
        waiting message of its queue less the resend horizon (G8). Several pruners are harmless.
        """
        ...

    async def prunable(self, *, retention_ms: int) -> int:
        """Return how many keys are older than the retention; what `prune` keeps is among them."""
        ...

    async def purge_key(self, consumer: str, key: bytes) -> Purged:
        """Erase all that is kept of a key. A later copy of its message would run again.

        Raises:
            OperatorError: the consumer is unknown.
        """
        ...

    async def purge_session(self, consumer: str, session: bytes) -> Purged:
        """Erase a session's waiting messages and dead letters, and what the inbox has of their
        keys. Keys that were done before are known by no session and stay; purge them by key."""
        ...

    async def sessions(
        self, *, consumer: str | None = None, session: bytes | None = None, limit: int = 100
    ) -> list[SessionStatus]:
        """Return sessions with messages waiting, the longest backlog first."""
        ...

    async def close(self) -> None: ...


class Store(Protocol):
    """One database. `open` first; lanes, workers, publishers and dead letters are made from it,
    each with a connection of its own, used by one thread at a time.
    """

    features: Features

    async def open(self, *, migrate: Literal["auto", "check"]) -> None:
        """Connect, and bring the schema up to date or check it.

        Raises:
            ConfigurationError: the schema is newer than this code, or missing and
                `migrate="check"`, or the file is no database.
        """
        ...

    async def declare(self, topology: Topology) -> None:
        """Make rows of queues, topics and subscriptions. Harmless twice.

        Raises:
            ConfigurationError: a queue belongs to a consumer of another name.
        """
        ...

    async def lane(self, consumer: str, *, worker: str, number: int) -> Lane: ...

    async def workers(self) -> Workers: ...

    async def publisher(self) -> MarkingPublisher: ...

    async def dead_letters(self) -> DeadLetters: ...

    async def upkeep(self) -> Upkeep: ...

    async def status(self) -> list[ConsumerStatus]: ...

    async def inbox(self, consumer: str, key: bytes) -> InboxRow | None: ...

    async def skip_waits(self) -> int:
        """Make every retry and scheduled message due now; return how many waited."""
        ...

    async def close(self) -> None: ...


class Publisher(Protocol):
    """Puts messages into queues and topics."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        """Publish in order, all or none where the transport can. On return they are durable.

        After an error it is unknown which were stored; the same call again, with the same message
        ids, is safe for consumers that deduplicate. Order within a session is the order of the
        sequence, over calls the order of calls.

        Raises:
            ConfigurationError: the queue or topic is not declared, or a topic has no subscriber.
        """
        ...

    async def close(self) -> None: ...


class MarkingPublisher(Publisher, Protocol):
    """A publisher that keeps a number with what it sends, so that a long send can be resumed."""

    async def publish_marked(
        self, messages: Sequence[Outgoing], *, mark: str, number: int
    ) -> Sequence[Receipt]:
        """As `publish`, all or none, with the mark's number in the same transaction."""
        ...

    async def marked(self, mark: str) -> int:
        """Return the mark's number, 0 where there is none."""
        ...


class Receipt(NamedTuple):
    """What became of a published message.

    Attributes:
        message_id: the id under which it went.
        stored: False where a duplicate detection window folded it into an earlier one.
    """

    message_id: bytes
    stored: bool = True


@dataclass(frozen=True, slots=True)
class Settlement:
    """What to tell the broker about one delivery, after the commit.

    Attributes:
        action: `complete` takes it off the queue; `abandon` gives it back in its place.
        after_ms: with `abandon`: not before this many milliseconds.
    """

    delivery: Delivery
    action: Literal["complete", "abandon"] = "complete"
    after_ms: int = 0


class Source(Protocol):
    """Hands out a broker's messages under a lock (peek-lock)."""

    async def receive(self, limit: int) -> list[Delivery]:
        """Return up to `limit` messages, locked for this source; empty when none wait.

        A session's messages come in its order. A message that was not settled comes again, here
        or elsewhere, with a higher `delivery_count`.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Tell the broker. A delivery whose lock is gone is passed over: its message comes again
        and is judged by the inbox. Harmless twice.
        """
        ...

    async def extend(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Renew the locks; return the deliveries whose lock is lost."""
        ...

    async def close(self) -> None:
        """Give back what is locked, at once, and close. Harmless twice."""
        ...


class SessionSource(Source, Protocol):
    """A source that locks whole sessions: while it has one, nobody else receives of it."""

    async def release(self, sessions: Collection[bytes]) -> None:
        """Give sessions back. Their unsettled messages come again, first and in order."""
        ...
