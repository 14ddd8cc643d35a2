"""What OpenTelemetry is told: metrics, a span a batch with links, and context on what is sent."""

from __future__ import annotations

import asyncio

import pytest
from tests.driving import Driver, column, foreign, new_app, sql
from tests.unit.contrib.scenes import ENDED, FAILED_RUNS, play, shop

from procession import App, ConfigurationError, Context, Event, Retry

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from procession.contrib.opentelemetry import instrument
from procession.flows.batch import TRACEPARENTS_MAX

TRACE = "00-{0:032x}-{1:016x}-01"
QUEUE = {
    "messaging.system": "procession",
    "messaging.operation.name": "process",
    "messaging.operation.type": "process",
    "messaging.destination.name": "orders",
    "messaging.destination.subscription.name": "bills",
}


class Telemetry:
    """Providers of one test's own, and what they were told."""

    def __init__(self):
        self.reader = InMemoryMetricReader()
        self.exporter = InMemorySpanExporter()
        self.meters = MeterProvider([self.reader])
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.tracers.get_tracer("test")

    def instrument(self, app, **options):
        return instrument(app, meter_provider=self.meters, tracer_provider=self.tracers, **options)

    @property
    def spans(self):
        return self.exporter.get_finished_spans()

    def spans_of(self, queue):
        return [span for span in self.spans if span.name == f"process {queue}"]

    def points(self):
        """Return name to label sets to point."""
        data = self.reader.get_metrics_data()
        return {
            metric.name: {
                tuple(sorted(point.attributes.items())): point for point in metric.data.data_points
            }
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def close(self):
        self.meters.shutdown()
        self.tracers.shutdown()


@pytest.fixture
def telemetry():
    telemetry = Telemetry()
    yield telemetry
    telemetry.close()


def labels(**attributes):
    return tuple(sorted(attributes.items()))


def run(app):
    with app.ready_handlers(), Driver(app) as driver:
        driver.run()


# ---- metrics -------------------------------------------------------------------------------------


def test_what_happened_is_counted_under_the_conventions_names_and_our_own(tmp_path, telemetry):
    app = shop(tmp_path)
    telemetry.instrument(app)
    play(app)
    points = telemetry.points()
    queue = tuple(sorted(QUEUE.items()))
    assert points["messaging.client.consumed.messages"][queue].value == sum(ENDED.values())
    assert points["messaging.process.duration"][queue].count > 0
    assert points["messaging.process.duration"][queue].explicit_bounds[0] == 0.005
    assert {
        (dict(found)["end"], dict(found)["cause"]): point.value
        for found, point in points["procession.messages.ended"].items()
    } == ENDED
    bills = {"consumer": "bills"}
    reasons = points["procession.dead_lettered"]
    assert {dict(found)["reason"]: point.value for found, point in reasons.items()} == {
        "conflict": 1,
        "rejected": 1,
        "failed": 1,
    }
    assert points["procession.alerts"][labels(**bills, what="conflict")].value == 1
    assert points["procession.failures"][labels(**bills)].value == FAILED_RUNS
    assert points["procession.retries"][labels(**bills)].value == 2
    assert points["procession.reruns"][labels(**bills)].value == FAILED_RUNS + 1
    assert points["procession.dead_letters"][labels(**bills, queue="orders")].value == 3
    assert "procession.batch.duration" not in points
    app.close()


def test_sessions_and_keys_never_become_attributes_of_metrics(tmp_path, telemetry):
    app = shop(tmp_path)
    telemetry.instrument(app, spans="message")
    play(app)
    before = {name: set(points) for name, points in telemetry.points().items()}
    app.send_many("orders", [{"client": f"session-{n}"} for n in range(200)])
    run(app)
    assert {name: set(points) for name, points in telemetry.points().items()} == before
    app.close()


def test_lost_sessions_takeovers_hung_handlers_and_an_absent_store_are_counted(telemetry):
    told = telemetry.instrument(App("t", store="memory://"))
    away = {"consumer": "c", "error": "locked", "fault": False}
    told.emit(Event.SESSION_LOST, {"consumer": "c", "detail": "taken over"})
    told.emit(Event.LANE_HUNG, {"consumer": "c", "key": "k", "seconds": 21.0})
    told.emit(Event.WORKER_TAKEN_OVER, {"worker": "w", "consumers": ["c"]})
    told.emit(Event.STORE_UNAVAILABLE, away)
    points = telemetry.points()
    for name in ("sessions.lost", "handlers.hung", "store.unavailable", "lanes.paused"):
        assert points[f"procession.{name}"][labels(consumer="c")].value == 1
    assert points["procession.takeovers"][()].value == 1
    told.emit(Event.STORE_AVAILABLE, {"consumer": "c"})
    assert telemetry.points()["procession.lanes.paused"][labels(consumer="c")].value == 0


# ---- the batch's span ----------------------------------------------------------------------------


def test_a_batch_is_one_span_with_a_link_to_each_producers_trace(tmp_path, telemetry):
    app = shop(tmp_path)
    telemetry.instrument(app)
    for number in range(6):
        context = TRACE.format(1 + number // 2, 7)
        app.send("orders", {"client": f"c{number}"}, headers={"traceparent": context})
    app.send("orders", {"client": "x"})
    run(app)
    (span,) = telemetry.spans_of("orders")
    assert [link.context.trace_id for link in span.links] == [1, 2, 3]
    assert {link.context.span_id for link in span.links} == {7}
    assert span.kind is SpanKind.CONSUMER
    assert dict(span.attributes) == {
        **QUEUE,
        "messaging.batch.message_count": 7,
        "procession.ended.processed": 7,
    }
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    app.close()


def test_the_links_of_a_span_are_limited(tmp_path, telemetry):
    app = shop(tmp_path)
    telemetry.instrument(app)
    for number in range(TRACEPARENTS_MAX + 20):
        headers = {"traceparent": TRACE.format(1 + number, 7)}
        app.send("orders", {"client": f"c{number}"}, headers=headers)
    run(app)
    span = telemetry.spans_of("orders")[0]
    assert [link.context.trace_id for link in span.links] == list(range(1, TRACEPARENTS_MAX + 1))
    app.close()


@pytest.mark.parametrize(
    ("traceparent", "linked"),
    [
        (TRACE.format(1, 2), True),
        ("cc" + TRACE.format(1, 2)[2:], True),
        ("cc" + TRACE.format(1, 2)[2:] + "-what-will-be", True),
        (TRACE.format(1, 2) + "-what-will-be", False),
        ("ff" + TRACE.format(1, 2)[2:], False),
        (TRACE.format(0, 2), False),
        (TRACE.format(1, 0), False),
        (TRACE.format(10, 2).upper(), False),
        (TRACE.format(1, 2) + "1", False),
        (TRACE.format(1, 2)[:-1], False),
        ("", False),
    ],
)
def test_a_link_is_made_of_what_the_apis_own_reader_takes(tmp_path, telemetry, traceparent, linked):
    own = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    context = get_current_span(own).get_span_context()
    app = shop(tmp_path)
    telemetry.instrument(app)
    app.send("orders", {"client": "a"}, headers={"traceparent": traceparent})
    run(app)
    (span,) = telemetry.spans_of("orders")
    assert [link.context for link in span.links] == ([context] if context.is_valid else [])
    assert bool(span.links) is linked
    app.close()


@pytest.mark.parametrize(
    "headers",
    [
        '{"traceparent": "nonsense"}',
        '{"traceparent": ["00"]}',
        '{"traceparent": null}',
        '{"traceparent": 5}',
        "[1, 2]",
        "no JSON",
        "[" * 5_000,
    ],
)
@pytest.mark.parametrize("spans", ["batch", "message"])
def test_headers_of_any_shape_do_no_harm(tmp_path, telemetry, headers, spans):
    app = shop(tmp_path)
    telemetry.instrument(app, spans=spans)
    foreign(app, "orders", headers=headers, body=b'{"client":"a"}', format=1)
    run(app)
    (status,) = app.status()
    assert status.counts == {("processed", ""): 1}
    assert telemetry.spans_of("orders")[-1].links == ()
    app.close()


def test_the_span_is_current_in_its_handlers_and_not_after_them(tmp_path, telemetry):
    app = new_app(tmp_path)
    telemetry.instrument(app)
    seen = []

    @app.consumer("q", name="c", session="n")
    def handle(payload: dict) -> None:
        seen.append(get_current_span().get_span_context().span_id)
        with telemetry.tracer.start_as_current_span("query"):
            pass

    app.send_many("q", [{"n": n} for n in range(3)])
    run(app)
    batch = telemetry.spans_of("q")[0]
    assert seen == [batch.context.span_id] * 3
    queries = [span for span in telemetry.spans if span.name == "query"]
    assert {query.parent.span_id for query in queries} == {batch.context.span_id}
    assert not get_current_span().get_span_context().is_valid
    app.close()


def test_the_span_is_current_in_async_handlers(tmp_path, telemetry):
    app = new_app(tmp_path)
    telemetry.instrument(app)
    seen = []

    @app.consumer("q", name="c", session="n")
    async def handle(payload: dict) -> None:
        await asyncio.sleep(0)
        seen.append(get_current_span().get_span_context().span_id)

    app.send_many("q", [{"n": n} for n in range(3)])
    run(app)
    app.send("q", {"n": 9})
    run(app)
    first, second = telemetry.spans_of("q")
    assert seen == [first.context.span_id] * 3 + [second.context.span_id]
    app.close()


def test_a_failing_handler_is_told_on_its_batchs_span(tmp_path, telemetry):
    app = shop(tmp_path)
    telemetry.instrument(app)
    app.send("orders", {"client": "a", "do": "fail"}, message_id="bad")
    run(app)
    spans = telemetry.spans_of("orders")
    assert len(spans) == FAILED_RUNS
    for span in spans:
        (event,) = span.events
        assert event.name == "message.failed"
        assert event.attributes["key"] == "bad"
        assert event.attributes["error"] == "ValueError: no such client"
    assert spans[-1].attributes["procession.ended.dead-lettered"] == 1
    app.close()


def test_a_batch_that_does_not_commit_is_a_failed_span(tmp_path, telemetry):
    app = new_app(tmp_path)
    telemetry.instrument(app)

    @app.consumer("q", name="c", session="n")
    def handle(payload: dict, ctx: Context) -> None:
        if ctx.run == 1:
            ctx.write("INSERT INTO child VALUES (1)")

    app.open()
    sql(app, "CREATE TABLE parent (id INTEGER PRIMARY KEY)")
    sql(app, "CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    app.send("q", {"n": 1})
    run(app)
    refused, committed = telemetry.spans_of("q")
    assert refused.status.status_code is StatusCode.ERROR
    assert refused.attributes["error.type"] == "IntegrityError"
    assert committed.status.status_code is StatusCode.UNSET
    app.close()


def test_a_batch_without_an_end_is_ended_by_the_next_one(telemetry):
    told = telemetry.instrument(App("t", store="memory://"))
    begun = {"consumer": "c", "messages": 1, "traceparents": []}
    told.emit(Event.BATCH_BEGUN, begun)
    told.emit(Event.BATCH_BEGUN, begun)
    (span,) = telemetry.spans
    assert span.attributes["error.type"] == "abandoned"
    lost = {"consumer": "c", "error": "SessionLost", "reason": "gone", "runs": 0, "batch_s": 0.5}
    told.emit(Event.BATCH_ROLLED_BACK, lost)
    assert telemetry.spans[-1].status.description == "gone"
    assert telemetry.spans[-1].attributes["error.type"] == "SessionLost"
    durations = telemetry.points()["messaging.process.duration"]
    assert {dict(found)["error.type"] for found in durations} == {"SessionLost"}
    assert not get_current_span().get_span_context().is_valid


# ---- a span a message ----------------------------------------------------------------------------


def test_by_option_each_run_is_a_span_below_its_batchs(tmp_path, telemetry):
    app = new_app(tmp_path)
    telemetry.instrument(app, spans="message")
    tries = []

    @app.consumer("q", name="c", session="s")
    def handle(payload: dict, ctx: Context) -> None:
        match payload["do"]:
            case "fail" if not tries:
                tries.append(1)
                raise ValueError("not today")
            case "later" if ctx.message.attempt == 0:
                raise Retry

    headers = {"traceparent": TRACE.format(5, 6)}
    app.send("q", {"s": "a", "do": "go"}, message_id="m1", headers=headers)
    app.send("q", {"s": "b", "do": "fail"}, message_id="m2")
    app.send("q", {"s": "c", "do": "later"}, message_id="m3")
    run(app)
    found = {}
    for span in telemetry.spans_of("q"):
        if "messaging.message.id" in span.attributes:
            found.setdefault(span.attributes["messaging.message.id"], []).append(span)
    batches = {span.context.span_id for span in telemetry.spans if span.parent is None}
    assert {key: len(spans) for key, spans in found.items()} == {"m1": 1, "m2": 2, "m3": 2}
    assert all(span.parent.span_id in batches for spans in found.values() for span in spans)
    (good,) = found["m1"]
    assert [link.context.trace_id for link in good.links] == [5]
    assert good.attributes["procession.session"] == "a"
    failed, again = found["m2"]
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "ValueError"
    assert failed.events[0].name == "exception"
    assert again.status.status_code is StatusCode.UNSET
    postponed, _ = found["m3"]
    assert postponed.attributes["procession.outcome"] == "Retry"
    assert postponed.status.status_code is StatusCode.UNSET
    app.close()


def test_a_failure_whose_text_cannot_be_made_stays_the_handlers_own(tmp_path, telemetry):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    app = new_app(tmp_path)
    telemetry.instrument(app, spans="message")

    @app.consumer("q", name="c")
    def handle(payload: dict) -> None:
        raise Odd

    app.send("q", {})
    run(app)
    (letter,) = app.dead_letters()
    assert {error.partition(":")[0] for error in letter.errors} == {"Odd"}
    app.close()


def test_off_makes_no_spans_and_asks_for_no_event(tmp_path, telemetry):
    app = shop(tmp_path)
    told = telemetry.instrument(app, spans="off")
    play(app)
    assert told.wants == frozenset()
    assert telemetry.spans == ()
    assert "procession.messages.ended" in telemetry.points()
    app.close()


# ---- context on what is sent ---------------------------------------------------------------------


def test_a_trace_goes_from_the_sender_through_a_handler_to_the_next_queue(tmp_path, telemetry):
    app = new_app(tmp_path)
    telemetry.instrument(app)
    app.queue("second", session="n")

    @app.consumer("first", name="one", session="n")
    def one(payload: dict, ctx: Context) -> None:
        ctx.send("second", payload)

    @app.consumer("second", name="two")
    def two(payload: dict) -> None: ...

    with telemetry.tracer.start_as_current_span("request") as request:
        app.send("first", {"n": 1})
    run(app)
    (first,), (second,) = telemetry.spans_of("first"), telemetry.spans_of("second")
    assert [link.context.trace_id for link in first.links] == [request.context.trace_id]
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    app.close()


def test_outside_of_spans_a_message_stays_without_headers(tmp_path, telemetry):
    app = shop(tmp_path)
    telemetry.instrument(app)
    app.send("orders", {"client": "a"})
    assert column(app, "SELECT headers FROM procession_messages") == [None]
    app.close()


def test_a_trace_that_the_sender_names_wins(tmp_path, telemetry):
    app = shop(tmp_path)
    telemetry.instrument(app)
    own = TRACE.format(3, 4)
    with telemetry.tracer.start_as_current_span("request"):
        outgoing = app.outgoing("orders", {"client": "a"}, headers={"traceparent": own, "x": "y"})
    assert outgoing.headers == {"traceparent": own, "x": "y"}


def test_propagation_is_off_where_it_is_not_wanted(tmp_path, telemetry):
    app = shop(tmp_path)
    telemetry.instrument(app, propagate=False)
    with telemetry.tracer.start_as_current_span("request"):
        assert app.outgoing("orders", {"client": "a"}).is_plain


def test_instrumenting_twice_counts_once(tmp_path, telemetry):
    app = shop(tmp_path)
    first = telemetry.instrument(app)
    assert telemetry.instrument(app) is first
    with telemetry.tracer.start_as_current_span("request"):
        assert len(app.outgoing("orders", {"client": "a"}).headers) == 1
    play(app)
    assert telemetry.points()["procession.failures"][labels(consumer="bills")].value == FAILED_RUNS
    app.close()


def test_unknown_spans_are_refused():
    with pytest.raises(ConfigurationError, match="'batch', 'message' or 'off'"):
        instrument(App("t", store="memory://"), spans="all")


def test_without_an_sdk_the_instrument_is_harmless(tmp_path):
    app = shop(tmp_path)
    instrument(app, spans="message")
    play(app)
    assert sum(app.status()[0].counts.values()) == sum(ENDED.values())
    app.close()
