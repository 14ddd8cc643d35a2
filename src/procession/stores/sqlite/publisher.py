"""Sends from outside of handlers, a transaction a call."""

from __future__ import annotations

from collections.abc import Sequence

from procession.abc import Receipt
from procession.message import Outgoing
from procession.stores.sqlite.connection import Place
from procession.stores.sqlite.sends import Sender
from procession.stores.sqlite.transactions import Transactions


class SqlitePublisher(Transactions):
    """Implements `procession.abc.MarkingPublisher` for the table queues of one file."""

    def __init__(self, place: Place, prefix: str) -> None:
        super().__init__(place, prefix)
        self._sender = Sender(self.connection, self.sql)

    async def publish(self, messages: Sequence[Outgoing]) -> list[Receipt]:
        """See `Publisher.publish`: all or none."""
        if not messages:
            return []
        with self.write("sending"):
            return self._send(messages)

    async def publish_marked(
        self, messages: Sequence[Outgoing], *, mark: str, number: int
    ) -> list[Receipt]:
        """See `MarkingPublisher.publish_marked`."""
        with self.write("sending") as connection:
            receipts = self._send(messages) if messages else []
            connection.execute(self.sql["set_mark"], (mark, number))
        return receipts

    async def marked(self, mark: str) -> int:
        """See `MarkingPublisher.marked`."""
        with self.read("reading a mark") as connection:
            row = connection.execute(self.sql["mark"], (mark,)).fetchone()
        return 0 if row is None else int(row[0])

    def _send(self, messages: Sequence[Outgoing]) -> list[Receipt]:
        stored = self._sender.send(messages)
        return [
            Receipt(message.message_id, fresh)
            for message, fresh in zip(messages, stored, strict=True)
        ]
