"""`procession run --health-port`: what probes are told, of real workers in real trouble."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pytest
from tests.driving import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = """
    import time
    from procession import App, Reject, Settings

    app = App(
        "shop",
        store="sqlite:///shop.db?synchronous=off",
        settings=Settings(
            pause_ms=10, pause_longest_ms=50, busy_ms=50, lease_ms=1_000, handler_limit_ms=500
        ),
    )

    @app.on_alert
    def page(fields):
        time.sleep(600)  # a pager that never answers, and no time limit

    @app.consumer("orders", name="bills", on_conflict="alert")
    def bill(order: dict) -> None: ...

    if __name__ == "__main__":
        app.run()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "shop.py").write_text(dedent(APP))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start():
    """Start a program that is killed with the test, if it has not ended by then."""
    started = []

    def start(*command, **environment):
        process = subprocess.Popen(
            [sys.executable, *command],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(start, port, *more, **environment):
    command = ("-m", "procession.cli", "run", "shop:app", "--health-port", str(port), *more)
    return start(*command, **environment)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, name):
    """Return a probe's status and answer; status 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError:
        return 0, {}


def wait_for(port, name, status):
    wait_until(lambda: ask(port, name)[0] == status, f"/{name} to be {status}", timeout_s=30)
    return ask(port, name)[1]


def send(payload, message_id):
    code = f"from shop import app; app.send('orders', {payload!r}, message_id={message_id!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_is_live_at_once_and_ready_when_its_workers_are_and_stops_in_good_order(
    folder, start
):
    port = free_port()
    process = run(start, port, "-p", "2")
    wait_for(port, "live", 200)
    wait_for(port, "ready", 200)
    wait_until(lambda: all(w["ready"] for w in ask(port, "ready")[1]["workers"]), "both workers")
    assert [worker["number"] for worker in ask(port, "ready")[1]["workers"]] == [1, 2]
    assert ask(port, "other")[0] == 404
    process.terminate()
    _, told = process.communicate(timeout=30)
    assert process.returncode == 0, told
    assert ask(port, "live")[0] == 0


def test_a_store_that_cannot_be_written_makes_a_run_unready_and_it_is_ready_again_after_it(
    folder, start
):
    port = free_port()
    run(start, port)
    wait_for(port, "ready", 200)
    with closing(sqlite3.connect("shop.db", isolation_level=None, timeout=30)) as other:
        other.execute("BEGIN IMMEDIATE")
        found = wait_for(port, "ready", 503)
        assert "lease" in str(found["why"]) or "locked" in str(found["why"])
        assert ask(port, "live")[0] == 200
        other.execute("ROLLBACK")
    wait_for(port, "ready", 200)


def test_a_file_that_was_moved_makes_a_run_unready_and_no_empty_one_takes_its_place(folder, start):
    port = free_port()
    run(start, port)
    first = wait_for(port, "ready", 200)["workers"][0]["pid"]
    (folder / "shop.db").rename(folder / "moved.db")
    wait_for(port, "ready", 503)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: ask(port, "live")[1]["workers"][0]["pid"] != first, "the death to be seen")
    time.sleep(1)
    assert not (folder / "shop.db").exists()
    assert ask(port, "ready")[0] == 503
    (folder / "moved.db").rename(folder / "shop.db")
    wait_for(port, "ready", 200)


def test_a_lane_that_is_stuck_outside_of_a_handler_makes_a_run_not_live(folder, start):
    port = free_port()
    run(start, port, "-p", "2")
    wait_for(port, "ready", 200)
    send({"n": 1}, "m1")
    send({"n": 2}, "m1")  # a conflict, whose alert hangs
    found = wait_for(port, "live", 503)
    assert "consumer 'bills' is stuck in a batch" in str(found["why"])
    assert ask(port, "ready")[0] == 503


def test_a_stopped_worker_makes_a_run_not_live_until_it_is_replaced(folder, start):
    (folder / "shop.py").write_text(dedent(APP).replace("lease_ms=1_000", "lease_ms=9_000"))
    port = free_port()
    run(start, port)
    found = wait_for(port, "ready", 200)
    first = found["workers"][0]["pid"]
    os.kill(first, signal.SIGSTOP)
    found = wait_for(port, "live", 503)
    assert "silent" in str(found["why"])
    wait_for(port, "ready", 200)
    assert ask(port, "live")[1]["workers"][0]["pid"] != first


def test_a_worker_that_died_is_no_reason_to_restart_the_run(folder, start):
    port = free_port()
    run(start, port)
    first = wait_for(port, "ready", 200)["workers"][0]["pid"]
    os.kill(first, signal.SIGKILL)

    def replaced():
        status, found = ask(port, "live")
        assert status == 200
        return found["ready"] and found["workers"][0]["pid"] not in (first, None)

    wait_until(replaced, "another worker")


@pytest.mark.parametrize("command", [("shop.py",), ("-m", "procession.cli", "run", "shop:app")])
def test_the_environment_may_name_the_port(folder, start, command):
    port = free_port()
    process = start(*command, PROCESSION_HEALTH_PORT=str(port))
    wait_for(port, "ready", 200)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_only_this_host_may_ask_unless_it_is_told_otherwise(folder, start):
    port = free_port()
    run(start, port)
    wait_for(port, "live", 200)
    assert listens(port) == {"0100007F"}
    open_port = free_port()
    run(start, open_port, "--health-host", "0.0.0.0")
    wait_for(open_port, "live", 200)
    assert listens(open_port) == {"00000000"}


def listens(port):
    """Return the addresses that listen at a port, as the kernel writes them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1][:8] for row in rows if row[3] == "0A" and int(row[1][9:], 16) == port}


@pytest.mark.parametrize("command", [("shop.py",), ("-m", "procession.cli", "run", "shop:app")])
def test_a_taken_port_is_a_wrong_configuration(folder, start, command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(*command, PROCESSION_HEALTH_PORT=str(taken.getsockname()[1]))
        _, told = process.communicate(timeout=30)
    assert process.returncode == (2 if command[0] == "-m" else 1)
    assert "another port" in told


def test_a_port_that_is_none_is_named(folder, start):
    process = start("shop.py", PROCESSION_HEALTH_PORT="http")
    _, told = process.communicate(timeout=30)
    assert "health port 'http' is none: PROCESSION_HEALTH_PORT is 1 to 65535" in told
