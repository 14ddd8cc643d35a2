"""The one table of metrics: what each event adds to which, and what is read from the store.

Both exporters follow it, so a metric has one meaning and one name (`procession.dead_lettered` is
`procession_dead_lettered_total` to Prometheus). No label ever holds a session, a key, a message id
or a text: the number of series is bounded by the consumers, and the lists of ends, causes and
reasons are closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

from procession.abc import ConsumerStatus
from procession.app import App
from procession.errors import ProcessionError, Reason
from procession.outcome import Cause, End
from procession.telemetry import Event

DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Those that OpenTelemetry's messaging conventions ask for."""

BACKLOG_AGE_S = 5.0
READING_SHARE_MAX = 0.02
OTHER = "other"
_REASONS = tuple(map(str, Reason))


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric. Names and labels are API: they never change without a changelog entry.

    Attributes:
        kind: a `counter` only rises; a `level` goes up and down with the events of this process;
            a `histogram` takes durations; a `gauge` is read from the store.
        unit: UCUM, as OpenTelemetry writes it.
    """

    name: str
    kind: Literal["counter", "level", "histogram", "gauge"]
    unit: str
    description: str
    labels: tuple[str, ...] = ("consumer",)


MESSAGES_ENDED = Metric(
    "procession.messages.ended",
    "counter",
    "{message}",
    "Messages by how they ended; a duplicate also by where it came from",
    ("consumer", "end", "cause"),
)
DEAD_LETTERED = Metric(
    "procession.dead_lettered",
    "counter",
    "{message}",
    "Messages that became dead letters, by reason",
    ("consumer", "reason"),
)
FAILURES = Metric("procession.failures", "counter", "{run}", "Handler runs that failed")
RETRIES = Metric("procession.retries", "counter", "{message}", "Failed messages set to run again")
RERUNS = Metric("procession.reruns", "counter", "{run}", "Handler runs that did not commit")
HANDLER_TIME = Metric("procession.handler.time", "counter", "s", "Time spent in handlers")
BATCH_DURATION = Metric(
    "procession.batch.duration", "histogram", "s", "Time from a batch's first message to its commit"
)
BATCHES_ROLLED_BACK = Metric(
    "procession.batches.rolled_back",
    "counter",
    "{batch}",
    "Batches that did not commit, by class of error",
    ("consumer", "error"),
)
ALERTS = Metric(
    "procession.alerts",
    "counter",
    "{alert}",
    "What someone should look at, such as a conflict",
    ("consumer", "what"),
)
SESSIONS_LOST = Metric(
    "procession.sessions.lost",
    "counter",
    "{event}",
    "Commits refused because the sessions were taken over",
)
HANDLERS_HUNG = Metric(
    "procession.handlers.hung", "counter", "{handler}", "Handlers that ran past their time limit"
)
TAKEOVERS = Metric(
    "procession.takeovers", "counter", "{worker}", "Vanished workers whose work was taken over", ()
)
STORE_UNAVAILABLE = Metric(
    "procession.store.unavailable", "counter", "{event}", "Times that the store could not be used"
)
LANES_PAUSED = Metric(
    "procession.lanes.paused", "level", "{lane}", "Lanes that wait for the store now"
)
BACKLOG = Metric(
    "procession.backlog",
    "gauge",
    "{message}",
    "Messages that have not ended: waiting, held behind a retry, or scheduled",
    ("consumer", "queue", "standing"),
)
HEAD_AGE = Metric(
    "procession.head.age",
    "gauge",
    "s",
    "Age of the oldest message that waits or is held; 0 where there is none",
    ("consumer", "queue"),
)
DEAD_LETTERS = Metric(
    "procession.dead_letters",
    "gauge",
    "{message}",
    "Dead letters that wait for a decision",
    ("consumer", "queue"),
)
SESSIONS = Metric(
    "procession.sessions",
    "gauge",
    "{session}",
    "Sessions that are owned beyond a transaction, or wait for a retry",
    ("consumer", "queue", "standing"),
)

METRICS = (
    MESSAGES_ENDED,
    DEAD_LETTERED,
    FAILURES,
    RETRIES,
    RERUNS,
    HANDLER_TIME,
    BATCH_DURATION,
    BATCHES_ROLLED_BACK,
    ALERTS,
    SESSIONS_LOST,
    HANDLERS_HUNG,
    TAKEOVERS,
    STORE_UNAVAILABLE,
    LANES_PAUSED,
    BACKLOG,
    HEAD_AGE,
    DEAD_LETTERS,
    SESSIONS,
)

Added = tuple[Metric, float, tuple[str, ...]]
"""A metric, how much is added to it, and the values of its labels."""


def zeros(consumers: Collection[str]) -> Iterator[Added]:
    """Return every series that alert rules watch, each with nothing added: a counter that appears
    with its first event shows no increase from zero, and the first would go unseen.
    """
    yield TAKEOVERS, 0, ()
    for consumer in ("", *consumers):
        yield STORE_UNAVAILABLE, 0, (consumer,)
    for consumer in consumers:
        for metric in (FAILURES, RETRIES, RERUNS, SESSIONS_LOST, HANDLERS_HUNG, LANES_PAUSED):
            yield metric, 0, (consumer,)
        for end in End:
            for cause in Cause if end is End.DUPLICATE else ("",):
                yield MESSAGES_ENDED, 0, (consumer, str(end), str(cause))
        for reason in (*_REASONS, OTHER):
            yield DEAD_LETTERED, 0, (consumer, reason)
        yield ALERTS, 0, (consumer, "conflict")


def _committed(fields: Mapping[str, Any], consumer: tuple[str]) -> Iterator[Added]:
    for end, causes in fields["counts"].items():
        for cause, number in causes.items():
            yield MESSAGES_ENDED, number, (*consumer, end, cause)
    yield HANDLER_TIME, fields["handler_s"], consumer
    yield BATCH_DURATION, fields["batch_s"], consumer
    if fields["reruns"]:
        yield RERUNS, fields["reruns"], consumer


def _ended(fields: Mapping[str, Any], consumer: tuple[str]) -> Iterable[Added]:
    reason = fields["reason"]
    if not reason:
        return ()
    # The reason of a `MessageError` that a user's own code raised can be any text.
    return ((DEAD_LETTERED, 1, (*consumer, reason if reason in _REASONS else OTHER)),)


def _unavailable(_fields: Mapping[str, Any], consumer: tuple[str]) -> Iterator[Added]:
    yield STORE_UNAVAILABLE, 1, consumer
    # The worker's keeper has no consumer, and does not say when it goes on.
    if consumer != ("",):
        yield LANES_PAUSED, 1, consumer


_ADDS: Mapping[Event, Callable[[Mapping[str, Any], tuple[str]], Iterable[Added]]] = {
    Event.BATCH_COMMITTED: _committed,
    Event.BATCH_ROLLED_BACK: lambda f, c: ((BATCHES_ROLLED_BACK, 1, (*c, f["error"])),),
    Event.MESSAGE_ENDED: _ended,
    Event.MESSAGE_FAILED: lambda _, c: ((FAILURES, 1, c),),
    Event.MESSAGE_RETRYING: lambda _, c: ((RETRIES, 1, c),),
    Event.ALERT: lambda f, c: ((ALERTS, 1, (*c, f["what"])),),
    Event.SESSION_LOST: lambda _, c: ((SESSIONS_LOST, 1, c),),
    Event.LANE_HUNG: lambda _, c: ((HANDLERS_HUNG, 1, c),),
    Event.WORKER_TAKEN_OVER: lambda _, __: ((TAKEOVERS, 1, ()),),
    Event.STORE_UNAVAILABLE: _unavailable,
    Event.STORE_AVAILABLE: lambda _, c: ((LANES_PAUSED, -1, c),),
}


def added_by(event: Event, fields: Mapping[str, Any]) -> Iterable[Added]:
    """Return what an event adds to the metrics."""
    adds = _ADDS.get(event)
    return () if adds is None else adds(fields, (fields.get("consumer", ""),))


class Backlog:
    """Reads the gauges from the store, and not more often than is good for it.

    Readings are kept for `age_s`, longer where reading takes long: at most 2% of the time are spent
    on it, so however many messages wait, looking at them does not slow the work. Callable
    from any thread; while the store cannot be read, there are no readings.

    Args:
        app: whose store is read. Every consumer in it is reported, also those of other programs.
        age_s: seconds.
    """

    def __init__(self, app: App, *, age_s: float = BACKLOG_AGE_S) -> None:
        self._app = app
        self._age_s = age_s
        self._lock = Lock()
        self._read_again_s = 0.0
        self._readings: Sequence[Added] = ()

    def readings(self) -> Sequence[Added]:
        """Return what the store said last."""
        with self._lock:
            began_s = time.monotonic()
            if began_s >= self._read_again_s:
                try:
                    found = self._app.status()
                except ProcessionError:
                    found = []
                self._readings = [reading for one in found for reading in _gauges(one)]
                now_s = time.monotonic()
                took_s = now_s - began_s
                self._read_again_s = now_s + max(self._age_s, took_s / READING_SHARE_MAX)
            return self._readings


def _gauges(status: ConsumerStatus) -> Iterator[Added]:
    labels = (status.consumer or "", status.queue)
    yield BACKLOG, status.waiting, (*labels, "waiting")
    yield BACKLOG, status.held, (*labels, "held")
    yield BACKLOG, status.scheduled, (*labels, "scheduled")
    yield HEAD_AGE, (status.head_age_ms or 0) / 1000, labels
    yield DEAD_LETTERS, status.dead_letters, labels
    yield SESSIONS, status.owned_sessions, (*labels, "owned")
    yield SESSIONS, status.retrying_sessions, (*labels, "retrying")
