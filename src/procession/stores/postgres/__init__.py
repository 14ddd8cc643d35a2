"""The store on PostgreSQL."""

from procession.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
