"""The pytest plugin: a fixture that runs an app for a test. Loaded by pytest where it is installed.

Example:
    ```
    from orders import app


    def test_a_payment_is_booked_once(procession_run):
        t = procession_run(app, setup="CREATE TABLE booked (id)")
        first = t.send("payments", {"id": 1})
        t.redeliver(first)
        t.drain()
        assert t.connection.execute("SELECT count(*) FROM booked").fetchone() == (1,)
    ```
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import pytest

from procession.app import App
from procession.testing.run import TestRun, run


@pytest.fixture
def procession_run() -> Generator[Callable[..., TestRun]]:
    """Run apps for this test: `procession_run(app, setup=…)` is `testing.run` until its end."""
    with ExitStack() as stack:

        def start(app: App, **options: Any) -> TestRun:
            return stack.enter_context(run(app, **options))

        yield start
