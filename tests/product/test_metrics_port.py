"""`procession run --metrics-port`: one endpoint for what all its processes count."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from textwrap import dedent

import pytest
from tests.driving import wait_until

pytest.importorskip("prometheus_client")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = """
    import os
    from procession import App, Settings

    app = App("shop", store="sqlite:///shop.db?synchronous=off", settings=Settings(pause_ms=10))

    @app.consumer("orders", name="bills", session="client")
    def bill(order: dict) -> None:
        if order.get("do") == "exit" and not os.path.exists("exited"):
            open("exited", "w").close()
            os._exit(3)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "shop.py").write_text(dedent(APP))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def send(orders):
    code = f"from shop import app; app.send_many('orders', {orders!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(port):
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "procession.cli", "run", "shop:app", "-p", "2"),
            *("--metrics-port", str(port)),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )


def scrape(port):
    """Return the samples by name and labels; nothing while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    samples = re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)
    return {series: float(value) for series, value in samples}


def test_what_all_workers_count_is_served_at_one_port(folder):
    port = free_port()
    send([{"client": f"c{n}"} for n in range(40)])
    process = start(port)
    try:
        processed = 'procession_messages_ended_total{cause="",consumer="bills",end="processed"}'
        wait_until(lambda: scrape(port).get(processed) == 40, "40 counted", timeout_s=30)
        send([{"client": "c1", "do": "exit"}])
        wait_until(
            lambda: scrape(port).get("procession_takeovers_total") == 1, "takeover", timeout_s=30
        )
        wait_until(lambda: scrape(port).get(processed) == 41, "41 counted", timeout_s=30)
        found = scrape(port)
        waiting = 'procession_backlog{consumer="bills",queue="orders",standing="waiting"}'
        assert waiting in found
        assert found['procession_dead_lettered_total{consumer="bills",reason="failed"}'] == 0
    finally:
        process.terminate()
        _, told = process.communicate(timeout=30)
    assert process.returncode == 0, told


def test_a_taken_port_is_a_wrong_configuration(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(taken.getsockname()[1])
        _, told = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "another port" in told
