"""A broker's messages on a real store: judged after a crash, held in order, given back."""

import pytest

from procession import App, Context, RetryPolicy, testing
from procession.flows.batch import LaneMemory
from procession.flows.consume import Consume
from procession.message import new_id
from procession.runtime.drive import drive
from procession.testing.clock import ManualClock
from procession.testing.run import register
from procession.transports.memory import MemoryBroker

SETUP = "CREATE TABLE seen (n INTEGER)"
LOCK_MS = 1_000


class Broken(Exception):
    pass


class Stand:
    """An app on SQLite whose queue is at a broker in memory."""

    def __init__(self, app, t, ran):
        self.app, self.t, self.ran = app, t, ran
        self.clock = ManualClock()
        self.broker = MemoryBroker(now_ms=self.clock.lease_ms, lock_ms=LOCK_MS)
        self.broker.declare("q")
        self.flows = []

    def send(self, number, session="a", **more):
        payload = {"n": number, **more}
        message = self.app.outgoing("q", payload, message_id=f"m{number}", session=session)
        drive(self.broker.publisher().publish([message]))

    def worker(self):
        name = new_id()
        register(self.app, name)
        lane = drive(self.app.store.lane("c", worker=name, number=0))
        memory = LaneMemory(
            settings=self.app.settings,
            clock=self.clock,
            instrument=self.app.instrument,
            draw=lambda: 0.5,
        )
        source = self.broker.source("q")
        flow = Consume(
            self.app.consumers["c"], lane, memory, features=self.app.store.features, source=source
        )
        self.flows.append((flow, lane, source))
        return flow

    def end(self, flow):
        """Close a worker as its runtime does after a fault."""
        _, lane, source = next(found for found in self.flows if found[0] is flow)
        drive(flow.close())
        drive(lane.close())
        drive(source.close())

    def drain(self, flow):
        for _ in range(200):
            if not drive(flow.step()) and not self.app.skip_waits():
                return
        pytest.fail("it does not come to rest")

    def seen(self):
        return [row[0] for row in self.t.connection.execute("SELECT n FROM seen ORDER BY rowid")]

    def counts(self):
        return dict(self.t.status["c"].counts)

    def left(self):
        return [item.message.message_id.decode() for item in self.broker.queues["q"]]


@pytest.fixture
def stand():
    app = App("t", store="sqlite:///never-made.db", retry=RetryPolicy(max_attempts=3))
    ran = []

    @app.consumer("q", name="c")
    def handle(payload: dict, ctx: Context):
        ran.append(payload["n"])
        ctx.write("INSERT INTO seen (n) VALUES (:n)", n=payload["n"])
        if ran.count(payload["n"]) <= payload.get("fails", 0):
            raise ValueError("as planned")

    with testing.run(app, setup=SETUP) as t:
        stand = Stand(app, t, ran)
        yield stand
        for _, lane, _ in stand.flows:
            drive(lane.close())


def test_each_message_takes_effect_once_and_leaves_the_broker(stand):
    for number in range(5):
        stand.send(number)
    stand.send(3)
    stand.drain(stand.worker())
    assert stand.seen() == [0, 1, 2, 3, 4]
    assert stand.left() == []
    assert stand.counts() == {("processed", ""): 5, ("duplicate", "resent"): 1}


def test_A01_a_settlement_that_fails_after_the_commit_leaves_a_duplicate_that_is_settled(stand):
    stand.send(1)
    flow = stand.worker()
    source = stand.flows[0][2]
    settle = source.settle

    async def fails(settlements):
        source.settle = settle
        raise Broken

    source.settle = fails
    with pytest.raises(Broken):
        drive(flow.step())
    assert stand.left() == ["m1"]
    stand.end(flow)
    stand.drain(stand.worker())
    assert stand.seen() == [1]
    assert stand.left() == []
    assert stand.counts() == {("processed", ""): 1, ("duplicate", "redelivered"): 1}


def test_a_lock_that_ended_is_told_apart_from_other_redeliveries(stand):
    stand.send(1)
    flow = stand.worker()
    source = stand.flows[0][2]

    async def lost(settlements):
        """The process dies before the broker hears of it."""

    source.settle = lost
    drive(flow.step())
    drive(stand.flows[0][1].close())
    stand.clock.advance(LOCK_MS + 1)
    stand.drain(stand.worker())
    assert stand.seen() == [1]
    assert stand.counts() == {("processed", ""): 1, ("duplicate", "lock_expired"): 1}


def test_X04_a_failed_message_is_held_in_the_store_and_its_session_waits_in_order(stand):
    stand.send(1, fails=2)
    stand.send(2)
    stand.send(3, session="b")
    flow = stand.worker()
    drive(flow.step())
    assert stand.left() == [], "what is held is settled at the broker"
    stand.send(4)
    stand.drain(flow)
    assert [n for n in stand.seen() if n != 3] == [1, 2, 4]
    assert sorted(stand.seen()) == [1, 2, 3, 4]


def test_a_copy_of_a_held_message_is_settled_and_not_run(stand):
    stand.send(1, fails=1)
    flow = stand.worker()
    drive(flow.step())
    stand.send(1, fails=1)
    stand.drain(flow)
    assert stand.seen() == [1]
    assert stand.counts() == {("processed", ""): 1, ("duplicate", "resent"): 1}


def test_a_message_that_never_succeeds_is_a_dead_letter_and_its_session_goes_on(stand):
    stand.send(1, fails=99)
    stand.send(2)
    stand.drain(stand.worker())
    assert stand.seen() == [2]
    (letter,) = stand.t.dead_letters
    assert (letter.reason, letter.message_id) == ("failed", b"m1")


def test_G04_what_is_in_hand_goes_back_when_the_flow_is_closed(stand):
    for number in range(3):
        stand.send(number)
    flow = stand.worker()
    flow._lines.add(drive(stand.flows[0][2].receive(10)))
    stand.end(flow)
    stand.drain(stand.worker())
    assert stand.seen() == [0, 1, 2]


def test_a_session_that_another_worker_owns_is_given_back_to_the_broker(stand):
    first = stand.worker()
    drive(stand.flows[0][1].own([b"a"]))
    stand.send(1)
    second = stand.worker()
    drive(second.step())
    assert stand.seen() == []
    assert stand.left() == ["m1"]
    drive(stand.flows[0][1].release([b"a"]))
    stand.clock.advance(LOCK_MS)
    stand.drain(second)
    assert stand.seen() == [1]
    drive(first.close())
