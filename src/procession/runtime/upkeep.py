"""Upkeep in turns: a small step now and then, so that it never stands in the way of a batch."""

from __future__ import annotations

import contextlib
import time

from procession.abc import Store, Upkeep
from procession.config import Settings
from procession.errors import ProcessionError
from procession.flows.upkeep import prune_step
from procession.runtime.drive import drive

STEP_PAUSE_S = 0.1
# A slow step (random keys of a large inbox, a full lane) is followed by a pause this many times as
# long: pruning has the write lock for a fifth of the time at most.
STEP_PAUSE_TIMES = 4


class UpkeepTurns:
    """The keeper's share of upkeep. Each `turn` takes at most one step of one walk.

    Several workers may do the same walk at once: it is harmless, and each step is short.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._upkeep: Upkeep | None = None
        self._due_s = time.monotonic() + settings.prune_every_ms / 1000

    def turn(self) -> None:
        """Take a step if one is due. A store that cannot be used now is left for later."""
        if time.monotonic() < self._due_s:
            return
        pause_s = self._settings.prune_every_ms / 1000
        with contextlib.suppress(ProcessionError):
            if self._upkeep is None:
                self._upkeep = drive(self._store.upkeep())
            began_s = time.monotonic()
            if drive(prune_step(self._upkeep, self._settings)) is not None:
                took_s = time.monotonic() - began_s
                pause_s = max(STEP_PAUSE_S, took_s * STEP_PAUSE_TIMES)
        self._due_s = time.monotonic() + pause_s

    def close(self) -> None:
        """Close its connection. Harmless twice."""
        upkeep, self._upkeep = self._upkeep, None
        if upkeep is not None:
            drive(upkeep.close())
