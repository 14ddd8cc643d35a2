import pytest
from tests.services import postgres_schema

from procession.abc import QueueDeclaration, Topology, WorkerRecord
from procession.stores.postgres import PostgresStore
from procession.testing.conformance import PublisherSuite


class TestPostgresPublisher(PublisherSuite):
    @pytest.fixture
    def make_publisher(self):
        with postgres_schema() as url:
            self.store = PostgresStore(url)
            self.run(self.store.open())
            queue = QueueDeclaration(name=self.queue, kind="queue")
            declared = Topology(queues=(queue,), consumers=((self.queue, "ship"),))
            self.run(self.store.declare(declared))
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
        found = []
        for _ in range(50):
            self.run(lane.accept(1_000))
            self.run(lane.begin())
            fetched = list(self.run(lane.fetch(1_000)).deliveries)
            self.run(lane.rollback())
            if len(fetched) == len(found):
                break
            found = fetched
        self.run(lane.close())
        return found
