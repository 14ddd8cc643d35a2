"""The SQLite store: every table in one file, one writer at a time, no server."""

from procession.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
