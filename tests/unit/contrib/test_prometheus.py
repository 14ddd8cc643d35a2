"""What Prometheus is told: counts, levels and gauges, under few labels, at an endpoint."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from datetime import timedelta

import pytest
from tests.driving import Driver, new_app, wait_until
from tests.unit.contrib.scenes import ENDED, FAILED_RUNS, play, shop

from procession import App, ConfigurationError, Event
from procession.contrib.metrics import METRICS, Backlog
from procession.errors import MessageError

prometheus_client = pytest.importorskip("prometheus_client")
from procession.contrib import prometheus  # noqa: E402


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def series(registry):
    """Return name to number of label sets."""
    found: dict[str, int] = {}
    for family in registry.collect():
        found[family.name] = len({tuple(sorted(s.labels.items())) for s in family.samples})
    return found


def ended(registry, consumer="bills"):
    (family,) = [f for f in registry.collect() if f.name == "procession_messages_ended"]
    return {
        (sample.labels["end"], sample.labels["cause"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["consumer"] == consumer
        if sample.value
    }


def test_what_happened_is_counted_by_end_cause_and_reason(tmp_path, registry):
    app = shop(tmp_path)
    prometheus.instrument(app, registry=registry)
    play(app)

    def value(name, **labels):
        return registry.get_sample_value(f"procession_{name}", {"consumer": "bills", **labels})

    assert ended(registry) == ENDED
    assert value("dead_lettered_total", reason="conflict") == 1
    assert value("dead_lettered_total", reason="rejected") == 1
    assert value("dead_lettered_total", reason="failed") == 1
    assert value("alerts_total", what="conflict") == 1
    assert value("failures_total") == FAILED_RUNS
    assert value("retries_total") == 2
    # The rejected run was for nothing, too.
    assert value("reruns_total") == FAILED_RUNS + 1
    assert value("handler_time_seconds_total") > 0
    assert value("batch_duration_seconds_count") > 0
    assert value("dead_letters", queue="orders") == 3
    assert value("backlog", queue="orders", standing="waiting") == 0
    app.close()


def test_the_counts_agree_with_the_stores_own(tmp_path, registry):
    app = shop(tmp_path)
    prometheus.instrument(app, registry=registry)
    play(app)
    (status,) = app.status()
    assert ended(registry) == {key: number for key, number in status.counts.items() if number}
    assert registry.get_sample_value("procession_reruns_total", {"consumer": "bills"}) == (
        status.reruns
    )
    app.close()


def test_sessions_and_keys_never_become_labels(tmp_path, registry):
    app = shop(tmp_path)
    prometheus.instrument(app, registry=registry)
    play(app)
    before = series(registry)
    app.send_many("orders", [{"client": f"session-{n}"} for n in range(300)])
    with Driver(app) as driver:
        driver.run()
    assert series(registry) == before
    text = prometheus_client.generate_latest(registry).decode()
    assert "session-" not in text
    assert "trip-7" not in text
    app.close()


def test_a_reason_that_a_users_code_made_up_is_no_label(tmp_path, registry):
    app = new_app(tmp_path)
    prometheus.instrument(app, registry=registry)

    def check(payload):
        raise MessageError(f"because of {payload['n']}", "it is odd")

    app.consumer("q", name="c", validators=[check])(lambda payload: None)
    for number in range(20):
        app.send("q", {"n": number})
    with Driver(app) as driver:
        driver.run()
    assert (
        registry.get_sample_value(
            "procession_dead_lettered_total", {"consumer": "c", "reason": "other"}
        )
        == 20
    )
    assert "because of" not in prometheus_client.generate_latest(registry).decode()
    app.close()


def test_rollbacks_lost_sessions_hung_handlers_and_takeovers_are_counted(registry):
    app = App("t", store="memory://")
    told = prometheus.instrument(app, registry=registry)
    lost = {"consumer": "c", "error": "Contention", "reason": "m", "runs": 3, "batch_s": 0.1}
    told.emit(Event.BATCH_ROLLED_BACK, lost)
    told.emit(Event.SESSION_LOST, {"consumer": "c", "detail": "taken over"})
    told.emit(Event.LANE_HUNG, {"consumer": "c", "key": "k", "seconds": 21.0})
    told.emit(Event.WORKER_TAKEN_OVER, {"worker": "w", "consumers": ["c"]})
    value = registry.get_sample_value
    labels = {"consumer": "c"}
    rolled_back = {**labels, "error": "Contention"}
    assert value("procession_batches_rolled_back_total", rolled_back) == 1
    assert value("procession_sessions_lost_total", labels) == 1
    assert value("procession_handlers_hung_total", labels) == 1
    assert value("procession_takeovers_total") == 1


def test_a_paused_lane_is_a_level_until_the_store_is_back(registry):
    told = prometheus.instrument(App("t", store="memory://"), registry=registry)
    away = {"consumer": "c", "error": "locked", "fault": False}
    told.emit(Event.STORE_UNAVAILABLE, away)
    told.emit(Event.STORE_UNAVAILABLE, away)
    told.emit(Event.STORE_UNAVAILABLE, {**away, "consumer": ""})
    value = registry.get_sample_value
    assert value("procession_lanes_paused", {"consumer": "c"}) == 2
    assert value("procession_lanes_paused", {"consumer": ""}) is None
    told.emit(Event.STORE_AVAILABLE, {"consumer": "c"})
    assert value("procession_lanes_paused", {"consumer": "c"}) == 1
    assert value("procession_store_unavailable_total", {"consumer": "c"}) == 2
    assert value("procession_store_unavailable_total", {"consumer": ""}) == 1


def test_every_series_that_rules_watch_is_there_before_its_first_event(tmp_path, registry):
    app = shop(tmp_path)
    told = prometheus.instrument(app, registry=registry)
    told.emit(Event.WORKER_STARTED, {"worker": "w"})
    value = registry.get_sample_value
    labels = {"consumer": "bills"}
    duplicates = {**labels, "end": "duplicate", "cause": "lock_expired"}
    assert value("procession_messages_ended_total", duplicates) == 0
    assert value("procession_dead_lettered_total", {**labels, "reason": "vanished"}) == 0
    assert value("procession_alerts_total", {**labels, "what": "conflict"}) == 0
    assert value("procession_takeovers_total") == 0
    before = series(registry)
    play(app)
    new = {name for name, number in series(registry).items() if number != before[name]}
    assert new <= {
        "procession_batch_duration_seconds",
        "procession_handler_time_seconds",
        "procession_batches_rolled_back",
    }
    app.close()


# ---- what is read from the store -----------------------------------------------------------------


@pytest.mark.parametrize("store", ["sqlite", "memory"])
def test_the_head_age_is_that_of_the_oldest_message_that_is_not_scheduled(tmp_path, store):
    options = {"store": "memory://"} if store == "memory" else {}
    app = new_app(tmp_path, **options)
    app.consumer("q", name="c", session="s")(lambda payload: None)

    def head_age_ms():
        (status,) = app.status()
        return status.head_age_ms

    assert head_age_ms() is None
    app.send("q", {"s": "a"}, after=timedelta(minutes=1))
    assert head_age_ms() is None
    app.send("q", {"s": "b"})
    time.sleep(0.03)
    app.send("q", {"s": "c"})
    assert 30 <= head_age_ms() < 10_000
    with Driver(app) as driver:
        driver.run_ready()
    assert head_age_ms() is None
    app.close()


def test_the_head_age_counts_a_session_that_waits_for_a_retry(tmp_path):
    app = shop(tmp_path)
    app.send("orders", {"client": "a", "do": "fail"})
    with Driver(app) as driver:
        while not app.status()[0].held:
            assert driver.step("bills")
        time.sleep(0.02)
        app.send("orders", {"client": "b"})
        (status,) = app.status()
        assert (status.held, status.waiting) == (1, 1)
        assert status.head_age_ms >= 20
    app.close()


class CountingApp(App):
    """Counts how often it is asked for its status, and may be slow."""

    asked = 0
    takes_s = 0.0

    def status(self):
        self.asked += 1
        time.sleep(self.takes_s)
        return super().status()


def test_a_reading_is_kept_for_a_while():
    app = CountingApp("t", store="memory://")
    backlog = Backlog(app, age_s=60)
    for _ in range(5):
        backlog.readings()
    assert app.asked == 1
    old = Backlog(app, age_s=0.01)
    old.readings()
    # How long depends on how long the reading took, and this machine may be busy.
    wait_until(lambda: len(old.readings()) == 0 and app.asked == 3, "another reading")


def test_at_most_a_fiftieth_of_the_time_is_spent_on_readings():
    app = CountingApp("t", store="memory://")
    app.takes_s = 0.02
    backlog = Backlog(app, age_s=0)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        backlog.readings()
        time.sleep(0.01)
    assert app.asked == 1


def test_without_a_store_there_are_no_gauges_and_the_rest_is_served(tmp_path, registry):
    (tmp_path / "t.db").write_bytes(b"no database, but long enough to be taken for one" * 100)
    told = prometheus.instrument(shop(tmp_path), registry=registry)
    told.emit(Event.STORE_UNAVAILABLE, {"consumer": "bills", "error": "", "fault": False})
    text = prometheus_client.generate_latest(registry).decode()
    assert "procession_backlog" not in text
    assert 'procession_store_unavailable_total{consumer="bills"} 1.0' in text


def test_registering_does_not_open_the_store(tmp_path, registry):
    prometheus.instrument(shop(tmp_path), registry=registry)
    assert not (tmp_path / "t.db").exists()


# ---- registration and endpoint -------------------------------------------------------------------


def test_instrumenting_twice_counts_once(tmp_path, registry):
    app = shop(tmp_path)
    first = prometheus.instrument(app, registry=registry)
    assert prometheus.instrument(app, registry=registry) is first
    play(app)
    assert ended(registry) == ENDED
    app.close()


def test_two_apps_need_two_registries(tmp_path, registry):
    app = shop(tmp_path)
    prometheus.instrument(app, registry=registry)
    with pytest.raises(ConfigurationError, match="registry of its own"):
        prometheus.instrument(App("other", store="memory://"), registry=registry)
    with pytest.raises(ConfigurationError, match="another registry"):
        prometheus.instrument(app, registry=prometheus_client.CollectorRegistry())


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return answer.read().decode()


def test_the_endpoint_serves_and_closes(tmp_path, registry):
    app = shop(tmp_path)
    with prometheus.serve(app, port=0, registry=registry) as endpoint:
        app.send("orders", {"client": "a"})
        with Driver(app) as driver:
            driver.run()
        text = scrape(endpoint.port)
    assert 'procession_messages_ended_total{cause="",consumer="bills",end="processed"} 1.0' in text
    with pytest.raises(OSError, match="refused"):
        scrape(endpoint.port)
    app.close()


def test_a_taken_port_is_refused_in_words(registry):
    app = App("t", store="memory://")
    with (
        prometheus.serve(app, port=0, registry=registry) as endpoint,
        pytest.raises(ConfigurationError, match=f"127.0.0.1:{endpoint.port}.*another port"),
    ):
        prometheus.serve(app, port=endpoint.port, registry=registry)


def test_every_metric_of_the_table_is_exported(tmp_path, registry):
    app = shop(tmp_path)
    prometheus.instrument(app, registry=registry)
    app.open()
    exported = {family.name for family in registry.collect()}
    assert exported == {
        metric.name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
        for metric in METRICS
    }
    app.close()


PROCESS = """
import sys
from procession import App, Event
from procession.contrib import prometheus

app = App("t", store="memory://")
told = prometheus.instrument(app, backlog_age_s=None)
told.emit(Event.WORKER_TAKEN_OVER, {"worker": "w", "consumers": []})
told.emit(Event.STORE_UNAVAILABLE, {"consumer": "c", "error": "", "fault": False})
print("counted", flush=True)
sys.stdin.read()
"""
SERVING = """
import sys
from procession import App
from procession.contrib import prometheus

app = App("t", store=sys.argv[1])
app.queue("q")
with prometheus.serve_processes(app, port=0) as endpoint:
    print(endpoint.port, flush=True)
    sys.stdin.read()
"""


def test_the_counts_of_several_processes_are_summed_and_a_dead_ones_level_is_gone(
    tmp_path, monkeypatch
):
    folder = tmp_path / "counts"
    folder.mkdir()
    monkeypatch.setenv(prometheus.FOLDER_VARIABLE, str(folder))

    def start(code, *arguments):
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    counting = [start(PROCESS) for _ in range(2)]
    serving = start(SERVING, f"sqlite:///{tmp_path}/t.db")
    try:
        port = int(serving.stdout.readline())
        for process in counting:
            assert process.stdout.readline() == "counted\n"
        text = scrape(port)
        assert "procession_takeovers_total 2.0" in text
        assert 'procession_lanes_paused{consumer="c"} 2.0' in text
        assert 'procession_backlog{consumer="",queue="q",standing="waiting"} 0.0' in text
        counting[0].kill()
        counting[0].wait()
        text = scrape(port)
        assert "procession_takeovers_total 2.0" in text
        assert 'procession_lanes_paused{consumer="c"} 1.0' in text
    finally:
        for process in (*counting, serving):
            process.kill()
            process.communicate()


def test_the_folder_of_several_processes_must_exist(tmp_path, monkeypatch):
    monkeypatch.setenv(prometheus.FOLDER_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="names no folder"):
        prometheus.serve_processes(App("t", store="memory://"))
