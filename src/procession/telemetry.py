"""The table of events and the one protocol through which they leave. Decides nothing.

| event | when | fields |
|---|---|---|
| `batch.committed` | after a commit | consumer, counts, handled, handler_s |
| `batch.rolled_back` | a batch did not commit | consumer, reason, runs |
| `message.ended` | an end other than *processed* | consumer, end, cause, key, session, detail |
| `message.failed` | a handler failed | consumer, key, session, attempt, error |
| `message.retrying` | a failed message waits | consumer, key, session, attempt, after_ms |
| `alert` | someone should look | consumer, what, key, session, detail |
| `session.lost` | the fence refused a commit | consumer, detail |
| `worker.started`, `worker.stopped` | once a worker | worker |
| `worker.taken_over` | a vanished worker's work is free again | worker, consumers |
| `lane.hung` | a handler ran past its limit | consumer, key, seconds |
| `store.unavailable`, `store.available` | receiving pauses, resumes | consumer, error |
"""

from __future__ import annotations

import enum
import logging
from typing import Any, Protocol


class Event(enum.StrEnum):
    """Names are API: they never change without a changelog entry."""

    BATCH_COMMITTED = "batch.committed"
    BATCH_ROLLED_BACK = "batch.rolled_back"
    MESSAGE_ENDED = "message.ended"
    MESSAGE_FAILED = "message.failed"
    MESSAGE_RETRYING = "message.retrying"
    ALERT = "alert"
    SESSION_LOST = "session.lost"
    WORKER_STARTED = "worker.started"
    WORKER_STOPPED = "worker.stopped"
    WORKER_TAKEN_OVER = "worker.taken_over"
    LANE_HUNG = "lane.hung"
    STORE_UNAVAILABLE = "store.unavailable"
    STORE_AVAILABLE = "store.available"


class Instrument(Protocol):
    """Receives every event. Called on the lane's thread after the fact: must be quick, must not
    raise (what it raises is logged once a minute and dropped), and may be called concurrently.
    """

    def emit(self, event: Event, fields: dict[str, Any]) -> None: ...


LEVELS = {
    Event.BATCH_COMMITTED: logging.DEBUG,
    Event.BATCH_ROLLED_BACK: logging.INFO,
    Event.MESSAGE_ENDED: logging.INFO,
    Event.MESSAGE_FAILED: logging.WARNING,
    Event.MESSAGE_RETRYING: logging.INFO,
    Event.ALERT: logging.ERROR,
    Event.SESSION_LOST: logging.WARNING,
    Event.WORKER_STARTED: logging.INFO,
    Event.WORKER_STOPPED: logging.INFO,
    Event.WORKER_TAKEN_OVER: logging.WARNING,
    Event.LANE_HUNG: logging.ERROR,
    Event.STORE_UNAVAILABLE: logging.WARNING,
    Event.STORE_AVAILABLE: logging.INFO,
}


class LogInstrument:
    """Writes each event as one structured record of the logger `procession`.

    The fields are in the record's attribute `procession` (a dict), so any formatter can use them.
    A record that is not enabled is not built.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("procession")

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        """See `Instrument.emit`."""
        level = LEVELS[event]
        if self._logger.isEnabledFor(level):
            text = " ".join(f"{name}={value!r}" for name, value in fields.items())
            self._logger.log(level, "%s %s", event.value, text, extra={"procession": fields})


class Instruments:
    """Several instruments as one; a faulty one never disturbs a lane."""

    def __init__(self, *instruments: Instrument) -> None:
        self._instruments = instruments

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        """See `Instrument.emit`."""
        for instrument in self._instruments:
            try:
                instrument.emit(event, fields)
            except Exception:
                logging.getLogger("procession").exception("an instrument failed on %s", event)
