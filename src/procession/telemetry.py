"""The table of events and the one protocol through which they leave. Decides nothing.

| event | when | fields |
|---|---|---|
| `batch.begun` (on request) | before a batch's first handler | consumer, messages, traceparents |
| `batch.committed` | after a commit | consumer, counts, handled, handler_s, batch_s, reruns |
| `batch.rolled_back` | a batch did not commit | consumer, error, reason, runs, batch_s |
| `message.processed` (on request) | after the commit | consumer, *message* |
| `message.ended` | any other end | consumer, end, cause, reason, detail, *message* |
| `message.failed` | a handler failed | consumer, attempt, error, *message* |
| `message.retrying` | a failed message waits | consumer, attempt, after_ms, *message* |
| `alert` | someone should look | consumer, what, detail, *message* |
| `session.lost` | the fence refused a commit | consumer, detail |
| `worker.started`, `worker.stopped` | once a worker | worker |
| `worker.taken_over` | a vanished worker's work is free again | worker, consumers |
| `lane.hung` | a handler ran past its limit | consumer, key, seconds |
| `store.unavailable` | receiving pauses | consumer, error, fault |
| `store.available` | receiving goes on | consumer |

*message* is key, message_id, session and correlation_id. An event *on request* costs something to
make: it is made only while some instrument names it in its attribute `wants`, and goes to those.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Set as AbstractSet
from typing import Any, Protocol


class Event(enum.StrEnum):
    """Names are API: they never change without a changelog entry."""

    BATCH_BEGUN = "batch.begun"
    BATCH_COMMITTED = "batch.committed"
    BATCH_ROLLED_BACK = "batch.rolled_back"
    MESSAGE_PROCESSED = "message.processed"
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


ON_REQUEST = frozenset({Event.BATCH_BEGUN, Event.MESSAGE_PROCESSED})
_NONE: frozenset[Event] = frozenset()


class Instrument(Protocol):
    """Receives every event. Called on the lane's thread after the fact: must be quick, must not
    raise (what it raises is logged once a minute and dropped), and may be called concurrently.

    It may have an attribute `wants`, the set of the events on request that it asks for.
    """

    def emit(self, event: Event, fields: dict[str, Any]) -> None: ...  # noqa: D102  said above


def wants(instrument: Instrument) -> AbstractSet[Event]:
    """Return the events on request that an instrument asks for now."""
    wanted: AbstractSet[Event] = getattr(instrument, "wants", _NONE)
    return wanted


LEVELS = {
    Event.BATCH_BEGUN: logging.DEBUG,
    Event.BATCH_COMMITTED: logging.DEBUG,
    Event.BATCH_ROLLED_BACK: logging.INFO,
    Event.MESSAGE_PROCESSED: logging.DEBUG,
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

    The record's attribute `event` is the event's name, its attribute `procession` the fields (a
    dict), so any formatter can use them. A record that is not enabled is not built; one for each
    processed message is written at DEBUG.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("procession")

    @property
    def wants(self) -> AbstractSet[Event]:
        """See `Instrument`."""
        return {Event.MESSAGE_PROCESSED} if self._logger.isEnabledFor(logging.DEBUG) else _NONE

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        """See `Instrument.emit`."""
        level, logger = LEVELS[event], self._logger
        if logger.isEnabledFor(level):
            extra = {"event": event.value, "procession": fields}
            values = (event.value, _Text(fields))
            # `Logger.log` would look for its caller, a quarter of the cost, and find this line.
            record = logger.makeRecord(
                logger.name, level, __name__, 0, "%s %s", values, None, extra=extra
            )
            logger.handle(record)


class _Text:
    """An event's fields as text, made when a formatter wants it: those for machines do not."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={value!r}" for name, value in self._fields.items())


COMPLAIN_EVERY_S = 60.0


class Instruments:
    """Several instruments as one; a faulty one never disturbs a lane."""

    def __init__(self, *instruments: Instrument) -> None:
        self._instruments = instruments
        self._complained_s: dict[int, float] = {}

    @property
    def wants(self) -> AbstractSet[Event]:
        """What any of them asks for; see `Instrument`."""
        return _NONE.union(*map(self._wants_of, self._instruments))

    def _wants_of(self, instrument: Instrument) -> AbstractSet[Event]:
        try:
            return wants(instrument)
        except Exception as error:  # noqa: BLE001  told, but never passed on
            self._complain(instrument, "wants", error)
            return _NONE

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        """See `Instrument.emit`."""
        for instrument in self._instruments:
            try:
                if event not in ON_REQUEST or event in self._wants_of(instrument):
                    instrument.emit(event, fields)
            except Exception as error:  # noqa: BLE001  told, but never passed on
                self._complain(instrument, event, error)

    def _complain(self, instrument: Instrument, event: str, error: Exception) -> None:
        now, which = time.monotonic(), id(instrument)
        if which not in self._complained_s or now - self._complained_s[which] >= COMPLAIN_EVERY_S:
            self._complained_s[which] = now
            logging.getLogger("procession").error(
                "instrument %s failed on %s; its failures are told once a minute",
                type(instrument).__name__,
                event,
                exc_info=error,
            )
