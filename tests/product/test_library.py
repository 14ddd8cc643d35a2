"""A user's own loop over the library, beside other processes: killed with -9, marker, effect and
send are all there, or none; among busy workers it has its turn.
"""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.driving import column, wait_until

from procession import App, Inbox

# Handles one delivery as a user's program does, and dies where it is told to.
LOOP = """
import os, signal, sqlite3, sys
from procession import Inbox, Outbox

file, death = sys.argv[1:]

def point(name):
    if name == death:
        os.kill(os.getpid(), signal.SIGKILL)

connection = sqlite3.connect(file)
with Inbox(connection, consumer="billing").once("m1", payload=b"body") as first:
    point("after the marker")
    if first:
        connection.execute("INSERT INTO effect (mark) VALUES ('e')")
        point("after the effect")
        with Outbox(connection) as outbox:
            outbox.send("receipts", {"of": "m1"}, message_id="r1")
    point("after the sends")
point("before the commit")
connection.commit()
point("after the commit")
print("first" if first else "duplicate")
"""
POINTS = ["after the marker", "after the effect", "after the sends", "before the commit"]


def deliver(file: Path, death: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOOP, str(file), death],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def rows(file: Path) -> tuple[int, ...]:
    """Count effects, markers and sent messages."""
    with closing(sqlite3.connect(file)) as connection:
        return tuple(
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("effect", "procession_inbox", "procession_messages")
        )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "t.db"
    app = App("shop", store=f"sqlite:///{path}")
    app.queue("receipts")
    app.open()
    app.close()
    with closing(sqlite3.connect(path)) as connection:
        Inbox.prepare(connection)
        connection.execute("CREATE TABLE effect (mark TEXT)")
    return path


def test_X01_G10_a_kill_before_the_commit_leaves_nothing_and_the_next_run_does_it(
    file: Path,
) -> None:
    for point in POINTS:
        assert deliver(file, point).returncode == -signal.SIGKILL, point
        assert rows(file) == (0, 0, 0), point
    assert deliver(file).stdout == "first\n"
    assert rows(file) == (1, 1, 1)


def test_X01_G10_a_kill_after_the_commit_leaves_all_and_the_next_run_is_a_duplicate(
    file: Path,
) -> None:
    assert deliver(file, "after the commit").returncode == -signal.SIGKILL
    assert rows(file) == (1, 1, 1)
    assert deliver(file).stdout == "duplicate\n"
    assert rows(file) == (1, 1, 1)


@pytest.mark.slow
def test_C05_a_loop_has_its_turn_among_processes_of_slow_transactions(app, spawn, tmp_path) -> None:
    for _ in range(2):
        spawn("hog", seconds=8)
    wait_until(lambda: column(app, "SELECT count(*) FROM effect") > [2], "the others to begin")
    longest, done = 0.0, 0
    with closing(sqlite3.connect(tmp_path / "t.db", timeout=5)) as connection:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            asked = time.monotonic()
            with Inbox(connection, consumer="billing").once(done, payload=None) as first:
                longest = max(longest, time.monotonic() - asked)
                assert first
            connection.commit()
            done += 1
    assert done >= 8
    assert longest < 2
