"""Processes that stand still (SIGSTOP, a frozen container, a suspended host) and come back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.driving import column, ends, sql, unfinished, wait_until
from tests.product.child import make_app

from procession.errors import StoreUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def registered(app, child):
    return column(app, "SELECT id FROM procession_workers WHERE process = ?", (child.pid,))


def stopped(process):
    stat = Path(f"/proc/{process}/stat").read_text("utf-8")
    return stat.rsplit(")", 1)[1].split()[0] == "T"


def send(app, numbers, **more):
    for n in numbers:
        app.send("q", {"s": n % 3, "n": n, **more}, message_id=f"m{n}")


def check(app, numbers):
    effects = sql(app, "SELECT s, n FROM effect ORDER BY rowid")
    assert sorted(n for _, n in effects) == list(numbers)
    for session in range(3):
        mine = [n for s, n in effects if s == session]
        assert mine == sorted(mine)
    assert sorted(column(app, "SELECT n FROM sent")) == list(numbers)
    assert ends(app) == {"processed": len(numbers)}
    assert app.dead_letters() == []


def test_L06_a_worker_stopped_between_transactions_is_taken_over_and_comes_back_under_a_new_name(
    app, spawn
):
    one = spawn("work")
    send(app, range(10))
    wait_until(lambda: unfinished(app, "c") + unfinished(app, "out") == 0, "the first messages")
    (old,) = registered(app, one)
    one.send_signal(signal.SIGSTOP)
    wait_until(lambda: stopped(one.pid), "the stop")
    two = spawn("work")
    send(app, range(10, 20))
    wait_until(lambda: not registered(app, one), "the takeover")
    wait_until(lambda: unfinished(app, "c") + unfinished(app, "out") == 0, "the heir's messages")
    assert set(column(app, "SELECT process FROM effect WHERE n >= 10")) == {two.pid}

    one.send_signal(signal.SIGCONT)
    wait_until(lambda: registered(app, one), "the zombie to register anew")
    assert registered(app, one) != [old]
    two.send_signal(signal.SIGTERM)
    assert two.wait(30) == 0
    send(app, range(20, 30))
    wait_until(lambda: unfinished(app, "c") + unfinished(app, "out") == 0, "the last messages")

    assert set(column(app, "SELECT process FROM effect WHERE n >= 20")) == {one.pid}
    check(app, range(30))


def test_a_worker_stopped_in_mid_transaction_makes_others_wait_and_commits_when_it_comes_back(
    app, spawn, tmp_path
):
    flag = tmp_path / "stopped"
    one = spawn("work", settings={"handler_limit_ms": 30_000})
    wait_until(lambda: registered(app, one), "the worker")
    send(app, range(1), way="stop-once", flag=str(flag))
    wait_until(lambda: flag.exists() and stopped(one.pid), "the stop")
    two = spawn("work", settings={"busy_ms": 10_000})
    impatient = make_app(tmp_path / "t.db", busy_ms=100)
    with pytest.raises(StoreUnavailable, match="stayed locked"):
        impatient.send("q", {"s": 1, "n": 1}, message_id="m1")
    impatient.close()
    time.sleep(1.5)  # past the lease: nobody could take over, so nothing was
    assert registered(app, one)
    assert column(app, "SELECT count(*) FROM effect") == [0]

    os.kill(one.pid, signal.SIGCONT)
    send(app, range(1, 10))
    wait_until(lambda: unfinished(app, "c") + unfinished(app, "out") == 0, "all messages")
    wait_until(lambda: registered(app, two), "the second worker")

    assert column(app, "SELECT process FROM effect WHERE n = 0") == [one.pid]
    check(app, range(10))


def test_a_worker_stopped_at_any_moment_under_load_loses_and_doubles_nothing(app, spawn):
    children = [spawn("work") for _ in range(2)]
    for child in children:
        wait_until(lambda child=child: registered(app, child), "the worker")
    total = 0
    for turn in range(6):
        send(app, range(total, total + 20), way="sleep", seconds=0.002)
        total += 20
        victim = children[turn % 2]
        time.sleep(0.03 * (turn + 1))
        victim.send_signal(signal.SIGSTOP)
        time.sleep(1.2 if turn % 3 == 2 else 0.2)  # past the lease, or not
        victim.send_signal(signal.SIGCONT)
    wait_until(lambda: unfinished(app, "c") + unfinished(app, "out") == 0, "all messages")

    check(app, range(total))
