from procession.abc import QueueDeclaration, Topology
from procession.stores.memory import MemoryStore
from procession.testing.conformance import PublisherSuite
from procession.transports.memory import MemoryBroker


class TestMemoryPublisher(PublisherSuite):
    def place(self, folder):
        self.broker = MemoryBroker(now_ms=lambda: 1_000_000)
        self.broker.declare(self.queue)
        return self.broker.publisher

    def waiting(self):
        return self.run(self.broker.source(self.queue).receive(1_000))


class TestMemoryTablePublisher(PublisherSuite):
    def place(self, folder):
        self.store = MemoryStore()
        queue = QueueDeclaration(name=self.queue, kind="queue")
        self.run(self.store.declare(Topology(queues=(queue,), consumers=((self.queue, "ship"),))))
        return lambda: self.run(self.store.publisher())

    def waiting(self):
        subscription = self.store.subscription("ship")
        rows = sorted(subscription.rows.values(), key=lambda row: row.position)
        return [self.store.read(subscription, row) for row in rows]
