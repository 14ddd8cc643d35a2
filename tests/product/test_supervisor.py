"""`procession run` as a process with its workers: killed, hung, stopped and interrupted."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from textwrap import dedent

import pytest
from tests.driving import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = """
    import os, sys, time
    from procession import App, Context, RetryPolicy, Settings

    app = App(
        "shop",
        store="sqlite:///shop.db?synchronous=off",
        settings=Settings({settings}),
        retry=RetryPolicy(max_attempts=2, first_ms=10),
    )

    @app.consumer("orders", name="orders", session="client")
    def order(order: dict, ctx: Context) -> None:
        ctx.execute("INSERT INTO done (id, process) VALUES (:id, :process)",
                    id=order["id"], process=os.getpid())
        do = order.get("do", "")
        if do == "exit":
            os._exit(3)
        time.sleep(order.get("s", 0))
"""
QUICK = "pause_ms=10, pause_longest_ms=50"


class Run:
    """`procession run` in a folder of its own."""

    def __init__(self, folder, monkeypatch, settings):
        self.folder = folder
        (folder / "shop.py").write_text(dedent(APP).format(settings=settings))
        self.sql("CREATE TABLE done (id TEXT, process INTEGER)")
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        self.log = folder / "log"
        self.process = None

    def sql(self, statement):
        with contextlib.closing(sqlite3.connect(self.folder / "shop.db", timeout=5)) as connection:
            rows = connection.execute(statement).fetchall()
            connection.commit()
            return rows

    def send(self, *orders):
        script = (
            "import json, sys; from shop import app\n"
            "for order in json.load(sys.stdin):\n"
            "    app.send('orders', order, message_id=order['id'])\n"
        )
        subprocess.run(
            [sys.executable, "-c", script], input=json.dumps(orders), text=True, check=True
        )

    def start(self, *options):
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "procession.cli", "run", "shop:app", "--log-json", *options],
                stderr=log,
                start_new_session=True,
            )

    def events(self, name):
        records = [
            json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"
        ]
        return [record for record in records if record.get("event") == name]

    def workers(self):
        """Return the process ids of all workers that ever started, in order."""
        return [record["process"] for record in self.events("worker.started")]

    def wait_for_workers(self, number):
        wait_until(lambda: len(self.workers()) >= number, f"{number} workers", timeout_s=20)
        return self.workers()[-1]

    def done(self):
        return [row[0] for row in self.sql("SELECT id FROM done ORDER BY rowid")]

    def wait_for(self, *ids, timeout_s=20.0):
        wait_until(lambda: set(ids) <= set(self.done()), f"orders {ids}", timeout_s=timeout_s)

    def ends(self):
        return dict(self.sql("SELECT ended, sum(number) FROM procession_counts GROUP BY ended"))

    def left(self):
        return [row[0] for row in self.sql("SELECT message_id FROM procession_messages")]

    def registered(self):
        return self.sql("SELECT id FROM procession_workers")

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(20)

    def end(self):
        if self.process is not None:
            # The group is there as long as one of its workers is.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    made = []

    def make(settings=QUICK):
        made.append(Run(tmp_path, monkeypatch, settings))
        return made[-1]

    yield make
    for run in made:
        run.end()


def alive(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_worker_is_replaced_and_every_message_takes_effect_once(make_run):
    run = make_run()
    ids = [f"o{number}" for number in range(400)]
    run.send(*[{"id": id_, "client": f"c{index % 9}", "s": 0.01} for index, id_ in enumerate(ids)])
    run.start("--processes", "2")
    for killed in range(3):
        victim = run.wait_for_workers(2 + killed)
        run.wait_for(*run.done()[:1])
        os.kill(victim, signal.SIGKILL)
    run.wait_for_workers(5)
    run.wait_for(*ids, timeout_s=30)
    assert run.stop() == 0
    assert sorted(run.done()) == sorted(ids)
    assert run.ends()["processed"] == len(ids)
    # Each was buried by the supervisor at once, long before its lease of 30 s had ended.
    assert len(run.events("worker.taken_over")) == 3
    assert run.registered() == []


def test_sigterm_lets_the_running_handler_commit_and_takes_no_more(make_run):
    run = make_run()
    run.send({"id": "long", "client": "a", "s": 1}, {"id": "next", "client": "a", "s": 1})
    run.start()
    run.wait_for_workers(1)
    time.sleep(0.3)
    assert run.stop() == 0
    assert run.done() == ["long"]
    assert run.left() == [b"next"]
    assert run.registered() == []


def test_ctrl_c_reaches_the_whole_group_and_still_drains(make_run):
    """A terminal, or systemd, signals the workers as well as their supervisor."""
    run = make_run()
    run.send({"id": "long", "client": "a", "s": 1})
    run.start("--processes", "2")
    run.wait_for_workers(2)
    time.sleep(0.3)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.wait(20) == 0
    assert run.done() == ["long"]
    assert run.registered() == []


def test_a_second_signal_stops_at_once_and_nothing_is_lost(make_run):
    run = make_run()
    run.send({"id": "long", "client": "a", "s": 8})
    run.start()
    process_id = run.wait_for_workers(1)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    started = time.monotonic()
    assert run.stop(signal.SIGINT) == 130
    assert time.monotonic() - started < 3
    assert not alive(process_id)
    assert run.done() == []
    assert run.left() == [b"long"]
    # Its work is free at once, too.
    assert run.registered() == []


def test_a_handler_that_ends_the_process_is_a_dead_letter_and_harms_nobody(make_run):
    run = make_run()
    ids = [f"o{number}" for number in range(100)]
    run.send(
        *[
            {"id": id_, "client": f"c{index % 7}"} | ({"do": "exit"} if id_ == "o40" else {})
            for index, id_ in enumerate(ids)
        ]
    )
    run.start("--processes", "2")
    others = [id_ for id_ in ids if id_ != "o40"]
    run.wait_for(*others, timeout_s=40)
    wait_until(lambda: run.ends().get("dead-lettered") == 1, "the dead letter", timeout_s=20)
    assert run.stop() == 0
    assert sorted(run.done()) == sorted(others)
    assert run.sql("SELECT message_id, reason FROM procession_dead_letters") == [
        (b"o40", "vanished")
    ]
    # Each worker meets it in a batch of 500, one of 16 and alone: with two lone runs and two
    # workers that is a handful of deaths, and no more.
    assert len(run.events("worker.taken_over")) <= 8
    assert run.left() == []


def test_a_worker_with_a_hung_handler_is_replaced_at_once(make_run):
    run = make_run(f"{QUICK}, handler_limit_ms=300, abandoned_max=1")
    ids = [f"o{number}" for number in range(20)]
    run.send(*[{"id": id_, "client": id_, "s": 3600 if id_ == "o5" else 0} for id_ in ids])
    run.start()
    others = [id_ for id_ in ids if id_ != "o5"]
    run.wait_for(*others, timeout_s=40)
    wait_until(lambda: run.ends().get("dead-lettered") == 1, "the dead letter", timeout_s=30)
    assert run.stop() == 0
    assert sorted(run.done()) == sorted(others)
    assert "exit code 70); another one starts in 0 s" in run.log.read_text()


def test_a_silent_worker_is_killed_and_replaced(make_run):
    """Stopped as by a debugger, or by a handler that never gives the interpreter back: it cannot
    stop itself, and on SQLite it may hold the one write lock."""
    run = make_run(f"{QUICK}, lease_ms=1500")
    run.send({"id": "a", "client": "a", "s": 1})
    run.start()
    victim = run.wait_for_workers(1)
    time.sleep(1.2)  # it has been heard at least once
    os.kill(victim, signal.SIGSTOP)
    run.send({"id": "b", "client": "b"})
    run.wait_for("a", "b")
    assert not alive(victim)
    assert "no sign of life" in run.log.read_text()
    assert run.stop() == 0
    assert sorted(run.done()) == ["a", "b"]


def test_a_worker_that_does_not_stop_in_time_is_killed(make_run):
    run = make_run(f"{QUICK}, stop_ms=200")
    run.start()
    process_id = run.wait_for_workers(1)
    time.sleep(0.2)
    os.kill(process_id, signal.SIGSTOP)
    started = time.monotonic()
    assert run.stop() == 1
    assert 5 < time.monotonic() - started < 8
    assert not alive(process_id)
    assert "did not stop in good order (SIGKILL)" in run.log.read_text()
    assert run.registered() == []


def test_workers_stop_in_good_order_when_their_supervisor_is_gone(make_run):
    run = make_run()
    run.send({"id": "long", "client": "a", "s": 2}, {"id": "next", "client": "a", "s": 2})
    run.start()
    worker = run.wait_for_workers(1)
    time.sleep(0.3)
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not alive(worker), "the orphan's end")
    assert run.done() == ["long"]
    assert run.registered() == []


def test_a_worker_whose_configuration_is_wrong_ends_the_run(make_run):
    run = make_run()
    with (run.folder / "shop.py").open("a") as module:
        module.write("if '--lifeline' in sys.argv:\n    raise RuntimeError('not here')\n")
    run.start()
    assert run.process.wait(20) == 2
    assert "RuntimeError: not here" in run.log.read_text()


def test_the_log_is_json_lines_with_the_events_fields(make_run):
    run = make_run()
    run.send({"id": "a", "client": "a"})
    run.start("--log-level", "debug")
    run.wait_for("a")
    assert run.stop() == 0
    for line in run.log.read_text().splitlines():
        assert isinstance(json.loads(line), dict)
    committed = run.events("batch.committed")
    assert committed
    assert committed[0]["fields"]["consumer"] == "orders"
