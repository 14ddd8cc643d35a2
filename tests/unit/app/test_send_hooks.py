"""`app.on_send`: headers for everything that is sent, and the correlation id as one of them."""

from __future__ import annotations

import pytest
from tests.driving import Driver, new_app

from procession import App, ConfigurationError, Context
from procession.app.middleware import correlation, correlation_headers


def test_every_hook_gives_headers_and_those_of_the_send_win():
    app = App("t", store="memory://")
    app.queue("q", session="header:tenant")
    app.on_send(lambda: {"origin": "shop", "tenant": "acme"})
    app.on_send(lambda: {"tenant": "bolt"})
    assert app.outgoing("q", {}).headers == {"origin": "shop", "tenant": "bolt"}
    own = app.outgoing("q", {}, headers={"tenant": "core"})
    assert own.headers == {"origin": "shop", "tenant": "core"}
    assert (own.session, own.is_plain) == (b"core", False)


def test_a_hook_that_gives_nothing_leaves_a_message_plain():
    app = App("t", store="memory://")
    app.queue("q")
    app.on_send(dict)
    assert app.outgoing("q", {}).is_plain


def test_a_hook_that_raises_fails_the_send_before_anything_is_stored(tmp_path):
    app = new_app(tmp_path)
    app.queue("q")

    @app.on_send
    def broken():
        raise KeyError("no tenant")

    with pytest.raises(KeyError):
        app.send("q", {})
    assert app.status()[0].waiting == 0
    app.close()


def test_what_a_hook_gives_must_be_text():
    app = App("t", store="memory://")
    app.queue("q")
    app.on_send(lambda: {"tenant": 7})
    with pytest.raises(ConfigurationError, match="text"):
        app.outgoing("q", {})


def test_I16_a_correlation_id_goes_with_what_a_handler_sends(tmp_path):
    app = new_app(tmp_path)
    app.middleware(correlation)
    app.on_send(correlation_headers)
    app.queue("second")
    seen = []

    @app.consumer("first", name="one")
    def one(payload: dict, ctx: Context) -> None:
        ctx.send("second", payload)

    @app.consumer("second", name="two")
    def two(payload: dict, ctx: Context) -> None:
        seen.append(ctx.message.headers["correlation-id"])

    app.send("first", {"n": 1}, headers={"correlation-id": "trip-7"})
    app.send("first", {"n": 2}, message_id="m2")
    with app.ready_handlers(), Driver(app) as driver:
        driver.run()
    assert seen == ["trip-7", "m2"]
    assert app.outgoing("first", {}).is_plain, "outside of handlers there is none"
    app.close()
