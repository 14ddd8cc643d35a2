"""Decides how far a log may be committed when its messages complete out of order."""

from __future__ import annotations

import heapq


class Watermark:
    """The contiguous prefix of completed positions of one partition or stream.

    Positions are begun in growing order (gaps are allowed: a compacted log has them) and complete
    in any order; the watermark never passes one that is begun and not complete.

    Example:
        >>> mark = Watermark()
        >>> for position in (5, 6, 9):
        ...     mark.begin(position)
        >>> mark.complete(6), mark.complete(5), mark.complete(9)
        (None, 7, 10)
    """

    def __init__(self) -> None:
        self._open: list[int] = []
        self._running: set[int] = set()
        self._last = -1

    def begin(self, position: int) -> None:
        """Take in a position that was received.

        Raises:
            ValueError: if positions do not grow; after a rewind make a new watermark.
        """
        if position <= self._last:
            msg = f"position {position} came after {self._last}: make a new watermark on a rewind"
            raise ValueError(msg)
        self._last = position
        heapq.heappush(self._open, position)
        self._running.add(position)

    def complete(self, position: int) -> int | None:
        """Take in a completed position; return the next position to read from, if it moved.

        Raises:
            ValueError: if the position was never begun, or is complete already.
        """
        if position not in self._running:
            msg = f"position {position} is not open"
            raise ValueError(msg)
        self._running.discard(position)
        moved: int | None = None
        while self._open and self._open[0] not in self._running:
            moved = heapq.heappop(self._open) + 1
        return moved

    @property
    def in_flight(self) -> int:
        """How many positions are begun and not complete."""
        return len(self._running)
