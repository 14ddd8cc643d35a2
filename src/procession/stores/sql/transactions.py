"""Short transactions outside of batches, as the shared parts of the server stores use them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from procession.stores.sql.sends import Run


class Transactions(Protocol):
    """A connection for one short transaction after another."""

    def write(self, what: str) -> AbstractContextManager[Run]:
        """Run the block in a transaction: committed at its end, or rolled back.

        Raises:
            StoreUnavailable: the server cannot be used now.
            Contention: another transaction was in the way, several times.
        """
        ...

    def read(self, what: str) -> AbstractContextManager[Run]:
        """Run the block's reads."""
        ...

    def close(self) -> None:
        """Close the connection. Harmless twice."""
        ...
