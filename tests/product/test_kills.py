"""kill -9 at every step: the next run converges, every effect is there once and in order."""

from __future__ import annotations

import signal

import pytest
from tests.driving import column, ends, sql, unfinished, wait_until
from tests.product.child import POINTS

from procession.runtime.drive import drive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MESSAGES = 48
SESSIONS = 6


def send_everything(app):
    """Send messages of several sessions, some of which fail once or are bad, and copies of some."""
    for n in range(MESSAGES):
        way = {10: "fail-once", 21: "reject", 33: "fail-once"}.get(n, "")
        app.send("q", {"s": n % SESSIONS, "n": n, "way": way}, message_id=f"m{n}")
        if n % 12 == 5:
            app.send("q", {"s": n % SESSIONS, "n": n, "way": way}, message_id=f"m{n}")
        if n == 30:
            app.send("q", {"s": n % SESSIONS, "n": -n, "way": way}, message_id=f"m{n}")


def registered(app, child):
    return column(app, "SELECT id FROM procession_workers WHERE process = ?", (child.pid,))


def bury(app, child):
    """Take over what a child had, as its supervisor does."""
    workers = drive(app.store.workers())
    for worker in registered(app, child):
        drive(workers.take_over(worker, dead=True))
    drive(workers.close())


def all_ended(app):
    return lambda: unfinished(app, "c") + unfinished(app, "out") == 0


def stop(app, child):
    wait_until(lambda: registered(app, child), "the worker to start")
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0, child.stderr.read()


def check(app):
    effects = sql(app, "SELECT s, n FROM effect ORDER BY rowid")
    expected = [n for n in range(MESSAGES) if n != 21]
    assert sorted(n for _, n in effects) == expected
    for session in range(SESSIONS):
        mine = [n for s, n in effects if s == session]
        assert mine == sorted(mine)
    assert sorted(column(app, "SELECT n FROM sent")) == expected
    assert ends(app) == {
        "processed": MESSAGES - 1,
        "dead-lettered": 2,
        "duplicate": MESSAGES // 12,
    }
    assert sorted(letter.reason for letter in app.dead_letters()) == ["conflict", "rejected"]
    assert ends(app, "out") == {"processed": MESSAGES - 1}
    assert column(app, "SELECT count(*) FROM procession_sessions") == [0]
    assert column(app, "SELECT count(*) FROM procession_inbox") == [MESSAGES * 2 - 1]


@pytest.mark.parametrize("point", POINTS)
def test_X01_a_worker_killed_at_a_point_leaves_a_state_that_the_next_one_completes(
    app, spawn, point
):
    send_everything(app)
    killed = 0
    for passes in (1, 2, 3, 5, 8):
        child = spawn("die", point=point, passes=passes)
        wait_until(
            lambda child=child: child.poll() is not None or all_ended(app)(), "death or the end"
        )
        if child.poll() is None:
            stop(app, child)
            break
        assert child.returncode == -signal.SIGKILL, child.stderr.read()
        killed += 1
        bury(app, child)
    last = spawn("work")
    wait_until(all_ended(app), "all messages to end")
    stop(app, last)

    assert killed >= 2
    check(app)


def test_P01_a_worker_that_nobody_buries_is_taken_over_when_its_lease_has_ended(app, spawn):
    send_everything(app)
    child = spawn("die", point="after-attempt", passes=1)
    assert child.wait(30) == -signal.SIGKILL
    heir = spawn("work")
    wait_until(all_ended(app), "all messages to end")
    stop(app, heir)

    check(app)


def test_a_handler_that_ends_its_process_ends_as_a_dead_letter_and_innocents_have_no_attempt(
    app, spawn
):
    for n in range(20):
        app.send("q", {"s": n, "n": n, "way": "die" if n == 7 else ""}, message_id=f"m{n}")
    deaths = 0
    while not all_ended(app)() and deaths < 12:
        child = spawn("work")
        wait_until(
            lambda child=child: child.poll() is not None or all_ended(app)(), "death or the end"
        )
        if child.poll() is None:
            stop(app, child)
            break
        assert child.returncode == 9
        deaths += 1
        bury(app, child)
        waiting = dict(sql(app, "SELECT message_id, attempts FROM procession_messages"))
        waiting.pop(b"m7", None)
        assert set(waiting.values()) <= {0, 1}

    (letter,) = app.dead_letters()
    assert (letter.reason, letter.message_id, letter.attempts) == ("vanished", b"m7", 5)
    assert sorted(column(app, "SELECT n FROM effect")) == [n for n in range(20) if n != 7]
    assert ends(app) == {"processed": 19, "dead-lettered": 1}
    assert deaths == 6  # in company, as a suspect of four, then alone four times
