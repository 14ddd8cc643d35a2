import psycopg
import pytest
from tests.services import postgres_schema

from procession.stores.postgres import PostgresStore
from procession.testing.conformance import StoreSuite


class TestPostgresStore(StoreSuite):
    # A server on a busy machine takes its time, and a moment is to be far longer than that.
    moment_ms = 1_000
    drivers_insert = "INSERT INTO conformance_effects (name) VALUES (%(name)s)"
    own_table = "procession_inbox"
    slow_statement = "SELECT pg_sleep(60)"
    misuses = (
        *StoreSuite.misuses,
        "/* a comment */ COMMIT",
        "SET search_path = public",
        "SELECT set_config('lock_timeout', '0', false)",
        "TRUNCATE conformance_effects",
        "DO $$ BEGIN NULL; END $$",
    )

    @pytest.fixture
    def make_store(self):
        with postgres_schema() as url:
            # Not what is tested here, and a third of the time.
            yield lambda: PostgresStore(f"{url}%20-csynchronous_commit%3Doff")

    def outside(self, store, statement):
        with psycopg.connect(store.place.conninfo, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def make_schema_newer(self, store):
        self.outside(store, "UPDATE procession_meta SET value = value + 1 WHERE name = 'schema'")
        return True
