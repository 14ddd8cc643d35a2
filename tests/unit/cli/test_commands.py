import json
import sqlite3
from decimal import Decimal

import pytest

import procession


def order(**fields):
    return json.dumps({"id": "o1", "client": "ada", "amount": 1} | fields)


# ---- send ----------------------------------------------------------------------------------------


def test_a_sent_message_is_handled_as_the_apps_own(shell):
    """The rule of its queue reads the consumer's type, and its type is the consumer's."""
    message_id = shell.send(order(), "--id", "m1", "--header", "tenant=acme=b")
    assert message_id == "m1"
    shell.module.app.send("orders", shell.module.Order("o1", "ada", Decimal("1.0")))
    shell.work()
    assert shell.module.ran == [("o1", Decimal(1))] * 2


def test_a_message_sent_again_under_its_id_takes_effect_once(shell):
    shell.send(order(), "--id", "m1")
    shell.send(order(note=""), "--id", "m2")
    shell.send('{"amount": 1.00, "client": "ada", "id": "o1"}', "--id", "m1")
    shell.work()
    assert len(shell.module.ran) == 2


def test_numbers_are_sent_exactly(shell):
    exact = "0.12345678901234567890123"
    shell.send(f'{{"id": "o1", "client": "ada", "amount": {exact}}}')
    shell.work()
    assert shell.module.ran == [("o1", Decimal(exact))]


def test_fields_that_the_consumer_does_not_know_are_sent_all_the_same(shell):
    shell.send(order(amount=-1, more={"a": 1}), "--id", "m1")
    shell.work()
    (letter,) = shell.module.app.dead_letters()
    assert json.loads(letter.body)["more"] == {"a": 1}
    shell.module.app.close()


def test_a_payload_comes_from_a_file_or_standard_input(shell):
    (shell.folder / "order.json").write_text(order(id="o2"))
    assert shell("send", shell.target, "orders", "--file", "order.json").code == 0
    assert shell("send", shell.target, "orders", "-", stdin=order(id="o3").encode()).code == 0
    binary = b"\x00\x01 raw"
    assert shell("send", shell.target, "files", "-", stdin=binary).code == 0
    shell.work()
    assert [ran[0] for ran in shell.module.ran[:2]] == ["o2", "o3"]
    assert shell.module.ran[2] == binary


def test_a_message_waits_for_its_time(shell):
    shell.send(order(), "--after", "3600")
    (_, orders) = json.loads(shell("status", shell.target, "--json").out)["consumers"]
    assert (orders["scheduled"], orders["waiting"]) == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["orders", "{"], 1, "undecodable"),
        (["orders", '{"id": "o1"}'], 1, "missing required field"),
        (["orders", '{"id": "o1", "id": "o2", "client": "a", "amount": 1}'], 1, "twice"),
        (["orders", order(), "--session", "bob"], 1, "session-mismatch"),
        (["orders", order(), "--id", " "], 1, "message id"),
        (["orders", order(), "--type", "Refund"], 1, "no handler for message type 'Refund'"),
        (["orderz", "{}"], 2, "'orderz' is not declared"),
        (["orders"], 2, "--file"),
        (["orders", order(), "--file", "order.json"], 2, "once"),
        (["orders", "--file", "none.json"], 2, "none.json cannot be read"),
        (["orders", order(), "--header", "tenant"], 2, "NAME=VALUE"),
        (["orders", order(), "--after", "-1"], 2, "--after"),
        (["orders", order(), "more"], 2, "more"),
        ([], 2, "QUEUE"),
    ],
)
def test_what_would_not_be_handled_is_not_sent(shell, arguments, code, says):
    result = shell("send", shell.target, *arguments)
    assert (result.code, result.out) == (code, "")
    assert says in result.err
    assert not any(status.waiting for status in shell.module.app.status())
    shell.module.app.close()


def test_a_queue_without_a_consumer_takes_any_json(shell):
    module = shell.write(
        """
        from datetime import timedelta
        from procession import App
        app = App("a", store="sqlite:///a.db")
        app.queue("q", session="client", duplicate_window=timedelta(hours=1))
        """
    )
    first = shell("send", f"{module}:app", "q", '{"client": "ada"}', "--id", "m1", "--json")
    again = shell("send", f"{module}:app", "q", '{"client": "ada"}', "--id", "m1", "--json")
    assert json.loads(first.out) == {"queue": "q", "message_id": "m1", "stored": True}
    assert json.loads(again.out) == {"queue": "q", "message_id": "m1", "stored": False}
    told = shell("send", f"{module}:app", "q", '{"client":"ada"}', "--id=m1")
    assert "not stored again" in told.err
    # Another payload under the id is a conflict, which the window must not hide.
    other = shell("send", f"{module}:app", "q", '{"client":1}', "--id=m1", "--json")
    assert json.loads(other.out)["stored"]
    refused = shell("send", f"{module}:app", "q", "{}")
    assert refused.code == 1
    assert "client" in refused.err


# ---- status --------------------------------------------------------------------------------------


def test_status_tells_what_waits_and_every_end(shell):
    for number, amount in enumerate([1, 2, -1]):
        shell.send(order(amount=amount), "--id", f"m{number}")
    shell.send(order(amount=1), "--id", "m0")
    shell.send(order(amount=9), "--id", "m0")
    shell.work()
    shell.send(order(), "--id", "m9")
    result = shell("status", shell.target)
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    # The run that was rejected did not commit.
    assert ["orders", "orders", "1", "0", "0", "0", "2", "1"] in lines
    assert ["orders", "processed", "-", "2"] in lines
    assert ["orders", "duplicate", "resent", "1"] in lines
    assert ["orders", "dead-lettered", "-", "2"] in lines
    document = json.loads(shell("status", shell.target, "--json").out)
    ended = next(c for c in document["consumers"] if c["consumer"] == "orders")["ended"]
    assert ended["duplicate"] == {"total": 1, "causes": {"resent": 1}}
    assert {end.value for end in procession.End} == set(ended)


def test_status_of_a_store_without_work_is_a_table_too(shell):
    result = shell("status", shell.target)
    assert result.code == 0
    assert "orders" in result.out


# ---- migrate -------------------------------------------------------------------------------------


def schema(shell):
    with sqlite3.connect(shell.folder / "shop.db") as connection:
        rows = connection.execute("SELECT value FROM procession_meta WHERE name = 'schema'")
        return rows.fetchone()[0]


def test_migrate_makes_the_tables_and_says_so(shell):
    result = shell("migrate", shell.target)
    assert (result.code, schema(shell)) == (0, 1)
    assert "schema version 0 -> 1" in result.out
    assert "is up to date" in shell("migrate", shell.target).out


def test_printed_migrations_are_all_that_a_database_needs(shell):
    result = shell("migrate", shell.target, "--print")
    assert result.code == 0
    assert not (shell.folder / "shop.db").exists()
    with sqlite3.connect(shell.folder / "shop.db") as connection:
        connection.executescript(f"BEGIN; {result.out} COMMIT;")
    assert shell("migrate", shell.target, "--print").out == ""
    assert "version 1 is up to date" in shell("migrate", shell.target).out
    shell.send(order())
    shell.work()
    assert len(shell.module.ran) == 1


def test_a_newer_schema_is_refused_by_every_command(shell):
    shell("migrate", shell.target)
    with sqlite3.connect(shell.folder / "shop.db") as connection:
        connection.execute("UPDATE procession_meta SET value = 99 WHERE name = 'schema'")
    for command in (
        ("status", shell.target),
        ("migrate", shell.target),
        ("migrate", shell.target, "--print"),
        ("run", shell.target),
        ("send", shell.target, "orders", order()),
        ("dead-letters", "list", shell.target),
    ):
        result = shell(*command)
        assert result.code == 2
        assert "upgrade this one" in result.err


def test_a_store_that_cannot_be_reached_exits_3(shell):
    module = shell.write(
        """
        from procession import App
        app = App("a", store="sqlite:///no/such/folder/a.db")
        @app.consumer("q", name="q")
        def q(payload: dict) -> None: ...
        """
    )
    for command in (["status"], ["run"], ["dead-letters", "list"]):
        result = shell(*command, f"{module}:app")
        assert result.code == 3
        assert result.err.startswith("procession: database /")
        assert "no/such/folder/a.db: the file cannot be opened" in result.err
        assert result.err.count("\n") == 1


# ---- the rest ------------------------------------------------------------------------------------


def test_an_app_without_consumers_is_not_run(shell):
    module = shell.write("from procession import App\napp = App('a', store='sqlite:///a.db')")
    result = shell("run", f"{module}:app")
    assert result.code == 2
    assert "has no consumer" in result.err


def test_wrong_options_exit_2(shell):
    assert shell("run", shell.target, "--log-level", "loud").code == 2
    assert shell("run", shell.target, "--processes", "0").code == 2
    assert shell("nonsense").code == 2
    assert shell("status", shell.target, "--nonsense").code == 2


def test_help_shows_examples_of_every_command(shell):
    for command in (
        ["run"],
        ["send"],
        ["status"],
        ["migrate"],
        *(["dead-letters", name] for name in ("list", "show", "edit", "replay", "discard")),
    ):
        result = shell(*command, "--help")
        assert result.code == 0
        assert f"    procession {' '.join(command)} orders:app" in result.out
    listed = shell("--help").out
    assert "dead-letters" in listed
    assert "\n  worker " not in listed
    assert shell("--version").out == f"procession {procession.__version__}\n"


def test_the_demo_gets_its_options(shell):
    result = shell("demo", "--help")
    assert result.code == 0
    assert "--kills" in result.out
    assert shell("demo", "--kills", "many").code == 2
