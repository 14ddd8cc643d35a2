"""The library: inbox and outbox on the user's own open connection, in the user's own transaction.

It inserts the marker, or the messages, and never commits: what the user commits is there together,
what the user rolls back is gone together. Whatever else an app does (order, retries, dead letters,
workers) stays with the user.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self, assert_never

from procession.app import App
from procession.app.queues import Queues, check_name
from procession.codecs.json import JsonCodec
from procession.config import Settings
from procession.core.fingerprints import fingerprint
from procession.core.inbox import Verdict, judge
from procession.core.keys import encode_key
from procession.errors import ConfigurationError, Conflict, KeyDead, KeyWaits, Reason
from procession.message import Outgoing
from procession.outcome import End
from procession.stores.sqlite.library import UserConnection

_CODEC = JsonCodec()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the inbox says of a key. True if the key is fresh: this is the one time to act on it.

    Attributes:
        verdict: FRESH, DUPLICATE or CONFLICT.
        end: how the message of a known key ended, such as "processed"; None for a fresh one.
        recorded_at_ms: when it did, milliseconds since 1970 UTC; None for a fresh one.
    """

    verdict: Verdict
    end: str | None = None
    recorded_at_ms: int | None = None

    def __bool__(self) -> bool:
        return self.verdict is Verdict.FRESH


class _OnConnection:
    """What inbox and outbox share: the user's connection."""

    def __init__(self, connection: sqlite3.Connection, *, table_prefix: str) -> None:
        self._connection = _user_connection(connection, table_prefix)

    @classmethod
    def prepare(cls, connection: sqlite3.Connection, *, table_prefix: str = "procession_") -> None:
        """Make the tables, or bring them up to date. Harmless twice; `procession migrate` and an
        app on the same file do the same.

        Durable on return; but where a transaction is open, it happens in that one and is durable
        with the user's commit.

        Raises:
            ConfigurationError: the tables are of a newer release.
            TransientError: the database cannot be written now.
        """
        _user_connection(connection, table_prefix).prepare()

    def begin(self) -> None:
        """Open a write transaction on the connection, as `BEGIN IMMEDIATE` would.

        It waits in turn with the workers of apps on the same file, as long as the connection's own
        timeout allows; SQLite's own way of waiting may be passed over for seconds while they are
        busy.

        Raises:
            TransactionMisuse: a transaction is open already.
            TransientError: the database stayed locked.
        """
        self._connection.begin()


class Inbox(_OnConnection):
    """Tells the first delivery of a message from the others, in the user's own transaction.

    For each (consumer, key) at most one transaction that recorded the key commits (G1); others are
    told that they are duplicates, or conflicts (G5). No order, no retries, no dead letters.

    Args:
        connection: an open `sqlite3.Connection`, of the file that holds the business tables.
        consumer: names whose effects they are. It is part of every key: keep it for ever. An app's
            consumer of this name on the same file has the same keys.
        table_prefix: of the tables' names.

    Raises:
        ConfigurationError: an argument is wrong.

    Example:
        >>> connection = sqlite3.connect(":memory:")
        >>> Inbox.prepare(connection)
        >>> for _ in range(2):
        ...     with Inbox(connection, consumer="billing").once("msg-1", payload={"a": 1}) as first:
        ...         print("charge" if first else f"{first.end} before")
        ...     connection.commit()
        charge
        processed before
    """

    def __init__(
        self, connection: sqlite3.Connection, *, consumer: str, table_prefix: str = "procession_"
    ) -> None:
        super().__init__(connection, table_prefix=table_prefix)
        self._consumer = check_name(consumer, "consumer")

    @contextmanager
    def once(
        self, key: object, *, payload: Any, on_conflict: Literal["raise", "tell"] = "raise"
    ) -> Generator[Answer]:
        """Record a key on entry, and say whether it is the first time: `if first:` act on it.

        The marker is part of the open transaction and commits with it: commit after the block. A
        block that raises is taken back, its own statements and the marker alike, and the error
        goes on. Where no transaction is open, a connection that opens one by itself before the
        first write (`sqlite3.connect(path)`) has it opened here, as a write transaction.

        Args:
            key: names the operation, mostly the producer's message id: str, int, UUID or bytes, at
                most 512 bytes.
            payload: what the key stands for: the same key with another payload is a conflict.
                `bytes` are compared as they are, anything else by its canonical JSON, as an app
                does. None where the key alone says it all.
            on_conflict: `raise`, or `tell` it in the answer, which is false then.

        Raises:
            Conflict: the key is known with another payload.
            KeyDead: an app on this file has the key's message as a dead letter.
            KeyWaits: an app on this file holds the key's message, or is at it: ask again later.
            TransactionMisuse: no transaction is open and each statement would commit by itself;
                or the transaction was ended inside the block.
            TransientError: the write lock was not to be had: roll back and run it all again.
            MessageError: the key is none, or the payload cannot be written as JSON.
            ConfigurationError: there are no tables, or of another version: see `prepare`.

        Example:
            >>> connection = sqlite3.connect(":memory:")
            >>> Inbox.prepare(connection)
            >>> with Inbox(connection, consumer="billing").once("m1", payload=b"...") as first:
            ...     if first:
            ...         pass  # connection.execute("UPDATE ...")
            >>> connection.commit()
        """
        if on_conflict not in ("raise", "tell"):
            raise ConfigurationError(f"on_conflict={on_conflict!r}: it is 'raise' or 'tell'")
        name = encode_key(key, what="dedup key", reason=Reason.BAD_KEY)
        mark = fingerprint(_CODEC.encode(payload), canonical=True)
        with self._connection.savepoint():
            yield self._answer(name, mark, raises=on_conflict == "raise")

    def _answer(self, key: bytes, mark: bytes, *, raises: bool) -> Answer:
        connection = self._connection
        subscription, row = connection.find(self._consumer, key)
        if row is None:
            answer = Answer(Verdict.FRESH)
        else:
            verdict = judge(row.state, row.fingerprint, mark)
            answer = Answer(verdict, row.end, row.recorded_ms)
        match answer.verdict:
            case Verdict.FRESH:
                connection.record(subscription, key, mark)
            case Verdict.DUPLICATE:
                connection.count(subscription, End.DUPLICATE)
            case Verdict.CONFLICT if raises:
                raise Conflict(
                    f"{self._known(key, answer)}, with another payload: one key was used for two "
                    "operations, or the message was changed; nothing of this one took effect"
                )
            case Verdict.CONFLICT:
                connection.count(subscription, End.CONFLICT)
            case Verdict.DEAD:
                raise KeyDead(
                    f"{self._known(key, answer)} as a dead letter: nothing of it took effect, and "
                    "only its replay runs it (`procession dead-letters`)"
                )
            case Verdict.HELD | Verdict.BUSY:
                what = (
                    "held to run again later" if answer.verdict is Verdict.HELD else "in progress"
                )
                raise KeyWaits(
                    f"{self._known(key, answer)} as {what}: nothing of it took effect yet; ask "
                    "again when it has ended"
                )
            case _:
                assert_never(answer.verdict)
        return answer

    def _known(self, key: bytes, answer: Answer) -> str:
        since = datetime.fromtimestamp((answer.recorded_at_ms or 0) / 1000, UTC)
        return (
            f"key {key.decode(errors='replace')!r} of consumer {self._consumer!r} is known since "
            f"{since.isoformat(timespec='milliseconds')}"
        )


class Outbox(_OnConnection):
    """Sends to the queues and topics of an app on the same file, if and only if the user's own
    transaction commits (G4).

    What is sent is kept until `flush`, which writes it as part of the open transaction: call it as
    the last statement before the commit. As a context manager it does so at the end of a block
    that does not raise, and forgets all at the end of one that does. Make one for each transaction.

    Args:
        connection: an open `sqlite3.Connection`, of the file that holds the queues.
        app: whose queues' rules and message types hold, where its code can be imported. Without
            it a session is what `send` says.
        table_prefix: of the tables' names.

    Example:
        >>> connection = sqlite3.connect(":memory:")
        >>> app = App("shop", store="memory://")
        >>> orders = app.queue("orders", session="customer")
        >>> with Outbox(connection, app=app) as outbox:
        ...     pass  # connection.execute("INSERT ..."), then outbox.send("orders", {...})
        >>> connection.commit()
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        app: App | None = None,
        table_prefix: str = "procession_",
    ) -> None:
        super().__init__(connection, table_prefix=table_prefix)
        self._app = app
        self._queues = Queues(Settings())
        self._waiting: list[Outgoing] = []

    def send(  # noqa: PLR0913  keyword-only, all with defaults
        self,
        queue: str,
        payload: Any,
        *,
        message_id: str | None = None,
        session: str | None = None,
        after: timedelta | None = None,
        due: datetime | None = None,
        expires: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Keep a message for `flush`; return its message id. Parameters as `Context.send`.

        Raises:
            ConfigurationError: the app does not declare the queue, or times contradict each other.
            MessageError: the payload cannot be serialized or is too large, or a key is not valid.
        """
        if self._app is None:
            self._queues.declare(queue, "queue")
        outgoing = (self._app or self._queues).outgoing(
            queue,
            payload,
            message_id=message_id,
            session=session,
            after=after,
            due=due,
            expires=expires,
            headers=headers,
        )
        self._waiting.append(outgoing)
        return outgoing.message_id.decode()

    def flush(self) -> int:
        """Write what was sent, in order; return how many were stored: one that a queue's duplicate
        window folds into an earlier one is not. Without messages it does nothing.

        After an error nothing of it was written, and the messages are kept for another try.

        Raises:
            ConfigurationError: a queue is not declared in the file, a topic has no subscriber, or
                there are no tables of this version.
            TransactionMisuse: no transaction is open, and each statement would commit by itself.
            TransientError: the write lock was not to be had: roll back and run it all again.
        """
        if not self._waiting:
            return 0
        with self._connection.savepoint():
            stored = self._connection.send(self._waiting)
        self._waiting.clear()
        return stored

    def __enter__(self) -> Self:
        """Begin a block of sends."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what was sent; after an error forget it."""
        try:
            if kind is None:
                self.flush()
        finally:
            self._waiting.clear()


def _user_connection(connection: object, table_prefix: str) -> UserConnection:
    if isinstance(connection, sqlite3.Connection):
        return UserConnection(connection, table_prefix)
    raise ConfigurationError(
        f"a connection of type {type(connection).__module__}.{type(connection).__qualname__} is "
        "not known here: pass an open sqlite3.Connection. Inside of an app's handler the inbox is "
        "there already; send with ctx.send"
    )
