"""An app inside another program: threads beside its own, health over HTTP."""

import asyncio
import json
import sqlite3
import threading
import time
import urllib.error
import urllib.request

from procession import App, Settings
from procession.runtime.health import HealthServer


def new_app(tmp_path, handled):
    app = App("t", store=f"sqlite:///{tmp_path}/t.db?synchronous=off")

    @app.consumer("q", name="c")
    def handle(payload: dict):
        handled.set()

    return app


def test_with_app_works_beside_the_programs_own_code(tmp_path):
    handled = threading.Event()
    app = new_app(tmp_path, handled)
    with app:
        app.send("q", {})
        assert handled.wait(10)
        assert app.health()["live"]
    assert not app.health()["live"]
    assert app.status()[0].counts == {("processed", ""): 1}
    app.close()


def test_async_with_app_leaves_the_programs_loop_free(tmp_path):
    handled = threading.Event()
    app = new_app(tmp_path, handled)

    async def program():
        ticks = 0
        async with app:
            app.send("q", {})
            while not handled.is_set():
                ticks += 1
                await asyncio.sleep(0.001)
        return ticks

    assert asyncio.run(asyncio.wait_for(program(), 10)) > 0
    app.close()


def ask(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_health_answers_live_and_ready(tmp_path):
    app = new_app(tmp_path, threading.Event())
    with app:
        server = HealthServer(app, port=0)
        server.start()
        try:
            status, found = ask(server.port, "/ready")
            assert (status, found["ready"], found["lanes"][0]["consumer"]) == (200, True, "c")
            assert ask(server.port, "/live")[0] == 200
            assert ask(server.port, "/other")[0] == 404
        finally:
            server.stop()
    app.close()


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_that_cannot_renew_its_lease_is_not_ready_but_lives(tmp_path):
    settings = Settings(busy_ms=20, pause_ms=20, lease_ms=300)
    app = App("t", store=f"sqlite:///{tmp_path}/t.db?synchronous=off", settings=settings)
    app.consumer("q", name="c")(lambda payload: None)
    with app:
        wait_until(lambda: app.health()["ready"])
        other = sqlite3.connect(tmp_path / "t.db", isolation_level=None, timeout=30)
        other.execute("BEGIN IMMEDIATE")
        try:
            wait_until(lambda: not app.health()["ready"])
            assert app.health()["live"]
        finally:
            other.execute("ROLLBACK")
            other.close()
        wait_until(lambda: app.health()["ready"])
    app.close()
