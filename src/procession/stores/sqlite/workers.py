"""The leases of workers on SQLite, by the host's boot-time clock."""

from __future__ import annotations

import json
import time

from procession.abc import WorkerRecord
from procession.errors import WorkerLost
from procession.stores.sqlite.connection import Place, boot_id, lease_now, wall_now
from procession.stores.sqlite.transactions import Transactions

# After a lease has ended a takeover passes the turnstile once and waits this long, so that a
# renewal that was waiting there goes first.
RENEWAL_HEADSTART_S = 0.05


class SqliteWorkers(Transactions):
    """Implements `procession.abc.Workers`."""

    def __init__(self, place: Place, prefix: str, *, batch_max: int, suspect_batch: int) -> None:
        super().__init__(place, prefix)
        self._batch_max = batch_max
        self._suspect_batch = suspect_batch

    async def register(self, worker: WorkerRecord) -> None:
        """See `Workers.register`."""
        with self.write(f"registering worker {worker.id}") as connection:
            connection.execute(
                self.sql["register"],
                {
                    "id": worker.id,
                    "lease_ms": worker.lease_ms,
                    "boot": boot_id(),
                    "until": lease_now() + worker.lease_ms,
                    "host": worker.host,
                    "process": worker.process,
                    "consumers": json.dumps(worker.consumers),
                    "now": wall_now(),
                },
            )
            connection.execute(self.sql["free_other_boots"], {"boot": boot_id()})

    async def renew(self, worker: str) -> None:
        """See `Workers.renew`."""
        with self.write(f"renewing the lease of worker {worker}") as connection:
            renewed = connection.execute(
                self.sql["renew"],
                {"id": worker, "boot": boot_id(), "lease_now": lease_now()},
            )
            if renewed.rowcount != 1:
                raise WorkerLost(
                    f"worker {worker} was taken over: its lease had ended before this renewal"
                )

    async def expired(self) -> list[str]:
        """See `Workers.expired`."""
        with self.read("reading leases") as connection:
            rows = connection.execute(
                self.sql["expired"], {"boot": boot_id(), "lease_now": lease_now()}
            ).fetchall()
        return [row[0] for row in rows]

    async def known(self) -> list[str]:
        """See `Workers.known`."""
        with self.read("reading workers") as connection:
            return [row[0] for row in connection.execute(self.sql["workers"]).fetchall()]

    async def take_over(self, worker: str, *, dead: bool = False) -> list[str] | None:
        """See `Workers.take_over`."""
        if not dead:
            with self.write(f"looking at worker {worker}"):
                pass
            time.sleep(RENEWAL_HEADSTART_S)  # noqa: ASYNC251  a blocking store, on its own thread
        with self.write(f"taking over worker {worker}") as connection:
            row = connection.execute(
                self.sql["end_worker"],
                {"id": worker, "dead": dead, "boot": boot_id(), "lease_now": lease_now()},
            ).fetchone()
            if row is None:
                return None
            consumers = [str(name) for name in json.loads(row[0])]
            connection.execute(self.sql["free_sessions"], (worker,))
            connection.execute(self.sql["drop_free_sessions"])
            for consumer in consumers:
                connection.execute(
                    self.sql["suspect"],
                    {
                        "consumer": consumer,
                        "batch_max": self._batch_max,
                        "suspect_batch": self._suspect_batch,
                    },
                )
        return consumers

    async def leave(self, worker: str) -> None:
        """See `Workers.leave`."""
        with self.write(f"ending worker {worker}") as connection:
            connection.execute(
                self.sql["end_worker"], {"id": worker, "dead": True, "boot": "", "lease_now": 0}
            ).fetchone()
            connection.execute(self.sql["free_sessions"], (worker,))
            connection.execute(self.sql["drop_free_sessions"])
