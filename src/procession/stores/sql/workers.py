"""The leases of workers on servers, by the server's clock."""

from __future__ import annotations

import json

from procession.abc import WorkerRecord
from procession.errors import WorkerLost
from procession.stores.sql.sends import Run
from procession.stores.sql.transactions import Transactions


class SqlWorkers:
    """Implements `procession.abc.Workers`."""

    def __init__(self, transactions: Transactions, *, batch_max: int, suspect_batch: int) -> None:
        self._transactions = transactions
        self._batch_max = batch_max
        self._suspect_batch = suspect_batch

    async def register(self, worker: WorkerRecord) -> None:
        """See `Workers.register`."""
        with self._transactions.write(f"registering worker {worker.id}") as run:
            run(
                "register",
                id=worker.id,
                lease_ms=worker.lease_ms,
                host=worker.host,
                process=worker.process,
                consumers=json.dumps(worker.consumers),
            )

    async def renew(self, worker: str) -> None:
        """See `Workers.renew`."""
        with self._transactions.write(f"renewing the lease of worker {worker}") as run:
            if run("renew", id=worker).count != 1:
                raise WorkerLost(
                    f"worker {worker} was taken over: its lease had ended before this renewal"
                )

    async def expired(self) -> list[str]:
        """See `Workers.expired`."""
        with self._transactions.read("reading leases") as run:
            return [row[0] for row in run("expired").rows()]

    async def known(self) -> list[str]:
        """See `Workers.known`."""
        with self._transactions.read("reading workers") as run:
            return [row[0] for row in run("workers").rows()]

    async def take_over(self, worker: str, *, dead: bool = False) -> list[str] | None:
        """See `Workers.take_over`."""
        with self._transactions.write(f"taking over worker {worker}") as run:
            rows = run("lock_worker", id=worker, dead=dead).rows()
            if not rows:
                return None
            consumers = [str(name) for name in json.loads(rows[0][0])]
            self._end(run, worker, more=1)
            for consumer in consumers:
                run(
                    "suspect",
                    consumer=consumer,
                    batch_max=self._batch_max,
                    suspect_batch=self._suspect_batch,
                )
        return consumers

    async def leave(self, worker: str) -> None:
        """See `Workers.leave`."""
        with self._transactions.write(f"ending worker {worker}") as run:
            if run("lock_worker", id=worker, dead=True).rows():
                self._end(run, worker, more=0)

    async def close(self) -> None:
        """See `Workers.close`."""
        self._transactions.close()

    def _end(self, run: Run, worker: str, *, more: int) -> None:
        run("end_worker", id=worker)
        sessions = run("lock_sessions", id=worker).rows()
        if sessions:
            run("free_sessions", id=worker, more=more)
            run(
                "drop_free_sessions",
                subscriptions=[row[0] for row in sessions],
                keys=[row[1] for row in sessions],
            )
