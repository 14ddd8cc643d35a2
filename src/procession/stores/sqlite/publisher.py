"""Sends from outside of handlers, a transaction a call."""

from __future__ import annotations

from collections.abc import Sequence

from procession.abc import Receipt
from procession.message import Outgoing
from procession.stores.sqlite.connection import Place
from procession.stores.sqlite.sends import Sender
from procession.stores.sqlite.transactions import Transactions


class SqlitePublisher(Transactions):
    """Implements `procession.abc.Publisher` for the table queues of one file."""

    def __init__(self, place: Place, prefix: str) -> None:
        super().__init__(place, prefix)
        self._sender = Sender(self.connection, self.sql)

    async def publish(self, messages: Sequence[Outgoing]) -> list[Receipt]:
        """See `Publisher.publish`: all or none."""
        if not messages:
            return []
        with self.write("sending"):
            stored = self._sender.send(messages)
        return [
            Receipt(message.message_id, fresh)
            for message, fresh in zip(messages, stored, strict=True)
        ]
