"""What is sent is there if and only if its transaction committed, in order, none is missed."""

from __future__ import annotations

import threading
import time

import pytest
from tests.driving import ENDLESS, Driver, column, ends, foreign, run_until_idle, sql

from procession import Context
from procession.errors import ConfigurationError, MessageError
from procession.runtime.drive import drive


def collecting(app, queue="out", name="out", **options):
    got = []

    def handle(message: dict, ctx: Context):
        got.append(message["n"])

    app.consumer(queue, name=name, **options)(handle)
    return got


def test_a_run_that_does_not_commit_sends_nothing(make):
    app = make()
    got = collecting(app)

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        ctx.send("out", {"n": message["n"]})
        if message["n"] == 1 and ctx.message.attempt < 2:
            raise ValueError

    app.send_many("q", [{"n": n} for n in range(4)])
    run_until_idle(app)

    assert sorted(got) == [0, 1, 2, 3]
    assert ends(app, "out") == {"processed": 4}


def test_a_duplicate_sends_nothing_again(make):
    app = make()
    got = collecting(app)

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        ctx.send("out", {"n": 1}, message_id="derived")

    for _ in range(3):
        app.send("q", {}, message_id="m")
    run_until_idle(app)

    assert got == [1]
    assert ends(app, "out") == {"processed": 1}


def draw_and_fail(driver):
    with driver.workers.write("a send that fails") as connection:
        connection.execute("UPDATE procession_meta SET value = value + 3 WHERE name = 'number'")
        raise LookupError


def test_O01_a_number_that_was_drawn_and_rolled_back_stalls_nobody(make):
    app = make()
    got = collecting(app)
    app.open()
    with Driver(app) as driver:
        for n in range(5):
            with pytest.raises(LookupError):
                draw_and_fail(driver)
            app.send("out", {"n": n})
            sql(app, "UPDATE procession_meta SET value = value + 100 WHERE name = 'number'")
        driver.run()

    assert got == [0, 1, 2, 3, 4]


def test_O01_a_row_with_a_smaller_number_that_comes_late_is_handled(make):
    app = make()
    got = collecting(app, "q", "c")
    with Driver(app) as driver:
        late = foreign(app, message_id=b"late", body=b'{"n":1}')
        sql(app, "DELETE FROM procession_messages WHERE id = ?", (late,))
        app.send("q", {"n": 2})
        driver.run()
        sql(
            app,
            "INSERT INTO procession_messages (id, message_id, format, body, sent_ms) "
            "VALUES (?, x'6c', 2, CAST('{\"n\":1}' AS BLOB), 0)",
            (late,),
        )
        driver.run()

    assert got == [2, 1]


@pytest.mark.parametrize("clock", ["runs", "stands", "steps-back"])
def test_O03_the_order_of_sending_is_the_order_of_handling_whatever_the_clock(
    make, monkeypatch, clock
):
    app = make()
    got = collecting(app, session="s")

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        for n in range(5):
            ctx.send("out", {"s": "A", "n": message["n"] * 5 + n})

    moments = iter(range(10**9, 0, -1_000))
    real = time.time_ns
    if clock != "runs":
        monkeypatch.setattr(
            time,
            "time_ns",
            lambda: (
                real()
                if clock == "runs"
                else next(moments) * 1_000_000
                if clock == "steps-back"
                else 10**18
            ),
        )
    with Driver(app) as driver:
        for n in range(10):
            app.send("q", {"n": n})
            if n % 3:
                driver.step("c")
        driver.run()
        for n in range(50, 100):
            app.send("out", {"s": "A", "n": n})
        driver.run()

    assert got == list(range(100))


def test_O04_two_workers_never_have_messages_of_one_session_in_another_order(make):
    app = make(settings={"batch_max": 7, "suspect_batch": 7})
    got = []

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context):
        got.append((message["s"], message["n"]))
        if message["n"] % 11 == 0 and ctx.message.attempt < 1:
            raise ValueError

    app.send_many("q", [{"s": f"s{n % 20}", "n": n} for n in range(400)])
    drivers = [Driver(app) for _ in range(3)]
    while sum(driver.step() for driver in drivers) or sum(s.held for s in app.status()):
        pass
    for driver in drivers:
        driver.close()

    assert ends(app) == {"processed": 400}
    last = {}
    for session, n in got:
        assert n >= last.get(session, 0)
        last[session] = n


def test_O05_what_follows_a_failed_message_of_its_key_waits_and_another_key_does_not(make):
    app = make(retry=ENDLESS)
    got = []

    @app.consumer("q", name="relay", session="s")
    def relay(message: dict, ctx: Context):
        if message["n"] == "A" and ctx.message.attempt < 2:
            raise ConnectionError
        got.append(message["n"])

    for n, s in (("A", 1), ("B", 1), ("C", 2)):
        app.send("q", {"s": s, "n": n})
    run_until_idle(app)

    assert got == ["C", "A", "B"]


def test_a_chunk_is_stored_whole_or_not_at_all(make):
    app = make()
    got = collecting(app)
    app.open()

    with pytest.raises(MessageError):
        app.send_many("out", [{"n": 1}, {"n": float("nan")}, {"n": 3}])
    assert column(app, "SELECT count(*) FROM procession_messages") == [0]
    with pytest.raises(MessageError):
        app.send_many("out", ({"n": n if n < 1_500 else object()} for n in range(2_000)))
    assert column(app, "SELECT count(*) FROM procession_messages") == [1_000]
    run_until_idle(app)

    assert got == list(range(1_000))


@pytest.mark.parametrize("queue", ["typo", "", "OUT", "out "])
def test_a_queue_that_nobody_declared_is_an_error_in_words(make, queue):
    app = make()
    collecting(app)

    with pytest.raises(ConfigurationError, match="declared"):
        app.send(queue, {"n": 1})


def test_a_topic_without_subscriber_is_an_error_to_the_sender(make):
    app = make()
    app.topic("news")

    with pytest.raises(ConfigurationError, match="no subscriber"):
        app.send("news", {})


def test_every_subscriber_of_a_topic_gets_its_own_copy_in_order(make):
    app = make()
    app.topic("news")
    one = collecting(app, "news", "one", session="s")
    two = collecting(app, "news", "two", session="s")
    for n in range(10):
        app.send("news", {"s": "A", "n": n})
    run_until_idle(app)

    assert one == two == list(range(10))


def test_senders_on_many_threads_lose_nothing_and_keep_each_ones_order(make):
    app = make()
    got = []

    @app.consumer("out", name="out", session="s")
    def handle(message: dict, ctx: Context):
        got.append((message["s"], message["n"]))

    def sender(number):
        for n in range(50):
            app.send("out", {"s": number, "n": n})

    threads = [threading.Thread(target=sender, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    run_until_idle(app)

    for number in range(4):
        assert [n for s, n in got if s == number] == list(range(50))


def test_a_commit_on_another_connection_is_seen_as_a_change_and_an_own_one_is_not(make):
    app = make()
    collecting(app)
    app.open()
    with Driver(app) as driver:
        lane = driver.lane("out")
        drive(lane.changed())
        assert drive(lane.changed()) is False
        app.send("out", {"n": 1})
        assert drive(lane.changed()) is True
        assert drive(lane.changed()) is False
        driver.run()
        assert drive(lane.changed()) is False
