'''Conformance suites: what a store, a source or a publisher must do, a test for each promise of
`procession.abc`. They check an adapter from outside and know none.

An adapter's own test file is short:

    class TestSqliteStore(StoreSuite):
        """SQLite keeps every promise of a store."""

        own_table = "procession_inbox"

        def place(self, folder):
            return lambda: SqliteStore(f"sqlite:///{folder}/store.db")

        def outside(self, store, statement):
            with contextlib.closing(sqlite3.connect(store.path)) as connection, connection:
                return connection.execute(statement).fetchall()

A test that asks for what the adapter's `Features` deny is skipped and says why.
'''

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "attempts",
            "batches",
            "brokers",
            "dead_letters",
            "fences",
            "handlers",
            "histories",
            "leases",
            "lifecycle",
            "order",
            "publisher",
            "sends",
            "source",
            "stage",
            "upkeep",
            "wakeups",
        )
    )
)

# ruff: noqa: E402  the asserts of what follows are rewritten, so that a failure shows its values
from procession.testing.conformance.publisher import PublisherHooks, PublisherSuite
from procession.testing.conformance.source import SessionSourceSuite, SourceHooks, SourceSuite
from procession.testing.conformance.stage import StoreHooks
from procession.testing.conformance.store import StoreSuite

__all__ = [
    "PublisherHooks",
    "PublisherSuite",
    "SessionSourceSuite",
    "SourceHooks",
    "SourceSuite",
    "StoreHooks",
    "StoreSuite",
]
