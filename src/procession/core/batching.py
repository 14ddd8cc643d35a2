"""Decides how many messages the next batch takes.

A batch closes by count, or when its handlers have used the budget: then what ran commits and the
rest goes back. A consumer seen to be slow gets small batches from the start; contention halves
them; both grow back by steps.
"""

from __future__ import annotations


class BatchSize:
    """The size of the next batch of one lane, from what the last ones cost.

    Args:
        batch_max: never more than this, messages.
        budget_s: handler time that a batch may use, seconds.

    Example:
        >>> size = BatchSize(batch_max=500, budget_s=0.05)
        >>> size.committed(10, handler_s=0.1)
        >>> size.next()
        5
    """

    def __init__(self, *, batch_max: int, budget_s: float) -> None:
        if batch_max < 1 or budget_s <= 0:
            msg = f"batch_max={batch_max} and budget_s={budget_s} must be positive"
            raise ValueError(msg)
        self._max = batch_max
        self._budget_s = budget_s
        self._message_s = 0.0
        self._allowed = batch_max

    def next(self) -> int:
        """Return how many messages to take, 1 to `batch_max`."""
        # Compared by multiplying: the quotient of a tiny time would be infinite.
        if self._message_s * self._allowed <= self._budget_s:
            return self._allowed
        return max(1, int(self._budget_s / self._message_s))

    def committed(self, handled: int, handler_s: float) -> None:
        """Take in what a committed batch cost: `handled` runs, `handler_s` seconds in handlers."""
        if handled <= 0:
            return
        seen = handler_s / handled
        # One slow run counts in full, quick ones win trust back by a quarter at a time.
        if seen >= self._message_s:
            self._message_s = seen
        else:
            self._message_s += (seen - self._message_s) / 4
        self._allowed = min(self._max, self._allowed + max(1, self._allowed // 8))

    def contended(self) -> None:
        """Take in that the batch met another transaction and was rolled back."""
        self._allowed = max(1, self._allowed // 2)
