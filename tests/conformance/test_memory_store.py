from procession.stores.memory import MemoryClock, MemoryStore
from procession.testing.conformance import StoreSuite


class Clock(MemoryClock):
    def __init__(self):
        self.passed_ms = 0

    def lease_ms(self):
        return 1_000_000 + self.passed_ms

    def wall_ms(self):
        return 1_800_000_000_000 + self.passed_ms


class TestMemoryStore(StoreSuite):
    moment_ms = 10_000

    def place(self, folder):
        self.clock = Clock()
        store = MemoryStore(clock=self.clock)
        return lambda: store

    def pass_time(self, duration_ms):
        self.clock.passed_ms += duration_ms

    def effect(self, lane, name):
        lane.mark()
        lane.sql.connection.add(name)

    def effects(self, store):
        return sorted(name for name, number in store.effects.items() for _ in range(number))
