"""The sample alert rules watch metrics that exist, by labels they have, and say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.contrib.scenes import shop

from procession import Event
from procession.contrib.metrics import METRICS

yaml = pytest.importorskip("yaml")
prometheus_client = pytest.importorskip("prometheus_client")
from procession.contrib import prometheus  # noqa: E402

FILE = Path(__file__).parents[3] / "deploy" / "prometheus" / "procession.rules.yml"
NAME = re.compile(r"\bprocession_\w+")
SELECTED = re.compile(r"(procession_\w+)(?:\{([^}]*)\})?")
MUST_WATCH = {
    "procession_messages_ended_total",
    "procession_head_age_seconds",
    "procession_dead_lettered_total",
    "procession_dead_letters",
    "procession_takeovers_total",
    "procession_lanes_paused",
    "procession_alerts_total",
}


@pytest.fixture(scope="module")
def rules():
    (group,) = yaml.safe_load(FILE.read_text("utf-8"))["groups"]
    return group["rules"]


def labels_by_name():
    """Return the name of each sample that we export to the labels it can have."""
    found = {}
    for metric in METRICS:
        name = metric.name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
        for suffix in suffixes.get(metric.kind, [""]):
            found[name + suffix] = set(metric.labels)
    return found


def test_each_metric_of_a_rule_is_one_that_we_export(rules, tmp_path):
    registry = prometheus_client.CollectorRegistry()
    app = shop(tmp_path)
    told = prometheus.instrument(app, registry=registry)
    told.emit(Event.WORKER_STARTED, {"worker": "w"})
    app.open()
    exported = {sample.name for family in registry.collect() for sample in family.samples}
    watched = {name for rule in rules for name in NAME.findall(rule["expr"])}
    assert watched - exported == set()
    assert watched >= MUST_WATCH
    app.close()


def test_each_label_of_a_rule_is_one_that_its_metric_has(rules):
    known = labels_by_name()
    for rule in rules:
        expression = rule["expr"]
        grouped = {
            label.strip()
            for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
            for label in labels.split(",")
        }
        used = SELECTED.findall(expression)
        assert used, rule["alert"]
        for name, selector in used:
            selected = set(re.findall(r"(\w+)\s*[=!]", selector))
            assert selected <= known[name], rule["alert"]
        available = set.union(*(known[name] for name, _ in used))
        assert grouped <= available, rule["alert"]
        shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert shown <= grouped, f"{rule['alert']}: its labels are lost in the expression"


def test_each_rule_says_how_urgent_it_is_and_what_to_do(rules):
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 40


def test_what_is_counted_in_each_process_is_summed_and_what_is_read_is_not(rules):
    read = {name for name, labels in labels_by_name().items() if "queue" in labels}
    for rule in rules:
        for name in NAME.findall(rule["expr"]):
            if name in read:
                assert not re.search(r"\bsum\b", rule["expr"]), rule["alert"]
            else:
                assert rule["expr"].lstrip().startswith("sum"), rule["alert"]
