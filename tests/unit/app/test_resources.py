"""What lives as long as a worker: made once, given by annotation, closed in reverse."""

from collections.abc import Generator

import pytest

from procession import App, Context, testing
from procession.errors import ConfigurationError


class Rates(dict):
    pass


class Client:
    pass


def new_app():
    return App("t", store="sqlite:///never-made.db")


def drain(app):
    with testing.run(app) as t:
        t.send("q", {})
        t.send("q", {})
        t.drain()


@pytest.mark.parametrize("colour", ["def", "async def"])
def test_a_resource_is_made_once_and_closed_after_the_last_handler(colour):
    told, app = [], new_app()

    @app.resource
    def rates() -> Generator[Rates]:
        told.append("open")
        yield Rates(EUR=2)
        told.append("close")

    def plain(payload: dict, ctx: Context, rates: Rates):
        told.append(rates["EUR"])

    async def asynchronous(payload: dict, rates: Rates, ctx: Context):
        told.append(rates["EUR"])

    app.consumer("q", name="c")(plain if colour == "def" else asynchronous)
    drain(app)
    assert told == ["open", 2, 2, "close"]


def test_a_handler_may_take_resources_without_a_context():
    seen, app = [], new_app()

    @app.resource
    def client() -> Client:
        return Client()

    @app.consumer("q", name="c")
    def handle(payload: dict, client: Client):
        seen.append(client)

    drain(app)
    assert len(seen) == 2
    assert seen[0] is seen[1]


def test_lifespan_hooks_surround_the_resources():
    told, app = [], new_app()

    @app.lifespan
    def life() -> Generator[None]:
        told.append("start")
        yield
        told.append("stop")

    @app.resource
    def client() -> Generator[Client]:
        told.append("open")
        yield Client()
        told.append("close")

    @app.consumer("q", name="c")
    def handle(payload: dict, client: Client): ...

    drain(app)
    assert told == ["start", "open", "close", "stop"]


def test_what_was_opened_is_closed_if_a_later_one_fails():
    told, app = [], new_app()

    @app.resource
    def client() -> Generator[Client]:
        try:
            yield Client()
        finally:
            told.append("close")

    @app.resource
    def rates() -> Rates:
        raise RuntimeError("no rates today")

    app.consumer("q", name="c")(lambda payload: None)
    with pytest.raises(RuntimeError, match="no rates"):
        drain(app)
    assert told == ["close"]


def test_asking_for_what_is_not_there_is_told_at_start():
    app = new_app()

    @app.consumer("q", name="c")
    def handle(payload: dict, client: Client): ...

    with pytest.raises(ConfigurationError, match="asks for a Client"):
        drain(app)


def refused(factory):
    app = new_app()
    with pytest.raises(ConfigurationError) as caught:
        app.resource(factory)
    return str(caught.value)


def test_a_resource_must_say_what_it_makes():
    async def asynchronous() -> Client: ...

    def untyped(): ...

    def yields_untyped():
        yield 1

    def nothing() -> None: ...

    assert "async" in refused(asynchronous)
    assert "annotate" in refused(untyped)
    assert "annotate" in refused(yields_untyped)
    assert "annotate" in refused(nothing)


def test_two_resources_of_one_type_are_refused():
    app = new_app()

    def client() -> Client: ...

    app.resource(client)
    with pytest.raises(ConfigurationError, match="already"):
        app.resource(client)


def test_a_parameter_that_says_nothing_is_refused_at_registration():
    app = new_app()
    with pytest.raises(ConfigurationError, match="'other'"):

        @app.consumer("q", name="c")
        def handle(payload: dict, ctx: Context, other): ...
