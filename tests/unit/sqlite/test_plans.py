"""A statement is served by the index that its comment names, in a database without statistics."""

import re
import sqlite3
from importlib.resources import files

import pytest

from procession.stores.sqlite.statements import migrations, statements

TEXT = (files("procession.stores") / "sql" / "sqlite" / "queries.sql").read_text("utf-8")
NAMED = re.findall(r"^-- name: (\w+)\n((?:--.*\n)*)", TEXT, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def database():
    connection = sqlite3.connect(":memory:")
    for _, _, text in migrations():
        connection.executescript(text)
    yield connection
    connection.close()


def indexes(connection):
    """Return the names of all indexes of ours, as comments write them."""
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'index' AND name LIKE 'procession%'"
    )
    return {name.removeprefix("procession_") for (name,) in rows}


@pytest.mark.parametrize(("name", "comment"), NAMED, ids=[name for name, _ in NAMED])
def test_a_statement_uses_the_index_that_its_comment_names(database, name, comment):
    sql = statements()[name]
    if not re.match(r"SELECT|UPDATE|DELETE", sql):
        return  # an INSERT finds its row by the constraint
    named = set(re.findall(r":(\w+)", re.sub(r"'[^']*'", "", sql)))
    values = dict.fromkeys(named, 1) if named else [1] * sql.count("?")
    rows = database.execute(f"EXPLAIN QUERY PLAN {sql}", values).fetchall()
    plan = "\n".join(row[3] for row in rows)
    for index in indexes(database):
        if re.search(rf"\b{index}\b", comment):
            assert re.search(rf"INDEX procession_{index}\b", plan), plan
    if "primary key" in comment:
        assert "PRIMARY KEY" in plan, plan
