"""Apps on fresh files, closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.driving import new_app, sql

from procession import App


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., App]]:
    apps: list[App] = []

    def make(**options: Any) -> App:
        app = new_app(tmp_path, **options)
        if not apps:
            sql(app, "CREATE TABLE effect (n INTEGER, mark TEXT UNIQUE)")
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.close()
