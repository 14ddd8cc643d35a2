"""Metrics for Prometheus, and an endpoint that serves them. Changes nothing for any message.

Needs `pip install 'procession[prometheus]'`. `instrument(app)` counts into a registry, for programs
that have an endpoint already; `serve(app)` also opens one. The metrics are those of
`procession.contrib.metrics`. A process counts its own messages, so several processes are summed;
what is read from the store is the same in all of them, so take the largest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client import REGISTRY as DEFAULT_REGISTRY
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from procession.app import App
from procession.contrib.metrics import (
    BACKLOG_AGE_S,
    DURATION_BUCKETS_S,
    METRICS,
    Added,
    Backlog,
    Metric,
    added_by,
    zeros,
)
from procession.errors import ConfigurationError
from procession.telemetry import Event

PORT = 9464
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class PrometheusInstrument:
    """Counts events into a registry; made by `instrument`."""

    def __init__(self, app: App, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._app = app
        self._families: dict[Metric, Any] = {
            metric: _family(metric, registry) for metric in METRICS if metric.kind != "gauge"
        }
        self._series: dict[tuple[Metric, tuple[str, ...]], Any] = {}

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        """See `Instrument.emit`."""
        if event is Event.WORKER_STARTED:
            self._add(zeros(self._app.consumers))
        self._add(added_by(event, fields))

    def _add(self, additions: Iterable[Added]) -> None:
        for metric, amount, labels in additions:
            # A dict of our own: the client's takes a lock and checks the labels at each look.
            series = self._series.get((metric, labels))
            if series is None:
                family = self._families[metric]
                series = family.labels(*labels) if labels else family
                self._series[metric, labels] = series
            if metric.kind == "histogram":
                series.observe(amount)
            else:
                series.inc(amount)


class BacklogCollector(Collector):
    """Gives a registry what the store says; made by `instrument`."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the gauges without values: being registered must not open the store."""
        return [_gauge(metric) for metric in METRICS if metric.kind == "gauge"]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the gauges."""
        families: dict[Metric, GaugeMetricFamily] = {}
        for metric, value, labels in self._backlog.readings():
            families.setdefault(metric, _gauge(metric)).add_metric(labels, value)
        return families.values()


def instrument(
    app: App,
    *,
    registry: CollectorRegistry = DEFAULT_REGISTRY,
    backlog_age_s: float | None = BACKLOG_AGE_S,
) -> PrometheusInstrument:
    """Count what an app does into a registry. Call it before the app runs; harmless twice.

    Args:
        app: to count.
        registry: by default the client's own, which most endpoints serve.
        backlog_age_s: seconds for which the store's numbers (backlog, head age, dead letters) are
            kept before it is asked again; None leaves them out.

    Raises:
        ConfigurationError: another app, or another registry, is counted there already.

    Example:
        >>> from procession import App
        >>> app = App("shop", store="memory://")
        >>> counted = instrument(app, registry=CollectorRegistry())
    """
    for known in app.instruments:
        if isinstance(known, PrometheusInstrument):
            if known.registry is not registry:
                raise ConfigurationError(f"app {app.name!r} counts into another registry already")
            return known
    try:
        made = PrometheusInstrument(app, registry)
        if backlog_age_s is not None:
            registry.register(BacklogCollector(Backlog(app, age_s=backlog_age_s)))
    except ValueError as error:
        raise ConfigurationError(
            f"app {app.name!r}: the registry has such metrics already ({error}); give each app of "
            "a process a registry of its own"
        ) from error
    app.instruments.append(made)
    return made


class Endpoint:
    """A `/metrics` endpoint on threads of its own, until it is closed."""

    def __init__(self, registry: CollectorRegistry, *, port: int, host: str) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigurationError(
                f"metrics cannot be served at {host}:{port}: {error.strerror}; choose another port"
            ) from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Serve no more. Harmless twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve(
    app: App,
    *,
    port: int = PORT,
    host: str = "127.0.0.1",
    registry: CollectorRegistry = DEFAULT_REGISTRY,
    backlog_age_s: float = BACKLOG_AGE_S,
) -> Endpoint:
    """Count what an app does in this process, and serve it at `http://host:port/metrics`.

    Call it in the program that runs the app, never where the app is declared: several processes
    import that, and only one gets the port. `procession run --metrics-port` serves all its workers
    at one port.

    Args:
        app: to count.
        port: 0 chooses a free one; see `Endpoint.port`.
        host: the address to listen at; by default only this host may ask.
        registry, backlog_age_s: as `instrument`.

    Raises:
        ConfigurationError: as `instrument`, or the port is taken.

    Example:
        >>> from procession import App
        >>> app = App("shop", store="memory://")
        >>> with serve(app, port=0, registry=CollectorRegistry()) as endpoint:
        ...     endpoint.port > 0
        True
    """
    instrument(app, registry=registry, backlog_age_s=backlog_age_s)
    return Endpoint(registry, port=port, host=host)


def serve_processes(
    app: App, *, port: int = PORT, host: str = "127.0.0.1", backlog_age_s: float = BACKLOG_AGE_S
) -> Endpoint:
    """Serve what several processes count, summed, at one endpoint: for who starts them.

    All of them, this one too, have `PROMETHEUS_MULTIPROC_DIR` set to one empty folder before they
    import this module, and call `instrument(app, backlog_age_s=None)`.

    Raises:
        ConfigurationError: the variable names no folder, or the port is taken.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not Path(folder or "?").is_dir():
        raise ConfigurationError(f"{FOLDER_VARIABLE}={folder!r} names no folder")
    registry = CollectorRegistry()
    _Processes(registry, folder)
    registry.register(BacklogCollector(Backlog(app, age_s=backlog_age_s)))
    return Endpoint(registry, port=port, host=host)


class _Processes(MultiProcessCollector):
    """Adds up the files of all processes; levels of those that have ended are left out."""

    def __init__(self, registry: CollectorRegistry, folder: str) -> None:
        self._folder = Path(folder)
        super().__init__(registry, folder)  # type: ignore[no-untyped-call]

    def collect(self) -> Any:
        for file in self._folder.glob("gauge_live*_*.db"):
            process = int(file.stem.rpartition("_")[2])
            if not _is_alive(process):
                mark_process_dead(process, str(self._folder))  # type: ignore[no-untyped-call]
        return super().collect()  # type: ignore[no-untyped-call]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _family(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name, labels = _name(metric), metric.labels
    match metric.kind:
        case "counter":
            return Counter(name, metric.description, labels, registry=registry)
        case "histogram":
            return Histogram(
                name, metric.description, labels, registry=registry, buckets=DURATION_BUCKETS_S
            )
        case _:
            return Gauge(
                name, metric.description, labels, registry=registry, multiprocess_mode="livesum"
            )


def _gauge(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(_name(metric), metric.description, labels=metric.labels)


def _name(metric: Metric) -> str:
    """Return the name as OpenTelemetry's own translation makes it; the client adds `_total`."""
    name = metric.name.replace(".", "_")
    return f"{name}_seconds" if metric.unit == "s" else name
