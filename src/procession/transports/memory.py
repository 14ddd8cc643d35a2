"""A broker in memory that locks sessions, for tests and the simulator.

It behaves like a peek-lock queue with sessions: a message is locked for one source until it is
settled or its lock ends, a session belongs to one source at a time, and a message that was not
completed comes again, in its place, with a higher delivery count.

It serves one thread: nothing here is locked. Sources may take turns in it, as coroutines do.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from procession.abc import Receipt, Settlement
from procession.errors import ConfigurationError
from procession.message import Delivery, Outgoing

Point = Callable[[str], Awaitable[None]]


async def no_point(_name: str) -> None:
    """Between two steps nothing happens; the simulator's point may suspend, or never return."""


@dataclass(slots=True)
class _Item:
    position: int
    message: Outgoing
    sent_ms: int
    count: int = 0
    lock: int = 0
    locked_until: int = 0
    not_before: int = 0
    lock_expired: bool = False


class MemoryBroker:
    """The queues of one broker, for one thread.

    Args:
        now_ms: its clock, milliseconds.
        lock_ms: how long a message stays locked for a source.
        point: awaited between any two steps.
    """

    def __init__(
        self, *, now_ms: Callable[[], int], lock_ms: int = 30_000, point: Point = no_point
    ) -> None:
        self.now_ms = now_ms
        self.lock_ms = lock_ms
        self.point = point
        self.queues: dict[str, list[_Item]] = {}
        self.session_locks: dict[tuple[str, bytes], tuple[int, int]] = {}
        self._positions = itertools.count(1)
        self._tokens = itertools.count(1)

    def declare(self, queue: str) -> None:
        """Make a queue. Harmless twice."""
        self.queues.setdefault(queue, [])

    def put(self, message: Outgoing) -> None:
        """Store a message at the end of its queue."""
        if message.target not in self.queues:
            raise ConfigurationError(f"queue {message.target!r} is not declared at this broker")
        item = _Item(next(self._positions), message, self.now_ms())
        self.queues[message.target].append(item)

    def token(self) -> int:
        """Return a lock token that was never used."""
        return next(self._tokens)

    def source(self, queue: str) -> MemorySource:
        """Return a source of a queue."""
        self.declare(queue)
        return MemorySource(self, queue)

    def publisher(self) -> MemoryPublisher:
        """Return a publisher."""
        return MemoryPublisher(self)


class MemorySource:
    """Implements `procession.abc.SessionSource`."""

    def __init__(self, broker: MemoryBroker, queue: str) -> None:
        self._broker = broker
        self._queue = queue
        self._id = broker.token()
        self._locks: set[int] = set()

    async def receive(self, limit: int) -> list[Delivery]:
        await self._broker.point("receive")
        broker, now = self._broker, self._broker.now_ms()
        blocked: set[bytes] = set()
        received: list[Delivery] = []
        for item in broker.queues[self._queue]:
            if len(received) >= limit:
                break
            session = item.message.session
            if session is not None and (session in blocked or not self._may_lock(session, now)):
                continue
            if item.locked_until > now or item.not_before > now:
                # What lies behind a message that may not run yet must not overtake it; one that
                # this source has locked is in its hand already.
                if session is not None and item.not_before > now:
                    blocked.add(session)
                continue
            # Nobody settled or gave back what still has a lock: its time ended.
            item.lock_expired = item.lock != 0
            item.lock = broker.token()
            item.locked_until = now + broker.lock_ms
            item.count += 1
            if session is not None:
                broker.session_locks[self._queue, session] = (self._id, item.locked_until)
            received.append(self._delivery(item))
        return received

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        await self._broker.point("settle")
        items = {item.lock: item for item in self._broker.queues[self._queue] if item.lock}
        for settlement in settlements:
            item = items.get(_token(settlement.delivery))
            if item is None:
                continue  # its lock is gone: the message comes again and the inbox judges it
            if settlement.action == "complete":
                self._broker.queues[self._queue].remove(item)
            else:
                item.lock = item.locked_until = 0
                item.not_before = self._broker.now_ms() + settlement.after_ms
        await self._broker.point("settled")

    async def extend(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        await self._broker.point("extend")
        now = self._broker.now_ms()
        items = {item.lock: item for item in self._broker.queues[self._queue] if item.lock}
        lost = []
        for delivery in deliveries:
            item = items.get(_token(delivery))
            if item is None or item.locked_until <= now:
                lost.append(delivery)
                continue
            item.locked_until = now + self._broker.lock_ms
            if delivery.session is not None:
                lock = (self._id, item.locked_until)
                self._broker.session_locks[self._queue, delivery.session] = lock
        return lost

    async def release(self, sessions: Collection[bytes]) -> None:
        await self._broker.point("release_sessions")
        for session in sessions:
            self._unlock(session)

    async def close(self) -> None:
        mine = [
            session
            for (queue, session), (owner, _) in self._broker.session_locks.items()
            if owner == self._id and queue == self._queue
        ]
        for session in mine:
            self._unlock(session)
        for item in self._broker.queues[self._queue]:
            if item.lock in self._locks and item.message.session is None:
                item.lock = item.locked_until = 0
        self._locks.clear()

    def _may_lock(self, session: bytes, now: int) -> bool:
        lock = self._broker.session_locks.get((self._queue, session))
        return lock is None or lock[0] == self._id or lock[1] <= now

    def _unlock(self, session: bytes) -> None:
        lock = self._broker.session_locks.get((self._queue, session))
        if lock is None or lock[0] != self._id:
            return
        del self._broker.session_locks[self._queue, session]
        for item in self._broker.queues[self._queue]:
            if item.message.session == session:
                item.lock = item.locked_until = 0

    def _delivery(self, item: _Item) -> Delivery:
        message = item.message
        self._locks.add(item.lock)
        return Delivery(
            item.position,
            message.session,
            message.message_id,
            message.type,
            message.format,
            message.body,
            message.headers,
            item.sent_ms,
            delivery_count=item.count,
            lock=item.lock,
            lock_expired=item.lock_expired,
        )


class MemoryPublisher:
    """Implements `procession.abc.Publisher`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def publish(self, messages: Sequence[Outgoing]) -> list[Receipt]:
        await self._broker.point("publish")
        for message in messages:
            if message.target not in self._broker.queues:
                raise ConfigurationError(f"queue {message.target!r} is not declared here")
        for message in messages:
            self._broker.put(message)
        return [Receipt(message.message_id) for message in messages]

    async def close(self) -> None:
        """See `Publisher.close`."""


def _token(delivery: Delivery) -> int:
    return delivery.lock if isinstance(delivery.lock, int) else 0
