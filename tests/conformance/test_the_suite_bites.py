import pytest
from tests.conformance import (
    broken,
    test_memory_publisher,
    test_memory_source,
    test_memory_store,
    test_sqlite_store,
)

from procession.testing.conformance import StoreSuite
from procession.testing.conformance.stage import Stage

SUITES = {
    "sqlite": test_sqlite_store.TestSqliteStore,
    "memory": test_memory_store.TestMemoryStore,
}
BOTH = ("sqlite", "memory")
FAILURE = (AssertionError, pytest.fail.Exception)

STORES = [
    (
        broken.ChecksThenInserts,
        "a_key_is_recorded_once_and_nothing_of_the_second_batch_is_left",
        ("sqlite",),
    ),
    (broken.ChecksThenInserts, "of_copies_that_run_at_the_same_moment_one_commits", ("sqlite",)),
    (
        broken.IgnoresDuplicates,
        "a_key_is_recorded_once_and_nothing_of_the_second_batch_is_left",
        BOTH,
    ),
    (broken.FoldsCase, "keys_are_told_apart_byte_by_byte", BOTH),
    (broken.MarksBeforeTheCommit, "a_rollback_after_the_flush_leaves_nothing", BOTH),
    (broken.SettlesBeforeTheCommit, "a_rollback_after_the_flush_leaves_nothing", BOTH),
    (broken.SettlesBeforeTheCommit, "a_lane_that_ends_before_its_commit_leaves_nothing", BOTH),
    (
        broken.SettlesBeforeTheCommit,
        "a_process_that_dies_before_its_commit_leaves_nothing",
        ("sqlite",),
    ),
    (broken.CommitsWithTheFlush, "a_rollback_after_the_flush_leaves_nothing", BOTH),
    (broken.HasNoFence, "after_a_release_and_another_owner_the_old_holder_commits_nothing", BOTH),
    (broken.ReusesHolders, "a_holder_is_never_used_again", BOTH),
    (broken.OwnsWhatOthersOwn, "own_leaves_out_what_another_holder_owns", BOTH),
    (broken.TakesOverTheLiving, "a_worker_that_renewed_meanwhile_is_left_alone", BOTH),
    (broken.TakesOverTheLiving, "a_worker_whose_lease_lasts_is_left_alone", BOTH),
    (broken.TakesOverTwice, "of_two_takeovers_at_once_one_succeeds", ("sqlite",)),
    (
        broken.CountsInnocents,
        "an_attempt_is_counted_before_its_run_and_for_its_message_alone",
        BOTH,
    ),
    (
        broken.CountsAfterTheRun,
        "an_attempt_is_counted_before_its_run_and_for_its_message_alone",
        BOTH,
    ),
    (broken.PagesByNumber, "a_scheduled_message_is_invisible_until_due_and_holds_nobody", BOTH),
    (broken.PagesByNumber, "a_late_commit_with_a_smaller_number_is_not_lost", ("memory",)),
    (broken.RetriesAtTheTail, "a_session_that_waits_keeps_its_order_and_delays_nobody", BOTH),
    (broken.ForgetsWakeups, "a_commit_between_an_empty_fetch_and_the_question_is_reported", BOTH),
    (broken.NeverRests, "an_idle_lane_comes_to_rest", BOTH),
    (broken.SendsToOneSubscriber, "a_topic_gives_each_subscriber_a_copy_of_its_own", BOTH),
    (broken.UndoesNothing, "undo_takes_back_the_handler_or_says_that_all_is_lost", BOTH),
    (broken.CannotBeInterrupted, "after_an_interruption_nothing_of_the_handler_has_effect", BOTH),
    (broken.ReplaysInSilence, "a_replay_is_queued_once_however_often_it_is_asked_for", BOTH),
    (broken.ReplaysConflicts, "a_conflict_is_replayed_under_a_new_key_alone", BOTH),
    (broken.ForgetsTooEarly, "a_key_is_remembered_for_its_retention_and_then_forgotten", BOTH),
    (broken.ForgetsWhatWaits, "a_key_stays_while_an_older_message_of_its_queue_waits", BOTH),
]
SOURCES = [
    (broken.SettlesOnReceipt, "what_was_not_settled_comes_again_when_its_lock_has_ended"),
    (broken.CompletesTheUnlocked, "a_stale_completion_is_passed_over"),
    (broken.CompletesTheUnlocked, "a_stale_abandonment_is_passed_over"),
    (broken.AbandonsToTheTail, "an_abandoned_message_comes_again_in_its_place"),
    (broken.KeepsWhatItHad, "close_gives_back_at_once_and_in_order"),
    (broken.SharesSessions, "a_session_in_hand_is_given_to_no_other_source"),
    (broken.HandsOutTheNewestFirst, "a_sessions_messages_come_in_its_order"),
    (broken.ForgetsDeliveries, "what_was_not_settled_comes_again_when_its_lock_has_ended"),
]
PUBLISHERS = [
    (broken.PublishesOneByOne, "of_a_call_that_fails_all_is_stored_or_nothing"),
    (broken.PublishesLater, "what_was_published_is_there_on_return"),
    (broken.PublishesBackwards, "many_at_once_are_all_there_and_in_order"),
]


def test_no_test_of_the_suite_hides_another():
    names = [name for part in StoreSuite.__mro__ for name in vars(part) if name.startswith("test_")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("adapter", "name", "store"),
    [
        pytest.param(adapter, name, store, id=f"{adapter.__name__}-{store}-{name}")
        for adapter, name, stores in STORES
        for store in stores
    ],
)
def test_the_store_suite_catches_a_broken_store(adapter, name, store, tmp_path, monkeypatch):
    play(store, broken.Sound, name, tmp_path / "sound")
    adapter.prepare(monkeypatch)
    with pytest.raises(FAILURE):
        play(store, adapter, name, tmp_path / "broken")


def play(store, adapter, name, folder):
    """Run one test of the suite on a store that is wrapped in an adapter."""
    folder.mkdir()
    suite = SUITES[store]()
    make_store = suite.place(folder)
    stage = Stage(lambda: adapter(make_store()), suite)
    try:
        getattr(suite, f"test_{name}")(stage)
    finally:
        stage.close()


@pytest.mark.parametrize(("adapter", "name"), SOURCES)
def test_the_source_suite_catches_a_broken_source(adapter, name, tmp_path):
    suite = test_memory_source.TestMemorySource
    play_on(suite(), broken.Wrapped, name, tmp_path)
    suite.patience_s = 0.1
    with pytest.raises(FAILURE):
        play_on(suite(), adapter, name, tmp_path)


@pytest.mark.parametrize(("adapter", "name"), PUBLISHERS)
def test_the_publisher_suite_catches_a_broken_publisher(adapter, name, tmp_path):
    suite = test_memory_publisher.TestMemoryPublisher
    play_on(suite(), broken.Wrapped, name, tmp_path)
    with pytest.raises(FAILURE):
        play_on(suite(), adapter, name, tmp_path)


def play_on(suite, adapter, name, folder):
    """Run one test of the suite on a source or publisher that is wrapped in an adapter."""
    make = suite.place(folder)
    getattr(suite, f"test_{name}")(lambda: adapter(make()))
