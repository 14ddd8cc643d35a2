"""Says over HTTP whether a worker lives and is ready. Two small answers, nothing else.

`GET /live` is 200 until something is wrong that only a fresh process mends, `GET /ready` is 200
while messages are handled; else they are 503. Both tell why in JSON. What is true is decided by
whom they ask: `Worker.health`, or `Supervisor.health` for all workers of `procession run`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Generator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from procession.errors import ConfigurationError

REQUEST_TIMEOUT_S = 5.0
HOST = "127.0.0.1"
PORT_VARIABLE = "PROCESSION_HEALTH_PORT"
HOST_VARIABLE = "PROCESSION_HEALTH_HOST"
_PORTS = range(65_536)


class Health(Protocol):
    """What can be asked for its health."""

    def health(self) -> Mapping[str, Any]:
        """Return at least `live` and `ready` (bool); callable from any thread."""
        ...


class HealthServer:
    """Serves the health of a worker, a supervisor or an app on a thread of its own.

    Args:
        subject: whose health.
        port: 0 chooses a free one; see `port`.
        host: the address to listen at; by default only this host may ask.

    Raises:
        ConfigurationError: the port is taken, or the address is not this host's.
    """

    def __init__(self, subject: Health, *, port: int, host: str = HOST) -> None:
        class Answer(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S

            def do_GET(self) -> None:
                found = subject.health()
                name = self.path.partition("?")[0].strip("/")
                if name not in ("live", "ready"):
                    self._answer(404, {"error": "ask for /live or /ready"})
                    return
                self._answer(200 if found[name] else 503, found)

            def _answer(self, status: int, content: Mapping[str, Any]) -> None:
                body = json.dumps(content, default=str).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Say nothing: probes come every second."""

        try:
            self._server = ThreadingHTTPServer((host, port), Answer)
        except OSError as error:
            raise ConfigurationError(
                f"health cannot be served at {host}:{port}: {error.strerror}; choose another port"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="procession-health",
            daemon=True,
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def served(
    subject: Health, *, port: int | None = None, host: str | None = None
) -> Generator[HealthServer | None]:
    """Serve health while the block runs; nothing where no port is named.

    Args:
        subject: whose health.
        port: by default what `PROCESSION_HEALTH_PORT` says.
        host: by default what `PROCESSION_HEALTH_HOST` says, or this host alone.

    Raises:
        ConfigurationError: the port is none, or is taken.
    """
    named = os.environ.get(PORT_VARIABLE, "") if port is None else str(port)
    if not named:
        yield None
        return
    if not named.isdecimal() or int(named) not in _PORTS:
        raise ConfigurationError(f"health port {named!r} is none: {PORT_VARIABLE} is 1 to 65535")
    server = HealthServer(
        subject, port=int(named), host=host or os.environ.get(HOST_VARIABLE) or HOST
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()
