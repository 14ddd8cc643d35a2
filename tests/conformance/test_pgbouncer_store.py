import itertools

import psycopg
import pytest
from tests.services import database

from procession.stores.postgres import PostgresStore
from procession.testing.conformance import StoreSuite

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def place():
    with database("pgbouncer") as found:
        yield found


class TestPostgresStoreBehindPgBouncer(StoreSuite):
    """A pooler in transaction mode: nothing of a session outlives a transaction there. The tables
    are in a schema that the search path does not name."""

    # A server on a busy machine takes its time, and a moment is to be far longer than that.
    moment_ms = 1_000
    drivers_insert = "INSERT INTO conformance_effects (name) VALUES (%(name)s)"
    slow_statement = "SELECT pg_sleep(60)"

    @pytest.fixture
    def make_store(self, place):
        schema = f"t{next(NUMBERS)}"
        self.own_table = f"{schema}.procession_inbox"
        yield lambda: PostgresStore(f"{place.url}?schema={schema}")
        with psycopg.connect(place.admin_url, autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS conformance_effects")
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")

    def outside(self, store, statement):
        with psycopg.connect(store.place.conninfo, autocommit=True) as connection:
            connection.prepare_threshold = None
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def make_schema_newer(self, store):
        self.outside(
            store,
            f"UPDATE {store.place.schema}.procession_meta SET value = value + 1 "
            "WHERE name = 'schema'",
        )
        return True
