"""Keys from every side: sent, ruled, and inserted by programs that know only SQL."""

from __future__ import annotations

import unicodedata

import pytest
from tests.driving import Driver, column, ends, foreign, run_until_idle, sql

from procession import Context
from procession.errors import ConfigurationError, MessageError

LONG = "k" * 10_000
LIMIT = "k" * 512


def count_runs(app, **options):
    """A consumer that notes the id of every run."""
    runs = []

    def handle(message: dict, ctx: Context):
        runs.append(ctx.message.id)

    app.consumer("q", name="c", **options)(handle)
    return runs


def reasons(app):
    return [letter.reason for letter in app.dead_letters()]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", "empty"),
        ("   ", "blank"),
        ("\u2003\t", "blank"),
        (LONG, "10000 bytes"),
        ("🧾" * 129, "516 bytes"),
        ("a\0b", "NUL"),
        ("\ud800", "surrogate"),
        (7.5, "float"),
        (True, "bool"),
        ([], "list"),
        ({}, "dict"),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_bad_message_id_or_session_is_refused_at_the_send_in_words(make, key, words):
    app = make()
    runs = count_runs(app)

    with pytest.raises(MessageError, match=words):
        app.send("q", {}, message_id=key)
    with pytest.raises(MessageError, match=words):
        app.send("q", {}, session=key)

    run_until_idle(app)
    assert (runs, column(app, "SELECT count(*) FROM procession_inbox")) == ([], [0])


GOOD = ["a", "A", " a", "a ", "a\u200b", "🧾", "7", "007", "%", "'; --", "a\nb", LIMIT, "🧾" * 128]


def test_K07_keys_compare_byte_for_byte(make):
    app = make()
    runs = count_runs(app)
    keys = [*GOOD, "ABC", "abc", "àbc", "Àbc", "a\u0300bc"]
    for _ in range(2):
        for key in keys:
            app.send("q", {}, message_id=key, session=key)

    run_until_idle(app)

    assert runs == keys
    assert ends(app) == {"processed": len(keys), "duplicate": len(keys)}
    recorded = column(app, "SELECT key FROM procession_inbox ORDER BY id")
    assert recorded == [key.encode() for key in keys]


def test_K07_sessions_compare_byte_for_byte(make):
    app = make()
    order = []

    def handle(message: dict, ctx: Context):
        order.append(ctx.message.session)
        if message["bad"]:
            raise ValueError

    app.consumer("q", name="c")(handle)
    for session in ("ABC", "abc", "abc ", "àbc"):
        app.send("q", {"bad": session == "abc"}, session=session)
        app.send("q", {"bad": False}, session=session)

    with Driver(app) as driver:
        driver.step()
        assert order == ["ABC", "ABC", "abc", "abc ", "abc ", "àbc", "àbc"]
        driver.run()

    assert ends(app) == {"processed": 7, "dead-lettered": 1}


@pytest.mark.parametrize("length", [191, 255, 256, 512, 513, 1024, 10_000])
def test_K09_long_keys_with_one_prefix_never_meet(make, length):
    app = make()
    runs = count_runs(app, key="id")
    keys = ["x" * (length - 1) + last for last in "ab"]
    for key in [*keys, *keys]:
        app.send("q", {"id": key})

    run_until_idle(app)

    if length <= 512:
        assert len(runs) == 2
        assert ends(app) == {"processed": 2, "duplicate": 2}
    else:
        assert runs == []
        assert reasons(app) == ["bad-key"] * 4
        assert "hashed=True" in app.dead_letters()[0].detail


def test_K11_composed_and_decomposed_text_are_two_keys(make):
    app = make()
    runs = count_runs(app)
    text = "caf\u00e9 \u202eabc\u200b"
    both = [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]
    for key in [*both, *both]:
        app.send("q", {}, message_id=key, session=key)

    run_until_idle(app)

    assert runs == both
    assert both[0] != both[1]
    assert ends(app) == {"processed": 2, "duplicate": 2}


VALUES = [None, "", [], {}, "   ", LONG, "a\0b", 7.5, True]


def test_K02_messages_without_a_key_never_share_a_record(make):
    app = make()
    runs = count_runs(app, key="id")
    bodies = [{"id": value, "n": n} for value in VALUES for n in range(2)]
    bodies += [{"n": 1}, {"n": 2}, {"id": "real"}]
    app.send_many("q", bodies)

    run_until_idle(app)

    assert len(runs) == 1
    assert ends(app) == {"processed": 1, "dead-lettered": len(bodies) - 1}
    assert column(app, "SELECT count(*) FROM procession_inbox") == [1]
    assert len(app.dead_letters()) == len(bodies) - 1
    assert set(reasons(app)) == {"no-key", "bad-key"}
    assert all(letter.copies == 1 for letter in app.dead_letters())


class OwnError(Exception):
    pass


@pytest.mark.parametrize(
    "error", [OwnError("x"), ValueError(), ZeroDivisionError(), RecursionError(), SystemExit(1)]
)
def test_a_key_rule_that_raises_ends_its_own_message_alone(make, error):
    app = make()

    def rule(payload):
        if payload["n"] == 1:
            raise error
        return payload["n"]

    runs = count_runs(app, key=rule)
    app.send_many("q", [{"n": n} for n in range(3)])

    run_until_idle(app)

    assert len(runs) == 2
    assert set(reasons(app)) < {"no-key", "bad-key"}
    assert ends(app) == {"processed": 2, "dead-lettered": 1}


def test_K16_differences_at_any_depth_are_different_operations(make):
    app = make()
    runs = count_runs(app, key=lambda payload: payload["key"])
    deep = [
        {"key": "one", "t": 1, "p": {"id": "x"}},
        {"key": "one", "t": 1, "p": {"id": "y"}},
        {"key": "one", "a": [{"b": [{"c": [1, 2]}]}]},
        {"key": "one", "a": [{"b": [{"c": [2, 1]}]}]},
    ]
    for payload in [*deep, deep[0]]:
        app.send("q", payload)

    run_until_idle(app)

    assert len(runs) == 1
    assert ends(app) == {"processed": 1, "dead-lettered": 3, "duplicate": 1}
    assert reasons(app) == ["conflict"] * 3


@pytest.mark.parametrize(
    "rule",
    ["header:correlation-id", "header:x-delivery-count", "lock_token", "enqueuedTime", "offset"],
)
def test_I5_a_key_that_the_broker_assigns_or_that_groups_messages_is_refused(make, rule):
    app = make()

    with pytest.raises(ConfigurationError):
        app.consumer("q", name="c", key=rule)


def test_two_rules_for_one_queue_are_refused(make):
    app = make()
    app.queue("q", key="id")

    with pytest.raises(ConfigurationError, match="keep one"):
        app.consumer("q", name="c", key="number")


@pytest.mark.parametrize("body_format", [0, 1, 2, 9], ids="format{}".format)
@pytest.mark.parametrize(
    ("message_id", "reason"),
    [
        (b"", "no-key"),
        (b"  ", "bad-key"),
        ("\u2003".encode(), "bad-key"),
        (b"x" * 10_000, "bad-key"),
        (b"a\0b", "bad-key"),
        (b"\xff\xfe", "bad-key"),
        (b"\xed\xa0\x80", "bad-key"),
    ],
    ids=["empty", "blank", "em-space", "10000", "nul", "no-utf8", "surrogate"],
)
def test_K15_a_foreign_row_without_a_usable_id_is_a_dead_letter_however_it_is_written(
    make, message_id, reason, body_format
):
    app = make()
    runs = count_runs(app)
    for n in range(2):
        foreign(app, message_id=message_id, format=body_format, body=b'{"n":%d}' % n)
    app.send("q", {}, message_id="good")

    run_until_idle(app)

    assert runs == ["good"]
    assert reasons(app) == [reason] * 2
    assert [letter.body for letter in app.dead_letters()] == [b'{"n":0}', b'{"n":1}']
    assert ends(app) == {"processed": 1, "dead-lettered": 2}


@pytest.mark.parametrize(
    "session",
    [None, b"", b"  ", b"\0", b"\0" + b"7", b"x" * 10_000, b"a ", "🧾".encode()],
    ids=["none", "empty", "blank", "nul", "nul7", "10000", "space", "emoji"],
)
def test_N11_a_foreign_session_of_any_bytes_is_handled(make, session):
    app = make()
    fails = iter([True, True])

    def handle(message: dict, ctx: Context):
        assert ctx.message.session is None or isinstance(ctx.message.session, str)
        if message["n"] == 1 and next(fails, False):
            raise ValueError

    app.consumer("q", name="c")(handle)
    for n in range(3):
        foreign(app, message_id=b"m%d" % n, session=session, body=b'{"n":%d}' % n)
    app.send("q", {"n": 9}, session="other")

    run_until_idle(app)

    assert ends(app) == {"processed": 4}
    assert column(app, "SELECT count(*) FROM procession_sessions") == [0]


def test_a_foreign_session_that_is_no_text_is_a_dead_letter_that_says_so(make):
    app = make()
    runs = count_runs(app)
    foreign(app, message_id=b"a", session=b"\xff\xfe")
    foreign(app, message_id=b"b", session=b"good")

    run_until_idle(app)

    assert runs == ["b"]
    assert reasons(app) == ["bad-session"]
    assert "UTF-8" in app.dead_letters()[0].detail


@pytest.mark.parametrize("body_format", [1, 2])
def test_foreign_headers_that_are_no_object_stop_nobody(make, body_format):
    app = make()
    headers = ["{bad", "[1]", "7", '"text"', '{"a": 1}', "null", ""]

    def handle(message: dict, ctx: Context):
        if ctx.message.id.startswith("touched"):
            dict(ctx.message.headers)
            raise ValueError

    app.consumer("q", name="c")(handle)
    for number, text in enumerate(headers):
        for kind in ("touched", "left"):
            foreign(app, message_id=f"{kind}-{number}".encode(), headers=text, format=body_format)
    app.send("q", {}, headers={"correlation-id": "x"}, message_id="good")

    run_until_idle(app)

    assert app.recorded("c", "good").end == "processed"
    assert sum(ends(app).values()) == 2 * len(headers) + 1
    touched = [d for d in app.dead_letters() if d.message_id.startswith(b"touched")]
    assert len(touched) == len(headers)
    assert any(letter.headers == {"unreadable": "{bad"} for letter in touched)


def test_foreign_numbers_and_errors_out_of_range_stop_nobody(make):
    app = make()

    def handle(message: dict, ctx: Context):
        raise ValueError

    app.consumer("q", name="c")(handle)
    foreign(app, message_id=b"a", errors="{no json", attempts=1)
    foreign(app, message_id=b"b", attempts=-3)
    foreign(app, message_id=b"c", attempts=10**9)
    foreign(app, message_id=b"d", sent_ms=-1)
    foreign(app, message_id=b"e", expires_ms=1)
    foreign(app, message_id=b"f", replay_of=77)

    run_until_idle(app)

    assert ends(app) == {"dead-lettered": 5, "expired": 1}
    assert {letter.message_id for letter in app.dead_letters()} == {b"a", b"b", b"c", b"d", b"f"}


def test_what_a_foreign_program_writes_as_text_is_refused_by_the_table(make):
    app = make()
    count_runs(app)

    with pytest.raises(Exception, match="cannot store TEXT value in BLOB column"):
        foreign(app, message_id="text")
    with pytest.raises(Exception, match="NOT NULL"):
        foreign(app, message_id=None)
    with pytest.raises(Exception, match="NOT NULL"):
        foreign(app, body=None)


def test_I6_each_subscriber_of_a_topic_has_its_own_record_of_a_key(make):
    app = make()
    app.topic("q")
    runs = []
    for name in ("c", "d"):

        @app.consumer("q", name=name)
        def handle(message: dict, ctx: Context):
            runs.append(ctx.consumer)
            if ctx.consumer == "c" and ctx.message.attempt < 2:
                raise ValueError

    for _ in range(2):
        app.send("q", {}, message_id="m")

    run_until_idle(app)

    assert runs.count("d") == 1
    assert ends(app, "c") == ends(app, "d") == {"processed": 1, "duplicate": 1}
    assert sql(app, "SELECT count(*) FROM procession_inbox") == [(2,)]
