"""Keeps deliveries in hand in one line a session, and decides which may run next.

Holds no more than it was given; a session without deliveries leaves nothing behind. Deliveries
without a session are independent of each other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from procession.message import Delivery


class Lines:
    """The lines of one lane: first in, first out within a session, in turn between sessions.

    Example:
        >>> lines = Lines()
        >>> lines.take(10, may_run=lambda session: True)
        []
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[bytes | int, deque[Delivery]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Put each delivery at the end of its session's line."""
        for delivery in deliveries:
            line = delivery.session if delivery.session is not None else delivery.position
            self._lines.setdefault(line, deque()).append(delivery)
            self._size += 1

    def sessions(self) -> list[bytes]:
        """Return the sessions that have deliveries in hand."""
        return [line for line in self._lines if isinstance(line, bytes)]

    def take(self, limit: int, *, may_run: Callable[[bytes], bool]) -> list[Delivery]:
        """Take up to `limit` deliveries, a share of each line in turn, each line in its order.

        A line that gave more than others goes to the end, so a long line never starves a short
        one for more than one batch.
        """
        open_lines = [line for line in self._lines if not isinstance(line, bytes) or may_run(line)]
        taken: list[Delivery] = []
        if not open_lines:
            return taken
        share = max(1, limit // len(open_lines))
        for line in open_lines:
            waiting = self._lines[line]
            number = min(share, len(waiting), limit - len(taken))
            taken += [waiting.popleft() for _ in range(number)]
            if waiting:
                self._lines.move_to_end(line)
            else:
                del self._lines[line]
            if len(taken) >= limit:
                break
        self._size -= len(taken)
        return taken

    def put_back(self, deliveries: Iterable[Delivery]) -> None:
        """Put deliveries that did not run back to the front of their lines, in their order."""
        for delivery in reversed(list(deliveries)):
            line = delivery.session if delivery.session is not None else delivery.position
            self._lines.setdefault(line, deque()).appendleft(delivery)
            self._size += 1

    def drop(self, session: bytes) -> list[Delivery]:
        """Take a whole session out (it was lost, or it must wait) and return what it had."""
        line = self._lines.pop(session, None)
        if line is None:
            return []
        self._size -= len(line)
        return list(line)

    def clear(self) -> list[Delivery]:
        """Take everything out, in no particular order between sessions."""
        everything = [delivery for line in self._lines.values() for delivery in line]
        self._lines.clear()
        self._size = 0
        return everything
