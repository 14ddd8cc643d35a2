"""Keeps a store small: old keys go in small steps, each a transaction of its own.

A step that finds nothing to forget costs a read; one that dies loses its step and nothing else.
"""

from __future__ import annotations

from procession.abc import Upkeep
from procession.config import Settings

PRUNE_ROWS = 1_000
STEPS_MAX = 1_000_000


async def prune_step(upkeep: Upkeep, settings: Settings) -> int | None:
    """Look at the next 1,000 keys; return how many were forgotten, None at the end of a walk."""
    return await upkeep.prune(
        retention_ms=settings.retention_ms,
        resend_horizon_ms=settings.resend_horizon_ms,
        limit=PRUNE_ROWS,
    )


async def prune_all(upkeep: Upkeep, settings: Settings) -> int:
    """Walk once through all keys; return how many were forgotten."""
    total = 0
    for _ in range(STEPS_MAX):
        removed = await prune_step(upkeep, settings)
        if removed is None:
            break
        total += removed
    return total
