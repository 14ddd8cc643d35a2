"""Bodies that cannot be read or are not allowed: a dead letter with the raw bytes, and on."""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec
import pytest
from tests.driving import column, ends, foreign, run_until_idle

from procession import App, Context
from procession.errors import MessageError


class Order(msgspec.Struct):
    id: str
    quantity: int


@dataclass
class Checked:
    id: str

    def __post_init__(self) -> None:
        if self.id == "bad":
            raise PermissionError("not this one")


BAD = {
    "no-utf8": (b'{"id":"\xff","quantity":1}', "undecodable"),
    "no-json": (b"{bad", "undecodable"),
    "empty": (b"", "undecodable"),
    "two-values": (b"{}{}", "undecodable"),
    "bom": (b"\xef\xbb\xbf{}", "undecodable"),
    "nan": (b'{"id":"a","quantity":NaN}', "undecodable"),
    "infinity": (b'{"id":"a","quantity":-Infinity}', "undecodable"),
    "deep": (b"[" * 100_000, "undecodable"),
    "deep-inside": (
        b'{"id":"a","quantity":1,"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        "undecodable",
    ),
    "twice": (b'{"id":"a","id":"b","quantity":1}', "undecodable"),
    "nul": (b"\0", "undecodable"),
    "gzip": (b"\x1f\x8b\x08\0\0\0\0\0\0\xff", "undecodable"),
    "other-type": (b"[]", "invalid-payload"),
    "missing": (b'{"id":"a"}', "invalid-payload"),
    "wrong": (b'{"id":"a","quantity":"1"}', "invalid-payload"),
    "null": (b"null", "invalid-payload"),
}


def test_Q12_an_unreadable_body_is_a_dead_letter_with_its_bytes_and_the_lane_goes_on(make):
    app = make()
    seen = []

    @app.consumer("q", name="c")
    def handle(order: Order, ctx: Context):
        seen.append(order.id)

    for name, (body, _) in BAD.items():
        foreign(app, message_id=name.encode(), body=body, session=b"one", format=2)
        foreign(
            app,
            message_id=f"{name}-after".encode(),
            body=b'{"id":"a","quantity":1}',
            session=b"one",
        )

    run_until_idle(app)

    assert len(seen) == len(BAD)
    letters = {letter.message_id.decode(): letter for letter in app.dead_letters()}
    assert {name: letter.reason for name, letter in letters.items()} == {
        name: reason for name, (_, reason) in BAD.items()
    }
    for name, (body, _) in BAD.items():
        assert letters[name].body == body
        assert letters[name].attempts == 0
        assert letters[name].session == b"one"


def test_a_validator_of_any_behaviour_ends_its_own_message_alone(make):
    app = make()

    class Speechless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def check(payload):
        match payload["way"]:
            case "raise":
                raise LookupError("no")
            case "speechless":
                raise Speechless
            case "exit":
                raise SystemExit
            case "ours":
                raise MessageError("nothing-of-ours", 7)  # type: ignore[arg-type]
            case "false":
                return False
            case way:
                return way

    @app.consumer("q", name="c", validators=[check])
    def handle(message: dict): ...

    ways = ["raise", "speechless", "exit", "ours", "false", "fine", None, 0, ""]
    app.send_many("q", [{"way": way} for way in ways])

    run_until_idle(app)

    assert ends(app) == {"processed": 4, "dead-lettered": 5}
    assert all(letter.attempts == 0 for letter in app.dead_letters())


def test_a_type_that_refuses_its_own_values_is_an_invalid_payload(make):
    app = make()

    @app.consumer("q", name="c")
    def handle(message: Checked): ...

    app.send("q", b'{"id":"bad"}', message_id="a")
    app.send("q", b'{"id":"good"}', message_id="b")

    run_until_idle(app)

    (letter,) = app.dead_letters()
    assert (letter.reason, letter.message_id) == ("invalid-payload", b"a")
    assert "not this one" in letter.detail


def test_a_session_that_does_not_fit_its_payload_is_a_dead_letter(make):
    app = make()

    @app.consumer("q", name="c", validate_session=lambda payload: payload["order"])
    def handle(message: dict): ...

    app.send("q", {"order": "a"}, session="a")
    app.send("q", {"order": "a"}, session="b")
    app.send("q", {"order": "a"})
    app.send("q", {}, session="a")

    run_until_idle(app)

    assert ends(app) == {"processed": 1, "dead-lettered": 3}
    assert {letter.reason for letter in app.dead_letters()} == {"session-mismatch"}


def test_an_unknown_type_is_a_dead_letter_that_names_the_known_ones(make):
    app = make()

    @app.consumer("q", name="c")
    def handle(message: Order): ...

    app.send("q", Checked("x"))

    run_until_idle(app)

    (letter,) = app.dead_letters()
    assert letter.reason == "unknown-type"
    assert "Order" in letter.detail


@pytest.mark.parametrize(
    "payload",
    [object(), {1, 2}, {"a": float("nan")}, {"a": "\ud800"}, {"a": b"\xff"}.items()],
    ids=["object", "set", "nan", "surrogate", "items"],
)
def test_S03_a_payload_that_cannot_be_written_is_refused_before_anything_is_stored(make, payload):
    app: App = make()
    app.queue("other")

    @app.consumer("q", name="c")
    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (1)")
        ctx.send("other", payload)

    if payload != {1, 2}:  # a set has a documented order
        with pytest.raises(MessageError):
            app.send("other", payload)
        app.send("q", {})
        run_until_idle(app)
        assert ends(app) == {"dead-lettered": 1}
        assert column(app, "SELECT count(*) FROM effect") == [0]


def test_a_body_beyond_the_limit_is_refused_at_the_send(make):
    app = make(settings={"payload_max": 1_000})
    app.queue("q")

    app.send("q", b"x" * 1_000)
    with pytest.raises(MessageError, match=r"1001 bytes.*send a reference"):
        app.send("q", b"x" * 1_001)


def test_raw_bytes_reach_the_handler_as_they_are(make):
    app = make()
    seen = []

    @app.consumer("q", name="c")
    def handle(body: bytes):
        seen.append(body)

    bodies = [b"", b"\0\xff", b"{}", b"x" * 1_000_000]
    for number, body in enumerate(bodies):
        app.send("q", body, message_id=str(number))

    run_until_idle(app)

    assert seen == bodies


class Meeting(msgspec.Struct):
    at: dt.datetime


class Moment(msgspec.Struct):
    at: Annotated[dt.datetime, msgspec.Meta(tz=True)]


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_a_date_without_zone_stays_without_one_wherever_it_is_read(make, monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    app = make()
    seen = []

    @app.consumer("q", name="c")
    def handle(meeting: Meeting):
        seen.append(meeting.at)

    noon = dt.datetime(2026, 3, 29, 12)  # noqa: DTZ001  that is the point
    app.send("q", Meeting(noon))
    app.send("q", Meeting(noon.replace(tzinfo=dt.UTC)))
    run_until_idle(app)
    monkeypatch.undo()
    time.tzset()
    assert seen == [noon, noon.replace(tzinfo=dt.UTC)]
    assert [at.tzinfo for at in seen] == [None, dt.UTC]


def test_a_date_without_zone_is_an_invalid_payload_where_the_type_asks_for_a_zone(make):
    app = make()
    seen = []

    @app.consumer("q", name="c")
    def handle(moment: Moment):
        seen.append(moment.at)

    foreign(app, message_id=b"bad", body=b'{"at":"2026-03-29T12:00:00"}')
    foreign(app, message_id=b"good", body=b'{"at":"2026-03-29T12:00:00+02:00"}')
    run_until_idle(app)
    (letter,) = app.dead_letters()
    assert (letter.message_id, letter.reason) == (b"bad", "invalid-payload")
    assert "timezone" in letter.detail
    assert "$.at" in letter.detail
    assert len(seen) == 1
