"""Order within a session and quiet for all others: retries, lone runs, suspects."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from tests.driving import ENDLESS, PAUSE_S, Driver, column, ends, run_until_idle, sql

from procession import Context, Retry, RetryPolicy
from procession.errors import SessionLost, StoreUnavailable, TransactionMisuse
from procession.runtime.drive import drive


def ledger(app, *, fails, **options):
    """A consumer with sessions that notes (session, n) of what took effect, and all runs."""
    runs = []

    def handle(message: dict, ctx: Context):
        runs.append((message["s"], message["n"]))
        ctx.execute("INSERT INTO effect (n, mark) VALUES (:n, NULL)", n=message["n"])
        fails(message, ctx)

    app.consumer("q", name="c", session="s", **options)(handle)
    return runs


def fail_until(attempt, *numbers):
    def fails(message, ctx):
        if message["n"] in numbers and ctx.message.attempt < attempt:
            raise ValueError

    return fails


def test_N07_a_failing_message_stops_its_own_session_and_no_other_of_the_batch(make):
    app = make()
    runs = ledger(app, fails=fail_until(9, 1))
    for session, n in (("A", 1), ("B", 3), ("A", 2), ("B", 4)):
        app.send("q", {"s": session, "n": n})

    with Driver(app) as driver:
        driver.step()
        assert column(app, "SELECT n FROM effect") == [3, 4]
        assert runs == [("A", 1), ("B", 3), ("B", 4)]
        driver.run()

    assert ends(app) == {"processed": 3, "dead-lettered": 1}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_N08_what_follows_a_failing_message_waits_for_it_in_every_worker(make, workers):
    app = make(retry=ENDLESS)
    runs = ledger(app, fails=fail_until(4, 1))
    for n in range(1, 6):
        app.send("q", {"s": "A", "n": n})

    drivers = [Driver(app) for _ in range(workers)]
    for _ in range(200):
        for driver in drivers:
            driver.step()
        if ends(app) == {"processed": 5}:
            break
        if runs.count(("A", 1)) == 2:
            app.send("q", {"s": "A", "n": 6})
    drivers[0].run()
    for driver in drivers:
        driver.close()

    effects = column(app, "SELECT n FROM effect ORDER BY rowid")
    assert effects == sorted(effects)
    assert effects[:5] == [1, 2, 3, 4, 5]
    assert runs[:5] == [("A", 1)] * 5  # in company, then alone four times
    assert app.dead_letters() == []


def test_N09_a_retried_message_keeps_its_place_before_later_sends(make):
    app = make(retry=ENDLESS)
    ledger(app, fails=fail_until(3, 1))
    with Driver(app) as driver:
        app.send("q", {"s": "A", "n": 1})
        driver.step()
        driver.step()
        for n in range(2, 5):
            app.send("q", {"s": "A", "n": n})
            driver.step()
        driver.run()

    assert column(app, "SELECT n FROM effect ORDER BY rowid") == [1, 2, 3, 4]


def test_every_message_of_a_session_may_fail_and_the_order_holds(make):
    app = make(retry=ENDLESS)
    ledger(app, fails=fail_until(2, *range(100)))
    numbers = range(12)
    for n in numbers:
        app.send("q", {"s": f"s{n % 3}", "n": n})
    run_until_idle(app)

    effects = column(app, "SELECT n FROM effect ORDER BY rowid")
    for session in range(3):
        mine = [n for n in effects if n % 3 == session]
        assert mine == [n for n in numbers if n % 3 == session]


def test_a_thousand_messages_behind_a_retry_are_read_once_and_then_never_while_it_waits(make):
    app = make(retry=RetryPolicy(first_ms=60_000, longest_ms=60_000))
    ledger(app, fails=fail_until(9, 0))
    app.send_many("q", [{"s": "stuck", "n": n} for n in range(1_000)])
    with Driver(app) as driver:
        driver.run_ready()
        lane = driver.lane()
        read = []
        real = lane._connection

        class Counting:
            def execute(self, statement, parameters=()):
                cursor = real.execute(statement, parameters)
                if "procession fetch" not in statement:
                    return cursor
                rows = cursor.fetchall()
                read.append(len(rows))
                return type(
                    "Rows", (), {"fetchall": lambda self: rows, "__iter__": lambda s: iter(rows)}
                )()

            def __getattr__(self, name):
                return getattr(real, name)

        lane._connection = Counting()
        for n in range(20):
            app.send("q", {"s": "free", "n": 10_000 + n})
            assert driver.step() == 1
        lane._connection = real

        assert sum(read) == 20
        (status,) = app.status()
        assert (status.held, status.waiting) == (1_000, 0)
        driver.run_ready()

    assert ends(app) == {"processed": 20}


def test_a_message_without_session_that_fails_delays_nobody(make):
    app = make(retry=RetryPolicy(first_ms=60_000, longest_ms=60_000))
    runs = []

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        runs.append(message["n"])
        if message["n"] % 2:
            raise ValueError

    app.send_many("q", [{"n": n} for n in range(20)])
    with Driver(app) as driver:
        driver.run_ready()
        app.send_many("q", [{"n": n} for n in range(100, 110, 2)])
        assert driver.step() == 5

    assert ends(app) == {"processed": 15}
    assert [status.held for status in app.status()] == [10]


def test_attempts_are_counted_for_lone_runs_alone(make):
    app = make(retry=RetryPolicy(max_attempts=4, first_ms=1, factor=1, jitter=0))
    seen = []

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        seen.append((message["n"], ctx.message.attempt, ctx.run))
        if message["n"] == 1:
            raise ValueError

    app.send_many("q", [{"s": f"s{n}", "n": n} for n in range(4)])
    run_until_idle(app)

    assert [attempt for n, attempt, _ in seen if n == 1] == [0, 1, 2, 3, 4]
    assert [run for n, _, run in seen if n == 1] == [1, 2, 3, 4, 5]
    assert all(attempt == 0 for n, attempt, _ in seen if n != 1)
    assert app.dead_letters()[0].attempts == 4


def test_a_retry_asked_for_is_an_attempt_and_ends_like_any_other(make):
    app = make()
    runs = []

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        runs.append(ctx.message.attempt)
        raise Retry(timedelta(0), reason="not yet")

    app.send("q", {})
    run_until_idle(app)

    (letter,) = app.dead_letters()
    assert (letter.attempts, runs) == (3, [0, 2, 3])
    assert "not yet" in letter.detail


def die_in_handler(app, driver, *numbers):
    """Step until a handler for one of the numbers begins, and vanish there, as a killed process."""

    class Killed(BaseException):
        pass

    lane = driver.lane()
    real = lane.mark

    def mark():
        real()
        delivery = next(d for d in driver.seats["c"].flow._open.deliveries if d not in done)
        done.append(delivery)
        if int(delivery.message_id) in numbers:
            lane._connection.close()
            raise Killed

    lane.mark = mark
    done: list = []
    steps = 0
    while True:
        done.clear()
        try:
            handled = driver.step()
        except Killed:
            driver.seats = {}
            return steps
        steps += 1
        assert steps < 1_000, "nobody died"
        time.sleep(0 if handled else PAUSE_S)


def numbered(app, total):
    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    app.send_many(
        "q", [{"s": f"s{n}", "n": n} for n in range(total)], identify=lambda m: str(m["n"])
    )


def suspicion(app):
    return sql(app, "SELECT suspect_size, suspect_through > 0 FROM procession_subscriptions")


def test_suspects_shrink_to_sixteen_then_to_one_and_clear_and_innocents_keep_no_attempt(make):
    app = make(retry=RetryPolicy(max_attempts=2, first_ms=1, factor=1, jitter=0))
    numbered(app, 100)
    assert suspicion(app) == [(0, 0)]

    dying = Driver(app)
    die_in_handler(app, dying, 40)
    second = Driver(app)
    assert second.take_over(dying) == ["c"]
    assert suspicion(app) == [(16, 1)]
    assert column(app, "SELECT max(attempts) FROM procession_messages") == [0]

    assert die_in_handler(app, second, 40) == 2  # 0-15 and 16-31 pass
    assert column(app, "SELECT count(*) FROM effect") == [32]
    third = Driver(app)
    third.take_over(second)
    assert suspicion(app) == [(1, 1)]

    assert die_in_handler(app, third, 40) == 8  # 32-39 pass, each alone
    assert sql(app, "SELECT message_id, attempts FROM procession_messages WHERE attempts > 0") == [
        (b"40", 1)
    ]
    fourth = Driver(app)
    fourth.take_over(third)
    die_in_handler(app, fourth, 40)
    fifth = Driver(app)
    fifth.take_over(fourth)
    fifth.run()
    fifth.close()

    (letter,) = app.dead_letters()
    assert (letter.reason, letter.message_id) == ("vanished", b"40")
    assert ends(app) == {"processed": 99, "dead-lettered": 1}
    assert column(app, "SELECT n FROM effect ORDER BY rowid") == [n for n in range(100) if n != 40]
    assert suspicion(app)[0][0] == 0


def test_a_killer_among_held_messages_is_found_too(make):
    app = make(retry=RetryPolicy(max_attempts=2, first_ms=1, factor=1, jitter=0))
    fails = [True, True]

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["n"] == 0 and fails:
            fails.pop()
            raise ValueError

    app.send_many("q", [{"s": "one", "n": n} for n in range(30)], identify=lambda m: str(m["n"]))
    driver = Driver(app)
    driver.step()
    driver.step()
    for _ in range(6):
        die_in_handler(app, driver, 20)
        fresh = Driver(app)
        fresh.take_over(driver)
        driver = fresh
        if app.recorded("c", "20"):
            break
        dying = column(app, "SELECT attempts FROM procession_messages WHERE message_id = x'3230'")
        if dying == [2]:
            driver.run()
            break
    driver.close()

    assert [letter.reason for letter in app.dead_letters()] == ["vanished"]
    assert column(app, "SELECT n FROM effect ORDER BY rowid") == [n for n in range(30) if n != 20]


def test_a_session_that_another_worker_runs_alone_is_passed_over_and_keeps_its_order(make):
    app = make(retry=ENDLESS)
    ledger(app, fails=fail_until(1, 0))
    for n in range(3):
        app.send("q", {"s": "A", "n": n})
    app.send("q", {"s": "B", "n": 100})
    with Driver(app) as one, Driver(app) as two:
        lane = one.lane()
        drive(lane.begin())
        head = drive(lane.fetch(1)).deliveries[0]
        drive(lane.rollback())
        drive(lane.begin_attempt(head))

        assert two.run_ready() == 1  # B alone; A's messages are set aside
        assert column(app, "SELECT n FROM effect") == [100]
        with pytest.raises(SessionLost):
            drive(two.lane().begin_attempt(head))
        one.run()

    assert column(app, "SELECT n FROM effect ORDER BY rowid") == [100, 0, 1, 2]


def test_N02_a_session_is_not_given_away_while_one_of_its_messages_is_handled(make):
    app = make(settings={"busy_ms": 20})
    entered = []
    refused = []

    def elsewhere():
        try:
            other.step()
        except StoreUnavailable as error:
            refused.append(error)

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        entered.append(message["n"])
        if message["n"] == 0:
            with pytest.raises(TransactionMisuse, match="wait for itself"):
                other.step()
            worker = threading.Thread(target=elsewhere)
            worker.start()
            worker.join()

    app.send_many("q", [{"s": "A", "n": n} for n in range(3)])
    with Driver(app) as driver, Driver(app) as other:
        driver.run()

    assert entered == [0, 1, 2]
    assert len(refused) == 1


def test_scheduled_messages_hold_nobody_and_take_their_place_by_number_when_due(make):
    app = make()
    order = []

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        order.append(message["n"])

    with Driver(app) as driver:
        app.send("q", {"s": "A", "n": 1}, after=timedelta(milliseconds=30))
        app.send("q", {"s": "A", "n": 2})
        driver.step()
        assert order == [2]
        driver.run()
        app.send("q", {"s": "A", "n": 3}, after=timedelta(milliseconds=1))
        app.send("q", {"s": "A", "n": 4}, after=timedelta(hours=-0))
        sql(app, "UPDATE procession_messages SET due_ms = 1 WHERE due_ms IS NOT NULL")
        driver.run()

    assert order == [2, 1, 3, 4]


def test_sends_that_keep_coming_do_not_starve_a_session_that_waited(make):
    app = make(retry=ENDLESS, settings={"batch_max": 4, "suspect_batch": 4})
    ledger(app, fails=fail_until(2, 0))
    with Driver(app) as driver:
        app.send("q", {"s": "A", "n": 0})
        app.send("q", {"s": "A", "n": 1})
        for n in range(2, 60):
            app.send_many("q", [{"s": f"x{n}", "n": 1_000 + n}] * 4)
            driver.step()
        effects = column(app, "SELECT n FROM effect")
        driver.run()

    assert effects.index(0) < effects.index(1)
    assert 1 in effects[:200]
