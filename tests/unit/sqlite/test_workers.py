"""The worker around the lanes, in process: hangs, stops, wake-ups."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from tests.driving import ENDLESS, Driver, Recorder, column, ends, sql, wait_until

from procession import App, Context, Event, RetryPolicy
from procession.runtime.drive import drive

HANGING = {"handler_limit_ms": 120, "lease_ms": 3_000, "abandoned_max": 8, "stop_ms": 3_000}


@contextmanager
def running(app: App) -> Iterator[None]:
    worker = app.worker()
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
        worker.join()


def finished(app, total):
    return lambda: sum(ends(app).values()) >= total


def hang_in_sleep(ctx, release):
    ctx.execute("INSERT INTO effect (n) VALUES (-1)")
    release.wait(10)


def hang_with_rows_in_hand(ctx, release):
    ctx.execute("INSERT INTO effect (n) VALUES (-1)")
    rows = iter(ctx.execute("SELECT * FROM sqlite_master"))
    next(rows)
    release.wait(10)
    next(rows)


def hang_in_a_savepoint(ctx, release):
    with ctx.savepoint():
        ctx.execute("INSERT INTO effect (n) VALUES (-1)")
        release.wait(10)


def hang_in_sql(ctx, release):
    ctx.execute("INSERT INTO effect (n) VALUES (-1)")
    ctx.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "INSERT INTO effect (n) SELECT -i FROM n WHERE i % 1000000 = 0"
    )


def hang_in_sql_and_swallow(ctx, release):
    while not release.is_set():
        try:
            hang_in_sql(ctx, release)
        except BaseException:  # noqa: BLE001  it swallows: the fault under test
            time.sleep(0.001)
            try:
                ctx.execute("INSERT INTO effect (n) VALUES (-2)")
            except BaseException:  # noqa: BLE001  it swallows: the fault under test
                time.sleep(0.001)


HANGS = [
    hang_in_sleep,
    hang_with_rows_in_hand,
    hang_in_a_savepoint,
    hang_in_sql,
    hang_in_sql_and_swallow,
]


@pytest.mark.parametrize("hang", HANGS)
def test_a_handler_that_hangs_loses_its_connection_and_others_go_on(make, hang):
    recorder = Recorder()
    app = make(
        settings=HANGING,
        instruments=[recorder],
        retry=RetryPolicy(max_attempts=1, first_ms=1, jitter=0),
    )
    release = threading.Event()
    runs = []

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        runs.append((message["n"], ctx.message.attempt))
        if message["n"] == 1:
            hang(ctx, release)
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    app.send_many("q", [{"n": n} for n in range(4)])
    with running(app):
        wait_until(finished(app, 4), "all messages to end")
        sql(app, "INSERT INTO effect (n) VALUES (100)")  # nobody holds the write lock
        release.set()
        time.sleep(0.05)  # what the zombies still do has no effect

    assert ends(app) == {"processed": 3, "dead-lettered": 1}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 2, 3, 100]
    (letter,) = app.dead_letters()
    assert letter.reason == "vanished"
    assert len(recorder.of(Event.LANE_HUNG)) == 2
    assert [attempt for n, attempt in runs if n == 1] == [0, 1]
    assert [attempt for n, attempt in runs if n != 1] == [0] * len([n for n, _ in runs if n != 1])


def test_the_zombie_of_a_hung_handler_runs_no_other_message_of_its_batch(make):
    app = make(settings=HANGING, retry=RetryPolicy(max_attempts=1, first_ms=1, jitter=0))
    release = threading.Event()
    runs = []

    @app.consumer("q", name="c")
    def handle(message: dict):
        runs.append((message["n"], threading.current_thread().name))
        if message["n"] == 1:
            release.wait(10)

    app.send_many("q", [{"n": n} for n in range(4)])
    with running(app):
        wait_until(finished(app, 4), "all messages to end")
        release.set()
        time.sleep(0.05)

    assert ends(app) == {"processed": 3, "dead-lettered": 1}
    first = runs[0][1]
    assert [n for n, name in runs if name == first] == [0, 1]


@pytest.mark.parametrize("rule", ["key", "validator", "session"])
def test_a_rule_or_validator_that_hangs_loses_the_connection_as_a_handler_does(make, rule):
    app = make(settings=HANGING, retry=RetryPolicy(max_attempts=1, first_ms=1, jitter=0))
    release = threading.Event()
    runs = []

    def hang(payload):
        if payload["n"] == 1:
            release.wait(10)
        return str(payload["n"])

    options = {
        "key": {"key": hang},
        "validator": {"validators": [hang]},
        "session": {"validate_session": hang},
    }[rule]

    @app.consumer("q", name="c", **options)
    def handle(message: dict):
        runs.append(message["n"])

    for n in range(4):
        app.send("q", {"n": n}, session=str(n), message_id=f"m{n}")
    with running(app):
        wait_until(finished(app, 4), "all messages to end")
        release.set()
        time.sleep(0.05)

    assert ends(app) == {"processed": 3, "dead-lettered": 1}
    assert [letter.reason for letter in app.dead_letters()] in (["vanished"], ["bad-key"])
    assert 1 not in runs


async def sleep_long(ctx):
    ctx.execute("INSERT INTO effect (n) VALUES (-1)")
    await asyncio.sleep(10)


async def shield(ctx):
    try:
        await asyncio.sleep(10)
    finally:
        ctx.execute("INSERT INTO effect (n) VALUES (-1)")


@pytest.mark.parametrize("hang", [sleep_long, shield])
def test_an_async_handler_that_hangs_is_cancelled_and_fails(make, hang):
    app = make(settings=HANGING, retry=RetryPolicy(max_attempts=2, first_ms=1, jitter=0))

    @app.consumer("q", name="c")
    async def handle(message: dict, ctx: Context):
        if message["n"] == 1:
            await hang(ctx)
        await asyncio.sleep(0)
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    app.send_many("q", [{"n": n} for n in range(4)])
    with running(app):
        wait_until(finished(app, 4), "all messages to end")

    assert ends(app) == {"processed": 3, "dead-lettered": 1}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 2, 3]
    (letter,) = app.dead_letters()
    assert letter.reason == "failed"
    assert "handler_limit_ms" in letter.detail


def test_L07_an_async_handler_that_blocks_its_loop_neither_loses_the_lease_nor_commits_twice(make):
    recorder = Recorder()
    app = make(settings={"lease_ms": 300, "handler_limit_ms": 5_000}, instruments=[recorder])

    @app.consumer("q", name="c")
    async def handle(message: dict, ctx: Context):
        time.sleep(0.9)  # noqa: ASYNC251  the fault under test
        ctx.execute("INSERT INTO effect (n) VALUES (1)")

    app.send("q", {})
    with running(app), running(app):
        wait_until(finished(app, 1), "the message to end")

    assert column(app, "SELECT n FROM effect") == [1]
    assert ends(app) == {"processed": 1}
    assert app.dead_letters() == []


def test_L04_a_handler_of_several_leases_runs_once_while_another_worker_waits(make):
    app = make(settings={"lease_ms": 200, "handler_limit_ms": 5_000, "busy_ms": 5_000})
    runs = []

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        runs.append(message["n"])
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["n"] == 0:
            time.sleep(1.0)

    app.send_many("q", [{"s": "A", "n": n} for n in range(3)])
    with running(app), running(app):
        wait_until(finished(app, 3), "all messages to end")

    assert runs == [0, 1, 2]
    assert column(app, "SELECT n FROM effect") == [0, 1, 2]


def test_N03_a_session_that_was_taken_away_mid_run_is_run_again_by_its_new_holder_alone(make):
    recorder = Recorder()
    app = make(retry=ENDLESS, instruments=[recorder])
    runs = []

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        runs.append((message["n"], ctx.message.attempt))
        if message["n"] == 0 and ctx.message.attempt == 0:
            raise ValueError
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    app.send_many("q", [{"s": "A", "n": n} for n in range(3)])
    with running(app):
        wait_until(finished(app, 3), "all messages to end")
        # Taken over while idle: the worker comes back under another name, without a restart.
        (old,) = column(app, "SELECT id FROM procession_workers")
        sql(app, "DELETE FROM procession_workers")
        app.send("q", {"s": "A", "n": 3})
        wait_until(finished(app, 4), "the message after the takeover to end")
        (new,) = column(app, "SELECT id FROM procession_workers")

    assert old != new
    assert column(app, "SELECT n FROM effect") == [0, 1, 2, 3]
    assert recorder.of(Event.SESSION_LOST)


def test_N05_an_empty_queue_is_quiet_and_the_first_message_is_handled_promptly(make):
    recorder = Recorder()
    app = make(instruments=[recorder])
    handled = []

    @app.consumer("q", name="c")
    def handle(message: dict):
        handled.append(time.monotonic())

    with running(app):
        time.sleep(0.4)
        sent = time.monotonic()
        app.send("q", {})
        wait_until(lambda: handled, "the message")
        stopping = time.monotonic()

    assert handled[0] - sent < 5
    assert time.monotonic() - stopping < 5
    kinds = {event for event, _ in recorder.events}
    assert kinds == {Event.WORKER_STARTED, Event.BATCH_COMMITTED, Event.WORKER_STOPPED}


def test_a_retry_and_a_due_message_wake_an_idle_lane_without_help(make):
    """Its own commit changes nothing that it watches, and no other connection commits."""
    app = make(retry=RetryPolicy(max_attempts=3, first_ms=60, factor=1, jitter=0))
    seen = []

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        seen.append(message["n"])
        if message["n"] == 1 and seen.count(1) < 3:
            raise ValueError
        if message["n"] == 1:
            ctx.send("q", {"n": 2}, after=timedelta(milliseconds=60))

    with running(app):
        time.sleep(0.1)
        app.send("q", {"n": 1})
        wait_until(finished(app, 2), "retry and due message", timeout_s=8)

    assert seen == [1, 1, 1, 2]


def test_work_behind_thousands_of_waiting_messages_wakes_an_idle_lane(make):
    app = make(retry=RetryPolicy(first_ms=60_000, longest_ms=60_000))

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        if message["s"] == "stuck":
            raise ValueError

    app.send_many("q", [{"s": "stuck"}] * 6_000)
    app.send("q", {"s": "free"})
    with running(app):
        wait_until(finished(app, 1), "the free message", timeout_s=8)


def test_a_session_of_a_dead_worker_keeps_no_lane_busy(make):
    app = make(settings={"lease_ms": 60_000})

    @app.consumer("q", name="c", session="s")
    def handle(message: dict): ...

    app.open()
    sql(
        app,
        "INSERT INTO procession_sessions (subscription, key, held, retry_at, worker, holder) "
        "SELECT id, x'41', 1, 0, 'dead', 'dead.0.1' FROM procession_subscriptions",
    )
    begun = []
    with running(app):
        time.sleep(0.1)
        lane = next(
            thread._lane
            for thread in threading.enumerate()
            if thread.name.startswith("procession-c-")
        )
        real = lane._turnstile.begin
        lane._turnstile.begin = lambda connection: (begun.append(1), real(connection))
        time.sleep(0.3)

    assert len(begun) <= 3


def test_a_connection_may_be_taken_from_a_busy_lane_at_any_moment(make):
    """Nothing crashes, nothing is written in autocommit, and the next lane completes the rest."""
    app = make(retry=ENDLESS, settings={"batch_max": 16})
    draw = random.Random(7)

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n) RETURNING n", n=message["n"]).fetchone()
        ctx.write("INSERT INTO effect (n) VALUES (-1 - :n)", n=message["n"])
        if message["n"] % 10 == 3 and ctx.message.attempt < 1:
            raise ValueError

    def work(driver):
        with contextlib.suppress(Exception):
            while True:
                driver.step()

    sent = 0
    for _ in range(40):
        app.send_many("q", [{"s": n % 5, "n": n} for n in range(sent, sent + 30)])
        sent += 30
        driver = Driver(app)
        lane = threading.Thread(target=work, args=(driver,))
        lane.start()
        time.sleep(draw.random() * 0.01)
        driver.lane().interrupt()
        lane.join(10)
        assert not lane.is_alive()
        drive(driver.workers.take_over(driver.worker_id, dead=True))
    with Driver(app) as last:
        last.run()

    effects = column(app, "SELECT n FROM effect ORDER BY rowid")
    assert sorted(effects) == list(range(-sent, sent))
    assert ends(app) == {"processed": sent}
    for session in range(5):
        mine = [n for n in effects if n >= 0 and n % 5 == session]
        assert mine == sorted(mine)


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async"])
def test_G03_a_stop_waits_for_the_running_batch_and_its_commit(make, is_async):
    app = make()
    entered = threading.Event()

    def handle(message: dict, ctx: Context):
        entered.set()
        time.sleep(0.15)
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    async def handle_async(message: dict, ctx: Context):
        entered.set()
        await asyncio.sleep(0.15)
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    app.consumer("q", name="c")(handle_async if is_async else handle)
    app.send_many("q", [{"n": n} for n in range(5)])
    worker = app.worker()
    worker.start()
    assert entered.wait(5)
    worker.stop()
    worker.join()

    done = column(app, "SELECT n FROM effect")
    assert done[:1] == [0]
    assert ends(app) == {"processed": len(done)}
    (status,) = app.status()
    assert status.waiting == 5 - len(done)
    assert column(app, "SELECT count(*) FROM procession_workers") == [0]
    assert column(app, "SELECT suspect_size FROM procession_subscriptions") == [0]


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async"])
def test_G01_a_handler_that_outlasts_the_grace_is_undone_and_runs_again(make, is_async):
    app = make(settings={"stop_ms": 50})
    entered, release = threading.Event(), threading.Event()

    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if not release.is_set():
            entered.set()
            release.wait(10)

    async def handle_async(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        while not release.is_set():
            entered.set()
            await asyncio.sleep(0.01)

    app.consumer("q", name="c")(handle_async if is_async else handle)
    app.send("q", {"n": 1}, message_id="m")
    worker = app.worker()
    worker.start()
    assert entered.wait(5)
    began = time.monotonic()
    worker.stop()
    worker.join()
    assert time.monotonic() - began < 8
    assert column(app, "SELECT count(*) FROM effect") == [0]
    assert column(app, "SELECT count(*) FROM procession_sessions") == [0]
    release.set()

    with running(app):
        wait_until(finished(app, 1), "the message to run again")
    assert column(app, "SELECT n FROM effect") == [1]
    assert ends(app) == {"processed": 1}


def test_G01_an_async_handler_that_cancels_its_own_task_fails_and_stops_nobody(make):
    app = make(retry=RetryPolicy(max_attempts=2, first_ms=1, jitter=0))

    @app.consumer("q", name="c")
    async def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["n"] == 1:
            asyncio.current_task().cancel()
        await asyncio.sleep(0)

    app.send_many("q", [{"n": n} for n in range(4)])
    with running(app):
        wait_until(finished(app, 4), "all messages to end")

    assert ends(app) == {"processed": 3, "dead-lettered": 1}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 2, 3]


def test_G01_a_cancelled_async_handler_leaves_no_half_commit_at_any_await(make):
    app = make(settings=HANGING, retry=RetryPolicy(max_attempts=5, first_ms=1, jitter=0))
    points = 4

    @app.consumer("q", name="c")
    async def handle(message: dict, ctx: Context):
        for point in range(points):
            ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
            if ctx.message.attempt == 0 and message["n"] == point:
                raise asyncio.CancelledError
            await asyncio.sleep(0)

    app.send_many("q", [{"n": n} for n in range(points)])
    with running(app):
        wait_until(finished(app, points), "all messages to end")

    assert ends(app) == {"processed": points}
    assert sorted(column(app, "SELECT n FROM effect")) == sorted(list(range(points)) * points)


def test_C05_slow_handlers_of_several_workers_all_finish_and_no_user_sees_a_lock(make):
    app = make(settings={"busy_ms": 2_000})
    errors = []

    @app.consumer("q", name="c", concurrency=8)
    def handle(message: dict, ctx: Context):
        try:
            ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        except sqlite3.Error as error:
            errors.append(error)
            raise
        time.sleep(0.03)

    app.send_many("q", [{"n": n} for n in range(12)])
    with running(app), running(app), running(app):
        for n in range(12, 18):
            app.send("q", {"n": n})
        wait_until(finished(app, 18), "all messages to end")

    assert errors == []
    assert ends(app) == {"processed": 18}
    assert sorted(column(app, "SELECT n FROM effect")) == list(range(18))


def test_too_many_hung_handlers_make_the_worker_ask_for_a_replacement(make):
    app = make(settings={**HANGING, "abandoned_max": 2})
    release = threading.Event()

    @app.consumer("q", name="c")
    def handle(message: dict):
        release.wait(10)

    app.send_many("q", [{"n": n} for n in range(5)])
    worker = app.worker()
    worker._may_exit = True  # as in `run`, whose signals belong to the main thread
    worker.start()
    wait_until(lambda: worker.exit_code, "the worker to give up")
    worker.stop()
    worker.join()
    release.set()

    assert worker.exit_code == 70
    assert column(app, "SELECT suspect_size FROM procession_subscriptions") != [0]
    assert [s.waiting + s.held for s in app.status()] == [5]
