"""One message's way: receive, judge, run, and commit marker, effects and sends together.

The process may die between any two awaits. Before the commit, the next run finds nothing of this
batch; after it, everything; a broker that was not told yet delivers again and is told "duplicate".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from procession.abc import Features, Lane, Settlement, Source
from procession.core.batching import BatchSize
from procession.core.lines import Lines
from procession.errors import (
    Contention,
    DuplicateKey,
    MessageGone,
    SessionLost,
    WorkerLost,
)
from procession.flows.batch import Batch, Consumer, LaneMemory, TransactionLost
from procession.message import Delivery
from procession.telemetry import Event

RETURN_REFUSED_AFTER_MS = 50


class Consume:
    """The consume flow of one lane."""

    def __init__(
        self,
        consumer: Consumer,
        lane: Lane,
        memory: LaneMemory,
        *,
        features: Features,
        source: Source | None = None,
    ) -> None:
        self._consumer = consumer
        self._lane = lane
        self._memory = memory
        self._features = features
        self._source = source
        self._size = BatchSize(
            batch_max=1 if consumer.commit == "each" else memory.settings.batch_max,
            budget_s=memory.settings.batch_budget_ms / 1000,
        )
        self._lines = Lines()
        self._mine: set[bytes] = set()
        self._open: Batch | None = None

    async def step(self) -> int:
        """Handle one batch; return how many messages were in hand, 0 if there was no work.

        Raises:
            WorkerLost: this worker was taken over and must register again.
            StoreUnavailable: pause, then call again; nothing was lost, no attempt was spent.
        """
        try:
            handled = await self._step_table()
            if handled == 0 and self._source is not None:
                handled = await self._step_source(self._source)
        except TransactionLost:
            await self._rolled_back("a handler's error took the transaction with it")
        except DuplicateKey as error:
            self._memory.raced.update(d.position for d in self._open_deliveries())
            await self._rolled_back(str(error))
        except Contention as error:
            self._size.contended()
            await self._rolled_back(str(error))
        except WorkerLost:
            await self._rolled_back("the worker was taken over")
            raise
        except SessionLost as error:
            await self._rolled_back(str(error))
            await self._drop_hand()
            self._memory.instrument.emit(
                Event.SESSION_LOST, {"consumer": self._consumer.name, "detail": str(error)}
            )
        except (Exception, asyncio.CancelledError, KeyboardInterrupt) as error:
            await self._rolled_back(f"{type(error).__name__}: {error}")
            raise
        else:
            return handled
        return 1

    async def close(self) -> None:
        """Give back what is in hand. Harmless twice."""
        await self._drop_hand()

    # The table queue, and the store's held messages.

    async def _step_table(self) -> int:
        lane = self._lane
        limit = self._size.next()
        await lane.accept(limit)
        await lane.begin()
        fetched = await lane.fetch(limit)
        deliveries = fetched.deliveries
        if not deliveries:
            await (lane.commit() if fetched.changed else lane.rollback())
            return 0
        first = deliveries[0]
        if fetched.alone or self._memory.runs_alone(first):
            await lane.rollback()
            await self._run_alone(first)
            return 1
        batch = self._begin_batch(deliveries)
        await batch.run()
        if self._features.concurrent_batches:
            batch.fence()
        await self._commit(batch)
        return len(deliveries)

    async def _run_alone(self, delivery: Delivery) -> None:
        """Count the attempt, then run: a run that never ends is counted all the same."""
        lane = self._lane
        attempt = await lane.begin_attempt(delivery)
        await lane.begin()
        fresh = await lane.fetch_one(delivery.position)
        if fresh is None:
            raise MessageGone(f"message {delivery.message_id!r} is not in the queue any more")
        exhausted = attempt > self._consumer.retry.max_attempts
        batch = self._begin_batch([fresh], alone=True, exhausted=exhausted)
        await batch.run()
        batch.fence()
        batch.changes.release |= batch.changes.fence
        await self._commit(batch)

    # A broker.

    async def _step_source(self, source: Source) -> int:
        lane, lines = self._lane, self._lines
        limit = self._size.next()
        if len(lines) < limit:
            lines.add(await source.receive(limit - len(lines)))
        if not lines:
            await self._give_up(self._mine)
            return 0
        await self._own_sessions(source)
        taken = lines.take(limit, may_run=self._mine.__contains__)
        if not taken:
            return 0
        try:
            await lane.begin()
            waiting = await lane.waiting({d.session for d in taken if d.session is not None})
            batch = self._begin_batch(taken, held_sessions=waiting)
            await batch.run()
            batch.fence()
            await self._commit(batch)
        except BaseException:
            lines.put_back(taken)
            raise
        lines.put_back(batch.left)
        # A crash before this is harmless: the broker delivers again, the inbox says duplicate.
        await source.settle([Settlement(delivery) for delivery in batch.ended])
        return len(taken)

    async def _own_sessions(self, source: Source) -> None:
        in_hand = self._lines.sessions()
        wanted = [session for session in in_hand if session not in self._mine]
        if not wanted:
            return
        room = self._memory.settings.sessions_max - len(self._mine)
        if room < len(wanted):
            await self._give_up(self._mine.difference(in_hand))
            room = max(1, self._memory.settings.sessions_max - len(self._mine))
        wanted = wanted[:room]
        mine = await self._lane.own(wanted)
        self._mine |= mine
        refused = [
            Settlement(delivery, "abandon", RETURN_REFUSED_AFTER_MS)
            for session in wanted
            if session not in mine
            for delivery in self._lines.drop(session)
        ]
        if refused:
            await source.settle(refused)

    async def _give_up(self, sessions: set[bytes]) -> None:
        if sessions:
            await self._lane.release(sessions)
            self._mine = self._mine - sessions

    async def _drop_hand(self) -> None:
        """A delivery belongs to the acceptance under which it came: give all back."""
        await self._give_up(self._mine)
        in_hand = self._lines.clear()
        if in_hand and self._source is not None:
            await self._source.settle([Settlement(delivery, "abandon") for delivery in in_hand])

    # What every batch shares.

    def _begin_batch(
        self,
        deliveries: Sequence[Delivery],
        *,
        alone: bool = False,
        exhausted: bool = False,
        held_sessions: set[bytes] | None = None,
    ) -> Batch:
        self._open = Batch(
            self._consumer,
            self._lane,
            self._memory,
            deliveries,
            alone=alone,
            exhausted=exhausted,
            held_sessions=held_sessions,
        )
        return self._open

    def _open_deliveries(self) -> Sequence[Delivery]:
        return self._open.deliveries if self._open is not None else ()

    async def _commit(self, batch: Batch) -> None:
        batch.changes.reruns = self._memory.reruns
        taken = [hold for hold in batch.changes.holds if hold.take]
        brokers_positions = [hold.delivery.position for hold in taken]
        await self._lane.flush(batch.changes)
        await self._lane.commit()
        self._open = None
        self._memory.committed(batch.ended)
        # What was taken into the store has a position of the store now.
        self._memory.to_take.difference_update(brokers_positions)
        self._memory.alone.update(hold.delivery.position for hold in taken if hold.after_ms == 0)
        self._size.committed(batch.runs, batch.handler_s)
        emit = self._memory.instrument.emit
        emit(
            Event.BATCH_COMMITTED,
            {
                "consumer": self._consumer.name,
                "counts": batch.changes.counts,
                "handled": len(batch.ended),
                "handler_s": batch.handler_s,
            },
        )
        for event, fields in batch.events:
            emit(event, fields)

    async def _rolled_back(self, reason: str) -> None:
        batch, self._open = self._open, None
        await self._lane.rollback()
        self._memory.rolled_back(batch.ran if batch is not None else ())
        self._memory.instrument.emit(
            Event.BATCH_ROLLED_BACK,
            {
                "consumer": self._consumer.name,
                "reason": reason,
                "runs": 0 if batch is None else batch.runs,
            },
        )
