"""Metrics, spans and trace context for OpenTelemetry. Changes nothing for any message.

Needs `pip install 'procession[otel]'`; the providers are the program's own. Names follow the
messaging conventions where those have one (`messaging.client.consumed.messages`,
`messaging.process.duration`), else they are those of `procession.contrib.metrics`. A batch is one
span, current while its handlers run, with a link to each producer's trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import Token
from functools import partial
from threading import local
from typing import Any, Literal

from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.context import Context as TraceContext
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TracerProvider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import procession
from procession.app import App
from procession.app.middleware import Middleware
from procession.contrib.metrics import (
    BACKLOG_AGE_S,
    BATCH_DURATION,
    DURATION_BUCKETS_S,
    METRICS,
    Added,
    Backlog,
    Metric,
    added_by,
    zeros,
)
from procession.errors import ConfigurationError
from procession.flows.context import Context
from procession.outcome import Outcome
from procession.telemetry import Event

SYSTEM = "procession"
_NAME = "procession"
_TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()
_W3C = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
Spans = Literal["batch", "message", "off"]


class OpenTelemetryInstrument:
    """Counts events and makes a span of each batch; made by `instrument`."""

    def __init__(
        self, app: App, meter: Meter, tracer: Tracer, *, spans: Spans, backlog: Backlog | None
    ) -> None:
        self.wants = frozenset({Event.BATCH_BEGUN} if spans != "off" else ())
        self._app = app
        self._tracer = tracer
        self._add_to = {metric: _adder(meter, metric) for metric in METRICS if _is_added(metric)}
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages",
            unit="{message}",
            description="Number of messages that were delivered to the application.",
        )
        self._duration = meter.create_histogram(
            "messaging.process.duration",
            unit="s",
            description="Duration of processing operation.",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS_S,
        )
        if backlog is not None:
            for metric in METRICS:
                if metric.kind == "gauge":
                    meter.create_observable_gauge(
                        metric.name,
                        [partial(_observe, backlog, metric)],
                        unit=metric.unit,
                        description=metric.description,
                    )
        self._attributes: dict[tuple[Metric, tuple[str, ...]], dict[str, str]] = {}
        self._consumers: dict[str, dict[str, str]] = {}
        self._open = local()

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        """See `Instrument.emit`."""
        match event:
            case Event.BATCH_BEGUN:
                self._begin(fields)
                return
            case Event.WORKER_STARTED:
                self._add(zeros(self._app.consumers))
            case Event.MESSAGE_FAILED:
                self._note_failure(fields)
            case Event.BATCH_COMMITTED:
                attributes = self.attributes_of(fields["consumer"])
                self._consumed.add(fields["handled"], attributes)
                self._duration.record(fields["batch_s"], attributes)
                self._end(ends=fields["counts"])
            case Event.BATCH_ROLLED_BACK:
                if fields["batch_s"]:
                    attributes = self.attributes_of(fields["consumer"])
                    failed = {**attributes, "error.type": fields["error"]}
                    self._duration.record(fields["batch_s"], failed)
                self._end(error=fields["error"], reason=fields["reason"])
            case _:
                pass
        self._add(added_by(event, fields))

    def attributes_of(self, consumer: str) -> dict[str, str]:
        """Return the conventions' attributes of what a consumer does."""
        found = self._consumers.get(consumer)
        if found is None:
            known = self._app.consumers.get(consumer)
            found = self._consumers[consumer] = {
                "messaging.system": SYSTEM,
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.destination.name": known.queue.name if known else consumer,
                "messaging.destination.subscription.name": consumer,
            }
        return found

    def middleware(self) -> Middleware:
        """Return a middleware that makes a span of each handler run."""

        def span_message(_payload: Any, ctx: Context) -> Generator[None]:
            attributes = self.attributes_of(ctx.consumer)
            with self._tracer.start_as_current_span(
                f"process {attributes['messaging.destination.name']}",
                kind=SpanKind.CONSUMER,
                links=_links(_traceparents(ctx)),
                attributes={**attributes, **_message_attributes(ctx)},
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                try:
                    yield
                except Outcome as outcome:
                    span.set_attribute("procession.outcome", type(outcome).__name__)
                    raise
                except BaseException as error:
                    with suppress(Exception):  # its text is made by the user's own code
                        span.record_exception(error)
                        _fail(span, type(error).__name__, str(error))
                    raise

        return span_message

    def _add(self, additions: Iterable[Added]) -> None:
        for metric, amount, labels in additions:
            add = self._add_to.get(metric)
            if add is None:
                continue
            attributes = self._attributes.get((metric, labels))
            if attributes is None:
                attributes = dict(zip(metric.labels, labels, strict=True))
                self._attributes[metric, labels] = attributes
            add(amount, attributes)

    # The batch's span. A lane's events come on its own thread, one batch after the other.

    def _begin(self, fields: Mapping[str, Any]) -> None:
        self._end(error="abandoned", reason="the batch came to no end")
        attributes: dict[str, Any] = {**self.attributes_of(fields["consumer"])}
        if fields["messages"] > 1:
            attributes["messaging.batch.message_count"] = fields["messages"]
        span = self._tracer.start_span(
            f"process {attributes['messaging.destination.name']}",
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=_links(fields["traceparents"]),
        )
        self._open.batch = span, contexts.attach(trace.set_span_in_context(span))

    def _note_failure(self, fields: Mapping[str, Any]) -> None:
        found: _Open | None = getattr(self._open, "batch", None)
        if found is not None and found[0].is_recording():
            told = {name: value for name, value in fields.items() if value is not None}
            found[0].add_event(Event.MESSAGE_FAILED.value, told)

    def _end(
        self,
        *,
        ends: Mapping[str, Mapping[str, int]] | None = None,
        error: str = "",
        reason: str = "",
    ) -> None:
        found: _Open | None = getattr(self._open, "batch", None)
        if found is None:
            return
        self._open.batch = None
        span, token = found
        contexts.detach(token)
        for end, causes in (ends or {}).items():
            span.set_attribute(f"procession.ended.{end}", sum(causes.values()))
        if error:
            _fail(span, error, reason)
        span.end()


_Open = tuple[Span, Token[TraceContext]]


def instrument(
    app: App,
    *,
    spans: Spans = "batch",
    propagate: bool = True,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    backlog_age_s: float | None = BACKLOG_AGE_S,
) -> OpenTelemetryInstrument:
    """Tell OpenTelemetry what an app does. Call it before the app runs; harmless twice.

    Args:
        app: to tell of.
        spans: `batch` makes one span a batch; `message` adds one a handler run below it, at the
            cost of some 100 µs a message; `off` makes none.
        propagate: whether what the app and its handlers send carries the current span's context
            (`traceparent`, `tracestate`), so that its consumer can link to it. A message with
            headers takes longer to store.
        meter_provider, tracer_provider: by default the global ones.
        backlog_age_s: seconds for which the store's numbers (backlog, head age, dead letters) are
            kept before it is asked again; None leaves them out.

    Raises:
        ConfigurationError: `spans` is none of the three.

    Example:
        >>> from procession import App
        >>> app = App("shop", store="memory://")
        >>> told = instrument(app)
    """
    if spans not in ("batch", "message", "off"):
        raise ConfigurationError(f"spans={spans!r}: it is 'batch', 'message' or 'off'")
    for known in app.instruments:
        if isinstance(known, OpenTelemetryInstrument):
            return known
    version = procession.__version__
    made = OpenTelemetryInstrument(
        app,
        metrics.get_meter(_NAME, version, meter_provider),
        trace.get_tracer(_NAME, version, tracer_provider),
        spans=spans,
        backlog=None if backlog_age_s is None else Backlog(app, age_s=backlog_age_s),
    )
    app.instruments.append(made)
    if spans == "message":
        app.middleware(made.middleware())
    if propagate:
        app.on_send(trace_headers)
    return made


def trace_headers() -> dict[str, str]:
    """Return the current span's context as headers, or none outside of spans: for `app.on_send`."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers)
    return headers


def _links(traceparents: Iterable[str]) -> list[Link]:
    """Return links to the contexts that are valid: W3C Trace Context, section 3.2. Read here, since
    a whole batch is, and the API's own reader takes six times as long.
    """
    links = []
    for traceparent in traceparents:
        found = _W3C.fullmatch(traceparent)
        if found is None:
            continue
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more):
            continue
        context = SpanContext(
            int(trace_id, 16),
            int(span_id, 16),
            is_remote=True,
            trace_flags=TraceFlags(int(flags, 16)),
        )
        if context.is_valid:
            links.append(Link(context))
    return links


def _traceparents(ctx: Context) -> list[str]:
    try:
        found = ctx.message.headers.get(_TRACEPARENT)
    except (ValueError, RecursionError):  # another program wrote them, and they are no JSON object
        return []
    return [found] if isinstance(found, str) else []


def _message_attributes(ctx: Context) -> dict[str, str | int]:
    message = ctx.message
    attributes: dict[str, str | int] = {
        "messaging.message.id": message.id,
        "messaging.message.body.size": len(message.body),
        "procession.run": ctx.run,
    }
    if message.session is not None:
        attributes["procession.session"] = message.session
    return attributes


def _fail(span: Span, error: str, reason: str) -> None:
    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR, reason))


def _is_added(metric: Metric) -> bool:
    """Whether it is added to; the batch's duration has a name of the conventions' own."""
    return metric.kind != "gauge" and metric is not BATCH_DURATION


def _adder(meter: Meter, metric: Metric) -> Callable[[float, dict[str, str]], None]:
    if metric.kind == "level":
        make: Callable[..., Any] = meter.create_up_down_counter
    else:
        make = meter.create_counter
    found: Callable[[float, dict[str, str]], None] = make(
        metric.name, unit=metric.unit, description=metric.description
    ).add
    return found


def _observe(backlog: Backlog, metric: Metric, _options: CallbackOptions) -> Sequence[Observation]:
    return [
        Observation(value, dict(zip(metric.labels, labels, strict=True)))
        for known, value, labels in backlog.readings()
        if known is metric
    ]
