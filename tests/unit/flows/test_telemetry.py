"""Events leave through instruments: what costs something only on request, and nothing that an
instrument does reaches a lane.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field

import pytest
from tests.driving import Driver, Recorder, new_app

from procession import Context, Event
from procession.flows.batch import traceparents
from procession.message import Delivery
from procession.telemetry import ON_REQUEST, Instruments, LogInstrument

TRACE = "00-{0:032x}-{1:016x}-01"


class Asking(Recorder):
    """A recorder that asks for events on request."""

    def __init__(self, *wants):
        super().__init__()
        self.wants = frozenset(wants)


@dataclass
class Faulty:
    """An instrument that fails at everything, and cannot be hashed."""

    seen: list = field(default_factory=list)

    @property
    def wants(self):
        raise KeyError("wants")

    def emit(self, event, fields):
        self.seen.append(event)
        raise ValueError(event)


def run(app):
    with Driver(app) as driver:
        driver.run()


def test_events_on_request_go_to_those_alone_who_ask(tmp_path):
    plain, begun, processed = Recorder(), Asking(Event.BATCH_BEGUN), Asking(Event.MESSAGE_PROCESSED)
    app = new_app(tmp_path, instruments=[plain, begun, processed])
    app.consumer("q", name="c", session="s")(lambda payload: None)
    headers = {"correlation-id": "trip", "traceparent": TRACE.format(1, 2)}
    app.send("q", {"s": "a"}, message_id="m1", headers=headers)
    app.send("q", {"s": "b"}, message_id="m2")
    app.send("q", {"s": "b"}, message_id="m2")
    run(app)
    assert begun.of(Event.BATCH_BEGUN) == [
        {"consumer": "c", "messages": 3, "traceparents": [TRACE.format(1, 2)]}
    ]
    assert processed.of(Event.MESSAGE_PROCESSED) == [
        {
            "consumer": "c",
            "key": "m1",
            "message_id": "m1",
            "session": "a",
            "correlation_id": "trip",
        },
        {
            "consumer": "c",
            "key": "m2",
            "message_id": "m2",
            "session": "b",
            "correlation_id": None,
        },
    ]
    assert {event for event, _ in plain.events} == {Event.BATCH_COMMITTED, Event.MESSAGE_ENDED}
    assert processed.of(Event.BATCH_BEGUN) == begun.of(Event.MESSAGE_PROCESSED) == []
    app.close()


def test_a_processed_messages_key_is_the_one_its_rule_makes(tmp_path):
    processed = Asking(Event.MESSAGE_PROCESSED)
    app = new_app(tmp_path, instruments=[processed])
    app.consumer("q", name="c", key="order")(lambda payload: None)
    app.send("q", {"order": "o-7"}, message_id="m1")
    run(app)
    (fields,) = processed.of(Event.MESSAGE_PROCESSED)
    assert (fields["key"], fields["message_id"]) == ("o-7", "m1")
    app.close()


def test_every_event_of_a_message_says_which_one(tmp_path):
    recorder = Recorder()
    app = new_app(tmp_path, instruments=[recorder])

    @app.consumer("q", name="c", session="s")
    def handle(payload: dict, ctx: Context) -> None:
        raise ValueError

    app.send("q", {"s": "a"}, message_id="m", headers={"correlation-id": "trip"})
    app.send("q", {"s": "b"}, message_id="m", headers={"correlation-id": "trip"})
    run(app)
    wanted = {"key": "m", "message_id": "m", "correlation_id": "trip"}
    for event in (Event.MESSAGE_FAILED, Event.MESSAGE_RETRYING, Event.MESSAGE_ENDED, Event.ALERT):
        found = recorder.of(event)
        assert found, event
        for fields in found:
            assert wanted.items() <= fields.items()
            assert fields["session"] in ("a", "b")
    reasons = [fields["reason"] for fields in recorder.of(Event.MESSAGE_ENDED)]
    assert sorted(reasons) == ["conflict", "failed"]
    app.close()


def test_a_committed_batch_says_how_long_it_took_and_what_ran_for_nothing(tmp_path):
    recorder = Recorder()
    app = new_app(tmp_path, instruments=[recorder])

    @app.consumer("q", name="c", session="s")
    def handle(payload: dict, ctx: Context) -> None:
        if ctx.run == 1 and payload["s"] == "a":
            raise ValueError

    app.send_many("q", [{"s": "a"}, {"s": "b"}])
    run(app)
    batches = recorder.of(Event.BATCH_COMMITTED)
    assert [batch["reruns"] for batch in batches] == [1, 0]
    assert all(batch["batch_s"] >= batch["handler_s"] > 0 for batch in batches)
    app.close()


def test_every_events_fields_can_be_written_as_json(tmp_path):
    everything = Asking(*ON_REQUEST)
    app = new_app(tmp_path, instruments=[everything])

    @app.consumer("q", name="c", session="s")
    def handle(payload: dict, ctx: Context) -> None:
        if payload["s"] == "bad":
            raise ValueError

    app.send("q", {"s": "a"}, message_id="m")
    app.send("q", {"s": "a"}, message_id="m")
    app.send("q", {"s": "bad"})
    run(app)
    for event, fields in everything.events:
        assert json.loads(json.dumps(fields)) == fields, event
    assert everything.of(Event.BATCH_COMMITTED)[0]["counts"] == {
        "processed": {"": 1},
        "duplicate": {"resent": 1},
    }
    app.close()


def test_a_faulty_instrument_disturbs_nobody_and_is_told_once_a_minute(
    tmp_path, caplog, monkeypatch
):
    faulty, after = Faulty(), Asking(Event.MESSAGE_PROCESSED)
    app = new_app(tmp_path, instruments=[faulty, after])
    app.consumer("q", name="c")(lambda payload: None)
    app.send_many("q", [{"n": n} for n in range(5)])
    run(app)
    assert len(after.of(Event.MESSAGE_PROCESSED)) == 5
    assert len(faulty.seen) >= 1

    clock = [0.0]
    monkeypatch.setattr("procession.telemetry.time.monotonic", lambda: clock[0])
    together = Instruments(Faulty())
    caplog.clear()
    for seconds in (0.0, 30.0, 59.0, 60.0, 61.0):
        clock[0] = seconds
        together.emit(Event.ALERT, {})
    told = [record for record in caplog.records if "Faulty failed" in record.getMessage()]
    assert len(told) == 2
    assert isinstance(told[0].exc_info[1], ValueError)
    app.close()


# ---- the log -------------------------------------------------------------------------------------


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.DEBUG, "procession")
    return lambda: caplog.records


def test_a_record_has_the_events_name_and_fields(records):
    LogInstrument().emit(Event.MESSAGE_FAILED, {"consumer": "c", "key": "k"})
    (record,) = records()
    assert record.levelno == logging.WARNING
    assert record.event == "message.failed"
    assert record.procession == {"consumer": "c", "key": "k"}
    assert record.getMessage() == "message.failed consumer='c' key='k'"


def test_each_processed_message_is_a_record_at_debug(tmp_path, records):
    app = new_app(tmp_path)
    app.consumer("q", name="c")(lambda payload: None)
    app.send("q", {}, message_id="m", headers={"correlation-id": "trip"})
    run(app)
    (record,) = [found for found in records() if found.event == "message.processed"]
    assert record.levelno == logging.DEBUG
    assert (record.procession["key"], record.procession["correlation_id"]) == ("m", "trip")
    app.close()


def test_above_debug_nothing_of_it_is_made(tmp_path, caplog):
    caplog.set_level(logging.INFO, "procession")
    assert not LogInstrument().wants
    app = new_app(tmp_path)
    app.consumer("q", name="c")(lambda payload: None)
    app.send("q", {})
    run(app)
    assert not caplog.records
    app.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": TRACE.format(1, 2)},
        {"a": 'say "traceparent": "no"', "traceparent": TRACE.format(1, 2), "z": "\n"},
        {"a": "b"},
        {"traceparent": "a, b"},
        {"traceparent": ""},
        {"x": f'{{"traceparent": "{TRACE.format(1, 2)}"}}'},
        {},
    ],
)
def test_a_trace_context_is_found_in_stored_headers_as_in_read_ones(headers):
    stored, read = delivery(json.dumps(headers)), delivery(headers)
    well_formed = [found for found in traceparents([read]) if re.fullmatch("[0-9a-z-]*", found)]
    assert traceparents([stored]) == well_formed
    assert traceparents([delivery(json.dumps(headers, separators=(",", ":")))]) == well_formed


def delivery(raw_headers):
    return Delivery(1, None, b"m", "", 1, b"{}", raw_headers, 0)
