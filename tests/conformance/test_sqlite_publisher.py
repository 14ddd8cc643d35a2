import pytest

from procession.abc import QueueDeclaration, Topology, WorkerRecord
from procession.stores.sqlite import SqliteStore
from procession.testing.conformance import PublisherSuite


class TestSqlitePublisher(PublisherSuite):
    @pytest.fixture
    def make_publisher(self, tmp_path):
        self.store = SqliteStore(f"sqlite:///{tmp_path}/store.db?synchronous=off")
        self.run(self.store.open())
        queue = QueueDeclaration(name=self.queue, kind="queue")
        self.run(self.store.declare(Topology(queues=(queue,), consumers=((self.queue, "ship"),))))
        workers = self.run(self.store.workers())
        worker = WorkerRecord(
            id="reader", lease_ms=60_000, host="here", process=1, consumers=("ship",)
        )
        self.run(workers.register(worker))
        self.run(workers.close())
        yield lambda: self.run(self.store.publisher())
        self.run(self.store.close())

    def waiting(self):
        lane = self.run(self.store.lane("ship", worker="reader", number=1))
        self.run(lane.begin())
        deliveries = self.run(lane.fetch(1_000)).deliveries
        self.run(lane.close())
        return deliveries
