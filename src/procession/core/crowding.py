"""Decides how many lanes of one consumer may work at a time.

Handlers of several sessions keep locks on shared rows until their batch commits, so lanes that meet
on such rows wait for each other, or deadlock. Then fewer of them work; they come back one by one,
each time after a longer quiet if the last return ended in contention at once.
"""

from __future__ import annotations

QUIET_COMMITS = 50
QUIET_COMMITS_MAX = 1_600


class Crowd:
    """The lanes of one consumer in one process.

    Args:
        lanes: as many as there are.

    Attributes:
        allowed: how many may work now.

    Example:
        >>> crowd = Crowd(8)
        >>> crowd.contended()
        True
        >>> crowd.allowed
        4
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._quiet = 0
        self._needed = QUIET_COMMITS
        self.allowed = lanes

    def contended(self) -> bool:
        """Take in that a batch met another transaction; return whether lanes are to make way. Where
        one is left already, only smaller batches can help.
        """
        if self._quiet < self._needed and self.allowed < self._lanes:
            self._needed = min(QUIET_COMMITS_MAX, self._needed * 2)
        self._quiet = 0
        if self.allowed == 1:
            return False
        self.allowed = max(1, self.allowed // 2)
        return True

    def committed(self) -> None:
        """Take in a commit that met nobody."""
        if self.allowed == self._lanes:
            return
        self._quiet += 1
        if self._quiet >= self._needed:
            self._quiet = 0
            self.allowed += 1
