"""NOTIFY is sent outside of transactions, and only if a lane sleeps."""

import psycopg
import pytest
from tests.services import postgres_schema

from procession.abc import QueueDeclaration, Topology, WorkerRecord
from procession.message import BodyFormat, Outgoing
from procession.runtime.drive import drive
from procession.stores.postgres import PostgresStore


@pytest.fixture
def store():
    with postgres_schema() as url:
        store = PostgresStore(url)
        drive(store.open())
        drive(
            store.declare(
                Topology(
                    queues=(QueueDeclaration(name="orders", kind="queue"),),
                    consumers=(("orders", "ship"),),
                )
            )
        )
        yield store
        drive(store.close())


@pytest.fixture
def lane(store):
    workers = drive(store.workers())
    drive(
        workers.register(
            WorkerRecord(id="w", lease_ms=60_000, host="h", process=1, consumers=("ship",))
        )
    )
    lane = drive(store.lane("ship", worker="w", number=1))
    yield lane
    drive(lane.close())
    drive(workers.close())


@pytest.fixture
def heard(store):
    """Return what was notified since it was asked last."""
    with psycopg.connect(store.place.conninfo, autocommit=True) as connection:
        row = connection.execute("SELECT id FROM procession_subscriptions").fetchone()
        connection.execute(f"LISTEN procession_{row[0]}")
        yield lambda: list(connection.notifies(timeout=0.2))


def send(store):
    publisher = drive(store.publisher())
    drive(publisher.publish([Outgoing("orders", b"m", b"s", "t", int(BodyFormat.RAW), b"")]))
    drive(publisher.close())


def test_a_send_notifies_nobody_while_nobody_sleeps(store, lane, heard):
    send(store)
    assert heard() == []


def test_a_send_wakes_a_lane_that_sleeps(store, lane, heard):
    drive(lane.doze())
    send(store)
    assert len(heard()) == 1


def test_a_lane_that_works_again_sleeps_no_more(store, lane, heard):
    drive(lane.doze())
    drive(lane.accept(10))
    send(store)
    assert heard() == []


def test_a_lane_looks_once_more_after_it_fell_asleep(store, lane):
    drive(lane.accept(10))
    drive(lane.begin())
    drive(lane.rollback())
    assert not drive(lane.changed())
    send(store)  # between the look and the sleep: nobody is there to be woken
    assert drive(lane.doze())
    assert drive(lane.changed())


def test_what_a_handler_sends_wakes_too(store, lane, heard):
    drive(lane.doze())
    sender = drive(store.lane("ship", worker="w", number=2))
    from procession.abc import Changes

    changes = Changes()
    changes.sends.append(Outgoing("orders", b"m", b"s", "t", int(BodyFormat.RAW), b""))
    drive(sender.begin())
    drive(sender.flush(changes))
    assert heard() == []
    drive(sender.commit())
    assert len(heard()) == 1
    drive(sender.close())
