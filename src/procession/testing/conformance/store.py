"""What every store must do. An adapter's test file subclasses `StoreSuite`, gives what `StoreHooks`
asks for, and has all of it; see the package's docstring for one in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from procession.abc import Store
from procession.testing.conformance.attempts import Attempts
from procession.testing.conformance.batches import Batches
from procession.testing.conformance.brokers import Brokers
from procession.testing.conformance.dead_letters import DeadLetterKeeping
from procession.testing.conformance.fences import Fences
from procession.testing.conformance.handlers import Handlers
from procession.testing.conformance.histories import Histories
from procession.testing.conformance.leases import Leases
from procession.testing.conformance.lifecycle import Lifecycle
from procession.testing.conformance.order import Order
from procession.testing.conformance.sends import Sends
from procession.testing.conformance.stage import Stage
from procession.testing.conformance.upkeep import Keeping
from procession.testing.conformance.wakeups import Wakeups


class StoreSuite(
    Batches,
    Fences,
    Leases,
    Attempts,
    Order,
    Sends,
    Wakeups,
    Brokers,
    DeadLetterKeeping,
    Keeping,
    Handlers,
    Lifecycle,
    Histories,
):
    """Every promise of `procession.abc.Store` and what is made from it, a test each."""

    @pytest.fixture
    def stage(self, make_store: Callable[[], Store]) -> Iterator[Stage]:
        """Return a stage with a new store of the adapter."""
        stage = Stage(make_store, self)
        yield stage
        stage.close()
