"""Input that no program should meet: each is told in one line that says what is wrong and what to
do, exits with a code for scripts, and loses nothing."""

import json
import re
import sqlite3
import sys
from contextlib import closing

import pytest
from rich.cells import cell_len

MEGABYTE = 1_000_000
NESTED = "[" * 10_000 + "]" * 10_000
ORDER = '{"id": "1", "client": "ann", "amount": 1'


def stored(shell, queue="orders"):
    if not (shell.folder / "shop.db").exists():
        return []
    with closing(sqlite3.connect(shell.folder / "shop.db")) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            return []
        rows = connection.execute(
            "SELECT m.body FROM procession_messages AS m JOIN procession_subscriptions AS s"
            " ON m.id >> 43 = s.id WHERE s.queue = ? ORDER BY m.id",
            (queue,),
        )
        return [row[0] for row in rows]


@pytest.fixture
def any_json(shell):
    """A queue without a consumer, beside those of the shop."""
    name = shell.target.split(":")[0]
    text = (shell.folder / f"{name}.py").read_text() + '\napp.queue("any")\n'
    (shell.folder / f"{name}.py").write_text(text)
    return shell


# ---- payloads ------------------------------------------------------------------------------------


def test_a_payload_of_10_mb_arrives_whole(shell):
    (shell.folder / "big.json").write_text(ORDER + f', "note": "{"x" * (10 * MEGABYTE)}"}}')
    result = shell("send", shell.target, "orders", "--file", "big.json")
    assert result.code == 0, result.err
    (body,) = stored(shell)
    assert len(json.loads(body)["note"]) == 10 * MEGABYTE
    shell.work()
    assert shell.module.ran == [("1", 1)]


@pytest.mark.parametrize("queue", ["orders", "any"])
def test_a_payload_beyond_the_limit_is_refused_with_both_sizes_and_a_way_out(any_json, queue):
    shell = any_json
    (shell.folder / "huge.json").write_text(ORDER + f', "note": "{"x" * (17 * MEGABYTE)}"}}')
    result = shell("send", shell.target, queue, "--file", "huge.json")
    assert result.code == 1
    assert "17000" in result.err
    assert "16777216 (settings.payload_max): send a reference instead" in result.err
    assert stored(shell, queue) == []


BAD = {
    "deep": (f'{ORDER}, "x": {NESTED}}}'.encode(), "nested too deep"),
    "deep objects": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deep"),
    "no utf-8": (f'{ORDER}, "note": "'.encode() + b'\xe4"}', "UTF-8"),
    "utf-16": (f"{ORDER}}}".encode("utf-16"), "no JSON"),
    "nan": (f'{ORDER}, "x": NaN}}'.encode(), "no JSON"),
    "infinity": (f'{ORDER}, "x": -Infinity}}'.encode(), "no JSON"),
    "too large a number": (f'{ORDER}, "x": 1e999999999}}'.encode(), "exponent"),
    "a key twice": (f'{ORDER}, "id": "2"}}'.encode(), "the same key twice: 'id'"),
    "a key twice, escaped": (f'{ORDER}, "\\u0069d": "2"}}'.encode(), "the same key twice: 'id'"),
    "a key twice, inside": (f'{ORDER}, "x": [{{"a": 1, "a": 1}}]}}'.encode(), "twice: 'a'"),
    "cut off": (ORDER.encode(), "no JSON"),
    "nothing": (b"", "no JSON"),
}


@pytest.mark.parametrize("queue", ["orders", "any"])
@pytest.mark.parametrize(("body", "says"), BAD.values(), ids=BAD)
def test_a_payload_that_not_all_readers_take_alike_is_not_sent(any_json, body, says, queue):
    shell = any_json
    result = shell("send", shell.target, queue, "-", stdin=body)
    assert result.code == 1
    assert says in result.err
    assert result.err.count("\n") == 1
    assert stored(shell, queue) == []


# A UTF-16 file has no lines; nothing and half of an object are a file's business.
@pytest.mark.parametrize(
    ("body", "says"),
    [value for name, value in BAD.items() if name not in ("utf-16", "nothing")],
    ids=[name for name in BAD if name not in ("utf-16", "nothing")],
)
def test_a_bad_line_is_named_and_those_before_it_are_sent_once(shell, body, says):
    path = shell.folder / "orders.jsonl"
    path.write_bytes(f"{ORDER}}}\n".encode() + body + b"\n")
    for _ in range(2):
        result = shell("send", shell.target, "orders", "--lines", path)
        assert result.code in (1, 2)
        assert "orders.jsonl, line 2" in result.err
        assert says in result.err
        assert len(stored(shell)) == 1
    path.write_text(f"{ORDER}}}\n{ORDER}}}\n")
    assert (
        "1 messages sent, after line 1"
        in shell("send", shell.target, "orders", "--lines", path).out
    )


# ---- CSV -----------------------------------------------------------------------------------------

HEAD = b"id,client,amount\n"
CSV = {
    "a short row": (HEAD + b"1,ann,5\n2,ann\n", "line 3 has 2 cells, the header has 3", 1),
    "a long row": (HEAD + b"1,ann,5\n2,ann,5,\n", "line 3 has 4 cells, the header has 3", 1),
    "an unclosed quote": (HEAD + b'1,ann,5\n2,"ann,5\n', "is no CSV", 1),
    "text behind a quote": (HEAD + b'1,ann,5\n2,"a"n,5\n', "line 3 is no CSV", 1),
    "no utf-8": (HEAD + b"1,ann,5\n2,\xe4,5\n", "line 3 is not UTF-8 (byte 0xe4)", 1),
    "utf-16": ("id,client\n1,ann\n".encode("utf-16"), "line 1 is not UTF-8 (byte 0xff)", 0),
    "nothing": (b"", "first line must name each column once; it is empty", 0),
    "a mark alone": (b"\xef\xbb\xbf", "first line must name each column once; it is empty", 0),
    "a column twice": (b"id,client,id\n1,2,3\n", "once; 'id' stands there twice", 0),
    "a column without a name": (b"id,,client\n1,2,3\n", "once; column 2 has none", 0),
}


@pytest.mark.parametrize(("content", "says", "before"), CSV.values(), ids=CSV)
def test_a_ragged_csv_is_told_with_its_line_and_what_came_before_is_sent(
    shell, content, says, before
):
    path = shell.folder / "orders.csv"
    path.write_bytes(content)
    result = shell("send", shell.target, "orders", "--csv", path)
    assert result.code == 2
    assert says in result.err
    assert "orders.csv" in result.err
    assert len(stored(shell)) == before


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b"\xef\xbb\xbf" + HEAD + b"1,ann,5\n", 1),
        (HEAD.replace(b"\n", b"\r\n") + b"1,ann,5\r\n2,bob,6", 2),
        (HEAD + b'1,"a\nn",5\n\n2,bob,6\n', 2),
        (HEAD, 0),
        (b"id,client,amount,note\n1,ann,5," + b"x" * 300_000 + b"\n", 1),
    ],
    ids=["mark", "crlf", "line end in a cell", "head alone", "a large cell"],
)
def test_a_csv_that_is_only_unusual_is_sent(shell, content, rows):
    path = shell.folder / "orders.csv"
    path.write_bytes(content)
    result = shell("send", shell.target, "orders", "--csv", path)
    assert (result.code, result.out) == (0, f"{rows} messages sent\n"), result.err
    assert all(json.loads(body).keys() >= {"id", "client", "amount"} for body in stored(shell))


@pytest.mark.parametrize("value", ["{}", "[1]", "true", "1.5", "null"])
def test_a_message_id_is_text_or_a_whole_number(shell, value):
    path = shell.folder / "orders.jsonl"
    path.write_text(f'{ORDER}}}\n{{"id": {value}, "client": "ann", "amount": 1}}\n')
    result = shell("send", shell.target, "orders", "--lines", path, "--id-field", "id")
    assert result.code == 2
    assert "orders.jsonl, line 2: field 'id' is" in result.err
    assert len(stored(shell)) == 1


# ---- a file that is not what it was --------------------------------------------------------------


CHANGES = {
    "a line changed": lambda lines: [lines[0], lines[1].replace("ann", "bob"), *lines[2:]],
    "a line more in the middle": lambda lines: [lines[0], lines[2], *lines[1:]],
    "a line less": lambda lines: [lines[0], *lines[2:], lines[1]],
    "shorter": lambda lines: lines[:2],
    "lines swapped": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_was_changed_behind_the_first_line_is_refused_not_guessed(shell, change):
    path = shell.folder / "orders.jsonl"
    lines = [f'{{"id": "{n}", "client": "ann", "amount": {n}}}\n' for n in range(5)]
    path.write_text("".join(lines[:3]))
    assert shell("send", shell.target, "orders", "--lines", path).code == 0
    path.write_text("".join(change(lines)))
    result = shell("send", shell.target, "orders", "--lines", path)
    assert result.code == 2
    assert "was changed since its first 3 lines were sent" in result.err
    assert "--again" in result.err
    assert len(stored(shell)) == 3
    assert shell("send", shell.target, "orders", "--lines", path, "--again").code == 0


def test_a_last_line_may_get_its_end_later(shell):
    path = shell.folder / "orders.jsonl"
    path.write_text(f"{ORDER}}}\n{ORDER}}}")
    assert "2 messages" in shell("send", shell.target, "orders", "--lines", path).out
    path.write_text(f"{ORDER}}}\n{ORDER}}}\n{ORDER}}}\n")
    assert (
        "1 messages sent, after line 2"
        in shell("send", shell.target, "orders", "--lines", path).out
    )


# ---- terminals and outputs -----------------------------------------------------------------------

LISTS = [
    ("status",),
    ("sessions",),
    ("dead-letters", "list"),
    ("inbox", "show"),
    ("doctor",),
]


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
@pytest.mark.parametrize("columns", [40, 30])
def test_a_narrow_terminal_gets_a_line_a_cell_and_all_of_it(shell, monkeypatch, command, columns):
    client, note = "a client of more than forty characters, 北京", "why " * 20
    for n in range(3):
        shell.send(json.dumps({"id": f"{n}", "client": client, "amount": n - 1, "note": note}))
    shell.send('{"id": "m1", "client": "bob", "amount": 1}', "--id", "m1")
    shell.work()
    shell.send(json.dumps({"id": "9", "client": client, "amount": 1}))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    out = shell(*command, shell.target, *(["m1"] if "inbox" in command else [])).out
    assert out
    plain = re.sub(r"\x1b\[\d*m", "", out)
    assert max(cell_len(line) for line in plain.splitlines()) <= columns
    assert "…" not in out
    if command[0] in ("sessions", "dead-letters"):
        assert "北京" in out


def test_a_wide_terminal_gets_columns(shell, monkeypatch):
    shell.send('{"id": "m1", "client": "bob", "amount": 1}')
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    assert "Consumer  Queue   Waiting" in shell("status", shell.target).out
