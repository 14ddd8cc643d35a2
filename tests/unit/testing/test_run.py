"""`testing.run` gives an app a store of its own and handles messages when told to."""

import sys
from datetime import timedelta

import pytest

from procession import App, Context, Retry, testing
from procession.errors import ConfigurationError


def counting_app(store="sqlite:///never-made.db"):
    app = App("t", store=store)

    @app.consumer("q", name="c", session="s")
    def count(payload: dict, ctx: Context):
        ctx.write("INSERT INTO seen (id) VALUES (:id)", id=ctx.message.id)
        if payload.get("later") and ctx.message.attempt < 2:
            raise Retry(after=3600)
        if payload.get("bad"):
            raise ValueError("as planned")

    return app


SETUP = "CREATE TABLE seen (id TEXT)"


def seen(t):
    return [row[0] for row in t.connection.execute("SELECT id FROM seen ORDER BY rowid")]


def test_a_redelivery_takes_no_effect():
    with testing.run(counting_app(), setup=SETUP) as t:
        t.send("q", {"s": "a"}, message_id="m1")
        t.drain()
        t.redeliver("m1")
        assert t.drain() == 1
        assert seen(t) == ["m1"]
        assert t.status["c"].counts == {("processed", ""): 1, ("duplicate", "resent"): 1}


def test_a_redelivery_with_another_payload_is_a_conflict():
    with testing.run(counting_app(), setup=SETUP) as t:
        t.send("q", {"s": "a"}, message_id="m1")
        t.redeliver("m1", {"s": "a", "n": 2})
        t.drain()
        assert [letter.reason for letter in t.dead_letters] == ["conflict"]


def test_retries_and_schedules_do_not_wait():
    with testing.run(counting_app(), setup=SETUP) as t:
        t.send("q", {"s": "a", "later": 1}, message_id="m1")
        t.send("q", {"s": "a"}, message_id="m2")
        t.send("q", {"s": "b"}, message_id="m3", after=timedelta(hours=5))
        t.drain()
        assert seen(t) == ["m1", "m2", "m3"]


def test_a_poison_message_ends_as_a_dead_letter():
    with testing.run(counting_app(), setup=SETUP) as t:
        t.send("q", {"s": "a", "bad": 1}, message_id="m1")
        t.send("q", {"s": "a"}, message_id="m2")
        t.drain()
        assert seen(t) == ["m2"]
        assert [letter.reason for letter in t.dead_letters] == ["failed"]
        assert t.recorded("c", "m2").end == "processed"


def test_async_handlers_run_too():
    import asyncio

    app = App("t", store="sqlite:///never-made.db")

    @app.consumer("q", name="c")
    async def handle(payload: dict, ctx: Context):
        await asyncio.sleep(0)
        ctx.write("INSERT INTO seen (id) VALUES (:id)", id=ctx.message.id)

    with testing.run(app, setup=lambda connection: connection.execute(SETUP)) as t:
        t.send("q", {}, message_id="m1")
        t.drain()
        assert seen(t) == ["m1"]


def test_the_memory_store_works_without_a_file():
    app = App("t", store="memory://")

    @app.consumer("q", name="c")
    def handle(payload: dict, ctx: Context):
        ctx.connection.add("n", payload["n"])

    with testing.run(app) as t:
        t.send("q", {"n": 3}, message_id="m1")
        t.redeliver("m1")
        t.drain()
        assert app.store.effects == {"n": 3}


@pytest.mark.parametrize("colour", ["def", "async def"])
def test_a_crash_leaves_nothing_and_the_next_run_takes_effect_once(colour):
    app = App("t", store="sqlite:///never-made.db")
    app.queue("out")
    runs = []

    def handle(payload: dict, ctx: Context):
        runs.append(ctx.message.id)
        ctx.write("INSERT INTO seen (id) VALUES (:id)", id=ctx.message.id)
        ctx.send("out", payload)

    async def handle_async(payload: dict, ctx: Context):
        handle(payload, ctx)

    app.consumer("q", name="c", session="s")(handle if colour == "def" else handle_async)
    with testing.run(app, setup=SETUP) as t:
        for number in range(3):
            t.send("q", {"s": "a"}, message_id=f"m{number}")
        for _ in range(3):
            assert t.crash() > 0
        assert seen(t) == []
        assert t.status["out"].waiting == 0
        t.drain()
        assert seen(t) == ["m0", "m1", "m2"]
        assert t.status["out"].waiting == 3
        assert len(runs) > 3
        assert t.dead_letters == []
        assert t.crash() == 0


def test_a_crash_works_on_the_memory_store():
    app = App("t", store="memory://")

    @app.consumer("q", name="c")
    def handle(payload: dict, ctx: Context):
        ctx.connection.add("n", 1)

    with testing.run(app) as t:
        t.send("q", {})
        assert t.crash() == 1
        assert app.store.effects == {}
        t.drain()
        assert app.store.effects == {"n": 1}


@pytest.mark.parametrize("store", ["sqlite:///never-made.db", "memory://"])
def test_a_clock_that_is_moved_makes_waits_end_and_nothing_before(store):
    app, ran = App("t", store=store), []

    @app.consumer("q", name="c", session="s")
    def handle(payload: dict, ctx: Context):
        ran.append(ctx.message.id)
        if payload.get("later") and ctx.message.attempt < 2:
            raise Retry(after=3600)

    with testing.run(app) as t:
        t.send("q", {"s": "a", "later": 1}, message_id="m1")
        t.send("q", {"s": "b"}, message_id="m2", after=timedelta(hours=5))
        t.send("q", {"s": "c"}, message_id="m3", expires=timedelta(hours=2))
        t.drain(skip_waits=False)
        t.send("q", {"s": "d"}, message_id="m4", expires=timedelta(minutes=2))
        assert set(ran) == {"m1", "m3"}
        before = len(ran)
        t.advance(timedelta(minutes=59))
        t.drain(skip_waits=False)
        assert ran[before:] == []
        t.advance(timedelta(minutes=2))
        t.drain(skip_waits=False)
        assert ran[before:] == ["m1"]
        t.advance(timedelta(hours=4))
        t.drain(skip_waits=False)
        assert ran[before:] == ["m1", "m2"]
        assert t.status["c"].counts["expired", ""] == 1


def test_a_moved_clock_is_gone_with_its_run():
    from procession.stores.sqlite.connection import wall_now

    before = wall_now()
    with testing.run(counting_app(), setup=SETUP) as t:
        t.advance(timedelta(days=1000))
        assert wall_now() > before + 900 * 86_400_000
    assert wall_now() < before + 60_000


def test_an_endless_sender_is_told(monkeypatch):
    monkeypatch.setattr(sys.modules["procession.testing.run"], "STEPS_MAX", 20)
    app = App("t", store="sqlite:///never-made.db")

    @app.consumer("q", name="c", commit="each")
    def handle(payload: dict, ctx: Context):
        ctx.send("q", payload)

    with testing.run(app) as t:
        t.send("q", {})
        with pytest.raises(RuntimeError, match="for ever"):
            t.drain()


def test_the_apps_own_store_is_left_alone(tmp_path):
    app = counting_app(f"sqlite:///{tmp_path}/own.db")
    with testing.run(app, setup=SETUP) as t:
        t.send("q", {"s": "a"})
    assert list(tmp_path.iterdir()) == []
    app.open()
    with pytest.raises(ConfigurationError, match="open"), testing.run(app):
        pass
    app.close()
