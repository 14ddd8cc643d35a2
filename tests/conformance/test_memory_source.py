from procession.testing.conformance import SessionSourceSuite
from procession.transports.memory import MemoryBroker


class TestMemorySource(SessionSourceSuite):
    lock_ms = 10_000
    now_ms = 1_000_000

    def place(self, folder):
        self.broker = MemoryBroker(now_ms=lambda: self.now_ms, lock_ms=self.lock_ms)
        self.broker.declare(self.queue)
        return lambda: self.broker.source(self.queue)

    def put(self, *messages):
        self.run(self.broker.publisher().publish(messages))

    def pass_time(self, duration_ms):
        self.now_ms += duration_ms
