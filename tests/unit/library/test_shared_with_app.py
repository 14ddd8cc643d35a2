"""One inbox for the library and an app's consumer of the same name, in either order."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.driving import Driver, ends, new_app, run_until_idle

from procession import (
    App,
    ConfigurationError,
    Conflict,
    Inbox,
    KeyDead,
    KeyWaits,
    Outbox,
    TransientError,
    Verdict,
)
from procession.flows.upkeep import prune_all
from procession.outcome import InboxState
from procession.runtime.drive import drive


@pytest.fixture
def got() -> list[Any]:
    return []


@pytest.fixture
def make(file: Path, tmp_path: Path, got: list[Any]) -> Iterator[Callable[..., App]]:
    """Return an app on the connections' file whose consumer `c` keeps what it consumed."""
    apps: list[App] = []

    def make(queue: str = "q", *, topic: bool = False) -> App:
        app = new_app(tmp_path)
        apps.append(app)
        if topic:
            app.topic(queue)

        @app.consumer(queue, name="c")
        def consume(payload: dict) -> None:
            if payload.get("fails"):
                raise ValueError("a bad one")
            got.append(payload["n"])

        return app

    yield make
    for app in apps:
        app.close()


def once(connection: sqlite3.Connection, key: str, payload: Any) -> bool:
    with Inbox(connection, consumer="c").once(key, payload=payload) as first:
        pass
    connection.commit()
    return bool(first)


def test_what_the_app_processed_is_a_duplicate_for_the_library(
    connection: sqlite3.Connection, make: Callable[..., App]
) -> None:
    app = make()
    app.send("q", {"n": 1}, message_id="m1")
    run_until_idle(app)
    assert not once(connection, "m1", {"n": 1})
    with pytest.raises(Conflict):
        once(connection, "m1", {"n": 2})


def test_what_the_library_recorded_is_a_duplicate_for_the_app(
    connection: sqlite3.Connection, make: Callable[..., App], got: list[Any]
) -> None:
    app = make()
    app.open()
    assert once(connection, "m1", {"n": 1})
    app.send_many("q", [{"n": 1}, {"n": 2}], identify=lambda item: f"m{item['n']}")
    run_until_idle(app)
    assert got == [2]
    assert ends(app) == {"processed": 2, "duplicate": 1}


def test_Q08_a_dead_letter_of_the_app_is_not_run_past_its_replay(
    connection: sqlite3.Connection, make: Callable[..., App]
) -> None:
    app = make()
    app.send("q", {"fails": True}, message_id="m1")
    run_until_idle(app)
    with pytest.raises(KeyDead, match="dead letter"):
        once(connection, "m1", {"fails": True})
    with pytest.raises(Conflict):
        once(connection, "m1", {"fails": False})
    assert not connection.in_transaction


@pytest.mark.parametrize(
    ("state", "word"), [(InboxState.HELD, "held"), (InboxState.IN_PROGRESS, "in progress")]
)
def test_a_key_that_waits_in_the_app_is_to_be_asked_for_again(
    connection: sqlite3.Connection, state: InboxState, word: str
) -> None:
    once(connection, "m1", b"body")
    connection.execute("UPDATE procession_inbox SET state = ?", (state,))
    connection.commit()
    with pytest.raises(KeyWaits, match=word) as caught:
        once(connection, "m1", b"body")
    assert isinstance(caught.value, TransientError)


def test_status_and_recorded_see_a_consumer_of_the_library(
    connection: sqlite3.Connection, make: Callable[..., App]
) -> None:
    app = make("other")
    with Inbox(connection, consumer="billing").once("m1", payload=b"body"):
        pass
    with Inbox(connection, consumer="billing").once("m1", payload=b"body"):
        pass
    with Inbox(connection, consumer="billing").once("m1", payload=b"x", on_conflict="tell"):
        pass
    connection.commit()
    (status,) = [status for status in app.status() if status.consumer == "billing"]
    assert status.queue == ""
    assert status.counts == {("processed", ""): 1, ("duplicate", ""): 1, ("conflict", ""): 1}
    row = app.recorded("billing", "m1")
    assert row is not None
    assert row.end == "processed"


def test_pruning_forgets_old_keys_of_the_library_as_those_of_an_app(
    connection: sqlite3.Connection, make: Callable[..., App]
) -> None:
    app = make("other")
    app.open()
    once(connection, "old", b"body")
    connection.execute("UPDATE procession_inbox SET recorded_ms = 0")
    connection.commit()
    once(connection, "young", b"body")
    upkeep = drive(app.store.upkeep())
    assert drive(prune_all(upkeep, app.settings)) == 1
    drive(upkeep.close())
    assert app.recorded("c", "old") is None
    assert app.recorded("c", "young") is not None


def test_a_name_that_an_app_uses_for_another_queue_is_still_refused(
    make: Callable[..., App],
) -> None:
    first = make("other")
    first.open()
    first.close()
    with pytest.raises(ConfigurationError, match="reads 'other'"):
        make("q").open()


def test_keys_of_the_library_hold_for_the_app_that_takes_the_name_over(
    connection: sqlite3.Connection,
    tmp_path: Path,
    make: Callable[..., App],
    got: list[Any],
) -> None:
    assert once(connection, "m1", {"n": 1})
    with closing(new_app(tmp_path)) as sender:
        sender.queue("q", duplicate_window=timedelta(hours=1))
        sender.send("q", {"n": 3}, message_id="m3", after=timedelta(hours=1))
        sender.send("q", {"n": 1}, message_id="m1")
        sender.send("q", {"n": 2}, message_id="m2")
    app = make("q")
    with Driver(app) as driver:
        driver.run_ready()
    assert got == [2]
    (status,) = app.status()
    assert (status.queue, status.consumer, status.scheduled) == ("q", "c", 1)
    assert not once(connection, "m2", {"n": 2}), "the library goes on with the same keys"
    with Outbox(connection) as outbox:
        outbox.send("q", {"n": 4})
    connection.commit()
    app.skip_waits()
    run_until_idle(app)
    assert sorted(got) == [2, 3, 4]


def test_a_topic_can_be_given_to_a_consumer_of_the_library(
    connection: sqlite3.Connection, make: Callable[..., App], got: list[Any]
) -> None:
    assert once(connection, "m1", {"n": 1})
    app = make("news", topic=True)
    app.send_many("news", [{"n": 1}, {"n": 2}], identify=lambda item: f"m{item['n']}")
    run_until_idle(app)
    assert got == [2]


def test_nothing_can_be_sent_to_a_consumer_of_the_library(
    connection: sqlite3.Connection, make: Callable[..., App]
) -> None:
    once(connection, "m1", b"body")
    outbox = Outbox(connection)
    with pytest.raises(ConfigurationError):
        outbox.send("", 1)
    outbox.send("c", 1)
    with pytest.raises(ConfigurationError, match="not declared"):
        outbox.flush()


def test_the_verdict_is_what_the_apps_flow_would_say(connection: sqlite3.Connection) -> None:
    inbox = Inbox(connection, consumer="c")
    verdicts = []
    for payload in (b"one", b"one", b"two"):
        with inbox.once("m1", payload=payload, on_conflict="tell") as first:
            verdicts.append(first.verdict)
    assert verdicts == [Verdict.FRESH, Verdict.DUPLICATE, Verdict.CONFLICT]
