"""Each promise broken in a history is told, and a good history is let pass."""

from procession.testing.checkers import History, Sent, violations

SENT = [Sent("m1", "a"), Sent("m2", "a"), Sent("m3", None)]


def good(**changes):
    history = History(
        sent=SENT,
        copies=3,
        effects={"m1": 1, "m2": 1, "m3": 1},
        applied={"a": ["m1", "m2"]},
        output={"a": ["m1", "m2"], "": ["m3"]},
        ends={"processed": 3},
    )
    for name, value in changes.items():
        setattr(history, name, value)
    return history


def promises(history):
    return {text.split(":")[0] for text in violations(history)}


def test_a_good_history_breaks_nothing():
    assert violations(good()) == []


def test_a_double_effect_is_found():
    assert promises(good(effects={"m1": 2, "m2": 1, "m3": 1})) == {"G1 effect once"}


def test_effects_out_of_order_are_found():
    assert promises(good(applied={"a": ["m2", "m1"]})) == {"G2 order"}


def test_a_late_effect_by_choice_is_no_disorder():
    history = good(
        applied={"a": ["m2", "m1"]}, output={"a": ["m2", "m1"], "": ["m3"]}, late=frozenset({"m1"})
    )
    assert violations(history) == []


def test_output_of_an_aborted_transaction_is_found():
    history = good(effects={"m1": 1, "m2": 1}, dead=frozenset({"m3"}))
    assert promises(history) == {"G4 consistent output"}


def test_missing_double_and_disordered_output_are_found():
    assert promises(good(output={"a": ["m1"], "": ["m3"]})) == {"G4 consistent output"}
    assert promises(good(output={"a": ["m1", "m1", "m2"], "": ["m3"]})) == {"G4 consistent output"}
    assert promises(good(output={"a": ["m2", "m1"], "": ["m3"]})) == {"G4 consistent output"}


def test_a_lost_message_is_found():
    history = good(effects={"m1": 1, "m2": 1}, output={"a": ["m1", "m2"]})
    assert promises(history) == {"G6 nothing lost"}


def test_a_miscounted_end_is_found():
    assert promises(good(ends={"processed": 2})) == {"G6 nothing lost"}


def test_a_dead_letter_that_took_effect_is_found():
    assert promises(good(dead=frozenset({"m1"}))) == {"G6 nothing lost"}
