"""A file is sent line by line, once, whatever interrupts it."""

import json
import sqlite3

import pytest

from procession.app import application, loading


def write(shell, name, *lines):
    path = shell.folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def order(number, **more):
    return json.dumps({"id": f"o{number}", "client": "ann", "amount": "5", **more})


def waiting(shell):
    with sqlite3.connect(shell.folder / "shop.db") as connection:
        rows = connection.execute("SELECT message_id FROM procession_messages ORDER BY id")
        found = [row[0].decode() for row in rows]
    connection.close()
    return found


def send(shell, option, path, *options):
    return shell("send", shell.target, "orders", option, path, *options)


def test_each_json_line_is_a_message(shell):
    path = write(shell, "orders.jsonl", order(1), "", order(2))
    result = send(shell, "--lines", path)
    assert (result.code, result.out) == (0, "2 messages sent\n")
    assert waiting(shell) == ["orders.jsonl/1", "orders.jsonl/3"]


def test_each_csv_row_is_a_message_and_a_field_may_name_it(shell):
    path = write(shell, "o.csv", "id,client,amount,note", 'o1,ann,5,"a, b"', "o2,bob,6,")
    assert json.loads(send(shell, "--csv", path, "--id-field", "id", "--json").out)["sent"] == 2
    assert waiting(shell) == ["o1", "o2"]


def test_a_file_that_was_sent_is_not_sent_again(shell):
    path = write(shell, "orders.jsonl", order(1), order(2))
    send(shell, "--lines", path)
    assert "0 messages sent, after line 2" in send(shell, "--lines", path).out
    assert len(waiting(shell)) == 2
    send(shell, "--lines", path, "--again")
    assert len(waiting(shell)) == 4


def test_lines_that_were_added_are_sent_alone(shell):
    send(shell, "--lines", write(shell, "orders.jsonl", order(1)))
    send(shell, "--lines", write(shell, "orders.jsonl", order(1), order(2)))
    assert waiting(shell) == ["orders.jsonl/1", "orders.jsonl/2"]


def test_an_interrupted_send_resumes_and_sends_nothing_twice(shell, monkeypatch):
    monkeypatch.setattr(loading, "SEND_CHUNK", 3)
    path = write(shell, "orders.jsonl", *(order(number) for number in range(10)))
    chunks = []
    original = application.App.publisher

    def interrupted(app):
        chunks.append(1)
        publisher = original(app)
        send_marked = publisher.publish_marked

        async def fail_third(messages, **mark):
            chunks.append(1)
            if len(chunks) == 4:
                raise KeyboardInterrupt
            return await send_marked(messages, **mark)

        publisher.publish_marked = fail_third
        return publisher

    monkeypatch.setattr(application.App, "publisher", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loading.send_file(
            shell.module.app,
            path,
            form="lines",
            make=lambda text, key: shell.module.app.outgoing(
                "orders", shell.module.Order(**json.loads(text)), message_id=key
            ),
            queue="orders",
        )
    shell.module.app.close()
    monkeypatch.undo()
    monkeypatch.chdir(shell.folder)
    assert len(waiting(shell)) == 6
    assert "4 messages sent, after line 6" in send(shell, "--lines", path).out
    assert waiting(shell) == [f"orders.jsonl/{number}" for number in range(1, 11)]


@pytest.mark.parametrize(
    ("option", "lines", "said"),
    [
        ("--lines", [order(1), "{no json"], "line 2 is no JSON"),
        ("--lines", [order(1), '{"id": 1}'], "line 2"),
        ("--csv", ["id,client,amount", "o1,ann,5", "o2,ann"], "line 3 has 2 cells"),
        ("--csv", ["id,id", "1,2"], "name each column once"),
        ("--csv", ["id,client,amount", 'o1,"ann,5'], "is no CSV"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_what_came_before_is_sent(shell, option, lines, said):
    result = send(shell, option, write(shell, "bad.txt", *lines))
    assert result.code in (1, 2)
    assert said in result.err
    assert len(waiting(shell)) == (1 if lines[0] != "id,id" and "CSV" not in said else 0)


def test_a_file_that_is_not_there_or_not_text_is_told(shell):
    assert "cannot be read" in send(shell, "--lines", shell.folder / "none").err
    path = shell.folder / "latin.jsonl"
    path.write_bytes(b'{"id": "\xe4"}\n')
    assert "not UTF-8" in send(shell, "--lines", path).err


def test_a_file_excludes_a_payload(shell):
    path = write(shell, "orders.jsonl", order(1))
    assert send(shell, "--lines", path, "--id", "x").code == 2
