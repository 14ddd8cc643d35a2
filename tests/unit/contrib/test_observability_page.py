"""docs/observability.md: its lists are the code's, its log set-ups keep an event's fields."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import pytest
from tests.driving import Driver, new_app

from procession import Context, Event
from procession.contrib.metrics import METRICS
from procession.telemetry import LEVELS, ON_REQUEST

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"
TEXT = PAGE.read_text("utf-8")


def rows(heading):
    """Return the cells of the first table below a heading."""
    below = TEXT[TEXT.index(f"## {heading}\n") :]
    table = re.search(r"(?:^\|.*\|\n)+", below, re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]
    ]


def test_the_page_lists_every_event_with_its_level():
    found = {cells[0].strip("`"): cells[1] for cells in rows("Events")}
    assert found.keys() == set(Event)
    for event, level in LEVELS.items():
        assert ("on request" in found[event]) == (event in ON_REQUEST)
        if event is not Event.BATCH_BEGUN:
            assert found[event].startswith(logging.getLevelName(level))


def test_the_page_lists_every_metric_with_its_kind_and_labels():
    found = {
        cells[0].strip("`"): (cells[1], tuple(filter(None, cells[2].split(", "))))
        for cells in rows("Metrics")
    }
    assert found == {metric.name: (metric.kind, metric.labels) for metric in METRICS}


@pytest.fixture
def page():
    """Return what the page's section on logs defines."""
    pytest.importorskip("structlog")
    section = TEXT[TEXT.index("## Logs\n") : TEXT.index("### Correlation")]
    names = {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, names)
    return names


@pytest.mark.parametrize("handler", ["json_handler", "structlog_handler"])
def test_a_set_up_of_the_page_keeps_the_fields_of_events_and_of_handlers_records(
    tmp_path, page, handler
):
    stream = io.StringIO()
    logger = logging.getLogger("procession")
    added = page[handler](stream)
    logger.addHandler(added)
    logger.setLevel(logging.DEBUG)
    try:
        app = new_app(tmp_path)

        @app.consumer("q", name="c", session="s")
        def handle(payload: dict, ctx: Context) -> None:
            ctx.logger.info("paid %d", 7)
            if ctx.run == 1:
                raise ValueError("not yet")

        app.send("q", {"s": "a"}, message_id="m", headers={"correlation-id": "trip"})
        with Driver(app) as driver:
            driver.run()
        app.close()
        logger.error("of our own", exc_info=KeyError("k"))
    finally:
        logger.removeHandler(added)
        logger.setLevel(logging.NOTSET)
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    by_event = {record["event"]: record for record in records}
    which = {"consumer": "c", "key": "m", "session": "a", "correlation_id": "trip"}
    failed = by_event["message.failed"]
    assert failed["level"] == "warning"
    assert failed["error"] == "ValueError: not yet"
    for event in ("message.failed", "message.processed", "paid 7"):
        assert which.items() <= by_event[event].items()
    assert by_event["batch.committed"]["counts"] == {"processed": {"": 1}}
    assert "KeyError" in by_event["of our own"]["exception"]
