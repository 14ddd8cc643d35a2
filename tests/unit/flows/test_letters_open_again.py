"""A dead letter that was decided on is opened again by a new death, not by a copy."""

import pytest

from procession import App, Reject, testing
from procession.runtime.drive import drive


@pytest.fixture(params=["sqlite:///never-made.db", "memory://"], ids=["sqlite", "memory"])
def t(request):
    app = App("t", store=request.param)

    @app.consumer("q", name="c")
    def refuse(payload: dict):
        raise Reject(payload["why"])

    with testing.run(app) as running:
        running.app = app
        yield running


def letters(t):
    from procession.abc import DeadLetterFilter

    return t.app.dead_letters(DeadLetterFilter(status=None))


def die(t, why="first"):
    t.send("q", {"why": why}, message_id="m")
    t.drain()


def test_a_copy_of_a_discarded_letter_leaves_it_decided(t):
    die(t)
    t.app.discard_dead_letter(letters(t)[0].number, by="ann", why="not ours")
    die(t)
    (letter,) = letters(t)
    assert (letter.status, letter.copies) == ("discarded", 2)


def test_a_new_death_after_the_key_was_forgotten_opens_the_letter_again(t):
    die(t)
    t.app.discard_dead_letter(letters(t)[0].number, by="ann", why="not ours")
    upkeep = drive(t.app.store.upkeep())
    if t.app.database is None:
        t.app.store.subscription("c").inbox.clear()
    else:
        t.connection.execute("DELETE FROM procession_inbox")
    drive(upkeep.close())
    die(t)
    (letter,) = letters(t)
    assert (letter.status, letter.copies, letter.reason) == ("dead", 2, "rejected")
    assert letter.history[-1]["what"] == "died again"


def test_a_discarded_conflict_stays_decided(t):
    die(t)
    die(t, why="other")
    conflict = next(letter for letter in letters(t) if letter.reason == "conflict")
    t.app.discard_dead_letter(conflict.number, by="ann", why="known")
    die(t, why="other")
    found = next(letter for letter in letters(t) if letter.reason == "conflict")
    assert (found.status, found.copies) == ("discarded", 2)


def test_an_early_copy_of_an_edited_message_is_counted_on_its_letter(t):
    die(t)
    t.app.edit_dead_letter(letters(t)[0].number, '{"why": "mended"}', by="ann")
    die(t)
    (letter,) = letters(t)
    assert (letter.status, letter.copies) == ("dead", 2)
