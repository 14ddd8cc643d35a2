"""`seeing`: what it costs to be seen. Workload W without instruments, and under all of them: JSON
log lines, OpenTelemetry's SDK with metrics and a span a batch, Prometheus scraped each second.

The traced pair is the same on messages that each carry another producer's `traceparent`, with that
header on both sides, so that each span has all the links it can have.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Literal

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from bench.measure import Figure, Options, Result, Timing, in_turn, more_cpu_us, rate, ratio
from bench.queued import Queued
from bench.workload import MESSAGES, expected, messages, row_names
from procession import Event
from procession.contrib import opentelemetry, prometheus

SHARE_GOAL = 0.9
READ_EVERY_S = 1.0
Watch = Callable[[Queued, Path], AbstractContextManager[None]]


class Nowhere(SpanExporter):
    """Takes spans as an exporter does, and sends them nowhere."""

    def __init__(self) -> None:
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += len(spans)
        return SpanExportResult.SUCCESS


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "procession", {})
        return json.dumps({"at": record.created, "level": record.levelname, **fields})


@contextmanager
def logged(_subject: Queued, folder: Path) -> Iterator[None]:
    logger = logging.getLogger("procession")
    handler = logging.FileHandler(folder / "log")
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        handler.close()


@contextmanager
def scraped(subject: Queued, _folder: Path) -> Iterator[None]:
    with (
        prometheus.serve(subject.app, port=0, registry=CollectorRegistry()) as endpoint,
        each_second(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics").read()
        ),
    ):
        yield


def told(spans: Literal["batch", "message"]) -> Watch:
    @contextmanager
    def watch(subject: Queued, _folder: Path) -> Iterator[None]:
        reader, exporter, tracers = InMemoryMetricReader(), Nowhere(), TracerProvider()
        tracers.add_span_processor(BatchSpanProcessor(exporter))
        meters = MeterProvider([reader])
        opentelemetry.instrument(
            subject.app, spans=spans, meter_provider=meters, tracer_provider=tracers
        )
        with each_second(reader.get_metrics_data):
            yield
        tracers.shutdown()
        meters.shutdown()
        assert exporter.spans, "no span was exported"

    return watch


@contextmanager
def everything(subject: Queued, folder: Path) -> Iterator[None]:
    with ExitStack() as stack:
        for watch in (logged, scraped, told("batch")):
            stack.enter_context(watch(subject, folder))
        yield


@contextmanager
def each_second(read: Callable[[], object]) -> Iterator[None]:
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(READ_EVERY_S):
            read()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        read()


def unseen(_subject: Queued, _folder: Path) -> AbstractContextManager[None]:
    return nullcontext()


def seeing(options: Options) -> Result:
    sent = messages(options.fewer(MESSAGES, MESSAGES // 2))
    wanted = expected(sent)

    def seen(watch: Watch, *, traced: bool = False) -> Callable[[Path], Timing]:
        def measure(folder: Path) -> Timing:
            subject = Queued(folder, rows=row_names())
            if traced:
                numbers = count(1)
                subject.app.on_send(lambda: {"traceparent": f"00-{next(numbers):032x}-{7:016x}-01"})
            subject.fill(sent)
            with watch(subject, folder):
                # Series are made at the first event; half a second's work must not pay for that.
                subject.app.instrument.emit(Event.WORKER_STARTED, {"worker": "warm-up"})
                timing = subject.work(len(sent))
            subject.check(wanted)
            subject.app.close()
            return timing

        return measure

    # Two that are compared with a goal alternate, so that each has the other on both sides.
    pair = in_turn(options.runs, {"none": seen(unseen), "all": seen(everything)})
    traced_pair = in_turn(
        options.runs,
        {"none": seen(unseen, traced=True), "all": seen(everything, traced=True)},
    )
    each = in_turn(
        (options.runs + 1) // 2,
        {
            "none": seen(unseen),
            "log": seen(logged),
            "prometheus": seen(scraped),
            "otel": seen(told("batch")),
            "spans": seen(told("message")),
        },
    )
    none, traced = pair["none"], traced_pair["none"]
    of_none = {name: ratio(each[name], each["none"]) for name in ("log", "prometheus", "otel")}
    of_none["all"], of_traced = ratio(pair["all"], none), ratio(traced_pair["all"], traced)
    all_us, all_traced_us = more_cpu_us(pair["all"], none), more_cpu_us(traced_pair["all"], traced)
    a_span_us = more_cpu_us(each["spans"], each["none"])
    goal = f"≥ {SHARE_GOAL}"
    return Result(
        bench="seeing",
        store=options.store,
        queue="table",
        per_s=rate(pair["all"]),
        runs=options.runs,
        figures=[
            Figure("without instruments", f"{rate(none):,.0f}/s"),
            Figure("JSON log, of that", f"{of_none['log']:.2f}"),
            Figure("Prometheus, of that", f"{of_none['prometheus']:.2f}"),
            Figure("OpenTelemetry, a span a batch, of that", f"{of_none['otel']:.2f}"),
            Figure("all, of that", f"{of_none['all']:.2f}", goal, of_none["all"] >= SHARE_GOAL),
            Figure("all, CPU a message more than that", f"{all_us:.1f} µs"),
            Figure("each message from another trace, no instruments", f"{rate(traced):,.0f}/s"),
            Figure("all, of that", f"{of_traced:.2f}", goal, of_traced >= SHARE_GOAL),
            Figure("all, CPU a message more", f"{all_traced_us:.1f} µs"),
            Figure("a span a message, CPU", f"{a_span_us:.1f} µs"),
        ],
        fields={
            **{f"vs_none_{name}": value for name, value in of_none.items()},
            "vs_traced_all": of_traced,
            "all_cpu_us": all_us,
            "all_traced_cpu_us": all_traced_us,
            "span_a_message_cpu_us": a_span_us,
        },
    )
