import contextlib
import sqlite3

from procession.stores.sqlite import SqliteStore
from procession.testing.conformance import StoreSuite


class TestSqliteStore(StoreSuite):
    own_table = "procession_inbox"
    misuses = (*StoreSuite.misuses, "PRAGMA synchronous = OFF", "ATTACH ':memory:' AS other")
    ender = "INSERT OR ROLLBACK INTO conformance_effects (name) VALUES ('taken')"
    slow_statement = """
        WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000)
        SELECT count(*) FROM n
    """

    def place(self, folder):
        return lambda: SqliteStore(f"sqlite:///{folder}/store.db?synchronous=off")

    def outside(self, store, statement):
        with contextlib.closing(sqlite3.connect(store.path)) as connection, connection:
            return connection.execute(statement).fetchall()

    def make_schema_newer(self, store):
        self.outside(store, "UPDATE procession_meta SET value = value + 1 WHERE name = 'schema'")
        return True
