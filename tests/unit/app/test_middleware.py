"""Code around handlers: order, failures, both colours."""

import logging

import pytest
from tests.driving import foreign, new_app, run_until_idle

from procession import App, Context, Reject, testing
from procession.app.middleware import correlation, timing
from procession.app.middleware.correlation import in_hand
from procession.errors import ConfigurationError


def app_with(handler):
    app = App("t", store="sqlite:///never-made.db")
    app.consumer("q", name="c")(handler)
    return app


def run(app, *payloads):
    with testing.run(app) as t:
        for payload in payloads:
            t.send("q", payload, headers={"correlation-id": "c-1"})
        t.drain()
        return t.status["c"].counts, t.dead_letters


@pytest.mark.parametrize("colour", ["def", "async def"])
def test_the_first_registered_is_the_outermost(colour):
    told = []

    def plain(payload: dict):
        told.append("handler")

    async def asynchronous(payload: dict):
        told.append("handler")

    app = app_with(plain if colour == "def" else asynchronous)

    @app.middleware
    def outer(payload, ctx):
        told.append("outer before")
        yield
        told.append("outer after")

    @app.middleware
    def inner(payload, ctx):
        told.append(f"inner before {payload['n']}")
        yield
        told.append("inner after")

    run(app, {"n": 7})
    assert told == ["outer before", "inner before 7", "handler", "inner after", "outer after"]


def test_a_failure_is_raised_at_the_yield_and_fails_the_run():
    told = []

    def refuse(payload: dict):
        raise Reject("no")

    app = app_with(refuse)

    @app.middleware
    def watch(payload, ctx):
        try:
            yield
        except Reject as error:
            told.append(error.reason)
            raise

    _, dead = run(app, {})
    assert told == ["no"]
    assert [letter.reason for letter in dead] == ["rejected"]


def test_a_middleware_that_raises_fails_the_run():
    app = app_with(lambda payload: None)

    @app.middleware
    def broken(payload, ctx):
        raise Reject("closed today")
        yield

    _, dead = run(app, {})
    assert [letter.detail for letter in dead] == ["closed today"]


def test_a_plain_function_is_no_middleware():
    app = app_with(lambda payload: None)
    with pytest.raises(ConfigurationError, match="no generator function"):
        app.middleware(lambda payload, ctx: None)


def test_timing_tells_slow_handlers_only(caplog):
    import time

    app = app_with(lambda payload: time.sleep(payload["s"]))
    app.middleware(timing(slow_ms=30))
    with caplog.at_level(logging.WARNING, "procession.handler"):
        run(app, {"s": 0}, {"s": 0.05})
    told = [record for record in caplog.records if record.name == "procession.handler"]
    assert len(told) == 1
    assert told[0].procession["consumer"] == "c"


def test_correlation_is_known_inside_the_run_and_nowhere_else():
    seen = []
    app = app_with(lambda payload: seen.append(in_hand.get()))
    app.middleware(correlation)
    run(app, {})
    assert (seen[0].consumer, seen[0].correlation_id) == ("c", "c-1")
    assert in_hand.get() is None


def test_a_handler_without_a_context_has_middlewares_too():
    def takes_context(payload: dict, ctx: Context):
        assert ctx.message.headers["correlation-id"] == "c-1"

    app = app_with(takes_context)
    app.middleware(correlation)
    counts, _ = run(app, {})
    assert counts == {("processed", ""): 1}


@pytest.mark.parametrize("headers", ["[1]", "7", "null", "{bad", '{"correlation-id": 5}'])
def test_foreign_headers_that_are_no_object_make_a_message_its_own_correlation(tmp_path, headers):
    app, seen = new_app(tmp_path), []

    @app.consumer("q", name="c")
    def handle(payload: dict, ctx: Context):
        seen.append(in_hand.get().correlation_id)
        ctx.logger.info("handled")

    app.middleware(correlation)
    foreign(app, message_id=b"m1", headers=headers, format=1)
    with app.ready_handlers():
        run_until_idle(app)
    assert seen == ["m1"]
    app.close()


def test_a_middleware_of_another_arity_is_refused_at_once():
    app = App("t", store="memory://")

    def timed(ctx):
        yield

    with pytest.raises(ConfigurationError, match=r"timed.*two arguments"):
        app.middleware(timed)
