"""Pruning forgets only what nothing can ask for; purging erases; sessions are told."""

import sqlite3
import threading
import time

import pytest

from procession import App, Context, OperatorError, Settings, testing
from procession.flows.upkeep import PRUNE_ROWS, prune_all, prune_step
from procession.runtime.drive import drive
from procession.runtime.upkeep import STEP_PAUSE_S, UpkeepTurns

DAY_MS = 86_400_000


@pytest.fixture(params=["sqlite:///never-made.db", "memory://"], ids=["sqlite", "memory"])
def t(request):
    app = App("t", store=request.param)

    @app.consumer("q", name="c", session="s")
    def handle(payload: dict, ctx: Context):
        if payload.get("bad"):
            raise ValueError("as planned")

    with testing.run(app) as running:
        running.app = app
        yield running


def grow_old(t, days=30):
    """Move everything recorded and sent into the past."""
    store = t.app.store
    if t.app.database is None:
        for subscription in store.subscriptions:
            for row in subscription.inbox.values():
                row.recorded_ms -= days * DAY_MS
            for row in subscription.rows.values():
                row.sent_ms -= days * DAY_MS
        return
    connection = t.connection
    connection.execute(
        "UPDATE procession_inbox SET recorded_ms = recorded_ms - ?", (days * DAY_MS,)
    )
    connection.execute("UPDATE procession_messages SET sent_ms = sent_ms - ?", (days * DAY_MS,))
    connection.execute("UPDATE procession_dead_letters SET died_ms = died_ms - ?", (days * DAY_MS,))


def upkeep(t):
    return drive(t.app.store.upkeep())


def prune(t):
    found = upkeep(t)
    try:
        return drive(prune_all(found, t.app.settings))
    finally:
        drive(found.close())


def test_M04_only_keys_past_their_retention_are_forgotten(t):
    t.send("q", {"s": "a"}, message_id="old")
    t.drain()
    grow_old(t)
    t.send("q", {"s": "a"}, message_id="young")
    t.drain()
    assert prune(t) == 1
    assert t.recorded("c", "old") is None
    assert t.recorded("c", "young").end == "processed"


def test_dead_keys_stay_until_a_person_decides(t):
    t.send("q", {"s": "a", "bad": 1}, message_id="dead")
    t.drain()
    grow_old(t)
    assert prune(t) == 0
    assert t.recorded("c", "dead").end == "dead-lettered"


def test_T01_a_key_with_an_open_dead_letter_stays(t):
    t.send("q", {"s": "a"}, message_id="m")
    t.drain()
    t.redeliver("m", {"s": "a", "other": 1})
    t.drain()
    grow_old(t)
    assert prune(t) == 0
    assert t.recorded("c", "m") is not None


def test_a_key_younger_than_the_oldest_waiting_message_stays(t):
    t.send("q", {"s": "a"}, message_id="done")
    t.drain()
    grow_old(t, days=4)
    t.send("q", {"s": "b"}, message_id="waits")
    grow_old(t, days=8)
    assert prune(t) == 0, "a copy sent beside the waiting message would run again"
    t.drain()
    assert prune(t) == 1
    assert t.recorded("c", "done") is None


def test_two_pruners_do_no_harm(t):
    for number in range(5):
        t.send("q", {"s": "a"}, message_id=f"m{number}")
    t.drain()
    grow_old(t)
    first, second = upkeep(t), upkeep(t)
    options = {"retention_ms": 7 * DAY_MS, "resend_horizon_ms": 7 * DAY_MS, "limit": 2}
    removed = 0
    for _ in range(4):
        removed += drive(first.prune(**options)) or 0
        removed += drive(second.prune(**options)) or 0
    assert removed == 5
    drive(first.close())
    drive(second.close())


def test_a_walk_goes_in_steps_and_begins_again(t):
    for number in range(5):
        t.send("q", {"s": "a"}, message_id=f"m{number}")
    t.drain()
    grow_old(t)
    assert prune(t) == 5
    assert prune(t) == 0
    t.send("q", {"s": "a"}, message_id="later")
    t.drain()
    grow_old(t)
    assert prune(t) == 1


def test_purging_a_key_erases_all_of_it(t):
    t.send("q", {"s": "a", "bad": 1}, message_id="m")
    t.send("q", {"s": "b"}, message_id="other")
    t.drain()
    t.send("q", {"s": "c"}, message_id="m")
    found = upkeep(t)
    purged = drive(found.purge_key("c", b"m"))
    assert (purged.messages, purged.inbox, purged.dead_letters) == (1, 1, 1)
    assert t.recorded("c", "m") is None
    assert t.recorded("c", "other") is not None
    assert t.dead_letters == []
    drive(found.close())


def test_purging_a_session_erases_what_waits_and_what_died(t):
    t.send("q", {"s": "a", "bad": 1}, message_id="m1")
    t.drain()
    t.send("q", {"s": "a"}, message_id="m2")
    t.send("q", {"s": "b"}, message_id="m3")
    found = upkeep(t)
    purged = drive(found.purge_session("c", b"a"))
    assert (purged.messages, purged.inbox, purged.dead_letters) == (1, 1, 1)
    t.drain()
    assert t.recorded("c", "m2") is None
    assert t.recorded("c", "m3") is not None
    drive(found.close())


def test_purging_of_an_unknown_consumer_is_told(t):
    found = upkeep(t)
    with pytest.raises(OperatorError, match="nobody"):
        drive(found.purge_key("nobody", b"m"))
    drive(found.close())


def test_sessions_tell_backlog_and_head_age(t):
    for number in range(3):
        t.send("q", {"s": "long"}, message_id=f"l{number}")
    t.send("q", {"s": "short"}, message_id="s0")
    grow_old(t, days=1)
    found = upkeep(t)
    rows = drive(found.sessions())
    assert [(row.session, row.backlog) for row in rows] == [(b"long", 3), (b"short", 1)]
    assert rows[0].head_age_ms >= DAY_MS
    assert [row.session for row in drive(found.sessions(session=b"short"))] == [b"short"]
    assert drive(found.sessions(consumer="nobody")) == []
    drive(found.close())


def test_the_keeper_prunes_while_the_worker_works(tmp_path):
    app = App(
        "t",
        store=f"sqlite:///{tmp_path}/t.db?synchronous=off",
        settings=Settings(prune_every_ms=1, retention_ms=1, resend_horizon_ms=1),
    )
    app.consumer("q", name="c")(lambda payload: None)
    with app:
        app.send("q", {}, message_id="m")
        deadline = time.monotonic() + 20
        while app.status()[0].counts != {("processed", ""): 1} or app.recorded("c", "m"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    app.close()


def test_turns_survive_a_store_that_is_away(tmp_path):
    app = App(
        "t",
        store=f"sqlite:///{tmp_path}/t.db?synchronous=off",
        settings=Settings(prune_every_ms=1, busy_ms=1),
    )
    app.consumer("q", name="c")(lambda payload: None)
    app.open()
    turns = UpkeepTurns(app.store, app.settings)
    other = sqlite3.connect(tmp_path / "t.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    time.sleep(0.01)
    turns.turn()
    other.execute("ROLLBACK")
    time.sleep(0.01)
    turns.turn()
    turns.close()
    other.close()
    app.close()


def fill_inbox(path, keys):
    """Append keys of the first consumer, recorded thirty days ago."""
    connection = sqlite3.connect(path)
    long_ago = int(time.time() * 1000) - 30 * DAY_MS
    connection.executemany(
        "INSERT INTO procession_inbox (subscription, key, state, fingerprint, recorded_ms) "
        "VALUES (1, ?, 3, x'00', ?)",
        ((f"old-{number:06d}".encode(), long_ago) for number in range(keys)),
    )
    connection.commit()
    connection.close()


def old_keys(path):
    connection = sqlite3.connect(path)
    (number,) = connection.execute("SELECT count(*) FROM procession_inbox").fetchone()
    connection.close()
    return number


@pytest.fixture
def large(tmp_path):
    """An app on a file with ten steps' worth of old keys."""
    app = App(
        "t",
        store=f"sqlite:///{tmp_path}/t.db?synchronous=off",
        settings=Settings(prune_every_ms=1),
    )
    app.consumer("q", name="c")(lambda payload: None)
    app.open()
    fill_inbox(tmp_path / "t.db", 10 * PRUNE_ROWS)
    yield app
    app.close()


def test_a_step_of_pruning_reads_no_more_of_a_large_inbox_than_of_a_small_one(large):
    found = drive(large.store.upkeep())
    counted = []
    for _ in range(10):
        ticks = []
        found.connection.set_progress_handler(lambda ticks=ticks: ticks.append(1), 100)
        drive(prune_step(found, large.settings))
        counted.append(len(ticks))
    # The first step finds all ten thousand keys in the inbox, the last one only its own.
    assert counted[0] <= counted[-1] * 1.1
    drive(found.close())


def test_a_slow_step_of_pruning_is_followed_by_a_longer_pause(large, tmp_path):
    path = tmp_path / "t.db"
    turns = UpkeepTurns(large.store, large.settings)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    release.start()
    time.sleep(0.01)
    turns.turn()
    release.join()
    began = time.monotonic()
    while time.monotonic() < began + 3 * STEP_PAUSE_S:
        turns.turn()
        time.sleep(0.01)
    assert old_keys(path) == 9 * PRUNE_ROWS
    turns.close()
    other.close()
