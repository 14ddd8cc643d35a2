import json
import logging
from collections import Counter

import pytest

from procession.cli import logs
from procession.cli.terminal import masked, printable
from procession.outcome import Cause, End
from procession.telemetry import Event, LogInstrument


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ada:secret@db/orders", "postgresql://ada:***@db/orders"),
        ("store 'mysql://ada:s:e@c/r@t@db/x': no", "store 'mysql://ada:***@db/x': no"),
        ("redis://:secret@cache", "redis://:***@cache"),
        ("x://db/y?user=ada&password=se%20cret&z=1", "x://db/y?user=ada&password=***&z=1"),
        ("sqlite:///orders.db", "sqlite:///orders.db"),
        ("http://host:80/path", "http://host:80/path"),
    ],
)
def test_passwords_of_urls_are_never_printed(text, shown):
    assert masked(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("line\nline\r\t\0", "line\\nline\\r\\t\\x00"),
        ("\x9b2J", "\\x9b2J"),
        ("abc\u202edcba", "abc\\u202edcba"),
        ("\ud800", "\\ud800"),
        ("café 北京\u3000🧑\u200d🚀", "café 北京\u3000🧑\u200d🚀"),
    ],
)
def test_nobodys_text_steers_a_terminal(text, shown):
    assert printable(text) == shown


def test_lines_are_kept_where_they_are_wanted():
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


@pytest.fixture
def record():
    """Make a record of the package's own logger, as a handler gets it."""
    made = []

    class Keep(logging.Handler):
        def emit(self, record):
            made.append(record)

    logger, keep = logging.getLogger("procession.tests"), Keep()
    logger.addHandler(keep)

    def log(emit):
        emit(logger)
        return made[-1]

    yield log
    logger.removeHandler(keep)


def test_a_line_of_the_log_is_one_line_without_secrets(record):
    made = record(lambda logger: logger.warning("to %s\nall\x1b[2J", "x://ada:secret@db"))
    line = logs.Lines().format(made)
    assert line.endswith(
        f"WARNING [{made.process}] procession.tests: to x://ada:***@db\\nall\\x1b[2J"
    )


def test_an_events_fields_are_in_the_json_line(record):
    fields = {"consumer": "orders", "key": "a\nb", "attempt": 2, "after_ms": None, "o": object}
    made = record(lambda logger: LogInstrument(logger).emit(Event.MESSAGE_FAILED, fields))
    line = logs.JsonLines().format(made)
    assert "\n" not in line
    document = json.loads(line)
    assert document["event"] == "message.failed"
    assert document["level"] == "warning"
    assert document["fields"] == fields | {"o": str(object)}


def test_counts_by_end_and_cause_are_in_the_json_line(record):
    counts = Counter({(End.PROCESSED, None): 3, (End.DUPLICATE, Cause.RESENT): 1})
    fields = {"consumer": "orders", "counts": counts}
    made = record(lambda logger: LogInstrument(logger).emit(Event.SESSION_LOST, fields))
    document = json.loads(logs.JsonLines().format(made))
    assert document["fields"]["counts"] == {"processed": 3, "duplicate/resent": 1}


def test_a_json_line_holds_any_record(record):
    def fail(logger):
        try:
            int("x://ada:secret@db")
        except ValueError:
            logger.exception("%s and %s", "this", object)

    document = json.loads(logs.JsonLines().format(record(fail)))
    assert document["message"] == f"this and {object}"
    assert "x://ada:***@db" in document["exception"]


def test_the_log_can_be_quiet(capsys):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        logs.set_up("warning", as_json=False)
        root.info("hidden")
        root.warning("shown")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    said = capsys.readouterr()
    assert "shown" in said.err
    assert "hidden" not in said.err
    assert said.out == ""
