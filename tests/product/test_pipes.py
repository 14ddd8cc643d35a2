"""Outputs that nobody reads, and sends that are killed: what was asked for is done once, and no
command ends in a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from textwrap import dedent

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = """
    from procession import App, Reject, RetryPolicy

    app = App("shop", store="sqlite:///shop.db?synchronous=off", retry=RetryPolicy(max_attempts=1))

    @app.consumer("orders", name="orders", session="client")
    def order(order: dict) -> None:
        if order.get("bad"):
            raise Reject("bad")

    app.queue("any")
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with dead letters and waiting messages in its store."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(dedent(APP))
    (folder / "many.jsonl").write_text('{"client": "ann"}\n' * 10)
    fill = """
        import time
        from shop import app
        with app:
            for n in range(8):
                app.send("orders", {"client": f"c{n}", "bad": n < 6}, message_id=f"m{n}")
            while sum(status.waiting for status in app.status()):
                time.sleep(0.01)
        for n in range(500):
            app.send("any", {})
    """
    subprocess.run([sys.executable, "-c", dedent(fill)], cwd=folder, check=True)
    return folder


def command(*arguments):
    return [sys.executable, "-m", "procession.cli", *arguments]


def rows(folder, query):
    with contextlib.closing(sqlite3.connect(folder / "shop.db")) as connection:
        return connection.execute(query).fetchall()


COMMANDS = {
    "--help": "",
    "send --help": "",
    "status": "shop:app",
    "status --json": "shop:app",
    "sessions": "shop:app",
    "dead-letters list": "shop:app",
    "dead-letters list --json": "shop:app",
    "dead-letters show": "shop:app 1",
    "dead-letters edit": 'shop:app 2 --body {"client":"c1"}',
    "dead-letters replay": "shop:app 3",
    "dead-letters discard": "shop:app 4 --why x",
    "inbox show": "shop:app m7",
    "doctor": "shop:app",
    "health": "shop:app",
    "prune": "shop:app",
    "purge": "shop:app --consumer orders --key m6 --yes",
    "migrate": "shop:app",
    "send": "shop:app any {}",
    "send --lines": "many.jsonl shop:app any",
}


def run_unread(folder, *arguments):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command(*arguments),
        cwd=folder,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_whose_output_nobody_reads_ends_quietly_with_1(shop, name):
    assert run_unread(shop, *name.split(), *COMMANDS[name].split()) == (1, "")


def test_what_was_asked_for_is_done_although_nobody_read_it(shop):
    ids = "SELECT message_id FROM procession_messages WHERE message_id IN (x'6131', x'6d34')"
    run_unread(shop, "send", "shop:app", "any", "{}", "--id", "a1")
    run_unread(shop, "dead-letters", "replay", "shop:app", "5")
    run_unread(shop, "dead-letters", "discard", "shop:app", "6", "--why", "x")
    assert sorted(rows(shop, ids)) == [(b"a1",), (b"m4",)]
    found = dict(rows(shop, "SELECT id, status FROM procession_dead_letters"))
    assert (found[5], found[6]) == ("queued", "discarded")


@pytest.mark.parametrize("arguments", [("status", "shop:app"), ("send", "shop:app", "any", "{}")])
def test_an_output_on_a_full_disk_is_told_in_one_line(shop, arguments):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            command(*arguments),
            cwd=shop,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "procession: the output cannot be written: No space left on device; what was asked for is "
        "done\n"
    )


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "2>/dev/full", "1>&- 2>&-"])
def test_the_exit_code_tells_where_nothing_else_can(shop, closed):
    line = f"{sys.executable} -m procession.cli status nowhere:app {closed}"
    done = subprocess.run(["sh", "-c", line], cwd=shop, capture_output=True, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("form", ["lines", "csv"])
def test_a_send_that_is_killed_anywhere_goes_on_and_sends_each_line_once(tmp_path, form):
    (tmp_path / "shop.py").write_text(dedent(APP))
    number = 12_000
    if form == "lines":
        lines = [f'{{"client": "c{n % 9}", "n": {n}}}\n' for n in range(number)]
    else:
        lines = ["client,n\n", *(f"c{n % 9},{n}\n" for n in range(number))]
    (tmp_path / "big.txt").write_text("".join(lines))
    arguments = command("send", "shop:app", "orders", f"--{form}", "big.txt")

    def sent():
        if not (tmp_path / "shop.db").exists():
            return 0
        with contextlib.suppress(sqlite3.OperationalError):
            return rows(tmp_path, "SELECT count(*) FROM procession_messages")[0][0]
        return 0

    kills = 0
    for enough in (1, 5_000):
        with subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
            while sent() < enough and process.poll() is None:
                time.sleep(0.002)
            kills += process.poll() is None
            process.send_signal(signal.SIGKILL)
    assert kills == 2
    before = sent()
    assert 0 < before < number
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"{number - before:,} messages sent, after line" in done.stdout
    found = rows(tmp_path, "SELECT message_id FROM procession_messages ORDER BY id")
    first = 1 if form == "lines" else 2
    assert [row[0] for row in found] == [f"big.txt/{first + n}".encode() for n in range(number)]
