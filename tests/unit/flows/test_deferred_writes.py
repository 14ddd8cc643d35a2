"""`ctx.write` waits until its handler has returned: what that may change and what it may not."""

import contextlib
import sqlite3

import pytest
from tests.driving import Recorder, column, ends, new_app, run_until_idle, sql

from procession import Context, Event, TransactionMisuse

INSERT = "INSERT INTO t (n) VALUES (:n)"


class Stage:
    """An app whose handler is one of the test's, over a table of unique numbers."""

    def __init__(self, folder):
        self.recorder = Recorder()
        self.app = new_app(folder, instruments=[self.recorder])
        self.runs = []

    def handle(self, handler, numbers, **settings):
        @self.app.consumer("q", name="c", session="n", **settings)
        def run(payload: dict, ctx: Context) -> None:
            self.runs.append((payload["n"], ctx.run, ctx.message.attempt))
            handler(payload["n"], ctx)

        sql(self.app, "CREATE TABLE t (n INTEGER PRIMARY KEY, seen INTEGER)")
        self.app.send_many("q", [{"n": n} for n in numbers], identify=lambda p: f"m{p['n']}")
        run_until_idle(self.app)

    @property
    def rows(self):
        return column(self.app, "SELECT n FROM t ORDER BY n")


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    stage.app.close()


def test_a_write_is_seen_by_the_statement_after_it(stage):
    seen = []

    def handler(n, ctx):
        ctx.write(INSERT, n=n)
        seen.append(ctx.execute("SELECT count(*) FROM t").fetchone()[0])
        ctx.write("UPDATE t SET seen = 1 WHERE n = :n", n=n)
        ctx.connection.execute("UPDATE t SET seen = seen + 1 WHERE n = ?", (n,))
        ctx.write("UPDATE t SET seen = seen * 10 WHERE n = :n", n=n)

    stage.handle(handler, [1])
    assert seen == [1]
    assert column(stage.app, "SELECT seen FROM t") == [20]


def test_writes_and_the_connection_keep_their_order(stage):
    def handler(n, ctx):
        connection = ctx.connection
        ctx.write(INSERT, n=n)
        connection.execute("UPDATE t SET seen = 7 WHERE n = ?", (n,))

    stage.handle(handler, [1])
    assert column(stage.app, "SELECT seen FROM t") == [7]


def test_parameters_are_those_of_the_moment_of_the_call(stage):
    def handler(n, ctx):
        parameters = {"n": n}
        ctx.write(INSERT, parameters)
        parameters["n"] = 99

    stage.handle(handler, [1])
    assert stage.rows == [1]


def test_a_handler_that_raises_after_its_writes_costs_the_others_no_rerun(stage):
    def handler(n, ctx):
        ctx.write(INSERT, n=n)
        if n == 2:
            raise ValueError

    stage.handle(handler, [1, 2, 3])
    assert stage.rows == [1, 3]
    assert [run for run in stage.runs if run[0] != 2] == [(1, 1, 0), (3, 1, 0)]
    assert ends(stage.app)["dead-lettered"] == 1


def test_a_refused_write_fails_its_own_message_and_no_other(stage):
    def handler(n, ctx):
        ctx.write(INSERT, n=n)
        if n == 2:
            ctx.write(INSERT, n=1)

    stage.handle(handler, [1, 2, 3])
    assert stage.rows == [1, 3]
    assert ends(stage.app)["processed"] == 2
    assert {fields["key"] for fields in stage.recorder.of(Event.MESSAGE_FAILED)} == {"m2"}
    assert [attempt for n, _, attempt in stage.runs if n == 2] == [0, 1, 2, 3]


def test_many_refused_writes_cost_one_rerun_of_their_batch(stage):
    def handler(n, ctx):
        ctx.write(INSERT, n=n)
        if n % 4 == 2:
            ctx.write(INSERT, n=1)

    numbers = list(range(1, 101))
    stage.handle(handler, numbers)
    good = [n for n in numbers if n % 4 != 2]
    assert stage.rows == good
    assert max(run for n, run, _ in stage.runs if n in good) == 2


def test_a_refused_write_that_changed_rows_leaves_none_of_them(stage):
    def handler(n, ctx):
        ctx.write(INSERT, n=n)
        if n == 2:
            # FAIL keeps what the statement did before it met the taken number.
            ctx.write("INSERT OR FAIL INTO t (n) VALUES (50), (51), (1)")

    stage.handle(handler, [1, 2, 3])
    assert stage.rows == [1, 3]


def test_a_savepoint_takes_back_its_own_writes_and_no_others(stage):
    caught = []

    def handler(n, ctx):
        ctx.write(INSERT, n=n)
        try:
            with ctx.savepoint():
                ctx.write(INSERT, n=n + 10)
                ctx.write(INSERT, n=n)
        except sqlite3.IntegrityError as error:
            caught.append(type(error).__name__)
        with ctx.savepoint():
            ctx.write(INSERT, n=n + 20)
        with contextlib.suppress(KeyError), ctx.savepoint():
            ctx.write(INSERT, n=n + 30)
            raise KeyError

    stage.handle(handler, [1])
    assert caught == ["IntegrityError"]
    assert stage.rows == [1, 21]
    assert ends(stage.app) == {"processed": 1}


def test_a_write_may_not_end_the_transaction(stage):
    def handler(n, ctx):
        ctx.write(INSERT, n=n)
        if n == 2:
            ctx.write("COMMIT")

    stage.handle(handler, [1, 2, 3])
    assert stage.rows == [1, 3]
    assert "TransactionMisuse" in stage.recorder.of(Event.MESSAGE_FAILED)[0]["error"]


def test_a_write_after_the_run_is_refused(stage):
    kept = []
    stage.handle(lambda _, ctx: kept.append(ctx), [1])
    with pytest.raises(TransactionMisuse):
        kept[0].write(INSERT, n=1)
