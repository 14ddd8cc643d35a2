"""Adapters that break one promise each, in ways that adapters have been broken in the field. They
wrap a sound adapter and speak the protocol alone, so each is the same fault on every store.
"""

import contextlib
import itertools
import sqlite3

from procession.abc import Changes, Fetched, Receipt
from procession.errors import OperatorError
from procession.message import Outgoing


class Wrapped:
    """The sound adapter, as it is."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Store(Wrapped):
    lane_of = workers_of = dead_letters_of = publisher_of = upkeep_of = Wrapped

    @classmethod
    def prepare(cls, monkeypatch):
        """Break what no wrapper reaches."""

    async def lane(self, consumer, *, worker, number):
        return self.lane_of(await self.inner.lane(consumer, worker=worker, number=number))

    async def workers(self):
        return self.workers_of(await self.inner.workers())

    async def dead_letters(self):
        return self.dead_letters_of(await self.inner.dead_letters())

    async def publisher(self):
        return self.publisher_of(await self.inner.publisher())

    async def upkeep(self):
        return self.upkeep_of(await self.inner.upkeep())


class Sound(Store):
    """Wrapped, and not broken."""


# The inbox.


class ChecksThenInserts(Store):
    """It looks whether a key is there, and then inserts: there is no unique constraint."""

    async def open(self, *, migrate="auto"):
        await self.inner.open(migrate=migrate)
        with contextlib.closing(sqlite3.connect(self.inner.path)) as connection:
            connection.executescript(
                "DROP INDEX IF EXISTS procession_inbox_key;"
                "CREATE INDEX procession_inbox_key ON procession_inbox (subscription, key);"
            )


class IgnoresDuplicates(Store):
    """INSERT IGNORE: a key that is there already goes unnoticed."""

    class lane_of(Wrapped):  # noqa: N801
        async def flush(self, changes):
            known = await self.inner.judge([entry.key for entry in changes.entries])
            changes.entries = [
                entry
                for entry in changes.entries
                if entry.expected is not None or entry.key not in known
            ]
            await self.inner.flush(changes)


class FoldsCase(Store):
    """The inbox has a collation that takes big for small letters."""

    class lane_of(Wrapped):  # noqa: N801
        async def flush(self, changes):
            for entry in changes.entries:
                entry.key = entry.key.lower()
            await self.inner.flush(changes)

        async def judge(self, keys):
            rows = await self.inner.judge([key.lower() for key in keys])
            return {key: rows[key.lower()] for key in keys if key.lower() in rows}

    async def inbox(self, consumer, key):
        return await self.inner.inbox(consumer, key.lower())


class MarksBeforeTheCommit(Store):
    """The marker is committed in a transaction of its own, before the effects."""

    class lane_of(Wrapped):  # noqa: N801
        async def flush(self, changes):
            marks, changes.entries = changes.entries, []
            await self.inner.flush(changes)
            first = Changes()
            first.entries = marks
            await self.inner.rollback()
            await self.inner.begin()
            await self.inner.flush(first)
            await self.inner.commit()
            await self.inner.begin()
            await self.inner.flush(changes)


class SettlesBeforeTheCommit(Store):
    """Messages are removed in a transaction of their own, before the effects."""

    class lane_of(Wrapped):  # noqa: N801
        async def flush(self, changes):
            first = Changes()
            first.removed, changes.removed = changes.removed, []
            await self.inner.flush(first)
            await self.inner.commit()
            await self.inner.begin()
            await self.inner.flush(changes)


class CommitsWithTheFlush(Store):
    """Autocommit: what is flushed is committed."""

    class lane_of(Wrapped):  # noqa: N801
        async def flush(self, changes):
            await self.inner.flush(changes)
            await self.inner.commit()
            await self.inner.begin()


# Sessions.


class HasNoFence(Store):
    """The commit asks nobody."""

    class lane_of(Wrapped):  # noqa: N801
        async def flush(self, changes):
            changes.fence = set()
            await self.inner.flush(changes)


class ReusesHolders(Store):
    """A holder is named by worker and lane, not by its acceptance."""

    @classmethod
    def prepare(cls, monkeypatch):
        for module in ("sqlite.lane", "memory"):
            monkeypatch.setattr(
                f"procession.stores.{module}.holder_name",
                lambda worker, lane, acceptance: f"{worker}.{lane}",
            )


class OwnsWhatOthersOwn(Store):
    """It says of any session that it is ours."""

    class lane_of(Wrapped):  # noqa: N801
        async def own(self, sessions):
            await self.inner.own(sessions)
            return set(sessions)


class TakesOverTheLiving(Store):
    """A takeover does not look at the lease again."""

    class workers_of(Wrapped):  # noqa: N801
        async def take_over(self, worker, *, dead=False):
            return await self.inner.take_over(worker, dead=True)


class TakesOverTwice(Store):
    """A takeover goes by what it read before: each of two believes that it succeeded."""

    class workers_of(Wrapped):  # noqa: N801
        async def take_over(self, worker, *, dead=False):
            expired = await self.inner.expired()
            found = await self.inner.take_over(worker, dead=dead)
            return ["ship"] if found is None and worker in expired else found


# Attempts.


class CountsInnocents(Store):
    """An attempt is counted for all that were in the batch."""

    class lane_of(Wrapped):  # noqa: N801
        async def begin_attempt(self, delivery):
            await self.inner.accept(100)
            await self.inner.begin()
            fetched = await self.inner.fetch(100)
            await self.inner.rollback()
            for other in fetched.deliveries:
                if other.position != delivery.position:
                    await self.inner.begin_attempt(other)
            return await self.inner.begin_attempt(delivery)


class CountsAfterTheRun(Store):
    """An attempt is counted with its commit, so a run that never ends is never counted."""

    class lane_of(Wrapped):  # noqa: N801
        async def begin_attempt(self, delivery):
            delivery.attempts += 1
            return delivery.attempts


# The queue.


class PagesByNumber(Store):
    """It goes on after the greatest number that it has committed."""

    class lane_of(Wrapped):  # noqa: N801
        last = -1

        async def fetch(self, limit):
            fetched = await self.inner.fetch(limit)
            later = [d for d in fetched.deliveries if d.position > self.last]
            return Fetched(deliveries=later, alone=fetched.alone, changed=fetched.changed)

        async def flush(self, changes):
            await self.inner.flush(changes)
            self.last = max([self.last, *(d.position for d in changes.removed)])


class RetriesAtTheTail(Store):
    """A message that waits is sent again, with a delay: others of its session overtake it."""

    class lane_of(Wrapped):  # noqa: N801
        async def flush(self, changes):
            for hold in changes.holds:
                delivery = hold.delivery
                again = Outgoing(
                    "orders",
                    delivery.message_id,
                    delivery.session,
                    delivery.type,
                    delivery.format,
                    delivery.body,
                )
                again.is_plain, again.after_ms = False, hold.after_ms
                changes.sends.append(again)
                changes.removed.append(delivery)
            changes.holds = []
            await self.inner.flush(changes)


class ForgetsWakeups(Store):
    """The first look after a fetch is the baseline: what came in between is forgotten."""

    class lane_of(Wrapped):  # noqa: N801
        fetched = False

        async def fetch(self, limit):
            self.fetched = True
            return await self.inner.fetch(limit)

        async def changed(self):
            changed = await self.inner.changed()
            fetched, self.fetched = self.fetched, False
            return changed and not fetched


class NeverRests(Store):
    """It always says that there may be work."""

    class lane_of(Wrapped):  # noqa: N801
        async def changed(self):
            await self.inner.changed()
            return True


class SendsToOneSubscriber(Store):
    """The subscribers of a topic share one copy."""

    class publisher_of(Wrapped):  # noqa: N801
        sent = itertools.count()

        async def publish(self, messages):
            if any(message.target == "events" for message in messages):
                messages = messages[:1]
            return await self.inner.publish(messages)


# Handlers.


class UndoesNothing(Store):
    """It says that it took a handler's statements back."""

    class lane_of(Wrapped):  # noqa: N801
        async def undo(self):
            return True


class CannotBeInterrupted(Store):
    """A handler that hangs keeps its connection."""

    class lane_of(Wrapped):  # noqa: N801
        def interrupt(self):
            pass


# Operators.


class ReplaysInSilence(Store):
    """A replay that cannot be queued says nothing."""

    class dead_letters_of(Wrapped):  # noqa: N801
        async def replay(self, number, *, by, as_new=None):
            with contextlib.suppress(OperatorError):
                await self.inner.replay(number, by=by, as_new=as_new)


class ReplaysConflicts(Store):
    """A conflict runs again under a key that took effect."""

    class dead_letters_of(Wrapped):  # noqa: N801
        async def replay(self, number, *, by, as_new=None):
            await self.inner.replay(number, by=by, as_new=as_new or b"m1")


class ForgetsTooEarly(Store):
    """A key is forgotten whatever its retention."""

    class upkeep_of(Wrapped):  # noqa: N801
        async def prune(self, *, retention_ms, resend_horizon_ms, limit):
            return await self.inner.prune(retention_ms=-1, resend_horizon_ms=-1, limit=limit)


class ForgetsWhatWaits(Store):
    """A key is forgotten although its producer may send it again."""

    class upkeep_of(Wrapped):  # noqa: N801
        async def prune(self, *, retention_ms, resend_horizon_ms, limit):
            return await self.inner.prune(
                retention_ms=retention_ms, resend_horizon_ms=-retention_ms * 1_000, limit=limit
            )


# Sources, on the broker in memory.


class SettlesOnReceipt(Wrapped):
    """Auto-acknowledge: a message is gone when it was handed out."""

    async def receive(self, limit):
        received = await self.inner.receive(limit)
        ours = {delivery.position for delivery in received}
        queue = self.inner._broker.queues[self.inner._queue]
        queue[:] = [item for item in queue if item.position not in ours]
        return received


class CompletesTheUnlocked(Wrapped):
    """It settles by message, whoever holds the lock now."""

    async def settle(self, settlements):
        items = {item.position: item for item in self.inner._broker.queues[self.inner._queue]}
        for settlement in settlements:
            item = items.get(settlement.delivery.position)
            if item is not None:
                settlement.delivery.lock = item.lock
        await self.inner.settle(settlements)


class AbandonsToTheTail(Wrapped):
    """What is given back goes to the end of the queue."""

    async def settle(self, settlements):
        queue = self.inner._broker.queues[self.inner._queue]
        await self.inner.settle(settlements)
        for settlement in settlements:
            for item in [i for i in queue if i.position == settlement.delivery.position]:
                queue.remove(item)
                queue.append(item)


class KeepsWhatItHad(Wrapped):
    """Close gives nothing back."""

    async def close(self):
        pass


class SharesSessions(Wrapped):
    """Messages are locked, sessions are not."""

    async def receive(self, limit):
        self.inner._broker.session_locks.clear()
        return await self.inner.receive(limit)


class HandsOutTheNewestFirst(Wrapped):
    """A stack."""

    async def receive(self, limit):
        return list(reversed(await self.inner.receive(limit)))


class ForgetsDeliveries(Wrapped):
    """It never says that a message comes again."""

    async def receive(self, limit):
        received = await self.inner.receive(limit)
        for delivery in received:
            delivery.delivery_count = 1
        return received


# Publishers.


class PublishesOneByOne(Wrapped):
    """A call that fails leaves half of its messages."""

    async def publish(self, messages):
        return [receipt for message in messages for receipt in await self.inner.publish([message])]


class PublishesLater(Wrapped):
    """On return the messages are in a buffer."""

    def __init__(self, inner):
        super().__init__(inner)
        self.buffer = []

    async def publish(self, messages):
        sent, self.buffer = self.buffer, list(messages)
        await self.inner.publish(sent)
        return [Receipt(message.message_id) for message in messages]


class PublishesBackwards(Wrapped):
    """The order of a call is lost."""

    async def publish(self, messages):
        return list(reversed(await self.inner.publish(list(reversed(messages)))))
