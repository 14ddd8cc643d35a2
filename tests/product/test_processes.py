"""Several processes on one file: turns, signals, permissions, a disk that is really full."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from tests.driving import column, ends, sql, unfinished, wait_until
from tests.product.child import make_app

from procession.runtime.drive import drive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def registered(app, child):
    return column(app, "SELECT id FROM procession_workers WHERE process = ?", (child.pid,))


def test_C05_three_processes_of_slow_transactions_starve_neither_each_other_nor_a_renewal(
    app, spawn
):
    hogs = [spawn("hog", seconds=4) for _ in range(3)]
    workers = drive(app.store.workers())
    worker = app.worker()
    worker.start()
    longest = 0.0
    until = time.monotonic() + 4
    renewals = 0
    while time.monotonic() < until:
        asked = time.monotonic()
        drive(workers.renew(worker.id))
        longest = max(longest, time.monotonic() - asked)
        renewals += 1
        time.sleep(0.1)
    worker.stop()
    worker.join()
    told = [json.loads(hog.communicate(timeout=60)[0]) for hog in hogs]
    drive(workers.close())

    assert longest < 5
    assert renewals >= 3
    assert max(hog["longest"] for hog in told) < 5
    assert min(hog["done"] for hog in told) >= 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_G03_a_signal_finishes_the_batch_and_nothing_is_redelivered(app, spawn, number):
    child = spawn("work")
    for n in range(20):
        app.send("q", {"s": n, "n": n, "way": "sleep", "seconds": 0.1}, message_id=f"m{n}")
    wait_until(lambda: column(app, "SELECT n FROM effect"), "the first commit")
    child.send_signal(number)
    assert child.wait(30) == 0, child.stderr.read()

    done = column(app, "SELECT n FROM effect")
    assert 1 <= len(done) < 20
    (status,) = [s for s in app.status() if s.consumer == "c"]
    assert (status.waiting, status.held, status.reruns) == (20 - len(done), 0, 0)
    assert column(app, "SELECT count(*) FROM procession_workers") == [0]
    assert column(app, "SELECT max(suspect_size) FROM procession_subscriptions") == [0]


def test_G03_a_grace_shorter_than_the_handler_undoes_it_and_the_next_worker_runs_it_once(
    app, spawn, tmp_path
):
    child = spawn("work", settings={"stop_ms": 100})
    flag = tmp_path / "running"
    payload = {"s": 1, "n": 1, "way": "sleep", "seconds": 2, "flag": str(flag)}
    app.send("q", payload, message_id="m1")
    wait_until(flag.exists, "the handler")
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0
    assert column(app, "SELECT count(*) FROM effect") == [0]
    spawn("work")
    wait_until(lambda: unfinished(app) + unfinished(app, "out") == 0, "the message")

    assert column(app, "SELECT n FROM effect") == [1]
    assert column(app, "SELECT n FROM sent") == [1]
    assert ends(app) == {"processed": 1}


def test_G03_a_second_signal_aborts_at_once_and_loses_nothing(app, spawn, tmp_path):
    child = spawn("work")
    flag = tmp_path / "running"
    payload = {"s": 1, "n": 1, "way": "sleep", "seconds": 20, "flag": str(flag)}
    app.send("q", payload, message_id="m1")
    wait_until(flag.exists, "the handler")
    child.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert child.wait(30) == 130
    assert time.monotonic() - began < 10
    assert column(app, "SELECT count(*) FROM effect") == [0]
    (status,) = [s for s in app.status() if s.consumer == "c"]
    assert status.waiting == 1


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which needs root")
@pytest.mark.parametrize("locked", ["file", "folder", "both"])
def test_a_file_that_may_not_be_written_is_a_clear_error(spawn, locked):
    folder = Path(tempfile.mkdtemp())
    try:
        file = folder / "t.db"
        app = make_app(file)
        app.open()
        app.close()
        folder.chmod(0o555 if locked in ("folder", "both") else 0o777)
        for path in folder.iterdir():
            path.chmod(0o444 if locked in ("file", "both") else 0o666)
        told, errors = spawn("nobody", file=file).communicate(timeout=60)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)

    assert told.startswith(("StoreUnavailable", "ConfigurationError")), (told, errors)
    assert "permission" in told or "writable" in told


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which needs root")
@pytest.mark.parametrize("mode", [0o444, 0], ids=["read-only", "unreadable"])
@pytest.mark.parametrize("name", ["t.db", "t.db-wal", "t.db-shm", "t.db-turnstile"])
def test_a_file_beside_the_database_that_may_not_be_used_is_a_clear_error_and_nothing_is_lost(
    spawn, name, mode
):
    folder = Path(tempfile.mkdtemp())
    app = make_app(folder / "t.db")
    try:
        app.send("q", {"s": 1, "n": 1})
        folder.chmod(0o777)
        for path in folder.iterdir():
            path.chmod(0o666)
        (folder / name).chmod(mode)
        told, errors = spawn("nobody", file=folder / "t.db").communicate(timeout=60)
        assert [status.waiting for status in app.status() if status.consumer == "c"] == [1]
        assert sql(app, "PRAGMA integrity_check") == [("ok",)]
    finally:
        app.close()
        shutil.rmtree(folder)

    assert told.startswith("StoreUnavailable"), (told, errors)
    assert str(folder / "t.db") in told
    assert "permissions" in told or "must be writable" in told


def test_a_disk_that_is_really_full_pauses_the_worker_and_nothing_is_lost(app, spawn, tmp_path):
    flag = tmp_path / "free"
    size = max(path.stat().st_size for path in tmp_path.glob("t.db*"))
    for n in range(300):
        app.send("q", {"s": n % 5, "n": n, "pad": "x" * 2_000}, message_id=f"m{n}")
    size = max(path.stat().st_size for path in tmp_path.glob("t.db*"))
    env = {**os.environ, "FULL_AT": str(size + 20_000)}
    child = spawn("full", env=env, flag=str(flag))
    wait_until(lambda: registered(app, child), "the worker")
    time.sleep(1.5)
    assert child.poll() is None
    before = unfinished(app)
    assert before > 0
    flag.touch()
    wait_until(lambda: unfinished(app) + unfinished(app, "out") == 0, "all messages")
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0

    assert sorted(column(app, "SELECT n FROM effect")) == list(range(300))
    assert sorted(column(app, "SELECT n FROM sent")) == list(range(300))
    assert ends(app) == {"processed": 300}
    assert sql(app, "PRAGMA integrity_check") == [("ok",)]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
