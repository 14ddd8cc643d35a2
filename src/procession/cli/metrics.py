"""`procession run --metrics-port`: what all its processes count, at one endpoint.

Each process counts into files of its own in one temporary folder; the supervisor adds them up when
it is asked, and reads the store's numbers itself.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator

from procession.app import App
from procession.errors import ConfigurationError

# Named by the client, and read when it is imported.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


@contextlib.contextmanager
def shared_folder(*, wanted: bool) -> Generator[None]:
    """Make the folder for the block; enter it before the app is imported, which may import the
    client.
    """
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="procession-metrics-") as folder:
        before = os.environ.get(FOLDER_VARIABLE)
        os.environ[FOLDER_VARIABLE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[FOLDER_VARIABLE]
            else:
                os.environ[FOLDER_VARIABLE] = before


def count(app: App) -> None:
    """Count what the app does in this process.

    Raises:
        ConfigurationError: the client is not installed.
    """
    try:
        from procession.contrib import prometheus  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "--metrics-port needs prometheus-client, which is not installed: "
            "pip install 'procession[prometheus]'"
        ) from error
    if not any(isinstance(one, prometheus.PrometheusInstrument) for one in app.instruments):
        prometheus.instrument(app, backlog_age_s=None)


@contextlib.contextmanager
def served(app: App, *, host: str, port: int | None) -> Generator[None]:
    """Serve what all processes count, while the block runs; nothing without a port.

    Raises:
        ConfigurationError: the client is not installed, or the port is taken.
    """
    if port is None:
        yield
        return
    count(app)
    from procession.contrib.prometheus import serve_processes  # noqa: PLC0415  an extra

    with serve_processes(app, host=host, port=port):
        yield
