"""The host's clock, for measuring and for writing down; never for a lease."""

from __future__ import annotations

import time


class HostClock:
    """Implements `procession.abc.Clock`."""

    monotonic_s = staticmethod(time.perf_counter)

    @staticmethod
    def wall_ms() -> int:
        """Return milliseconds since 1970 UTC."""
        return time.time_ns() // 1_000_000
