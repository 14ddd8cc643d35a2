"""Says over HTTP whether a worker lives and is ready. Two small answers, nothing else.

`GET /live` is 200 while the process answers and its lanes run. `GET /ready` is 200 while it can
work: the lease is renewed in time and no lane waits for the store; else 503. Both tell why in JSON.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

REQUEST_TIMEOUT_S = 5.0


class Health(Protocol):
    """What can be asked for its health."""

    def health(self) -> Mapping[str, Any]:
        """Return at least `live` and `ready` (bool); callable from any thread."""
        ...


class HealthServer:
    """Serves the health of one worker on a thread of its own.

    Args:
        subject: the worker.
        port: 0 chooses a free one; see `port`.
        host: who may ask; by default this host alone.
    """

    def __init__(self, subject: Health, *, port: int, host: str = "127.0.0.1") -> None:
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

        self._server = ThreadingHTTPServer((host, port), Answer)
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
