"""A store that is full, locked, foreign or newer: a pause or a clear error, no attempt, no loss."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from datetime import datetime, timedelta

import pytest
from tests.driving import (
    ENDLESS,
    Driver,
    Recorder,
    column,
    ends,
    new_app,
    run_until_idle,
    sql,
    wait_until,
)

from procession import App, Context, Event
from procession.errors import ConfigurationError, StoreUnavailable
from procession.runtime.drive import drive
from procession.stores.sqlite.connection import _GIVEN_UP


def fill_up(driver, *, spare):
    """Let the lane's database grow by `spare` pages at most."""
    connection = driver.lane()._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    free = connection.execute("PRAGMA freelist_count").fetchone()[0]
    assert free == 0
    connection.execute(f"PRAGMA max_page_count = {pages + spare}")


def free_space(driver):
    driver.lane()._connection.execute("PRAGMA max_page_count = 1000000")


BIG = "INSERT INTO effect (n, mark) VALUES (:n, hex(zeroblob(50000)) || :n)"


def plain(ctx, n):
    ctx.execute(BIG, n=n)


def swallowed(ctx, n):
    try:
        ctx.execute(BIG, n=n)
    except Exception:  # noqa: BLE001  it swallows: the fault under test
        ctx.execute("INSERT INTO effect (n) VALUES (-1)")


def in_savepoint(ctx, n):
    try:
        with ctx.savepoint():
            ctx.execute(BIG, n=n)
    except Exception:  # noqa: BLE001  it swallows: the fault under test
        return


def deferred(ctx, n):
    ctx.write(BIG, n=n)


@pytest.mark.parametrize("alone", [False, True], ids=["in-company", "alone"])
@pytest.mark.parametrize("write", [plain, swallowed, in_savepoint, deferred])
def test_a_full_disk_pauses_without_an_attempt_and_without_autocommit_and_goes_on(
    make, write, alone
):
    app = make()
    attempts = []

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        attempts.append(ctx.message.attempt)
        if alone and len(attempts) == 1:
            raise ValueError
        write(ctx, message["n"])

    app.send_many("q", [{"s": "A", "n": n} for n in range(3)])
    with Driver(app) as driver:
        if alone:
            driver.step()
        fill_up(driver, spare=8)
        for _ in range(8):
            with pytest.raises(StoreUnavailable, match="free some space"):
                driver.step()
            assert driver.lane()._connection.in_transaction is False
        assert column(app, "SELECT count(*) FROM effect") == [0]
        free_space(driver)
        driver.run()

    assert ends(app) == {"processed": 3}
    assert column(app, "SELECT n FROM effect ORDER BY rowid") == [0, 1, 2]
    assert max(attempts) <= 1
    assert app.dead_letters() == []


def test_a_disk_that_is_full_when_our_own_rows_are_written_loses_nothing(make):
    app = make()
    app.queue("other")

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        ctx.send("other", {"big": "x" * 20_000})

    app.send_many("q", [{"n": n} for n in range(20)])
    with Driver(app) as driver:
        fill_up(driver, spare=4)
        with pytest.raises(StoreUnavailable):
            driver.step()
        assert column(app, "SELECT count(*) FROM effect") == [0]
        assert {s.queue: s.waiting for s in app.status()} == {"q": 20, "other": 0}
        free_space(driver)
        driver.step()

    assert ends(app) == {"processed": 20}
    assert column(app, "SELECT count(*) FROM effect") == [20]


def test_a_send_to_a_full_disk_says_so_and_stores_nothing(make):
    app = make()
    app.queue("q")
    app.send("q", {})
    connection = app.publisher().connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(StoreUnavailable, match="full"):
        app.send_many("q", [{"big": "x" * 10_000}] * 10)

    assert [s.waiting for s in app.status()] == [1]
    connection.execute("PRAGMA max_page_count = 1000000")
    assert app.send_many("q", [{"big": "x" * 10_000}] * 10) == 10
    assert [s.waiting for s in app.status()] == [11]


@pytest.mark.parametrize("alone", [False, True], ids=["in-company", "alone"])
def test_C03_a_database_locked_by_another_program_pauses_without_an_attempt(make, alone):
    app = make(settings={"busy_ms": 30})
    attempts = []

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        attempts.append(ctx.message.attempt)
        if alone and len(attempts) == 1:
            raise ValueError
        ctx.execute("INSERT INTO effect (n) VALUES (1)")

    app.send("q", {})
    other = sqlite3.connect(str(app.database), isolation_level=None)
    with Driver(app) as driver:
        if alone:
            driver.step()
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(7):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="another program holds a write transaction"):
                driver.step()
            assert time.monotonic() - began < 5
        with pytest.raises(StoreUnavailable):
            app.send("q", {})
        assert [s.waiting for s in app.status()] == [1]  # reading needs no lock
        other.execute("ROLLBACK")
        driver.run()
    other.close()

    assert ends(app) == {"processed": 1}
    assert max(attempts) <= 1


def test_the_lane_says_that_the_store_is_away_and_when_it_is_back_and_loses_nothing(make):
    recorder = Recorder()
    app = make(
        settings={"busy_ms": 10, "pause_ms": 10, "pause_longest_ms": 20}, instruments=[recorder]
    )

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (1)")

    worker = app.worker()
    worker.start()
    other = sqlite3.connect(str(app.database), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    other.execute("INSERT INTO effect (n) VALUES (0)")
    other.execute("COMMIT")
    app.send("q", {})
    other.execute("BEGIN EXCLUSIVE")
    deadline = time.monotonic() + 10
    while not recorder.of(Event.STORE_UNAVAILABLE) and time.monotonic() < deadline:
        if ends(app):  # it was quicker than the lock: once more
            other.execute("ROLLBACK")
            app.send("q", {})
            other.execute("BEGIN EXCLUSIVE")
        time.sleep(0.01)
    other.execute("ROLLBACK")
    other.close()
    while sum(s.waiting for s in app.status()) and time.monotonic() < deadline:
        time.sleep(0.01)
    worker.stop()
    worker.join()

    kinds = [event for event, _ in recorder.events]
    assert kinds.index(Event.STORE_UNAVAILABLE) < kinds.index(Event.STORE_AVAILABLE)
    assert recorder.of(Event.STORE_UNAVAILABLE)[0]["fault"] is False
    assert [s.waiting + s.held for s in app.status()] == [0]
    assert app.dead_letters() == []


def test_a_newer_schema_is_refused_and_left_alone(make):
    app = make()
    app.queue("q")
    app.send("q", {})
    app.close()
    sql(app, "UPDATE procession_meta SET value = 99 WHERE name = 'schema'")
    before = sql(app, "SELECT * FROM procession_messages")

    for migrate in ("auto", "check"):
        fresh = make(migrate=migrate)
        fresh.queue("q")
        with pytest.raises(ConfigurationError, match=r"schema version 99.*upgrade"):
            fresh.send("q", {})

    assert sql(app, "SELECT * FROM procession_messages") == before
    assert column(app, "SELECT value FROM procession_meta WHERE name = 'schema'") == [99]


def test_a_missing_schema_is_made_or_refused_as_asked(tmp_path):
    checked = new_app(tmp_path, migrate="check")
    with pytest.raises(ConfigurationError, match="procession migrate"):
        checked.open()
    made = new_app(tmp_path)
    made.open()
    made.close()
    checked.open()
    checked.close()


@pytest.mark.parametrize(
    "content",
    [b"this is no database, but a text of some length\n" * 40, b"\0" * 5_000, b"SQLite format 2\0"],
    ids=["text", "zeros", "old"],
)
def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path, content):
    (tmp_path / "t.db").write_bytes(content)
    app = new_app(tmp_path)

    with pytest.raises(ConfigurationError, match=r"t\.db.*SQLite database"):
        app.open()

    assert (tmp_path / "t.db").read_bytes() == content


def test_an_empty_file_becomes_a_database(tmp_path):
    (tmp_path / "t.db").touch()
    app = new_app(tmp_path)
    app.open()
    app.close()


@pytest.mark.parametrize(
    "store",
    ["sqlite:///{}/", "sqlite:///{}/no/such/folder/t.db"],
    ids=["folder", "missing"],
)
def test_a_path_that_cannot_be_opened_is_named(tmp_path, store):
    app = new_app(tmp_path, store=store.format(tmp_path))

    with pytest.raises((StoreUnavailable, ConfigurationError), match=str(tmp_path)):
        app.open()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite://host/t.db",
        "sqlite:///t.db?synchronous=maybe",
        "sqlite:///t.db?typo=1",
        "sqlite3:///t.db",
        "",
    ],
)
def test_a_wrong_url_is_refused_at_once(url):
    with pytest.raises(ConfigurationError):
        App("t", store=url)


HOUR_NS = 3_600_000_000_000


@pytest.mark.parametrize("shift_ns", [-HOUR_NS, HOUR_NS], ids=["back", "forward"])
def test_L08_a_host_clock_set_by_an_hour_moves_no_lease_no_retry_and_no_order(
    make, monkeypatch, shift_ns
):
    app = make(retry=ENDLESS)
    order = []

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        order.append(message["n"])
        if message["n"] == 1 and ctx.message.attempt < 3:
            raise ValueError

    real = time.time_ns
    with Driver(app) as driver, Driver(app) as other:
        app.send("q", {"s": "A", "n": 1})
        driver.step()
        driver.step()  # a lone run: the message waits for its retry
        monkeypatch.setattr(time, "time_ns", lambda: real() + shift_ns)
        app.send("q", {"s": "A", "n": 2})
        assert drive(other.workers.expired()) == []
        assert drive(other.workers.take_over(driver.worker_id)) is None
        drive(driver.workers.renew(driver.worker_id))
        driver.run()

    assert order == [1, 1, 1, 1, 2]
    assert ends(app) == {"processed": 2}


def test_a_due_time_follows_the_wall_clock_and_a_lease_does_not(make, monkeypatch):
    app = make()

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context): ...

    real = time.time_ns
    with Driver(app) as driver:
        app.send("q", {}, after=timedelta(minutes=30))
        assert driver.run_ready() == 0
        monkeypatch.setattr(time, "time_ns", lambda: real() + HOUR_NS)
        driver.run_ready()

    assert ends(app) == {"processed": 1}


@pytest.mark.parametrize("zone", ["America/New_York", "Pacific/Kiritimati", "Asia/Kolkata"])
def test_L09_times_are_moments_whatever_the_zone_of_the_host(make, monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        app = make(retry=ENDLESS)

        @app.consumer("q", name="c")
        def handle(message: dict, ctx: Context):
            if ctx.message.attempt < 2:
                raise ValueError

        with pytest.raises(ConfigurationError, match="no zone"):
            app.send("q", {}, due=datetime(2030, 1, 1))  # noqa: DTZ001  the fault under test
        app.send("q", {}, due=datetime.now().astimezone() + timedelta(milliseconds=20))
        app.send("q", {}, due=datetime.now().astimezone() - timedelta(hours=30))
        app.send("q", {}, after=timedelta(milliseconds=10), expires=timedelta(seconds=60))
        run_until_idle(app)
        assert ends(app) == {"processed": 3}
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_process_that_is_stopped_in_the_turnstile_keeps_others_waiting_once(make):
    app = make(settings={"busy_ms": 100})
    app.queue("q")
    app.send("q", {})
    stopped = os.open(f"{app.database}-turnstile", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)

    began = time.monotonic()
    app.send("q", {})
    waited = time.monotonic() - began
    app.send_many("q", [{}] * 20)
    again = time.monotonic() - began - waited

    fcntl.flock(stopped, fcntl.LOCK_UN)
    os.close(stopped)
    queued = _GIVEN_UP[app.database]
    wait_until(lambda: not queued.is_alive(), "the place in the queue to be given back")
    app.send("q", {})

    assert [s.waiting for s in app.status()] == [23]
    assert waited > 0.15
    assert again < waited


def test_who_waits_at_the_turnstile_goes_in_as_soon_as_it_is_free(make):
    app = make(settings={"busy_ms": 5_000})
    app.queue("q")
    app.send("q", {})
    other = os.open(f"{app.database}-turnstile", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    sender = threading.Thread(target=app.send, args=("q", {}))
    sender.start()
    sender.join(0.05)
    assert sender.is_alive()

    fcntl.flock(other, fcntl.LOCK_UN)
    sender.join(5)
    os.close(other)

    assert not sender.is_alive()
    assert [s.waiting for s in app.status()] == [2]
