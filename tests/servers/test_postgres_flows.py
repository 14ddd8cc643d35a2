"""The flow on PostgreSQL: whose failure a deferred statement is, and what becomes of the others."""

import time

import psycopg
import pytest
from tests.services import postgres_schema

from procession import App, Context, RetryPolicy

N = 40


@pytest.fixture
def app():
    with postgres_schema() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "CREATE TABLE effects (n int PRIMARY KEY, twice int UNIQUE CHECK (twice <> 13))"
            )
        app = App("t", store=url, retry=RetryPolicy(max_attempts=2, first_ms=1))
        app.place = url
        yield app
        app.close()


def effects(app):
    with psycopg.connect(app.place) as connection:
        return [row[0] for row in connection.execute("SELECT n FROM effects ORDER BY n")]


def send_and_drain(app):
    for n in range(N):
        app.send("q", {"n": n, "key": str(n % 4)}, message_id=f"m{n}")
    drain(app)
    return app.dead_letters()


def drain(app):
    """Work until nothing waits."""
    with app:
        for _ in range(2_000):
            (status,) = app.status()
            if not status.waiting and not status.held:
                return
            time.sleep(0.01)
    raise AssertionError("messages still wait")


@pytest.mark.parametrize("how", ["write", "execute"])
def test_a_failing_statement_is_the_failure_of_its_own_message(app, how):
    runs = []

    @app.consumer("q", name="c", session="key")
    def handle(message: dict, ctx: Context):
        runs.append(message["n"])
        getattr(ctx, how)("INSERT INTO effects VALUES (:n, :n)", n=message["n"])

    (letter,) = send_and_drain(app)
    assert (letter.message_id, letter.reason) == (b"m13", "failed")
    assert all("check constraint" in error for error in letter.errors)
    assert len(letter.errors) == 2
    assert effects(app) == [n for n in range(N) if n != 13]
    assert runs.count(13) == 3  # in company, then twice alone


def test_an_error_that_the_handler_swallows_fails_its_message_all_the_same(app):
    @app.consumer("q", name="c", session="key")
    def handle(message: dict, ctx: Context):
        try:
            ctx.execute("INSERT INTO effects VALUES (:n, :n)", n=message["n"])
        except psycopg.Error:
            ctx.logger.info("swallowed")

    (letter,) = send_and_drain(app)
    assert letter.message_id == b"m13"
    assert effects(app) == [n for n in range(N) if n != 13]


def test_an_error_caught_in_a_savepoint_fails_nobody(app):
    @app.consumer("q", name="c", session="key")
    def handle(message: dict, ctx: Context):
        try:
            with ctx.savepoint():
                ctx.write("INSERT INTO effects VALUES (:n, :n)", n=message["n"])
        except psycopg.Error:
            ctx.write("INSERT INTO effects VALUES (:n, NULL)", n=message["n"])

    assert send_and_drain(app) == []
    assert effects(app) == list(range(N))


def test_a_deferred_constraint_is_the_failure_of_its_own_message(app):
    with psycopg.connect(app.place, autocommit=True) as connection:
        connection.execute("CREATE TABLE parents (n int PRIMARY KEY)")
        connection.execute(
            "CREATE TABLE children (n int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"
        )

    @app.consumer("q", name="c", session="key")
    def handle(message: dict, ctx: Context):
        if message["n"] != 13:
            ctx.write("INSERT INTO parents VALUES (:n)", n=message["n"])
        ctx.write("INSERT INTO children VALUES (:n)", n=message["n"])

    (letter,) = send_and_drain(app)
    assert letter.message_id == b"m13"
    with psycopg.connect(app.place) as connection:
        assert connection.execute("SELECT count(*) FROM children").fetchone() == (N - 1,)


def test_values_of_every_usual_kind_go_in_and_come_out(app):
    from datetime import UTC, date, datetime
    from decimal import Decimal
    from uuid import UUID

    sent = {
        "i": 2**40,
        "s": "naïve 'quotes' \\ %s",
        "b": b"\x00\xff",
        "f": 1.5,
        "t": True,
        "d": Decimal("1.10"),
        "w": datetime(2026, 12, 1, 12, tzinfo=UTC),
        "day": date(2026, 12, 1),
        "u": UUID(int=7),
        "none": None,
        "list": [1, 2],
    }
    seen = []

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        rows = ctx.execute(
            "SELECT :i::bigint, :s::text, :b::bytea, :f::float8, :t::bool, :d::numeric, "
            ":w::timestamptz, :day::date, :u::uuid, :none::int, :list::int[]",
            sent,
        )
        seen.append(rows.fetchone())

    app.send("q", {"n": 1})
    drain(app)
    assert seen == [tuple(sent.values())]


def test_a_missing_parameter_says_which(app):
    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        ctx.execute("SELECT :n, :other", n=1)

    app.send("q", {"n": 1})
    drain(app)
    (letter,) = app.dead_letters()
    assert "other" in letter.errors[0]
