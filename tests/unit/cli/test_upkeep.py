"""The commands that look after a store."""

import json
import sqlite3

OLD_MS = 30 * 86_400_000


def order(key, client="ann", amount="5"):
    return json.dumps({"id": key, "client": client, "amount": amount})


def document(result, code=0):
    assert result.code == code, result.err
    return json.loads(result.out)


def on_file(shell, statement, *parameters):
    with sqlite3.connect(shell.folder / "shop.db", isolation_level=None) as connection:
        found = connection.execute(statement, parameters).fetchall()
    connection.close()
    return found


def test_sessions_come_with_the_longest_backlog_first(shell):
    for number in range(3):
        shell.send(order(f"a{number}"))
    shell.send(order("b0", client="bob"))
    found = document(shell("sessions", shell.target, "--json"))["sessions"]
    assert [(row["session"], row["backlog"]) for row in found] == [("ann", 3), ("bob", 1)]
    table = shell("sessions", shell.target, "--session", "bob").out
    assert "bob" in table
    assert "ann" not in table


def test_an_empty_store_says_that_nothing_waits(shell):
    assert "no message waits" in shell("sessions", shell.target).out


def test_inbox_show_tells_how_a_key_ended(shell):
    shell.send(order("a0"), "--id", "key-1")
    assert shell("inbox", "show", shell.target, "key-1").code == 1
    shell.work()
    (row,) = document(shell("inbox", "show", shell.target, "key-1", "--json"))["rows"]
    assert (row["consumer"], row["ended"], row["state"]) == ("orders", "processed", "done")
    assert "processed" in shell("inbox", "show", shell.target, "key-1").out


def test_inbox_show_of_an_unknown_key_says_so(shell):
    result = shell("inbox", "show", shell.target, "nobody")
    assert result.code == 1
    assert "no consumer remembers key 'nobody'" in result.err


def test_prune_forgets_what_is_past_its_retention(shell):
    shell.send(order("a0"), "--id", "old")
    shell.work()
    on_file(shell, "UPDATE procession_inbox SET recorded_ms = recorded_ms - ?", OLD_MS)
    shell.send(order("a1"), "--id", "young")
    shell.work()
    assert document(shell("prune", shell.target, "--json")) == {
        "older_than_retention": 1,
        "forgotten": 1,
    }
    assert shell("inbox", "show", shell.target, "old").code == 1
    assert shell("inbox", "show", shell.target, "young").code == 0
    assert "0 keys forgotten" in shell("prune", shell.target).out


def test_purge_erases_a_key_and_leaves_no_trace_of_its_body(shell):
    shell.send(order("secret-1", amount="-1"), "--id", "key-1")
    shell.work()
    assert on_file(shell, "SELECT count(*) FROM procession_dead_letters") == [(1,)]
    found = document(
        shell("purge", shell.target, "--consumer", "orders", "--key", "key-1", "--yes", "--json")
    )
    assert found == {"messages": 0, "inbox": 1, "dead_letters": 1}
    for table in ("messages", "inbox", "dead_letters"):
        assert on_file(shell, f"SELECT count(*) FROM procession_{table}") == [(0,)]


def test_purge_erases_a_session(shell):
    shell.send(order("a0"))
    shell.send(order("b0", client="bob"))
    result = shell("purge", shell.target, "--consumer", "orders", "--session", "ann", "--yes")
    assert "1 waiting messages" in result.out
    found = document(shell("sessions", shell.target, "--json"))["sessions"]
    assert [row["session"] for row in found] == ["bob"]


def test_purge_asks_first_and_wants_one_thing(shell):
    refused = shell("purge", shell.target, "--consumer", "orders", "--key", "k", stdin=b"n\n")
    assert refused.code == 1
    both = shell("purge", shell.target, "--consumer", "c", "--key", "k", "--session", "s")
    assert both.code == 2
    assert "either --key or --session" in both.err


def test_doctor_finds_messages_of_a_consumer_that_the_code_lacks(shell):
    shell.send(order("a0"))
    on_file(shell, "UPDATE procession_subscriptions SET consumer = 'gone' WHERE queue = 'files'")
    shell.module.app._consumers.pop("files")
    shell.module.app._queues._queues.pop("files")
    on_file(
        shell,
        "INSERT INTO procession_messages (id, message_id, format, body, sent_ms) "
        "SELECT id * 8796093022208 + 999, x'61', 0, x'61', 1 FROM procession_subscriptions "
        "WHERE consumer = 'gone'",
    )
    found = document(shell("doctor", shell.target, "--json"), code=1)["findings"]
    wrong = [finding for finding in found if finding["severity"] == "wrong"]
    assert [finding["what"] for finding in wrong] == ["consumer gone"]
    assert "1 of its messages wait" in wrong[0]["said"]


def test_doctor_looks_at_settings_retention_disk_workers_and_backlog(shell):
    shell.send(order("a0", amount="-1"))
    shell.work()
    found = document(shell("doctor", shell.target, "--json"))["findings"]
    named = {finding["what"]: finding["severity"] for finding in found}
    assert {"lease", "retention", "disk", "workers", "backlog of orders"} <= named.keys()
    assert named["dead letters of orders"] == "look"
    assert "wait for a decision" in shell("doctor", shell.target).out


def test_health_says_whether_a_worker_runs(shell):
    assert document(shell("health", shell.target, "--json"), code=1)["healthy"] is False
    app = shell.module.app
    with app:
        found = document(shell("health", shell.target, "--json"))
        assert (found["healthy"], len(found["workers"])) == (True, 1)


def test_every_command_shows_an_example(shell):
    for command in ("sessions", "prune", "purge", "doctor", "health"):
        assert "Example" in shell(command, "--help").out
