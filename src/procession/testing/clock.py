"""A clock that stands still until it is told to go on."""

from __future__ import annotations

from procession.stores.memory import MemoryClock


class ManualClock(MemoryClock):
    """Both clocks of a store, and a flow's clock, moved by hand.

    Example:
        >>> clock = ManualClock()
        >>> clock.advance(1_500)
        >>> clock.monotonic_s()
        1.5
    """

    def __init__(self) -> None:
        self._ms = 0

    def advance(self, ms: int) -> None:
        """Let time pass, milliseconds."""
        self._ms += ms

    def lease_ms(self) -> int:  # type: ignore[override]  # a moment of this clock alone
        """Return milliseconds since this clock was made."""
        return self._ms

    def wall_ms(self) -> int:  # type: ignore[override]  # as above
        """Return milliseconds since 1970 UTC, as this clock has it."""
        return 1_796_000_000_000 + self._ms

    def monotonic_s(self) -> float:
        """Return seconds since this clock was made."""
        return self._ms / 1000
