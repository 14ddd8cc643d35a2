"""Child processes that never outlive their test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.driving import sql
from tests.product.child import make_app

from procession import App

ROOT = Path(__file__).parents[2]
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Start `tests.product.child` on the test's file."""
    children: list[subprocess.Popen[str]] = []

    def spawn(scenario: str = "work", *, file: Path | None = None, env: Any = None, **options: Any):
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.product.child",
                str(file or tmp_path / "t.db"),
                scenario,
                json.dumps(options),
            ],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield spawn
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.kill()
        child.communicate()


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    """The app whose consumers the children run."""
    app = make_app(tmp_path / "t.db")
    app.open()
    sql(app, "CREATE TABLE effect (s, n INTEGER, process INTEGER)")
    sql(app, "CREATE TABLE sent (n INTEGER)")
    yield app
    app.close()
