"""Several consumers on one store, renamed ones, and those this code does not know."""

from __future__ import annotations

import pytest
from tests.driving import Driver, column, ends, run_until_idle, sql

from procession import Context
from procession.abc import Settlement
from procession.errors import ConfigurationError
from procession.runtime.drive import drive
from procession.transports.memory import MemoryBroker


def consumer(app, queue="q", name="c", runs=None, **options):
    runs = [] if runs is None else runs

    def handle(message: dict, ctx: Context):
        runs.append((ctx.consumer, ctx.message.id))

    app.consumer(queue, name=name, **options)(handle)
    return runs


def test_one_consumer_name_twice_is_refused(make):
    app = make()
    consumer(app)

    with pytest.raises(ConfigurationError, match="registered already"):
        consumer(app, queue="other")
    with pytest.raises(ConfigurationError, match="registered already"):
        consumer(app)


def test_one_consumer_name_on_two_queues_is_refused_across_programs(make):
    one, two = make(), make()
    consumer(one, queue="a")
    consumer(two, queue="b")
    one.open()

    with pytest.raises(ConfigurationError, match="part of its dedup keys"):
        two.open()


def test_two_names_on_one_queue_are_refused(make):
    app = make()
    consumer(app)

    with pytest.raises(ConfigurationError, match=r"app\.topic"):
        consumer(app, name="d")


@pytest.mark.parametrize("name", [None, "", " ", "a ", "x" * 201, "a\nb", 7])
def test_a_consumer_needs_a_printable_name(make, name):
    app = make()

    with pytest.raises(ConfigurationError):
        consumer(app, name=name)


def test_D01_two_consumers_of_one_topic_run_once_each_and_fail_apart(make):
    app = make()
    app.topic("q")
    runs = []

    def handle(message: dict, ctx: Context):
        runs.append(ctx.consumer)
        if ctx.consumer == "c":
            raise ValueError

    app.consumer("q", name="c")(handle)
    app.consumer("q", name="d")(handle)
    app.send("q", {}, message_id="m")
    run_until_idle(app)

    assert ends(app, "c") == {"dead-lettered": 1}
    assert ends(app, "d") == {"processed": 1}
    assert runs.count("d") == 1
    (letter,) = app.dead_letters()
    assert letter.consumer == "c"


def test_D03_a_renamed_consumer_is_refused_in_words_and_its_messages_are_kept(make):
    old, new = make(), make()
    consumer(old, name="old")
    runs = consumer(new, name="new")
    old.send("q", {}, message_id="m")

    with pytest.raises(ConfigurationError, match=r"belongs to consumer 'old'.*Keep name='old'"):
        new.send("q", {})

    assert column(old, "SELECT count(*) FROM procession_messages") == [1]
    assert [(s.consumer, s.waiting) for s in old.status()] == [("old", 1)]
    assert runs == []


def test_messages_of_a_consumer_that_this_code_lacks_are_kept_and_shown(make):
    before, after = make(), make()
    before.topic("news")
    consumer(before, "news", "one")
    consumer(before, "news", "two")
    consumer(before, "other", "three")
    before.send("news", {}, message_id="m")
    before.send("other", {}, message_id="m")

    after.topic("news")
    runs = consumer(after, "news", "one")
    run_until_idle(after)
    after.send("news", {}, message_id="n")
    run_until_idle(after)

    assert runs == [("one", "m"), ("one", "n")]
    assert {s.consumer: s.waiting for s in after.status()} == {"one": 0, "two": 2, "three": 1}
    run_until_idle(before)
    assert {s.consumer: s.waiting for s in before.status()} == {"one": 0, "two": 0, "three": 0}


def test_a_queue_cannot_become_a_topic(make):
    one, two = make(), make()
    one.queue("q")
    two.topic("q")
    one.open()

    with pytest.raises(ConfigurationError, match="renamed"):
        two.open()


def test_messages_sent_before_a_queue_had_a_consumer_wait_for_it(make):
    one, two = make(), make()
    one.queue("q")
    one.send("q", {}, message_id="m")
    assert [(s.consumer, s.waiting) for s in one.status()] == [(None, 1)]

    runs = consumer(two)
    run_until_idle(two)

    assert runs == [("c", "m")]


def test_apps_with_other_table_prefixes_share_a_file(make):
    one, two = make(), make(table_prefix="other_")
    runs = consumer(one)
    others = consumer(two)
    one.send("q", {}, message_id="m")
    two.send("q", {}, message_id="m")
    run_until_idle(one)
    run_until_idle(two)

    assert runs == others == [("c", "m")]


def broker():
    return MemoryBroker(now_ms=lambda: 0)


def test_A01_a_settle_that_fails_after_the_commit_is_made_good_by_the_duplicate(make):
    app = make()
    runs = consumer(app)
    queue = broker()
    source = queue.source("q")
    app.open()
    queue.put(app.outgoing("q", {}, message_id="m"))
    real = source.settle

    async def fails(settlements: list[Settlement]):
        source.settle = real
        raise ConnectionError("the broker went away after our commit")

    source.settle = fails
    with Driver(app, source=source) as driver:
        with pytest.raises(ConnectionError):
            driver.step()
        assert app.recorded("c", "m").end == "processed"
        drive(source.close())  # the connection is lost, its locks with it
        driver.run_ready()

    assert runs == [("c", "m")]
    assert queue.queues["q"] == []
    assert ends(app) == {"processed": 1, "duplicate": 1}
    assert app.dead_letters() == []


def test_a_brokers_message_that_fails_is_taken_into_the_store_and_its_session_waits(make):
    app = make()
    order = []

    def handle(message: dict, ctx: Context):
        order.append(message["n"])
        if message["n"] == 1 and ctx.message.attempt < 2:
            raise ValueError

    app.consumer("q", name="c", session="s")(handle)
    queue = broker()
    source = queue.source("q")
    app.open()
    for n in range(4):
        queue.put(app.outgoing("q", {"s": "A", "n": n}, message_id=f"m{n}"))
    with Driver(app, source=source) as driver:
        driver.run()
        driver.run_ready()
        driver.run()

    assert [n for n in order if n != 1] == [0, 2, 3]
    assert order.index(2) > max(i for i, n in enumerate(order) if n == 1)
    assert ends(app) == {"processed": 4}
    assert queue.queues["q"] == []
    assert sql(app, "SELECT count(*) FROM procession_messages") == [(0,)]
