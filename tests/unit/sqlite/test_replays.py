"""Dead letters on their way back: through the inbox, in their session, once."""

from __future__ import annotations

import random
import threading
from datetime import timedelta

import pytest
from tests.driving import Driver, column, ends, foreign, sql

from procession import Context, OperatorError, Reject, RetryPolicy
from procession.abc import DeadLetterFilter
from procession.runtime.drive import drive

ONCE = RetryPolicy(max_attempts=1, first_ms=1)


def rejecting(app, bad, **options):
    """A consumer that rejects the numbers in `bad`; returns what took effect."""

    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["n"] in bad:
            raise Reject("bad")

    app.consumer("q", name="c", session="s", **options)(handle)


def effects(app):
    return column(app, "SELECT n FROM effect ORDER BY rowid")


def replay(app, *numbers, **options):
    return app.replay_dead_letters(numbers, by="test", **options)


def test_Q04_continue_lets_the_session_go_on_and_marks_the_replay_as_out_of_order(make):
    app = make(retry=ONCE)
    bad = {2}
    rejecting(app, bad)
    app.send_many("q", [{"s": "A", "n": n} for n in range(1, 5)], identify=lambda m: f"m{m['n']}")
    with Driver(app) as driver:
        driver.run()
        assert effects(app) == [1, 3, 4]
        bad.clear()
        (letter,) = app.dead_letters()
        replay(app, letter.number)
        driver.run()

    assert effects(app) == [1, 3, 4, 2]
    assert [app.recorded("c", f"m{n}").out_of_order for n in range(1, 5)] == [
        False,
        True,
        False,
        False,
    ]
    assert app.dead_letter(letter.number).status == "replayed"
    assert ends(app)["processed"] == 4


def test_Q08_a_replay_is_judged_by_the_inbox(make):
    app = make(retry=ONCE)
    bad = {1}
    rejecting(app, bad)
    with Driver(app) as driver:
        app.send("q", {"s": "A", "n": 1}, message_id="m")
        driver.run()
        bad.clear()
        # A copy of a dead letter is counted there and never run.
        app.send("q", {"s": "A", "n": 1}, message_id="m")
        driver.run()
        assert effects(app) == []
        (letter,) = app.dead_letters()
        assert letter.copies == 2
        # Somebody settled it by hand meanwhile: the replay takes no effect.
        sql(app, "UPDATE procession_inbox SET state = 3, ended = NULL")
        replay(app, letter.number)
        driver.run()
        assert effects(app) == []
        assert app.dead_letter(letter.number).status == "replayed"
        sql(app, "UPDATE procession_inbox SET state = 4")
        sql(app, "UPDATE procession_dead_letters SET status = 'dead'")
        replay(app, letter.number)
        driver.run()
        assert effects(app) == [1]
        app.send("q", {"s": "A", "n": 1}, message_id="m")
        driver.run()

    assert effects(app) == [1]


def test_Q10_a_retry_and_a_replay_keep_id_session_headers_type_and_time(make):
    app = make(retry=RetryPolicy(max_attempts=2, first_ms=1, factor=1, jitter=0))
    seen = []
    fails = [True] * 6

    @app.message("order.made")
    class Made(dict): ...

    @app.consumer("q", name="c", session="header:group")
    def handle(message: dict, ctx: Context):
        found = ctx.message
        seen.append((found.id, found.session, found.type, dict(found.headers), found.sent_at_ms))
        if fails:
            fails.pop()
            raise ValueError

    headers = {"group": "g7", "correlation-id": "k", "x": "ü 🧾"}
    app.send("q", {"n": 1}, message_id="m", headers=headers, expires=timedelta(hours=1))
    with Driver(app) as driver:
        driver.run()
        (letter,) = app.dead_letters()
        assert letter.headers == headers
        replay(app, letter.number)
        driver.run()
        replay(app, letter.number)
        driver.run()

    assert len(seen) == 7
    assert seen == [seen[0]] * 7
    assert seen[0][:4] == ("m", "g7", "", headers)
    assert ends(app) == {"dead-lettered": 2, "processed": 1}


def test_a_replay_that_fails_again_goes_back_to_its_dead_letter(make):
    app = make(retry=ONCE)
    rejecting(app, {1})
    with Driver(app) as driver:
        app.send("q", {"s": "A", "n": 1}, message_id="m")
        driver.run()
        (letter,) = app.dead_letters()
        for _ in range(3):
            replay(app, letter.number)
            driver.run()

    (again,) = app.dead_letters()
    assert again.number == letter.number
    assert [entry["what"] for entry in again.history] == ["replayed", "the replay failed"] * 3


def test_a_replay_waits_behind_a_retry_of_its_session_and_holds_no_other(make):
    app = make(retry=RetryPolicy(max_attempts=50, first_ms=60_000, longest_ms=60_000))
    bad = {1}
    fails = []

    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["n"] in bad:
            raise Reject("bad")
        if message["n"] == 2 and fails:
            fails.pop()
            raise ValueError

    app.consumer("q", name="c", session="s")(handle)
    with Driver(app) as driver:
        app.send("q", {"s": "A", "n": 1})
        driver.run()
        bad.clear()
        fails += [True] * 4
        app.send("q", {"s": "A", "n": 2})
        driver.run_ready()
        replay(app, app.dead_letters()[0].number)
        app.send("q", {"s": "A", "n": 3})
        app.send("q", {"s": "B", "n": 9})
        driver.run_ready()
        assert effects(app) == [9]
        for _ in range(3):
            sql(app, "UPDATE procession_sessions SET retry_at = 0")
            driver.run_ready()

    assert effects(app) == [9, 2, 1, 3]


def test_Q01_ten_replays_at_once_give_one_run(make):
    app = make(retry=ONCE)
    bad = {1}
    rejecting(app, bad)
    app.send("q", {"s": "A", "n": 1})
    with Driver(app) as driver:
        driver.run()
        bad.clear()
        (letter,) = app.dead_letters()
        queued = []

        def ask():
            letters = drive(app.store.dead_letters())
            try:
                drive(letters.replay(letter.number, by="test"))
                queued.append(1)
            except OperatorError:
                queued.append(0)
            finally:
                drive(letters.close())

        threads = [threading.Thread(target=ask) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        driver.run()
        assert [asked.queued for asked in replay(app, letter.number, letter.number)] == [False]
        driver.run()

    assert sum(queued) == 1
    assert len(queued) == 10
    assert effects(app) == [1]


def test_Q03_a_bulk_replay_keeps_the_order_of_each_session(make):
    app = make(retry=ONCE)
    bad = set(range(30))
    rejecting(app, bad)
    app.send_many("q", [{"s": n % 3, "n": n} for n in range(30)])
    with Driver(app) as driver:
        driver.run()
        bad.clear()
        numbers = [letter.number for letter in app.dead_letters()]
        random.Random(3).shuffle(numbers)
        assert all(asked.queued for asked in replay(app, *numbers))
        driver.run()

    found = effects(app)
    assert sorted(found) == list(range(30))
    for session in range(3):
        assert [n for n in found if n % 3 == session] == list(range(session, 30, 3))


def test_Q09_one_of_several_replays_that_cannot_be_is_told_and_the_others_go_on(make):
    app = make(retry=ONCE)
    bad = {1, 2, 3}
    rejecting(app, bad)
    app.send_many("q", [{"s": n, "n": n} for n in (1, 2, 3)])
    with Driver(app) as driver:
        driver.run()
        bad.clear()
        numbers = [letter.number for letter in app.dead_letters()]
        app.discard_dead_letter(numbers[1], by="test", why="wrong")
        asked = replay(app, *numbers, 999)
        driver.run()

    assert [(one.number, one.queued) for one in asked if one.queued] == [
        (numbers[0], True),
        (numbers[2], True),
    ]
    assert all(one.why for one in asked if not one.queued)
    assert sorted(effects(app)) == [1, 3]


@pytest.mark.parametrize("act", ["replay", "discard", "edit"])
def test_two_operators_decide_once(make, act):
    app = make(retry=ONCE)
    rejecting(app, {1})
    app.send("q", {"s": "A", "n": 1})
    with Driver(app) as driver:
        driver.run()
    (letter,) = app.dead_letters()
    one, two = drive(app.store.dead_letters()), drive(app.store.dead_letters())
    drive(one.replay(letter.number, by="one"))

    decisions = {
        "replay": lambda: two.replay(letter.number, by="two"),
        "discard": lambda: two.discard(letter.number, by="two", why="no"),
        "edit": lambda: two.edit(letter.number, body=b"{}", fingerprint=b"f" * 32, by="two"),
    }
    with pytest.raises(OperatorError, match="queued"):
        drive(decisions[act]())

    drive(one.close())
    drive(two.close())
    assert column(app, "SELECT count(*) FROM procession_messages") == [1]


def test_a_discard_ends_the_message_and_its_copies_stay_dead(make):
    app = make(retry=ONCE)
    rejecting(app, {1})
    with Driver(app) as driver:
        app.send("q", {"s": "A", "n": 1}, message_id="m")
        driver.run()
        app.discard_dead_letter(app.dead_letters()[0].number, by="test", why="wrong")
        app.send("q", {"s": "A", "n": 1}, message_id="m")
        driver.run()

    assert effects(app) == []
    assert app.dead_letters() == []
    (letter,) = app.dead_letters(DeadLetterFilter(status=None))
    assert (letter.status, letter.copies) == ("discarded", 2)
    assert ends(app)["discarded"] == 1


def test_dead_letters_without_a_key_are_kept_one_by_one(make):
    app = make()
    rejecting(app, ())
    for n in range(3):
        foreign(app, message_id=b"", body=b'{"s":"A","n":%d}' % n)
    with Driver(app) as driver:
        driver.run()
        letters = app.dead_letters()
        assert [letter.body for letter in letters] == [b'{"s":"A","n":%d}' % n for n in range(3)]
        replay(app, letters[1].number)
        driver.run()

    assert len(app.dead_letters()) == 3  # it has no key still, and says so again


def test_a_replay_survives_a_crash_and_runs_once(make):
    app = make(retry=ONCE)
    bad = {1}
    rejecting(app, bad)
    app.send("q", {"s": "A", "n": 1})
    first = Driver(app)
    first.run()
    bad.clear()
    replay(app, app.dead_letters()[0].number)
    lane = first.lane()
    drive(lane.begin())
    drive(lane.fetch(10))
    first.vanish()
    with Driver(app) as second:
        second.take_over(first)
        second.run()

    assert effects(app) == [1]
    assert app.dead_letters() == []
