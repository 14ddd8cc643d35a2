"""Faults that a hostile hour found: each by its promise."""

import sqlite3
import threading
import time

import pytest

from procession import App, Context, RetryPolicy, Settings, StoreUnavailable, testing
from procession.flows.upkeep import prune_all
from procession.runtime.drive import drive
from procession.stores.sqlite import upkeep as sqlite_upkeep

SETUP = "CREATE TABLE seen (id TEXT)"


def new_app(**options):
    app = App("t", store="sqlite:///never-made.db", **options)

    @app.consumer("q", name="c", session="s")
    def handle(payload: dict, ctx: Context):
        ctx.write("INSERT INTO seen (id) VALUES (:id)", id=ctx.message.id)
        if payload.get("fails", 0) > ctx.run - 1:
            raise ValueError("as planned")

    return app


def test_a_store_that_fails_in_a_lone_run_spends_one_attempt_however_often(monkeypatch):
    app = new_app(retry=RetryPolicy(max_attempts=3))
    with testing.run(app, setup=SETUP) as t:
        t.send("q", {"s": "a", "fails": 1}, message_id="m1")
        flow, _ = t._flows[0]
        drive(flow.step())
        flush = t._lanes[0].flush

        async def full(changes):
            raise StoreUnavailable("the disk is full")

        monkeypatch.setattr(t._lanes[0], "flush", full)
        for _ in range(8):
            with pytest.raises(StoreUnavailable):
                drive(flow.step())
        monkeypatch.setattr(t._lanes[0], "flush", flush)
        rows = t.connection.execute("SELECT attempts FROM procession_messages").fetchall()
        assert rows == [(1,)]
        t.drain()
        assert t.dead_letters == []
        assert t.connection.execute("SELECT id FROM seen").fetchall() == [("m1",)]


def test_a_handler_that_always_hangs_does_not_stop_a_program_that_holds_the_app(tmp_path):
    settings = Settings(handler_limit_ms=100, abandoned_max=2, lease_ms=5_000)
    app = App(
        "t",
        store=f"sqlite:///{tmp_path}/t.db?synchronous=off",
        settings=settings,
        retry=RetryPolicy(max_attempts=2, first_ms=1),
    )
    release = threading.Event()

    @app.consumer("q", name="c")
    def handle(payload: dict):
        if payload.get("hangs"):
            release.wait(30)

    with app:
        app.send("q", {"hangs": 1}, message_id="bad")
        for number in range(5):
            app.send("q", {}, message_id=f"m{number}")
        deadline = time.monotonic() + 30
        while app.status()[0].counts.get(("processed", "")) != 5 or not app.dead_letters():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert app.health()["live"]
        release.set()
    assert [letter.reason for letter in app.dead_letters()] == ["vanished"]
    app.close()


def held_rows(t):
    return t.connection.execute("SELECT held FROM procession_sessions").fetchall()


def test_purging_a_held_key_leaves_no_session_row():
    with testing.run(new_app(), setup=SETUP) as t:
        t.send("q", {"s": "a", "fails": 2}, message_id="m1")
        flow, _ = t._flows[0]
        drive(flow.step())
        drive(flow.step())
        assert held_rows(t) == [(1,)]
        upkeep = drive(t._app.store.upkeep())
        drive(upkeep.purge_key("c", b"m1"))
        drive(upkeep.close())
        assert held_rows(t) == []


def test_held_messages_that_another_program_deleted_are_forgotten():
    with testing.run(new_app(), setup=SETUP) as t:
        t.send("q", {"s": "a", "fails": 2}, message_id="m1")
        flow, _ = t._flows[0]
        drive(flow.step())
        drive(flow.step())
        t.connection.execute("DELETE FROM procession_messages")
        t.drain()
        assert held_rows(t) == []


def test_G12_a_batch_of_large_messages_ends_before_it_fills_the_memory(monkeypatch):
    from procession.stores.sqlite import lane

    monkeypatch.setattr(lane, "BATCH_BYTES_MAX", 10_000)
    seen = []
    app = App("t", store="sqlite:///never-made.db")
    app.consumer("q", name="c")(lambda body: seen.append(len(body["x"])))
    with testing.run(app) as t:
        for _ in range(10):
            t.send("q", {"x": "y" * 4_000})
        flow, _ = t._flows[0]
        assert drive(flow.step()) == 3
        t.drain()
    assert len(seen) == 10


def test_a_wall_clock_that_jumped_makes_no_key_forgotten(monkeypatch):
    with testing.run(new_app(), setup=SETUP) as t:
        t.send("q", {"s": "a"}, message_id="m1")
        t.drain()
        upkeep = drive(t._app.store.upkeep())
        now = sqlite_upkeep.wall_now
        monkeypatch.setattr(sqlite_upkeep, "wall_now", lambda: now() + 8 * 86_400_000)
        assert drive(prune_all(upkeep, t._app.settings)) == 0
        monkeypatch.setattr(sqlite_upkeep, "wall_now", now)
        assert drive(prune_all(upkeep, t._app.settings)) == 0
        drive(upkeep.close())
        assert t.recorded("c", "m1") is not None


def test_a_relative_path_is_that_of_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = App("t", store="sqlite:///here.db?synchronous=off")
    app.consumer("q", name="c")(lambda payload: None)
    app.open()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    app.send("q", {})
    app.close()
    assert list((tmp_path / "other").iterdir()) == []
    with sqlite3.connect(tmp_path / "here.db") as connection:
        assert connection.execute("SELECT count(*) FROM procession_messages").fetchone() == (1,)
    connection.close()
