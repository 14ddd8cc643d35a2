"""What a handler may do on the lane's connection: statements of the batch's transaction, and
nothing that ends it, reaches outside of it, or touches the store's own tables.
"""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from procession.abc import Changes, Lane
from procession.errors import ProcessionError, TransactionMisuse
from procession.testing.conformance.stage import TABLE, Stage, StoreHooks

INSERT = f"INSERT INTO {TABLE} (name) VALUES (:name)"  # noqa: S608  a name of ours
SELECT = f"SELECT name FROM {TABLE} WHERE name >= :from ORDER BY name"  # noqa: S608
INTERRUPT_S_MAX = 10.0


class Handlers(StoreHooks):
    """Undo, database errors, misuse, and the end by interruption."""

    # Undo.

    def test_undo_takes_back_one_handler_and_keeps_the_batch(self, stage: Stage) -> None:
        if not stage.features.savepoints:
            pytest.skip("this store undoes whole batches")
        lane = _open(stage)
        stage.effect(lane, "e1")
        stage.effect(lane, "e2")
        assert stage.run(lane.undo())
        stage.effect(lane, "e3")
        lane.mark()
        assert stage.run(lane.undo())
        stage.effect(lane, "e4")
        assert stage.run(lane.undo())
        assert stage.run(lane.undo())
        stage.commit(lane, Changes())
        assert stage.effects() == ["e1", "e3"]

    def test_undo_takes_back_the_handler_or_says_that_all_is_lost(self, stage: Stage) -> None:
        lane = _open(stage)
        stage.effect(lane, "e1")
        stage.effect(lane, "e2")
        if stage.run(lane.undo()):
            stage.commit(lane, Changes())
            assert stage.effects() == ["e1"]
        else:
            stage.run(lane.rollback())
            assert stage.effects() == []

    def test_a_handler_that_wrote_nothing_costs_nothing_to_undo(self, stage: Stage) -> None:
        lane = _open(stage)
        stage.effect(lane, "e1")
        lane.mark()
        assert stage.run(lane.undo())
        stage.commit(lane, Changes())
        assert stage.effects() == ["e1"]

    # Statements.

    def test_a_handler_reads_its_own_writes_as_tuples(self, stage: Stage) -> None:
        lane = _sql(stage)
        assert lane.sql.execute(INSERT, {"name": "e1"}).rowcount == 1
        lane.sql.write(INSERT, {"name": "e2"})
        rows = lane.sql.execute(SELECT, {"from": ""})
        assert rows.fetchone() == ("e1",)
        assert rows.fetchall() == [("e2",)]
        assert stage.effects() == []
        stage.commit(lane, Changes())
        assert stage.effects() == ["e1", "e2"]

    def test_a_statement_outside_of_the_transaction_is_refused(self, stage: Stage) -> None:
        lane = _sql(stage)
        lane.sql.execute(INSERT, {"name": "e1"})
        stage.run(lane.rollback())
        for end in (lane.rollback, lane.commit):
            with pytest.raises(TransactionMisuse):
                lane.sql.execute(INSERT, {"name": "late"})
            with pytest.raises(TransactionMisuse), lane.sql.savepoint():
                pass
            stage.run(lane.begin())
            stage.run(end())
        assert stage.effects() == []

    def test_an_uncaught_database_error_dooms_the_handler_and_no_other(self, stage: Stage) -> None:
        lane = _sql(stage)
        stage.effect(lane, "e1")
        lane.mark()
        lane.sql.execute(INSERT, {"name": "e2"})
        with pytest.raises(Exception, match=r".") as caught:  # the driver's own error
            lane.sql.execute(INSERT, {"name": "e1"})
        assert not isinstance(caught.value, ProcessionError)
        assert lane.sql.doomed is caught.value
        if stage.run(lane.undo()):
            assert lane.sql.lost is None
            lane.mark()
            assert _doomed(lane) is None
            lane.sql.execute(INSERT, {"name": "e3"})
            stage.commit(lane, Changes())
            assert stage.effects() == ["e1", "e3"]
        else:
            stage.run(lane.rollback())
            assert stage.effects() == []

    def test_an_error_caught_in_a_savepoint_takes_back_its_block_alone(self, stage: Stage) -> None:
        lane = _sql(stage)
        lane.sql.execute(INSERT, {"name": "e1"})
        with contextlib.suppress(Exception), lane.sql.savepoint():
            lane.sql.execute(INSERT, {"name": "e2"})
            lane.sql.execute(INSERT, {"name": "e1"})
        assert lane.sql.doomed is None
        with lane.sql.savepoint():
            lane.sql.execute(INSERT, {"name": "e3"})
            with contextlib.suppress(ZeroDivisionError), lane.sql.savepoint():
                lane.sql.execute(INSERT, {"name": "e4"})
                raise ZeroDivisionError
            lane.sql.execute(INSERT, {"name": "e5"})
        stage.commit(lane, Changes())
        assert stage.effects() == ["e1", "e3", "e5"]

    def test_an_earlier_error_is_not_forgiven_by_a_savepoint(self, stage: Stage) -> None:
        lane = _sql(stage)
        lane.sql.execute(INSERT, {"name": "e1"})
        with pytest.raises(Exception, match=r".") as first:
            lane.sql.execute("SELECT nothing FROM nowhere", {})
        with pytest.raises(ZeroDivisionError), lane.sql.savepoint():
            raise ZeroDivisionError
        assert lane.sql.doomed is first.value
        stage.run(lane.rollback())

    def test_an_error_that_ends_the_transaction_loses_the_whole_batch(self, stage: Stage) -> None:
        if not self.ender:
            pytest.skip("no statement of this store does that")
        stage.send("m1", session="s")
        lane = _sql(stage)
        stage.effect(lane, "taken")
        stage.commit(lane, Changes())
        before = stage.picture("m1")
        for inside in (False, True):
            taken = stage.take(lane)
            stage.effect(lane, "e1")
            lane.mark()
            block = lane.sql.savepoint() if inside else contextlib.nullcontext()
            with pytest.raises(Exception, match=r"."), block:
                lane.sql.execute(self.ender, {})
            assert inside or lane.sql.doomed is not None
            with pytest.raises(ProcessionError):
                lane.sql.execute(INSERT, {"name": "in autocommit"})
            assert not stage.run(lane.undo())
            with pytest.raises(ProcessionError):
                stage.run(lane.flush(stage.changes(taken)))
            with pytest.raises(ProcessionError):
                stage.run(lane.commit())
            stage.run(lane.rollback())
            assert stage.picture("m1") == before
        assert stage.work(lane) == ["m1"]

    # Misuse.

    def test_a_handler_cannot_end_the_transaction_or_change_the_schema(self, stage: Stage) -> None:
        lane = _sql(stage)
        stage.effect(lane, "e1")
        own = self.own_table
        for statement in (
            *self.misuses,
            f"DELETE FROM {own}",  # noqa: S608
            f"INSERT INTO {own} SELECT * FROM {own}",  # noqa: S608
            f"DROP TABLE {own}",
        ):
            lane.mark()
            with pytest.raises(TransactionMisuse):
                lane.sql.execute(statement, {})
            assert isinstance(lane.sql.doomed, TransactionMisuse), statement
            with pytest.raises(TransactionMisuse):
                lane.sql.connection.execute(statement)
            assert stage.run(lane.undo()), statement
        stage.effect(lane, "e2")
        stage.commit(lane, Changes())
        assert stage.effects() == ["e1", "e2"]

    @pytest.mark.parametrize("method", ["commit", "rollback", "close"])
    def test_the_handlers_connection_does_not_end_the_transaction(
        self, stage: Stage, method: str
    ) -> None:
        lane = _sql(stage)
        stage.effect(lane, "e1")
        lane.mark()
        lane.sql.connection.execute(self.drivers_insert, {"name": "e2"})
        with pytest.raises(TransactionMisuse):
            getattr(lane.sql.connection, method)()
        assert isinstance(lane.sql.doomed, TransactionMisuse)
        if stage.run(lane.undo()):
            stage.commit(lane, Changes())
            assert stage.effects() == ["e1"]
        else:
            stage.run(lane.rollback())
            assert stage.effects() == []

    def test_without_a_transaction_there_is_nothing_to_commit(self, stage: Stage) -> None:
        lane = stage.lane()
        with pytest.raises(TransactionMisuse):
            stage.run(lane.commit())
        _open(stage, lane)
        stage.run(lane.rollback())
        with pytest.raises(TransactionMisuse):
            stage.run(lane.flush(Changes()))
        with pytest.raises(TransactionMisuse):
            stage.run(lane.commit())

    # Interruption.

    def test_after_an_interruption_nothing_of_the_handler_has_effect(self, stage: Stage) -> None:
        stage.send("m1", session="s")
        before = stage.picture("m1")
        lane = stage.lane()
        written, interrupted = threading.Event(), threading.Event()
        refused: list[Exception] = []

        def hang() -> None:
            taken = stage.take(lane)
            stage.effect(lane, "e1")
            written.set()
            interrupted.wait(INTERRUPT_S_MAX)
            for number in range(3):
                try:
                    stage.effect(lane, f"zombie{number}")
                    stage.run(lane.flush(stage.changes(taken)))
                    stage.run(lane.commit())
                except Exception as error:  # noqa: BLE001  collected
                    refused.append(error)
            stage.run(lane.rollback())

        thread = threading.Thread(target=hang)
        thread.start()
        assert written.wait(INTERRUPT_S_MAX)
        lane.interrupt()
        interrupted.set()
        thread.join(INTERRUPT_S_MAX)
        assert not thread.is_alive()
        assert len(refused) == 3
        assert stage.picture("m1") == before
        with pytest.raises(ProcessionError):
            stage.run(lane.begin())

    def test_an_interruption_ends_a_running_statement(self, stage: Stage) -> None:
        if not self.slow_statement:
            pytest.skip("no slow statement was given")
        lane = stage.lane()
        started = threading.Event()
        ended: list[BaseException] = []

        def hang() -> None:
            stage.run(lane.begin())
            stage.effect(lane, "e1")
            started.set()
            try:
                lane.sql.execute(self.slow_statement, {}).fetchall()
            except Exception as error:  # noqa: BLE001  collected
                ended.append(error)

        thread = threading.Thread(target=hang)
        thread.start()
        assert started.wait(INTERRUPT_S_MAX)
        time.sleep(0.1)
        lane.interrupt()
        thread.join(INTERRUPT_S_MAX)
        assert not thread.is_alive()
        assert len(ended) == 1
        assert stage.effects() == []
        other = stage.lane()
        stage.send("m1")
        assert stage.work(other) == ["m1"]


def _open(stage: Stage, lane: Lane | None = None) -> Lane:
    lane = lane or stage.lane()
    stage.run(lane.begin())
    lane.mark()
    return lane


def _doomed(lane: Lane) -> BaseException | None:
    return lane.sql.doomed


def _sql(stage: Stage) -> Lane:
    if not stage.features.sql:
        pytest.skip("this store has no SQL")
    return _open(stage)
