"""Logs handlers that take long: the first thing to know of a consumer that falls behind."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from procession.app.middleware.chain import Middleware
from procession.flows.context import Context

SLOW_MS = 100


def timing(slow_ms: float = SLOW_MS) -> Middleware:
    """Return a middleware that logs each run of at least `slow_ms` milliseconds as a warning.

    Example:
        >>> from procession import App
        >>> from procession.app.middleware import timing
        >>> app = App("doc", store="memory://")
        >>> _ = app.middleware(timing(slow_ms=250))
    """

    def time_handler(_payload: Any, ctx: Context) -> Generator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            took_ms = (time.perf_counter() - began) * 1000
            if took_ms >= slow_ms:
                ctx.logger.warning("the handler took %.1f ms", took_ms)

    return time_handler
