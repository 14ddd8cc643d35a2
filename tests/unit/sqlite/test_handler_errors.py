"""Whatever a handler raises, returns or keeps: its message ends, its neighbours do not notice."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta

import pytest
from tests.driving import Driver, column, ends, run_until_idle, sql

from procession import Context, Reject, Retry
from procession.errors import TransactionMisuse


class OwnBaseException(BaseException):
    pass


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(7)


class WrongText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307  the fault under test


ERRORS = [
    ValueError("x"),
    AssertionError(),
    OwnBaseException("b"),
    SystemExit(3),
    StopIteration(1),
    StopAsyncIteration(),
    GeneratorExit(),
    MemoryError(),
    RecursionError(),
    TimeoutError(),
    asyncio.CancelledError(),
    ExceptionGroup("many", [ValueError(1), TypeError(2)]),
    BaseExceptionGroup("worse", [SystemExit(1), KeyboardInterrupt()]),
    Speechless(),
    Mute(),
    WrongText(),
    ValueError("NUL \0, a lone surrogate \ud800 and an emoji 🧾"),
    ValueError("x" * 100_000),
]


def three(app, bad, *, is_async=False):
    """A consumer for messages 0, 1, 2, of which 1 does what `bad` does."""

    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        return bad(message, ctx) if message["n"] == 1 else None

    async def handle_async(message: dict, ctx: Context):
        await asyncio.sleep(0)
        result = handle(message, ctx)
        return await result if asyncio.iscoroutine(result) else result

    app.consumer("q", name="c")(handle_async if is_async else handle)
    for n in range(3):
        app.send("q", {"n": n}, message_id=f"m{n}")


def raises(error):
    def bad(message, ctx):
        raise error

    return bad


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async"])
def test_X03_an_exception_of_any_kind_ends_as_a_dead_letter_and_is_never_done(make, is_async):
    app = make()

    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["error"] is not None:
            raise ERRORS[message["error"]]

    async def handle_async(message: dict, ctx: Context):
        await asyncio.sleep(0)
        handle(message, ctx)

    app.consumer("q", name="c")(handle_async if is_async else handle)
    for n in range(len(ERRORS)):
        app.send("q", {"n": n, "error": None}, message_id=f"good{n}")
        app.send("q", {"n": 1_000 + n, "error": n}, message_id=f"bad{n}")

    run_until_idle(app)

    assert ends(app) == {"processed": len(ERRORS), "dead-lettered": len(ERRORS)}
    assert column(app, "SELECT n FROM effect ORDER BY n") == list(range(len(ERRORS)))
    for letter in app.dead_letters():
        assert (letter.reason, letter.attempts, len(letter.errors)) == ("failed", 3, 3)
        assert len(letter.detail) <= 2_000
        assert app.recorded("c", letter.message_id.decode()).end == "dead-lettered"


def test_keyboard_interrupt_of_a_handler_on_a_lanes_thread_is_a_failed_run(make):
    app = make()
    three(app, raises(KeyboardInterrupt()))

    lane = threading.Thread(target=run_until_idle, args=(app,))
    lane.start()
    lane.join(10)

    assert ends(app) == {"processed": 2, "dead-lettered": 1}


def test_keyboard_interrupt_on_the_main_thread_ends_the_batch_without_an_attempt(make):
    app = make()
    keys = iter([KeyboardInterrupt(), None])

    def bad(message, ctx):
        error = next(keys)
        if error:
            raise error

    three(app, bad)
    with Driver(app) as driver:
        with pytest.raises(KeyboardInterrupt):
            driver.step()
        assert column(app, "SELECT n FROM effect") == []
        assert column(app, "SELECT attempts FROM procession_messages") == [0, 0, 0]
        driver.run()

    assert ends(app) == {"processed": 3}


@pytest.mark.parametrize(
    "reason",
    [None, 7, ValueError("an error object"), "\ud800", "x" * 50_000, Speechless(), "", "NUL \0"],
    ids=["none", "int", "exception", "surrogate", "long", "speechless", "empty", "nul"],
)
def test_a_rejection_with_any_reason_is_a_dead_letter_at_once(make, reason):
    app = make()
    three(app, raises(Reject(reason)))

    run_until_idle(app)

    assert ends(app) == {"processed": 2, "dead-lettered": 1}
    (letter,) = app.dead_letters()
    assert (letter.reason, letter.attempts) == ("rejected", 0)


@pytest.mark.parametrize("after", [1e300, timedelta.max, 10**15])
def test_a_retry_after_for_ever_is_bounded_and_holds_nobody_else(make, after):
    app = make()
    three(app, raises(Retry(after)))
    with Driver(app) as driver:
        driver.run_ready()

    assert ends(app) == {"processed": 2}
    (waits,) = [status for status in app.status() if status.consumer == "c"]
    assert (waits.held, waits.retrying_sessions) == (1, 1)


@pytest.mark.parametrize(
    "value",
    [None, False, 0, "", (), object(), Exception("returned, not raised"), float("nan"), 1, "ok"],
    ids=lambda value: type(value).__name__,
)
def test_A08_any_returned_value_is_success(make, value):
    app = make()
    three(app, lambda message, ctx: value)

    run_until_idle(app)

    assert ends(app) == {"processed": 3}


async def nothing():
    pass


@pytest.mark.parametrize(
    "bad",
    [
        lambda message, ctx: Reject("returned"),
        lambda message, ctx: Retry(1),
        lambda message, ctx: Reject,
        lambda message, ctx: nothing(),
    ],
    ids=["reject", "retry", "class", "coroutine"],
)
def test_A08_a_returned_outcome_or_awaitable_is_an_error_never_success(make, bad):
    app = make()
    three(app, bad)

    run_until_idle(app)

    assert ends(app) == {"processed": 2, "dead-lettered": 1}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 2]
    assert "return" in app.dead_letters()[0].errors[0]


def test_a_swallowed_database_error_outside_of_a_savepoint_fails_the_run(make):
    app = make()

    def bad(message, ctx):
        for _ in range(2):
            try:
                ctx.execute("INSERT INTO effect (mark) VALUES ('twice')")
            except Exception:  # noqa: BLE001  it swallows: the fault under test
                return

    three(app, bad)

    run_until_idle(app)

    assert ends(app) == {"processed": 2, "dead-lettered": 1}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 2]
    assert "UNIQUE" in app.dead_letters()[0].detail


def test_a_swallowed_error_of_a_later_row_fails_the_run(make):
    app = make()

    def bad(message, ctx):
        try:
            ctx.execute("SELECT abs(column1) FROM (VALUES (1), (-9223372036854775808))").fetchall()
        except Exception:  # noqa: BLE001  it swallows: the fault under test
            return

    three(app, bad)

    run_until_idle(app)

    assert ends(app) == {"processed": 2, "dead-lettered": 1}


def test_an_error_caught_around_a_savepoint_takes_back_the_block_alone(make):
    app = make()

    def bad(message, ctx):
        ctx.execute("INSERT INTO effect (n, mark) VALUES (10, 'kept')")
        try:
            with ctx.savepoint():
                ctx.execute("INSERT INTO effect (n, mark) VALUES (11, 'gone')")
                ctx.execute("INSERT INTO effect (n, mark) VALUES (12, 'kept')")
        except Exception:  # noqa: BLE001  it swallows: the fault under test
            ctx.execute("INSERT INTO effect (n) VALUES (13)")

    three(app, bad)

    run_until_idle(app)

    assert ends(app) == {"processed": 3}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 1, 2, 10, 13]


def test_savepoints_nest_and_an_exception_of_the_users_own_takes_back_its_block(make):
    app = make()

    def bad(message, ctx):
        with ctx.savepoint():
            ctx.execute("INSERT INTO effect (n) VALUES (10)")
            try:
                with ctx.savepoint():
                    ctx.execute("INSERT INTO effect (n) VALUES (11)")
                    raise LookupError  # noqa: TRY301  the handler's own
            except LookupError:
                pass
            ctx.execute("INSERT INTO effect (n) VALUES (12)")

    three(app, bad)

    run_until_idle(app)

    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 1, 2, 10, 12]


def test_a_savepoint_left_open_by_one_handler_never_undoes_another(make):
    app = make()
    kept = []

    def bad(message, ctx):
        block = ctx.savepoint()
        block.__enter__()
        ctx.execute("INSERT INTO effect (n) VALUES (10)")
        kept.append(block)

    def after(message: dict, ctx: Context):
        bad(message, ctx) if message["n"] == 1 else None
        if message["n"] == 2:
            with ctx.savepoint():
                ctx.execute("INSERT INTO effect (n) VALUES (2)")
                kept.pop().__exit__(ValueError, ValueError(), None)

    app.consumer("q", name="c")(after)
    for n in range(3):
        app.send("q", {"n": n}, message_id=f"m{n}")

    run_until_idle(app)

    assert ends(app) == {"processed": 3}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [2, 10]


def test_a_mutated_message_is_fresh_in_the_next_run_and_for_the_next_subscriber(make):
    app = make()
    app.topic("q")
    seen = []

    def handle(message: dict, ctx: Context):
        seen.append((ctx.consumer, dict(message), len(message["list"])))
        message["list"].append(1)
        message["n"] = "spoiled"
        if ctx.consumer == "c" and ctx.run < 3:
            raise ValueError

    app.consumer("q", name="c")(handle)
    app.consumer("q", name="d")(handle)
    app.send("q", {"n": 1, "list": []}, message_id="m")

    run_until_idle(app)

    assert ends(app, "c") == ends(app, "d") == {"processed": 1}
    assert len(seen) == 4
    assert all(message["n"] == 1 and length == 0 for _, message, length in seen)


def test_the_message_of_a_context_cannot_be_changed(make):
    app = make()
    wrong = []

    def bad(message, ctx):
        for attempt in (
            lambda: setattr(ctx.message, "id", "other"),
            lambda: ctx.message.headers.__setitem__("a", "b"),
        ):
            try:
                attempt()
            except (AttributeError, TypeError):
                continue
            wrong.append(attempt)

    three(app, bad)
    run_until_idle(app)

    assert wrong == []


@pytest.mark.parametrize("use", ["execute", "write", "send", "savepoint", "connection"])
def test_a_kept_context_is_refused_after_its_run(make, use):
    app = make()
    app.queue("other")
    kept, refused = [], []

    def handle(message: dict, ctx: Context):
        kept.append(ctx)
        if message["n"] != 2:
            return
        calls = {
            "execute": lambda old: old.execute("INSERT INTO effect (n) VALUES (9)"),
            "write": lambda old: old.write("INSERT INTO effect (n) VALUES (9)"),
            "send": lambda old: old.send("other", {}),
            "savepoint": lambda old: old.savepoint().__enter__(),
            "connection": lambda old: old.connection.execute("INSERT INTO effect (n) VALUES (9)"),
        }
        with pytest.raises(TransactionMisuse, match="over"):
            calls[use](kept[0])
        refused.append(use)

    app.consumer("q", name="c")(handle)
    for n in range(3):
        app.send("q", {"n": n}, message_id=f"m{n}")
    run_until_idle(app)

    assert refused == [use]
    assert ends(app) == {"processed": 3}
    assert column(app, "SELECT n FROM effect") == []
    with pytest.raises(TransactionMisuse, match="over"):
        kept[0].execute("INSERT INTO effect (n) VALUES (9)")


def test_a_kept_connection_writes_neither_into_a_later_run_nor_in_autocommit(make):
    app = make()
    kept = []

    def handle(message: dict, ctx: Context):
        if message["n"] == 0:
            kept.append(ctx.connection)
        elif message["n"] == 1:
            kept[0].execute("INSERT INTO effect (n) VALUES (9)")

    app.consumer("q", name="c")(handle)
    for n in range(3):
        app.send("q", {"n": n}, message_id=f"m{n}")
    run_until_idle(app)

    assert ends(app) == {"processed": 2, "dead-lettered": 1}
    with pytest.raises(TransactionMisuse):
        kept[0].execute("INSERT INTO effect (n) VALUES (9)")
    assert column(app, "SELECT n FROM effect") == []


def test_rows_that_a_handler_keeps_hold_no_snapshot_open(make):
    app = make(settings={"busy_ms": 200})
    kept = []

    def handle(message: dict, ctx: Context):
        rows = ctx.execute("SELECT n FROM effect")
        rows.fetchone()
        kept.append(rows)
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    app.consumer("q", name="c")(handle)
    with Driver(app) as driver:
        for n in range(3):
            app.send("q", {"n": n}, message_id=f"m{n}")
            driver.run()
            sql(app, "INSERT INTO effect (n) VALUES (100)")

    assert ends(app) == {"processed": 3}
    assert not hasattr(kept[0], "connection")
    assert not hasattr(kept[0], "execute")


def test_S03_an_error_that_cannot_be_told_leaves_no_claim_behind(make):
    app = make()
    three(app, raises(Speechless()))

    run_until_idle(app)

    (letter,) = app.dead_letters()
    assert "Speechless" in letter.detail
    assert column(app, "SELECT count(*) FROM procession_sessions") == [0]


def test_P04_after_every_way_out_of_a_handler_the_session_takes_its_next_message_at_once(make):
    app = make()
    order = []

    def handle(message: dict, ctx: Context):
        order.append(message["n"])
        if message["way"] is not None:
            raise ERRORS[message["way"]]

    app.consumer("q", name="c", session="s")(handle)
    for way, _ in enumerate(ERRORS):
        app.send("q", {"s": f"s{way}", "n": 1, "way": way})
        app.send("q", {"s": f"s{way}", "n": 2, "way": None})
    run_until_idle(app)

    assert ends(app) == {"processed": len(ERRORS), "dead-lettered": len(ERRORS)}
    assert column(app, "SELECT count(*) FROM procession_sessions") == [0]


@pytest.mark.parametrize("call", ["send", "send_many"])
def test_a_handler_that_uses_the_app_instead_of_its_context_is_told_at_once(make, call):
    app = make(settings={"busy_ms": 5_000})
    app.queue("out")
    calls = {
        "send": lambda: app.send("out", {}),
        "send_many": lambda: app.send_many("out", [{}]),
    }
    three(app, lambda message, ctx: calls[call]())

    began = time.monotonic()
    run_until_idle(app)

    assert time.monotonic() - began < 15
    assert ends(app) == {"processed": 2, "dead-lettered": 1}
    assert "use ctx.send" in app.dead_letters()[0].detail
