"""Sends from outside of handlers, a transaction a call, on servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from procession.abc import Receipt
from procession.message import Outgoing
from procession.stores.sql.sends import Plan, Run, Sender
from procession.stores.sql.transactions import Transactions


class SqlPublisher:
    """Implements `procession.abc.MarkingPublisher` for the table queues of one database.

    Args:
        write: writes the rows and tokens of a plan.
        wake: called after the commit with the subscriptions that have got messages.
    """

    def __init__(
        self,
        transactions: Transactions,
        *,
        write: Callable[[Run, Plan], None],
        wake: Callable[[set[int]], None],
    ) -> None:
        self._transactions = transactions
        self._write = write
        self._wake = wake

    async def publish(self, messages: Sequence[Outgoing]) -> list[Receipt]:
        """See `Publisher.publish`: all or none."""
        if not messages:
            return []
        with self._transactions.write("sending") as run:
            plan = self._send(run, messages)
        return self._sent(plan, messages)

    async def publish_marked(
        self, messages: Sequence[Outgoing], *, mark: str, number: int
    ) -> list[Receipt]:
        """See `MarkingPublisher.publish_marked`."""
        with self._transactions.write("sending") as run:
            plan = self._send(run, messages) if messages else Plan([], [], [], [])
            run("set_mark", mark=mark, number=number)
        return self._sent(plan, messages)

    async def marked(self, mark: str) -> int:
        """See `MarkingPublisher.marked`."""
        with self._transactions.read("reading a mark") as run:
            rows = run("mark", mark=mark).rows()
        return int(rows[0][0]) if rows else 0

    async def close(self) -> None:
        """See `Publisher.close`."""
        self._transactions.close()

    def _send(self, run: Run, messages: Sequence[Outgoing]) -> Plan:
        plan = Sender(run).plan(messages)
        self._write(run, plan)
        return plan

    def _sent(self, plan: Plan, messages: Sequence[Outgoing]) -> list[Receipt]:
        self._wake({row[0] for row in plan.rows})
        return [
            Receipt(message.message_id, fresh)
            for message, fresh in zip(messages, plan.stored, strict=True)
        ]
