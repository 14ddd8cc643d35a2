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
    DeferredWriteFailed,
    DuplicateKey,
    MessageGone,
    SessionLost,
    TransientError,
    WorkerLost,
)
from procession.flows.batch import (
    Batch,
    Consumer,
    LaneMemory,
    TransactionLost,
    safe_text,
    traceparents,
)
from procession.message import Delivery
from procession.telemetry import Event, wants

RETURN_REFUSED_AFTER_MS = 50


class CommitRefused(Exception):
    """The store refused what some message of the batch wrote: a deferred constraint, a send to a
    topic without subscriber. The error is the cause.
    """


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
        # Less than the size after a refused commit, until the message at fault was found.
        self._at_most = memory.settings.batch_max
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
        except (
            TransactionLost,
            DuplicateKey,
            Contention,
            DeferredWriteFailed,
            CommitRefused,
        ) as error:
            await self._prepare_rerun(error)
        except WorkerLost as error:
            await self._rolled_back(error)
            raise
        except SessionLost as error:
            await self._rolled_back(error)
            await self._drop_hand()
            self._memory.instrument.emit(
                Event.SESSION_LOST, {"consumer": self._consumer.name, "detail": str(error)}
            )
        except (Exception, asyncio.CancelledError, KeyboardInterrupt) as error:
            await self._rolled_back(error)
            raise
        else:
            return handled
        return 1

    async def _prepare_rerun(self, error: Exception) -> None:
        """Roll back, and remember what the next batch must do otherwise."""
        batch, memory = self._open, self._memory
        match error:
            case TransactionLost():
                await self._rolled_back(error, "a handler's error took the transaction with it")
            case DuplicateKey():
                memory.raced.update(d.position for d in self._open_deliveries())
                await self._rolled_back(error)
            case Contention():
                # Fewer lanes first, then smaller batches.
                if not memory.crowd.contended():
                    self._size.contended()
                await self._rolled_back(error)
            case DeferredWriteFailed():
                fault = error.__cause__ or error
                await self._rolled_back(fault, "a deferred statement failed")
                if batch is not None:
                    batch.failed_later(error.run, fault)
            case _:  # CommitRefused
                fault = error.__cause__ or error
                await self._rolled_back(fault)
                if batch is None or batch.alone:
                    raise fault from None
                self._narrow(batch)

    async def close(self) -> None:
        """Give back what is in hand. Harmless twice."""
        await self._drop_hand()

    # The table queue, and the store's held messages.

    async def _step_table(self) -> int:
        lane = self._lane
        limit = min(self._size.next(), self._at_most)
        await lane.accept(limit)
        await lane.begin()
        fetched = await lane.fetch(limit)
        deliveries = fetched.deliveries
        if not deliveries:
            await (lane.commit() if fetched.changed else lane.rollback())
            # What was moved out of the way may have hidden work behind it: look again at once.
            return int(fetched.changed)
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
        position, cut_short = delivery.position, self._memory.cut_short
        attempt = await self._lane.begin_attempt(delivery, again=position in cut_short)
        try:
            await self._lone_run(position, attempt)
        except TransientError:
            # The store cut it short: however often that happens, it is one attempt.
            cut_short.add(position)
            raise
        except MessageGone:
            if delivery.session is not None:
                await self._lane.rollback()
                await self._lane.release([delivery.session])
            raise
        cut_short.discard(position)

    async def _lone_run(self, position: int, attempt: int) -> None:
        over = attempt - self._consumer.retry.max_attempts
        batch = await self._begin_alone(position, attempt, exhausted=over > 0)
        if over > 1 and not self._consumer.keyed_by_id:
            batch.refuse_unread()
        else:
            await batch.run()
        try:
            await self._commit(batch)
        except CommitRefused as refused:
            fault = refused.__cause__ or refused
            await self._rolled_back(fault)
            batch = await self._begin_alone(position, attempt)
            batch.fail(fault)
            await self._commit(batch)

    async def _begin_alone(self, position: int, attempt: int, *, exhausted: bool = False) -> Batch:
        await self._lane.begin()
        fresh = await self._lane.fetch_one(position)
        if fresh is None:
            raise MessageGone(f"message {position} is not in the queue any more")
        fresh.attempts = attempt
        batch = self._begin_batch([fresh], alone=True, exhausted=exhausted)
        batch.fence()
        batch.changes.release |= batch.changes.fence
        return batch

    def _narrow(self, batch: Batch) -> None:
        """Look for the message at fault in half of the batch; one of one runs alone next."""
        if len(batch.deliveries) > 1:
            self._at_most = len(batch.deliveries) // 2
            return
        (delivery,) = batch.deliveries
        failed = self._memory.alone if delivery.lock is None else self._memory.to_take
        failed.add(delivery.position)

    # A broker.

    async def _step_source(self, source: Source) -> int:
        lane, lines = self._lane, self._lines
        limit = min(self._size.next(), self._at_most)
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
        if Event.BATCH_BEGUN in wants(self._memory.instrument):
            self._memory.instrument.emit(
                Event.BATCH_BEGUN,
                {
                    "consumer": self._consumer.name,
                    "messages": len(deliveries),
                    "traceparents": traceparents(deliveries),
                },
            )
        return self._open

    def _open_deliveries(self) -> Sequence[Delivery]:
        return self._open.deliveries if self._open is not None else ()

    async def _commit(self, batch: Batch) -> None:
        batch.changes.reruns = self._memory.reruns
        taken = [hold for hold in batch.changes.holds if hold.take]
        brokers_positions = [hold.delivery.position for hold in taken]
        try:
            await self._lane.flush(batch.changes)
            await self._lane.commit()
        except DeferredWriteFailed as error:
            if batch.alone:  # it is this very run that failed
                raise CommitRefused from error.__cause__
            raise
        except (TransientError, SessionLost, DuplicateKey):
            raise
        except Exception as error:
            raise CommitRefused from error
        self._open = None
        self._at_most = min(self._at_most * 2, self._memory.settings.batch_max)
        self._memory.committed(batch.ended)
        self._memory.crowd.committed()
        self._mine = self._mine - batch.changes.release
        # What was taken into the store has a position of the store now.
        self._memory.to_take.difference_update(brokers_positions)
        self._memory.alone.update(hold.delivery.position for hold in taken if hold.after_ms == 0)
        if not batch.alone:  # a lone run, mostly a failing one, says nothing of the others' cost
            self._size.committed(batch.runs, batch.handler_s)
        emit = self._memory.instrument.emit
        emit(
            Event.BATCH_COMMITTED,
            {
                "consumer": self._consumer.name,
                "counts": batch.counts(),
                "handled": len(batch.ended),
                "handler_s": batch.handler_s,
                "batch_s": self._seconds_of(batch),
                "reruns": batch.changes.reruns,
            },
        )
        if Event.MESSAGE_PROCESSED in wants(self._memory.instrument):
            for fields in batch.processed():
                emit(Event.MESSAGE_PROCESSED, fields)
        for event, fields in batch.events:
            emit(event, fields)

    def _seconds_of(self, batch: Batch) -> float:
        return self._memory.clock.monotonic_s() - batch.began_s

    async def _rolled_back(self, error: BaseException, reason: str = "") -> None:
        batch, self._open = self._open, None
        await self._lane.rollback()
        self._memory.rolled_back(batch.ran if batch is not None else ())
        self._memory.instrument.emit(
            Event.BATCH_ROLLED_BACK,
            {
                "consumer": self._consumer.name,
                "error": type(error).__name__,
                "reason": reason or safe_text(error, self._memory.settings.error_chars_max),
                "runs": 0 if batch is None else batch.runs,
                "batch_s": 0.0 if batch is None else self._seconds_of(batch),
            },
        )
