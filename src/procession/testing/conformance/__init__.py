'''Conformance suites: what a store, a source or a publisher must do, a test for each promise of
`procession.abc`. They check an adapter from outside and know none.

An adapter's own test file is short:

    class TestSqliteStore(StoreSuite):
        """SQLite keeps every promise of a store."""

        own_table = "procession_inbox"

        @pytest.fixture
        def make_store(self, tmp_path):
            return lambda: SqliteStore(f"sqlite:///{tmp_path}/store.db")

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
            "wakeups",
        )
    )
)

from procession.testing.conformance.stage import StoreHooks  # noqa: E402  asserts first
from procession.testing.conformance.store import StoreSuite  # noqa: E402

__all__ = ["StoreHooks", "StoreSuite"]
