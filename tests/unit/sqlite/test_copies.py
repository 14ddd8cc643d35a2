"""The same message more than once: in one batch, across batches, sessions and lanes."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.driving import Driver, Recorder, column, ends, run_until_idle, sql

from procession import Context, Event, Reject
from procession.outcome import Cause


def duplicates(app, consumer="c"):
    return {
        cause: number
        for status in app.status()
        if status.consumer == consumer
        for (end, cause), number in status.counts.items()
        if end == "duplicate"
    }


FIRST = ["done", "fails-once", "fails-always", "rejected"]


@pytest.mark.parametrize("split", [False, True], ids=["one-batch", "two-batches"])
@pytest.mark.parametrize("other_session", [False, True], ids=["same-session", "other-session"])
@pytest.mark.parametrize("other_payload", [False, True], ids=["same-payload", "other-payload"])
@pytest.mark.parametrize("first", FIRST)
def test_a_second_copy_gets_the_verdict_of_the_first(
    make, first, other_payload, other_session, split
):
    app = make()
    runs = []

    def handle(message: dict, ctx: Context):
        runs.append(message["copy"])
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["n"] != 1:
            return
        if first == "fails-always" or (first == "fails-once" and runs.count(message["copy"]) == 1):
            raise ValueError
        if first == "rejected":
            raise Reject("no")

    app.consumer("q", name="c")(handle)
    copy = {"n": 1, "copy": "b" if other_payload else "a"}
    with Driver(app) as driver:
        app.send("q", {"n": 0, "copy": "before"}, session="s")
        app.send("q", {"n": 1, "copy": "a"}, message_id="m", session="s")
        if split:
            driver.run()
        app.send("q", copy, message_id="m", session="t" if other_session else "s")
        app.send("q", {"n": 2, "copy": "after"}, session="s")
        app.send("q", {"n": 3, "copy": "after"}, session="t")
        driver.run()

    effects = column(app, "SELECT n FROM effect ORDER BY n")
    letters = app.dead_letters()
    assert sum(ends(app).values()) == 5
    assert ends(app)["processed"] == effects.count(1) + 3
    if first in ("done", "fails-once"):
        assert effects == [0, 1, 2, 3]
        if other_payload:
            assert [letter.reason for letter in letters] == ["conflict"]
        else:
            assert letters == []
            assert sum(duplicates(app).values()) == 1
    else:
        assert effects == [0, 2, 3]
        if other_payload:
            assert sorted(letter.reason for letter in letters).count("conflict") == 1
            assert len(letters) == 2
        else:
            assert [letter.copies for letter in letters] == [2]


def test_C01_a_thousand_copies_have_one_effect(make):
    app = make()

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (1)")

    for number in range(1_000):
        app.outgoing("q", {})
        if number % 100 == 0:
            app.publish(
                app.outgoing("q", {}, message_id="m", session=f"s{n % 7}") for n in range(100)
            )

    run_until_idle(app)

    assert column(app, "SELECT count(*) FROM effect") == [1]
    assert ends(app) == {"processed": 1, "duplicate": 999}


def test_C01_copies_for_several_workers_have_one_effect_and_no_dead_letter(make):
    app = make()

    @app.consumer("q", name="c", commit="each")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    drivers = [Driver(app) for _ in range(3)]
    for n in range(30):
        for _ in drivers:
            app.send("q", {"n": n}, message_id=f"m{n}")
    while sum(driver.step() for driver in drivers):
        pass
    for driver in drivers:
        driver.close()

    assert column(app, "SELECT n FROM effect ORDER BY n") == list(range(30))
    assert ends(app) == {"processed": 30, "duplicate": 60}


def test_a_business_key_joins_messages_of_different_ids(make):
    app = make()

    @app.consumer("q", name="c", key="order", session="order", fingerprint=["amount"])
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["amount"])

    app.send("q", {"order": 1, "amount": 10, "sent": "today"})
    app.send("q", {"order": 1, "amount": 10.0, "sent": "tomorrow"})
    app.send("q", {"order": 1, "amount": 11, "sent": "today"})

    run_until_idle(app)

    assert column(app, "SELECT n FROM effect") == [10]
    assert ends(app) == {"processed": 1, "duplicate": 1, "dead-lettered": 1}
    assert [letter.reason for letter in app.dead_letters()] == ["conflict"]


def test_a_conflict_may_be_an_alert_instead_of_a_dead_letter(make):
    recorder = Recorder()
    app = make(instruments=[recorder])
    told = []
    app.on_alert(told.append)

    @app.consumer("q", name="c", on_conflict="alert")
    def handle(message: dict): ...

    app.send("q", {"n": 1}, message_id="m")
    app.send("q", {"n": 2}, message_id="m")

    run_until_idle(app)

    assert ends(app) == {"processed": 1, "conflict": 1}
    assert app.dead_letters() == []
    assert [fields["what"] for fields in told] == ["conflict"]
    assert recorder.of(Event.ALERT) == told


def test_T04_a_commit_that_fails_leaves_no_marker_and_the_message_runs_again(make):
    app = make()
    runs = []

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        runs.append(ctx.run)
        ctx.execute("INSERT INTO effect (n) VALUES (1)")

    app.send("q", {}, message_id="m")
    with Driver(app) as driver:
        lane, real = driver.lane(), driver.lane().commit

        async def torn():
            lane.commit = real
            raise OSError("the power went")

        lane.commit = torn
        driver.step()
        assert app.recorded("c", "m") is None
        assert column(app, "SELECT n FROM effect") == []
        driver.run()

    assert len(runs) == 2
    assert column(app, "SELECT n FROM effect") == [1]
    assert ends(app) == {"processed": 1}


@pytest.mark.parametrize("again", ["redelivered", "sent-again"])
def test_X04_a_failed_message_leaves_no_marker_and_runs_when_it_comes_again(make, again):
    app = make()
    runs = []

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        runs.append(ctx.message.attempt)
        ctx.execute("INSERT INTO effect (n) VALUES (1)")
        if len(runs) == 1:
            raise ValueError

    app.send("q", {}, message_id="m")
    with Driver(app) as driver:
        driver.step()
        assert app.recorded("c", "m") is None
        if again == "sent-again":
            app.send("q", {}, message_id="m")
        driver.run()

    assert column(app, "SELECT n FROM effect") == [1]
    assert ends(app)["processed"] == 1


def test_X01_marker_and_effect_are_one_transaction(make):
    app = make()

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    with Driver(app) as driver:
        for n in range(20):
            app.send("q", {"n": n}, message_id=f"m{n}")
        for step in ("flush", "commit"):
            lane = driver.lane()
            real = getattr(lane, step)

            async def vanish(*_arguments, lane=lane):
                lane._connection.close()
                raise KeyboardInterrupt

            setattr(lane, step, vanish)
            with pytest.raises(KeyboardInterrupt):
                driver.step()
            assert column(app, "SELECT count(*) FROM effect") == [0]
            assert column(app, "SELECT count(*) FROM procession_inbox") == [0]
            del real
            driver.seats["c"] = type(driver.seats["c"])(driver, app.consumers["c"], 7)
        driver.run()

    assert column(app, "SELECT n FROM effect") == list(range(20))
    assert column(app, "SELECT count(*) FROM procession_inbox") == [20]


def test_X06_a_duplicate_poisons_nobodys_transaction(make):
    app = make()

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        with ctx.savepoint():
            ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    for n in (1, 1, 2, 2, 1, 3):
        app.send("q", {"n": n}, message_id=f"m{n}")

    run_until_idle(app)

    assert column(app, "SELECT n FROM effect") == [1, 2, 3]
    assert ends(app) == {"processed": 3, "duplicate": 3}


def test_A02_a_key_that_another_transaction_recorded_is_found_by_number_not_by_text(make):
    app = make()
    runs = []

    def handle(message: dict, ctx: Context):
        runs.append(message["n"])
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    app.consumer("q", name="c", key="n")(handle)
    with Driver(app) as driver:
        for n in range(3):
            app.send("q", {"n": n})
        lane = driver.lane()
        real = lane.judge

        async def blind(keys):
            lane.judge = real
            await real(keys)
            return {}

        lane.judge = blind
        # Another connection cannot commit meanwhile, so the row is there and the judge is blind.
        sql(
            app,
            "INSERT INTO procession_inbox (subscription, key, state, fingerprint, recorded_ms) "
            "SELECT id, CAST('1' AS BLOB), 3, randomblob(32), 0 FROM procession_subscriptions",
        )
        driver.run()

    assert column(app, "SELECT n FROM effect") == [0, 2]
    assert ends(app) == {"processed": 2, "dead-lettered": 1}  # the other one had another payload
    assert runs == [0, 1, 2, 0, 2]


def test_a_race_lost_for_a_key_is_counted_as_concurrent(make):
    app = make()

    @app.consumer("q", name="c", key="n")
    def handle(message: dict, ctx: Context): ...

    with Driver(app) as driver:
        app.send("q", {"n": 1})
        driver.run()
        app.send("q", {"n": 1})
        lane = driver.lane()
        real = lane.judge

        async def blind(keys):
            lane.judge = real
            return {}

        lane.judge = blind
        driver.run()

    assert duplicates(app) == {Cause.CONCURRENT: 1}


def test_I14_a_duplicate_window_folds_at_the_send_and_the_inbox_judges_what_passes(make):
    app = make()
    app.queue("q", duplicate_window=timedelta(seconds=60))

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (1)")

    with Driver(app) as driver:
        app.send("q", {}, message_id="m")
        app.send("q", {}, message_id="m")
        app.send("q", {}, message_id="M")
        assert column(app, "SELECT count(*) FROM procession_messages") == [2]
        driver.run()
        app.send("q", {}, message_id="m")
        assert column(app, "SELECT count(*) FROM procession_messages") == [0]
        sql(app, "UPDATE procession_recent_ids SET sent_ms = 0")
        app.send("q", {}, message_id="m")
        driver.run()

    assert ends(app) == {"processed": 2, "duplicate": 1}


def test_an_expired_message_ends_once_and_its_copy_is_a_duplicate(make):
    app = make()
    runs = []

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        runs.append(1)

    app.send("q", {}, message_id="m", expires=timedelta(0))
    app.send("q", {}, message_id="m")

    run_until_idle(app)

    assert runs == []
    assert ends(app) == {"expired": 1, "duplicate": 1}
