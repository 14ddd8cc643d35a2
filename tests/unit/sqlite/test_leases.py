"""Leases decide who may take over; the fence decides who commits."""

from __future__ import annotations

import threading

import pytest
from tests.driving import ENDLESS, Driver, column, ends, sql, wait_until

from procession import Context, Settings
from procession.errors import ConfigurationError, SessionLost, WorkerLost
from procession.runtime.drive import drive


def counting(app, **options):
    runs = []

    def handle(message: dict, ctx: Context):
        runs.append(message["n"])
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message.get("fails", 0) > ctx.message.attempt:
            raise ValueError

    app.consumer("q", name="c", session="s", **options)(handle)
    return runs


def expire(app, driver):
    sql(app, "UPDATE procession_workers SET lease_until = 0 WHERE id = ?", (driver.worker_id,))


def test_an_expired_lease_alone_refuses_nothing(make):
    app = make()
    counting(app)
    with Driver(app) as driver:
        expire(app, driver)
        app.send("q", {"s": "A", "n": 1})
        driver.run()
        drive(driver.workers.renew(driver.worker_id))
        assert drive(driver.workers.expired()) == []

    assert ends(app) == {"processed": 1}


@pytest.mark.parametrize("point", ["idle", "after-fetch", "after-own", "in-lone-run"])
def test_L06_a_worker_that_was_taken_over_commits_nothing_and_disturbs_nobody(make, point):
    app = make(retry=ENDLESS)
    counting(app)
    app.send("q", {"s": "A", "n": 1, "fails": 1})
    app.send("q", {"s": "A", "n": 2})
    zombie, heir = Driver(app), Driver(app)
    lane = zombie.lane()
    if point != "idle":
        drive(lane.begin())
        head = drive(lane.fetch(10)).deliveries[0]
        drive(lane.rollback())
        if point in ("after-own", "in-lone-run"):
            drive(lane.begin_attempt(head))
    expire(app, zombie)
    assert drive(heir.workers.expired()) == [zombie.worker_id]
    assert drive(heir.workers.take_over(zombie.worker_id)) == ["c"]
    heir.step()
    if point == "in-lone-run":
        with pytest.raises(WorkerLost, match="taken over"):
            zombie.step()
    owned = sql(app, "SELECT worker FROM procession_sessions WHERE worker IS NOT NULL")

    for act in (
        zombie.step,
        lambda: drive(zombie.workers.renew(zombie.worker_id)),
        lambda: drive(lane.own([b"A"])),
        lambda: drive(lane.begin()),
    ):
        with pytest.raises(WorkerLost):
            act()
    drive(lane.release([b"A"]))
    drive(zombie.workers.leave(zombie.worker_id))
    assert drive(heir.workers.take_over(zombie.worker_id)) is None
    assert sql(app, "SELECT worker FROM procession_sessions WHERE worker IS NOT NULL") == owned
    assert column(app, "SELECT id FROM procession_workers") == [heir.worker_id]

    heir.run()
    heir.close()
    zombie.close()
    assert column(app, "SELECT n FROM effect ORDER BY rowid") == [1, 2]
    assert ends(app) == {"processed": 2}


def test_a_takeover_leaves_a_worker_that_renewed_alone_and_happens_once(make):
    app = make()
    counting(app)
    one, two = Driver(app), Driver(app)
    assert drive(two.workers.take_over(one.worker_id)) is None
    expire(app, one)
    drive(one.workers.renew(one.worker_id))
    assert drive(two.workers.take_over(one.worker_id)) is None
    expire(app, one)
    assert drive(two.workers.take_over(one.worker_id)) == ["c"]
    assert drive(two.workers.take_over(one.worker_id)) is None
    assert drive(two.workers.take_over("never-was")) is None
    assert drive(two.workers.take_over("never-was", dead=True)) is None
    one.vanish()
    two.close()


def test_a_fence_that_does_not_hold_refuses_the_commit(make):
    app = make(retry=ENDLESS)
    counting(app)
    app.send("q", {"s": "A", "n": 1, "fails": 1})
    with Driver(app) as one:
        one.step()
        lane = one.lane()
        real = lane.fetch_one

        async def stolen(position):
            sql_inside = "UPDATE procession_sessions SET holder = 'somebody-else.0.1'"
            lane._connection.execute(sql_inside)
            lane.fetch_one = real
            return await real(position)

        lane.fetch_one = stolen
        one.step()  # SessionLost inside: rolled back, nothing recorded
        assert column(app, "SELECT count(*) FROM effect") == [0]
        one.run()

    assert ends(app) == {"processed": 1}


def test_a_holder_is_never_used_twice(make):
    app = make()
    counting(app)
    holders = set()
    with Driver(app) as one, Driver(app) as two:
        for _ in range(5):
            for driver in (one, two):
                assert drive(driver.lane().own([b"A"])) == {b"A"}
                (holder,) = column(app, "SELECT holder FROM procession_sessions")
                assert holder not in holders
                holders.add(holder)
                drive(driver.lane().release([b"A"]))
                drive(driver.lane().release([b"A"]))

    assert len(holders) == 10


def test_a_release_of_a_session_that_is_not_ours_does_nothing(make):
    app = make()
    counting(app)
    with Driver(app) as one, Driver(app) as two:
        drive(one.lane().own([b"A"]))
        assert drive(two.lane().own([b"A", b"B"])) == {b"B"}
        drive(two.lane().release([b"A", b"B"]))
        assert column(app, "SELECT worker FROM procession_sessions") == [one.worker_id]


def test_a_lease_of_another_boot_has_ended_and_a_retry_of_another_boot_is_due(make):
    app = make()
    counting(app)
    app.send("q", {"s": "A", "n": 1})
    one = Driver(app)
    sql(app, "UPDATE procession_workers SET lease_boot = 'another', lease_until = 1 << 50")
    sql(
        app,
        "INSERT INTO procession_sessions (subscription, key, held, retry_at, retry_boot) "
        "SELECT id, x'41', 1, 1 << 50, 'another' FROM procession_subscriptions",
    )
    sql(app, "UPDATE procession_messages SET id = -id")
    with Driver(app) as two:
        assert drive(two.workers.expired()) == [one.worker_id]
        assert drive(two.workers.take_over(one.worker_id)) == ["c"]
        two.run()
    one.vanish()

    assert ends(app) == {"processed": 1}


def test_a_renewal_that_waits_goes_before_a_takeover_that_waits(make):
    app = make()
    counting(app)
    one, two = Driver(app), Driver(app)
    expire(app, one)
    blocker = Driver(app)
    connection = blocker.workers
    result = {}

    with connection.write("holding the lock"):
        takeover = threading.Thread(
            target=lambda: result.update(taken=drive(two.workers.take_over(one.worker_id)))
        )
        takeover.start()
        renewal = threading.Thread(target=lambda: drive(one.workers.renew(one.worker_id)))
        wait_until(takeover.is_alive, "the takeover waits")
        renewal.start()
    for thread in (takeover, renewal):
        thread.join(10)
    for driver in (one, two, blocker):
        driver.close()

    assert result == {"taken": None}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lease_ms": 10_000, "renew_ms": 10_000}, "half of lease_ms"),
        ({"lease_ms": 10_000, "renew_ms": 6_000}, "half of lease_ms"),
        ({"lease_ms": 10, "batch_budget_ms": 50}, "batch_budget_ms"),
        ({"lease_ms": 0}, "at least 1"),
        ({"retention_ms": 1, "resend_horizon_ms": 2}, "retention_ms"),
    ],
)
def test_L04_settings_that_break_a_lease_are_refused_in_words(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        Settings(**settings)


def test_P01_a_claim_of_a_worker_that_died_is_refused_before_and_free_after_its_lease(make):
    app = make()
    runs = counting(app)
    app.send("q", {"s": "A", "n": 1})
    dead, heir = Driver(app), Driver(app)
    lane = dead.lane()
    drive(lane.begin())
    head = drive(lane.fetch(1)).deliveries[0]
    drive(lane.rollback())
    drive(lane.begin_attempt(head))
    dead.vanish()

    assert heir.run_ready() <= 1  # the message is set aside, not run
    assert runs == []
    with pytest.raises(SessionLost):
        drive(heir.lane().begin_attempt(head))
    expire(app, dead)
    for worker in drive(heir.workers.expired()):
        drive(heir.workers.take_over(worker))
    heir.run()
    heir.close()

    assert runs == [1]
    assert ends(app) == {"processed": 1}


def test_a_worker_that_leaves_in_good_order_makes_nobody_a_suspect(make):
    app = make()
    counting(app)
    app.send("q", {"s": "A", "n": 1})
    Driver(app).close()

    assert column(app, "SELECT suspect_size FROM procession_subscriptions") == [0]
    assert column(app, "SELECT count(*) FROM procession_workers") == [0]


def test_a_passing_session_leaves_no_row(make):
    app = make(retry=ENDLESS)
    counting(app)
    app.send_many("q", [{"s": f"s{n}", "n": n, "fails": n % 3} for n in range(60)])
    with Driver(app) as driver:
        driver.run()

    assert column(app, "SELECT count(*) FROM procession_sessions") == [0]
    assert column(app, "SELECT count(*) FROM procession_messages") == [0]
