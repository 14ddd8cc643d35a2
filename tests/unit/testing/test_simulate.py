"""`testing.simulate` lets sound handlers pass and finds those that are not."""

import sqlite3

import pytest

from procession import App, Context, testing
from procession.errors import ConfigurationError

SETUP = """
CREATE TABLE accounts (id TEXT PRIMARY KEY, balance INTEGER NOT NULL, last INTEGER NOT NULL);
INSERT INTO accounts VALUES ('a', 0, 0), ('b', 0, 0), ('c', 0, 0);
CREATE TABLE payments (id TEXT);
"""
MESSAGES = [
    ("payments", {"account": account, "amount": number * 10 + place, "number": number})
    for number in range(1, 6)
    for place, account in enumerate("abc")
]


def new_app(handler):
    app = App("t", store="sqlite:///never-made.db")
    app.topic("receipts")
    app.consumer("payments", name="pay", session="account")(handler)
    app.consumer("receipts", name="print")(lambda payload: None)
    return app


def sound(payload: dict, ctx: Context):
    ctx.execute(
        "UPDATE accounts SET balance = balance * 3 + :amount, last = :number WHERE id = :account",
        payload,
    )
    ctx.write(
        "INSERT INTO payments (id) VALUES (:id)", id=f"{payload['account']}{payload['number']}"
    )
    ctx.send("receipts", payload, message_id=f"r-{ctx.message.id}")


def test_a_sound_handler_passes_whatever_happens():
    report = testing.simulate(new_app(sound), MESSAGES, setup=SETUP, seeds=range(25))
    assert report.seeds == 25
    assert min(report.crashes, report.failures, report.losses, report.duplicates) > 5


def test_a_sound_async_handler_passes_too():
    async def handler(payload: dict, ctx: Context):
        sound(payload, ctx)

    report = testing.simulate(new_app(handler), MESSAGES, setup=SETUP, seeds=range(10))
    assert report.crashes > 0


def found(handler, **options):
    with pytest.raises(testing.ViolationError) as caught:
        testing.simulate(new_app(handler), MESSAGES, setup=SETUP, seeds=range(60), **options)
    return str(caught.value)


def test_an_effect_outside_of_the_transaction_is_found(tmp_path):
    def handler(payload: dict, ctx: Context):
        path = ctx.execute("SELECT file FROM pragma_database_list").fetchone()[0]
        # A second connection would wait for the batch's lock for ever, so it writes elsewhere;
        # what it wrote is brought back as an effect to be compared.
        with sqlite3.connect(f"{path}-outside") as other:
            other.execute("CREATE TABLE IF NOT EXISTS mails (id)")
            other.execute("INSERT INTO mails VALUES (?)", (ctx.message.id,))
            number = other.execute("SELECT count(*) FROM mails").fetchone()[0]
        other.close()
        ctx.write("UPDATE accounts SET balance = :n", n=number)

    text = found(handler)
    assert text.startswith("seed ")
    assert "accounts" in text
    assert "What led to it:" in text


def test_a_handler_that_counts_its_runs_is_found():
    runs = []

    def handler(payload: dict, ctx: Context):
        runs.append(1)
        ctx.write("INSERT INTO payments (id) VALUES (:id)", id=f"{len(runs) > len(MESSAGES)}")

    assert "payments" in found(handler)


def test_a_handler_that_depends_on_the_order_between_sessions_is_found():
    def handler(payload: dict, ctx: Context):
        ctx.write("UPDATE accounts SET balance = balance * 3 + :n", n=payload["amount"])

    assert "accounts: " in found(handler, faults=testing.Faults(crash=0, fail=0, lose=0))


def test_columns_that_may_differ_are_ignored():
    def handler(payload: dict, ctx: Context):
        ctx.write("UPDATE accounts SET last = abs(random()) WHERE id = :account", payload)

    assert "accounts" in found(handler)
    testing.simulate(
        new_app(handler), MESSAGES, setup=SETUP, seeds=range(5), ignore=["accounts.last"]
    )
    testing.simulate(new_app(handler), MESSAGES, setup=SETUP, seeds=range(5), ignore=["accounts"])


def test_one_seed_repeats():
    def handler(payload: dict, ctx: Context):
        ctx.write("UPDATE accounts SET balance = balance * 3 + :n", n=payload["amount"])

    first, second = found(handler), found(handler)
    assert first.splitlines()[0] == second.splitlines()[0]


def test_messages_may_be_sent_by_a_function():
    def send(app):
        app.send("payments", MESSAGES[0][1], message_id="one")

    assert testing.simulate(new_app(sound), send, setup=SETUP, seeds=[1]).seeds == 1


def test_nothing_sent_is_told():
    with pytest.raises(ConfigurationError, match="nothing was sent"):
        testing.simulate(new_app(sound), [], setup=SETUP)
