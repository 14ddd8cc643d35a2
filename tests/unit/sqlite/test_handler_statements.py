"""What a handler may not do to the batch's transaction, however it is spelled."""

from __future__ import annotations

import pytest
from tests.driving import Driver, column, ends, run_until_idle, sql

from procession import Context

ENDS = [
    "COMMIT",
    "commit;",
    " /* x */ cOmMiT",
    "-- a comment\nCOMMIT",
    "\n\t COMMIT TRANSACTION",
    "END",
    "end transaction",
    "ROLLBACK",
    "rollback transaction",
    "BEGIN",
    "BEGIN IMMEDIATE",
    "SAVEPOINT mine",
    "RELEASE procession_handler",
    "ROLLBACK TO procession_handler",
    "ROLLBACK TO SAVEPOINT procession_user",
    "EXPLAIN COMMIT",
    "COMMIT /* procession */",
    "ROLLBACK /* procession */",
    "RELEASE procession_handler /* procession */",
    "SAVEPOINT procession_handler /* procession */",
]
SCHEMA = [
    "CREATE TABLE mine (a)",
    "CREATE TEMP TABLE mine (a)",
    "CREATE TABLE mine AS SELECT 1",
    "CREATE INDEX mine ON effect (n)",
    "CREATE VIEW mine AS SELECT 1",
    "CREATE TRIGGER mine AFTER INSERT ON effect BEGIN SELECT 1; END",
    "CREATE VIRTUAL TABLE mine USING fts5(a)",
    "DROP TABLE effect",
    "DROP TABLE IF EXISTS procession_inbox",
    "ALTER TABLE effect ADD COLUMN more",
    "REINDEX",
    "ANALYZE",
    "VACUUM",
    "VACUUM INTO 'copy.db'",
    "ATTACH ':memory:' AS mine",
    "DETACH main",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA foreign_keys(0)",
    "PRAGMA synchronous = OFF",
    "PRAGMA writable_schema = ON",
    "PRAGMA query_only = ON",
    "PRAGMA user_version = 7",
]
OUR_TABLES = [
    "DELETE FROM procession_messages",
    "delete from PROCESSION_MESSAGES",
    (
        'INSERT INTO "procession_inbox" (subscription, key, state, fingerprint, recorded_ms) '
        "VALUES (1, x'61', 3, x'61', 0)"
    ),
    "REPLACE INTO procession_meta VALUES ('number', 0)",
    "UPDATE main.procession_sessions SET held = 0",
    "WITH x AS (SELECT 1) UPDATE procession_workers SET lease_ms = 0",
    (
        "INSERT INTO procession_counts VALUES (1, 'processed', '', 99) "
        "ON CONFLICT DO UPDATE SET number = 99"
    ),
]


def run_one(app, bad):
    """Run three messages, of which the middle one does something forbidden."""

    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["n"] == 1:
            bad(ctx)

    app.consumer("q", name="c")(handle)
    app.send_many("q", [{"n": n} for n in range(3)], identify=lambda m: f"m{m['n']}")
    run_until_idle(app)


def run_all(app, statements, call):
    """Run one message a statement, a good one between any two; return what each ended with."""

    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["statement"] is not None:
            call(ctx, message["statement"])

    app.consumer("q", name="c")(handle)
    for n, statement in enumerate(statements):
        app.send("q", {"n": 1_000 + n, "statement": statement}, message_id=statement)
        app.send("q", {"n": n, "statement": None})
    run_until_idle(app)

    return {letter.message_id.decode(): letter.detail for letter in app.dead_letters()}


def swallow(ctx, statement):
    try:
        ctx.execute(statement)
    except Exception:  # noqa: BLE001  it swallows: the fault under test
        return


def swallow_in_savepoint(ctx, statement):
    with ctx.savepoint():
        swallow(ctx, statement)


CALLS = {
    "execute": lambda ctx, statement: ctx.execute(statement),
    "write": lambda ctx, statement: ctx.write(statement),
    "connection": lambda ctx, statement: ctx.connection.execute(statement),
    "swallowed": swallow,
    "in-savepoint": swallow_in_savepoint,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_handler_neither_ends_the_transaction_nor_touches_schema_settings_or_our_tables(
    make, call
):
    app = make()
    statements = ENDS + SCHEMA + OUR_TABLES

    told = run_all(app, statements, call)

    assert set(told) == set(statements)
    assert column(app, "SELECT n FROM effect ORDER BY n") == list(range(len(statements)))
    assert ends(app) == {"processed": len(statements), "dead-lettered": len(statements)}
    assert column(app, "SELECT name FROM sqlite_master WHERE name = 'mine'") == []
    for statement, detail in told.items():
        if not statement.startswith(("VACUUM", "DETACH", "EXPLAIN")):  # these SQLite refuses itself
            assert "a handler may not" in detail, statement


@pytest.mark.parametrize(
    "name",
    [
        "commit",
        "rollback",
        "close",
        "executescript",
        "cursor",
        "backup",
        "create_function",
        "set_authorizer",
        "isolation_level",
        "iterdump",
        "interrupt",
    ],
)
def test_the_connection_of_a_handler_has_nothing_that_ends_its_transaction(make, name):
    app = make()

    def bad(ctx):
        try:
            getattr(ctx.connection, name)()
        except Exception:  # noqa: BLE001  it swallows: the fault under test
            return

    run_one(app, bad)

    assert ends(app) == {"processed": 2, "dead-lettered": 1}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 2]
    assert name in app.dead_letters()[0].detail


@pytest.mark.parametrize(
    "statement",
    ["SELECT 1; COMMIT", "INSERT INTO effect (n) VALUES (9); DELETE FROM effect", ";COMMIT"],
)
def test_two_statements_in_one_text_run_neither_of_them(make, statement):
    app = make()

    run_one(app, lambda ctx: swallow(ctx, statement))

    assert ends(app) == {"processed": 2, "dead-lettered": 1}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 2]


ROLLBACKS = {
    "or-rollback": "INSERT OR ROLLBACK INTO effect (n, mark) VALUES (9, 'taken')",
    "trigger": "INSERT INTO effect (n) VALUES (666)",
}


@pytest.mark.parametrize("swallowed", [False, True, None], ids=["raised", "swallowed", "savepoint"])
@pytest.mark.parametrize("statement", ROLLBACKS.values(), ids=ROLLBACKS.keys())
def test_a_statement_that_rolls_the_transaction_back_fails_its_own_message_alone(
    make, statement, swallowed
):
    app = make()
    sql(app, "INSERT INTO effect (n, mark) VALUES (100, 'taken')")
    sql(
        app,
        "CREATE TRIGGER no BEFORE INSERT ON effect WHEN new.n = 666 "
        "BEGIN SELECT RAISE(ROLLBACK, 'not 666'); END",
    )

    def bad(ctx):
        if swallowed is False:
            ctx.execute(statement)
        elif swallowed:
            swallow(ctx, statement)
            swallow(ctx, "INSERT INTO effect (n) VALUES (9)")
        else:
            try:
                with ctx.savepoint():
                    ctx.execute(statement)
            except Exception:  # noqa: BLE001  it swallows: the fault under test
                swallow(ctx, "INSERT INTO effect (n) VALUES (9)")

    run_one(app, bad)

    assert ends(app) == {"processed": 2, "dead-lettered": 1}
    assert column(app, "SELECT n FROM effect ORDER BY n") == [0, 2, 100]
    assert column(app, "SELECT attempts FROM procession_dead_letters") == [3]


def test_X05_other_constraints_than_our_own_are_failures_never_duplicates(make):
    app = make()
    sql(app, "CREATE TABLE parent (id INTEGER PRIMARY KEY)")
    sql(app, "CREATE TABLE child (parent INTEGER REFERENCES parent, size INTEGER CHECK (size > 0))")
    sql(app, "INSERT INTO effect (mark) VALUES ('taken')")

    told = run_all(
        app,
        [
            "INSERT INTO child VALUES (7, 1)",
            "INSERT INTO child VALUES (NULL, 0)",
            "INSERT INTO effect (mark) VALUES ('taken')",
            (
                "INSERT INTO procession_inbox (subscription, key, state, fingerprint, recorded_ms) "
                "VALUES (1, x'61', 3, x'61', 0)"
            ),
        ],
        CALLS["execute"],
    )

    assert len(told) == 4
    assert ends(app) == {"processed": 4, "dead-lettered": 4}


def test_X05_a_deferred_constraint_that_fails_at_the_commit_fails_its_own_message_alone(make):
    app = make()
    sql(app, "CREATE TABLE parent (id INTEGER PRIMARY KEY)")
    sql(app, "CREATE TABLE child (p INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")

    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["n"] in (5, 17):
            ctx.execute("INSERT INTO child VALUES (7)")

    app.consumer("q", name="c")(handle)
    app.send_many("q", [{"n": n} for n in range(40)], identify=lambda m: f"m{m['n']}")
    run_until_idle(app)

    assert ends(app) == {"processed": 38, "dead-lettered": 2}
    assert column(app, "SELECT n FROM effect") == [n for n in range(40) if n not in (5, 17)]
    assert [letter.message_id for letter in app.dead_letters()] == [b"m5", b"m17"]
    for letter in app.dead_letters():
        assert (letter.attempts, letter.reason) == (3, "failed")
        assert "FOREIGN KEY" in letter.detail
    assert column(app, "SELECT max(attempts) FROM procession_dead_letters") == [3]


def test_a_send_to_a_topic_without_subscriber_fails_its_own_message_alone(make):
    app = make()
    app.topic("nobody")

    def handle(message: dict, ctx: Context):
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])
        if message["n"] == 3:
            ctx.send("nobody", {})

    app.consumer("q", name="c", session="s")(handle)
    app.send_many("q", [{"n": n, "s": "one"} for n in range(8)])
    run_until_idle(app)

    assert ends(app) == {"processed": 7, "dead-lettered": 1}
    assert "no subscriber" in app.dead_letters()[0].detail
    assert column(app, "SELECT n FROM effect") == [0, 1, 2, 4, 5, 6, 7]


def test_no_statement_runs_in_autocommit_after_the_transaction_was_rolled_back_outside(make):
    app = make()
    with Driver(app) as driver:
        seen = []

        def handle(message: dict, ctx: Context):
            ctx.execute("INSERT INTO effect (n) VALUES (1)")
            if not seen:
                driver.lane()._guard.open_gate()
                driver.lane()._connection.execute("ROLLBACK")
                driver.lane()._guard._guarded = True
            seen.append(1)
            swallow(ctx, "INSERT INTO effect (n) VALUES (2)")

        app.consumer("q", name="c")(handle)

    app.close()
    with Driver(app) as driver:
        app.send("q", {})
        driver.step()
        assert column(app, "SELECT n FROM effect") == []
        driver.run()

    assert column(app, "SELECT n FROM effect") == [1, 2]


def test_the_business_schema_may_be_read(make):
    app = make()
    found = []

    def good(ctx):
        found.append(ctx.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        found.append(ctx.execute("SELECT count(*) FROM procession_messages").fetchone()[0])
        found.append(ctx.execute("PRAGMA foreign_keys").fetchone()[0])

    run_one(app, good)

    assert found[0] > 5
    assert found[2] == 1
    assert ends(app) == {"processed": 3}
