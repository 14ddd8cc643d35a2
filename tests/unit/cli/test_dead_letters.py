import base64
import getpass
import json
import os
import subprocess
import sys

import pytest

EVIL = "red\x1b[31m\nnext"


def order(**fields):
    return json.dumps({"id": "o1", "client": "ada", "amount": -1} | fields)


@pytest.fixture
def dead(shell):
    """Two dead letters of ada's, one of bob's, and a conflict."""
    shell.send(order(id="o1"), "--id", "m1")
    shell.send(order(id="o2", note=EVIL), "--id", "m2", "--header", "tenant=a\x1bb")
    shell.send(order(id="o3", client="bob"), "--id", "m3")
    shell.send(order(id="o4", client="bob", amount=4), "--id", "m4")
    shell.send(order(id="o4", client="bob", amount=5), "--id", "m4")
    shell.work()
    return shell


def letters(shell, *options):
    result = shell("dead-letters", "list", shell.target, "--json", *options)
    assert result.code == 0, result.err
    return json.loads(result.out)


def number(shell, message_id):
    return next(
        letter["number"]
        for letter in letters(shell, "--status", "all")
        if letter["message_id"] == message_id
    )


# ---- looking -------------------------------------------------------------------------------------


def test_letters_are_listed_by_what_they_are(dead):
    assert [letter["message_id"] for letter in letters(dead)] == ["m1", "m2", "m3", "m4"]
    assert [x["message_id"] for x in letters(dead, "--session", "bob")] == ["m3", "m4"]
    assert [x["message_id"] for x in letters(dead, "--reason", "conflict")] == ["m4"]
    assert letters(dead, "--consumer", "files") == []
    assert letters(dead, "--status", "discarded") == []
    assert len(letters(dead, "--limit", "2")) == 2
    text = dead("dead-letters", "list", dead.target)
    assert text.code == 0
    assert len(text.out.splitlines()) == 5
    assert "\x1b" not in text.out
    assert "there may be more" in dead("dead-letters", "list", dead.target, "--limit", "1").err
    assert dead("dead-letters", "list", dead.target, "--reason", "bad").code == 2


def test_show_tells_all_and_steers_no_terminal(dead):
    result = dead("dead-letters", "show", dead.target, number(dead, "m2"))
    assert result.code == 0
    assert "\x1b" not in result.out
    for text in ("m2", "rejected", "red\\x1b[31m\\nnext", "tenant: a\\x1bb", '"id": "o2"'):
        assert text in result.out
    document = json.loads(
        dead("dead-letters", "show", dead.target, number(dead, "m2"), "--json").out
    )
    assert document["detail"] == EVIL
    assert document["headers"] == {"tenant": "a\x1bb"}
    assert json.loads(document["body"])["note"] == EVIL


def test_a_binary_body_is_shown_as_hexadecimal(shell):
    body = b"\xff\x1b[2J" + bytes(range(256)) * 5
    shell("send", shell.target, "files", "-", stdin=body)
    shell.work()
    result = shell("dead-letters", "show", shell.target, "1")
    assert "\x1b" not in result.out
    assert "000000  ff 1b 5b 32 4a 00" in result.out
    assert "more bytes: see --json" in result.out
    document = json.loads(shell("dead-letters", "show", shell.target, "1", "--json").out)
    assert document["body_encoding"] == "base64"
    assert base64.b64decode(document["body"]) == body


@pytest.mark.parametrize("command", ["show", "edit"])
def test_a_letter_that_is_none_is_refused(dead, command):
    extra = ["--body", "{}"] if command == "edit" else []
    unknown = dead("dead-letters", command, dead.target, "77", *extra)
    assert (unknown.code, unknown.err) == (1, "procession: there is no dead letter 77\n")
    nonsense = dead("dead-letters", command, dead.target, "x", *extra)
    assert nonsense.code == 2
    assert "'x' is no number" in nonsense.err


# ---- edit ----------------------------------------------------------------------------------------


def test_a_mended_letter_runs_when_it_is_replayed(dead):
    letter = number(dead, "m1")
    edited = dead("dead-letters", "edit", dead.target, letter, "--body", order(amount=7))
    assert edited.code == 0
    assert dead("dead-letters", "replay", dead.target, letter).code == 0
    dead.work()
    assert [(id_, int(amount)) for id_, amount in dead.module.ran] == [("o4", 4), ("o1", 7)]
    (document,) = letters(dead, "--status", "replayed")
    assert document["history"][0]["by"] == getpass.getuser()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "undecodable"),
        (order(amount="much"), "invalid-payload"),
        (order(client="eve"), "session 'eve'"),
    ],
)
def test_a_body_that_would_not_be_handled_is_refused(dead, body, says):
    before = letters(dead)
    result = dead("dead-letters", "edit", dead.target, number(dead, "m1"), "--body", body)
    assert result.code == 1
    assert says in result.err
    assert letters(dead) == before


def test_a_new_body_comes_from_a_file_or_standard_input(dead):
    letter = number(dead, "m1")
    (dead.folder / "new.json").write_text(order(amount=8))
    assert dead("dead-letters", "edit", dead.target, letter, "--file", "new.json").code == 0
    assert json.loads(letters(dead)[0]["body"])["amount"] == 8
    new = order(amount=9).encode()
    result = dead("dead-letters", "edit", dead.target, letter, "--file", "-", "--json", stdin=new)
    assert json.loads(result.out) == {"number": letter, "edited": True}
    assert json.loads(letters(dead)[0]["body"])["amount"] == 9
    both = ("--file", "new.json", "--body", "{}")
    assert dead("dead-letters", "edit", dead.target, letter, *both).code == 2
    assert dead("dead-letters", "edit", dead.target, letter, "--file", "none").code == 2


def test_a_letter_is_edited_in_the_editor(dead, monkeypatch):
    letter = number(dead, "m1")
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", "sed -i s/-1/6/")
    assert dead("dead-letters", "edit", dead.target, letter, "--by", "ada").code == 0
    document = letters(dead)[0]
    assert json.loads(document["body"])["amount"] == 6
    assert document["history"][0]["by"] == "ada"


@pytest.mark.parametrize(
    ("editor", "code", "says"),
    [
        ("true", 0, "unchanged"),
        ("false", 1, "exit code 1"),
        ("no-editor-of-this-name", 1, "cannot be started"),
    ],
)
def test_an_editor_that_changes_nothing_changes_nothing(dead, monkeypatch, editor, code, says):
    before = letters(dead)
    monkeypatch.setenv("VISUAL", editor)
    result = dead("dead-letters", "edit", dead.target, number(dead, "m1"))
    assert result.code == code
    assert says in result.out + result.err
    assert letters(dead) == before


# ---- replay and discard --------------------------------------------------------------------------


def test_all_that_match_are_replayed_and_the_refused_are_reported(dead):
    result = dead("dead-letters", "replay", dead.target, "--all", "--session", "bob", "--json")
    assert result.code == 1
    document = json.loads(result.out)
    assert document["queued"] == [number(dead, "m3")]
    (refused,) = document["refused"]
    assert refused["number"] == number(dead, "m4")
    assert "--as-new KEY" in refused["why"]
    again = dead("dead-letters", "replay", dead.target, number(dead, "m3"), number(dead, "m1"))
    assert again.code == 1
    assert "refused: dead letter 3 is queued for a replay already" in again.out
    assert "1: queued again" in again.out
    assert dead("dead-letters", "replay", dead.target, "--all", "--consumer", "files").code == 0


def test_a_conflict_is_replayed_under_a_key_of_its_own(dead):
    letter = number(dead, "m4")
    result = dead("dead-letters", "replay", dead.target, letter, "--as-new", "m4-b")
    assert (result.code, result.out) == (0, f"{letter}: queued again\n")
    dead.work()
    assert [int(amount) for _, amount in dead.module.ran] == [4, 5]
    blank = dead("dead-letters", "replay", dead.target, letter, "--as-new", " ")
    assert blank.code == 1


@pytest.mark.parametrize(
    "options",
    [[], ["1", "--all"], ["1", "--consumer", "orders"], ["x"], ["--all", "--reason", "x"]],
)
def test_a_replay_says_which_letters(dead, options):
    assert dead("dead-letters", "replay", dead.target, *options).code == 2


def test_a_discard_needs_a_reason_and_is_for_good(dead):
    first, second = number(dead, "m1"), number(dead, "m2")
    without = dead("dead-letters", "discard", dead.target, first)
    assert without.code == 2
    assert "--why" in without.err
    result = dead("dead-letters", "discard", dead.target, first, second, "--why", "a test order")
    assert result.code == 0
    again = dead("dead-letters", "discard", dead.target, first, "--why", "x", "--json")
    assert again.code == 1
    assert json.loads(again.out)["refused"][0]["why"] == f"dead letter {first} was discarded"
    kept = letters(dead, "--status", "discarded")
    assert [letter["history"][0]["why"] for letter in kept] == ["a test order"] * 2
    assert dead("dead-letters", "replay", dead.target, first).code == 1


def test_a_user_without_a_name_is_told_by_number(dead, monkeypatch):
    def nameless():
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    dead("dead-letters", "discard", dead.target, number(dead, "m1"), "--why", "x")
    (kept,) = letters(dead, "--status", "discarded")
    assert kept["history"][0]["by"] == f"uid {os.getuid()}"


@pytest.mark.parametrize("buffered", [True, False])
def test_a_closed_pipe_is_no_traceback(dead, buffered):
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run(
        [sys.executable, "-m", "procession.cli", "status", dead.target],
        stdout=write_end,
        stderr=subprocess.PIPE,
        check=False,
        cwd=dead.folder,
        env=os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"},
    )
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (1, b"")
