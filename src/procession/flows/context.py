"""What a handler gets beside its payload. Lives for one run; a later use is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from procession.abc import Rows, Sql
from procession.errors import TransactionMisuse
from procession.message import Delivery, Message, Outgoing

Route = Callable[..., Outgoing]
_LOGGER = logging.getLogger("procession.handler")


class Context:
    """The batch's transaction, as one handler run may use it.

    A handler may run several times before its one commit (after a neighbour's failure, a lost
    race, a crash). What it does through the context is undone with a run that does not commit;
    what reaches outside of the transaction is not.

    Attributes:
        consumer: the consumer's name.
        run: 1 for the first run of this message by this lane, and so on.

    Example:
        >>> def pay(order: dict, ctx: Context) -> None:
        ...     ctx.write("UPDATE orders SET paid = 1 WHERE id = :id", id=order["id"])
        ...     ctx.send("receipts", {"order": order["id"]})
    """

    __slots__ = (
        "_defers",
        "_delivery",
        "_key",
        "_message",
        "_route",
        "_sends",
        "_sql",
        "_writes",
        "consumer",
        "run",
    )

    def __init__(
        self, sql: Sql, delivery: Delivery, consumer: str, key: bytes, route: Route, run: int
    ) -> None:
        self._sql: Sql | None = sql
        self._delivery = delivery
        self._message: Message | None = None
        self._key = key
        self._route = route
        self._sends: list[Outgoing] = []
        self._writes: list[tuple[str, Mapping[str, Any]]] = []
        self._defers = True
        self.consumer = consumer
        self.run = run

    @property
    def message(self) -> Message:
        """The message in hand: id, session, type, headers, body."""
        if self._message is None:
            self._message = Message(self._delivery)
        return self._message

    @property
    def idempotency_key(self) -> str:
        """The same text at each run of this message by this consumer, and for no other message:
        pass it on to services that deduplicate.
        """
        return f"{self.consumer}/{self._key.decode(errors='replace')}"

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records carry consumer, dedup key, session and correlation id."""
        return logging.LoggerAdapter(
            _LOGGER,
            {
                "procession": {
                    "consumer": self.consumer,
                    "key": self._key.decode(errors="replace"),
                    "session": self.message.session,
                    "correlation_id": self.message.header("correlation-id"),
                    "run": self.run,
                }
            },
        )

    def execute(
        self, statement: str, parameters: Mapping[str, Any] | None = None, /, **named: Any
    ) -> Rows:
        """Run a statement now, in the batch's transaction, and return its rows.

        Args:
            statement: SQL with parameters as `:name`.
            parameters: values by name; or give them as keywords.

        Raises:
            TransactionMisuse: the statement would end the transaction, change the schema or write
                this package's tables, or the run is over.
            Exception: the driver's own error. Outside of `savepoint()` the run has failed then,
                even if the handler catches it.
        """
        return self._in_order().execute(statement, named if parameters is None else parameters)

    def write(
        self, statement: str, parameters: Mapping[str, Any] | None = None, /, **named: Any
    ) -> None:
        """Write in the batch's transaction, without a result: as `execute`, but later: when the
        handler has returned, or before its next `execute`. Cheaper, since a handler that raises
        has nothing to take back. Its error fails this message; to catch it, use `savepoint()`.
        """
        sql = self._open()
        if self._defers:
            self._writes.append((statement, named if parameters is None else dict(parameters)))
        else:
            sql.execute(statement, named if parameters is None else parameters)

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """Return a block whose database errors may be caught: they take back the block alone."""
        with self._in_order().savepoint():
            try:
                yield
            except BaseException:
                self._writes.clear()
                raise
            self._in_order()

    @property
    def connection(self) -> Any:
        """The batch's connection, for code that wants the driver's own interface. It refuses to
        commit, roll back, close, and to change the schema.
        """
        sql = self._in_order()
        self._defers = False  # what is done on the connection is not seen from here
        return sql.connection

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
        """Send a message if, and only if, this run commits; return its message id.

        A run that does not commit sends nothing. A rerun draws another default id, which no one
        has seen; give `message_id` where the id must say which operation is meant.

        Args:
            queue: name of a queue or topic.
            payload: of the type that its consumer expects.
            message_id: the id; by default a UUIDv7.
            session: its session key, where the queue has no rule of its own.
            after, due: not before this long from now, or this moment (with a zone).
            expires: worth nothing this long after the send.
            headers: text by name.

        Raises:
            ConfigurationError: the queue is not declared.
            MessageError: the payload cannot be serialized, or a key is not valid.
        """
        self._open()
        outgoing = self._route(
            queue,
            payload,
            message_id=message_id,
            session=session,
            after=after,
            due=due,
            expires=expires,
            headers=headers,
        )
        self._sends.append(outgoing)
        return outgoing.message_id.decode()

    def _open(self) -> Sql:
        if self._sql is None:
            raise TransactionMisuse(
                f"the run of message {self._delivery.message_id!r} is over: a context must not be "
                "kept or used after its handler has returned"
            )
        return self._sql

    def _in_order(self) -> Sql:
        """Run what was deferred, because something comes that must see it."""
        sql = self._open()
        if self._writes:
            writes, self._writes = self._writes, []
            for statement, parameters in writes:
                sql.execute(statement, parameters)
        return sql

    def finish(self) -> None:
        """Run what was deferred, last in the run (the flow's call)."""
        if self._writes:
            sql = self._open()
            for statement, parameters in self._writes:
                sql.write(statement, parameters)

    def close(self) -> list[Outgoing]:
        """End the run's use of the context (the flow's call); return what it sent."""
        self._sql = None
        return self._sends
