import json
import random
import threading
from dataclasses import dataclass
from decimal import Decimal

import pytest
from tests.driving import Driver

from procession import App, MessageError, OperatorError, Reason, Reject, RetryPolicy, Settings
from procession.abc import DeadLetterFilter
from procession.outcome import InboxState

BY = "ada"
ONCE = RetryPolicy(max_attempts=1, first_ms=0)
STORES = ["memory://", "sqlite://"]


@dataclass
class Line:
    id: str
    order: str
    amount: Decimal


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return request.param if request.param == "memory://" else f"sqlite:///{tmp_path}/store.db"


def make_app(store, **options):
    settings = Settings(payload_max=10_000)
    return App("shop", store=store, settings=settings, retry=ONCE, **options)


def drain(app):
    """Handle everything that may run now."""
    with Driver(app) as driver:
        driver.run_ready()


class Shop:
    """An app whose handler records what it ran, and rejects amounts below zero."""

    def __init__(self, store, **rules):
        self.app = make_app(store)
        self.ran = []

        @self.app.consumer("lines", name="lines", session="order", **rules)
        def apply(line: Line, ctx) -> None:
            if line.amount < 0:
                raise Reject("an amount below zero")
            self.ran.append((line.id, str(line.amount), ctx.message.replayed))

    def send(self, id_, order, amount, **options):
        options.setdefault("message_id", id_)
        self.app.send("lines", Line(id_, order, Decimal(amount)), **options)

    def dead(self, **wanted):
        return self.app.dead_letters(DeadLetterFilter(**wanted))

    def edit(self, number, **fields):
        body = json.loads(self.app.dead_letter(number).body) | fields
        self.app.edit_dead_letter(number, json.dumps(body), by=BY)

    def replay(self, *numbers, **options):
        return self.app.replay_dead_letters(numbers, by=BY, **options)

    def state(self, key):
        row = self.app.recorded("lines", key)
        return None if row is None else InboxState(row.state)


@pytest.fixture
def shop(store):
    made = Shop(store)
    yield made
    made.app.close()


def killed(shop, id_="a", order="o", amount="-1"):
    shop.send(id_, order, amount)
    drain(shop.app)
    return shop.dead()[-1].number


# ---- edit ----------------------------------------------------------------------------------------


def test_a_mended_message_takes_effect_once_and_its_resend_is_a_duplicate(shop):
    number = killed(shop)
    # Spaces, another order of the keys and another spelling of the number: all the same message.
    text = '{ "order": "o",\n "id": "a", "amount": 12.50 }'
    shop.app.edit_dead_letter(number, text, by=BY)
    assert [outcome.queued for outcome in shop.replay(number)] == [True]
    drain(shop.app)
    shop.send("a", "o", "12.5")
    drain(shop.app)
    assert shop.ran == [("a", "12.5", True)]
    assert shop.dead() == []
    assert shop.app.dead_letter(number).status == "replayed"


def test_the_unmended_message_is_no_conflict_after_the_edit(shop):
    number = killed(shop)
    shop.edit(number, amount=1)
    shop.replay(number)
    drain(shop.app)
    shop.send("a", "o", "-1")
    drain(shop.app)
    assert shop.dead() == []
    assert len(shop.ran) == 1


def test_exact_numbers_survive_an_edit(shop):
    number = killed(shop)
    exact = "0.12345678901234567890123"
    text = f'{{"id": "a", "order": "o", "amount": {exact}}}'
    shop.app.edit_dead_letter(number, text, by=BY)
    shop.replay(number)
    drain(shop.app)
    assert shop.ran == [("a", exact, True)]


def test_a_payload_object_is_encoded_as_a_send_would(shop):
    number = killed(shop)
    shop.app.edit_dead_letter(number, Line("a", "o", Decimal("2.50")), by=BY)
    assert shop.app.dead_letter(number).body == b'{"amount":2.5,"id":"a","order":"o"}'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{", Reason.UNDECODABLE),
        ('{"id": "a", "order": "o"}', Reason.INVALID_PAYLOAD),
        ('{"id": "a", "order": "o", "amount": "much"}', Reason.INVALID_PAYLOAD),
        ('{"id": "a", "id": "b", "order": "o", "amount": 1}', Reason.UNDECODABLE),
        (b"\xff", Reason.UNDECODABLE),
        ("1" * 10_001, Reason.TOO_LARGE),
    ],
)
def test_a_body_that_the_consumer_would_refuse_is_refused(shop, body, reason):
    number = killed(shop)
    before = shop.app.dead_letter(number)
    with pytest.raises(MessageError) as refused:
        shop.app.edit_dead_letter(number, body, by=BY)
    assert refused.value.reason == reason
    assert shop.app.dead_letter(number) == before


def test_a_validator_guards_an_edit(store):
    def small(line):
        return line.amount < 100

    shop = Shop(store, validators=[small])
    number = killed(shop)
    with pytest.raises(MessageError, match="small refused it"):
        shop.edit(number, amount=1_000)
    shop.edit(number, amount=99)


def test_an_edit_cannot_make_another_message_of_it(store):
    shop = Shop(store, key="id")
    number = killed(shop)
    with pytest.raises(OperatorError, match="has the key 'b'"):
        shop.edit(number, id="b", amount=1)
    shop.edit(number, amount=1)


def test_an_edit_cannot_move_a_message_into_another_session(shop):
    number = killed(shop)
    with pytest.raises(OperatorError, match="belongs to session 'p'"):
        shop.edit(number, order="p", amount=1)


def test_a_message_without_a_key_gets_one_by_its_edit(store):
    app = make_app(store)
    ran = []

    @app.consumer("orders", name="orders", key="id")
    def order(payload: dict) -> None:
        ran.append(payload["id"])

    app.send("orders", {"amount": 1})
    drain(app)
    (letter,) = app.dead_letters()
    assert (letter.reason, letter.key) == (Reason.NO_KEY, None)
    app.edit_dead_letter(letter.number, '{"id": "a", "amount": 1}', by=BY)
    app.replay_dead_letters([letter.number], by=BY)
    drain(app)
    app.send("orders", {"id": "a", "amount": 1})
    drain(app)
    assert ran == ["a"]
    assert app.dead_letters() == []


def test_a_corrupted_body_of_raw_bytes_is_mended_as_json(store):
    """The producer sent bytes that no consumer reads; its later, right copy is a duplicate."""
    app = make_app(store)
    ran = []

    @app.consumer("orders", name="orders")
    def order(payload: dict) -> None:
        ran.append(payload)

    app.send("orders", b'{"amount": 1', message_id="a")
    drain(app)
    (letter,) = app.dead_letters()
    assert letter.reason == Reason.UNDECODABLE
    app.edit_dead_letter(letter.number, '{"amount" : 1.0}\n', by=BY)
    app.replay_dead_letters([letter.number], by=BY)
    drain(app)
    app.send("orders", {"amount": 1}, message_id="a")
    drain(app)
    assert ran == [{"amount": 1}]
    assert app.dead_letters() == []


def test_raw_bytes_are_stored_as_they_are(store):
    app = make_app(store)

    @app.consumer("files", name="files")
    def file(_body: bytes) -> None:
        raise Reject("no")

    app.send("files", b"\x00\x01")
    drain(app)
    (letter,) = app.dead_letters()
    app.edit_dead_letter(letter.number, b'{ "a": \xff}', by=BY)
    assert app.dead_letter(letter.number).body == b'{ "a": \xff}'


def test_a_letter_of_a_consumer_without_code_is_edited_unvalidated_but_canonical(tmp_path):
    shop = Shop(f"sqlite:///{tmp_path}/store.db")
    number = killed(shop)
    stranger = make_app(f"sqlite:///{tmp_path}/store.db")
    stranger.edit_dead_letter(number, ' {"order": "o", "id": "a", "amount": 3.0} ', by=BY)
    assert shop.app.dead_letter(number).body == b'{"amount":3,"id":"a","order":"o"}'
    shop.replay(number)
    drain(shop.app)
    shop.send("a", "o", "3")
    drain(shop.app)
    assert (shop.ran, shop.dead()) == ([("a", "3", True)], [])


def test_only_a_waiting_letter_is_edited(shop):
    number = killed(shop)
    shop.app.discard_dead_letter(number, by=BY, why="no use")
    with pytest.raises(OperatorError, match="was discarded"):
        shop.edit(number, amount=1)
    with pytest.raises(OperatorError, match="no dead letter 77"):
        shop.app.edit_dead_letter(77, "{}", by=BY)


# ---- replay --------------------------------------------------------------------------------------


def test_q01_concurrent_replays_give_one_run(tmp_path):
    shop = Shop(f"sqlite:///{tmp_path}/store.db")
    number = killed(shop)
    shop.edit(number, amount=1)
    outcomes = []
    apps = [Shop(f"sqlite:///{tmp_path}/store.db") for _ in range(5)]

    def replay(other):
        outcomes.extend(other.replay(number))
        outcomes.extend(other.replay(number))

    threads = [threading.Thread(target=replay, args=(other,)) for other in apps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    drain(shop.app)
    outcomes += shop.replay(number)
    drain(shop.app)
    assert [outcome.queued for outcome in outcomes].count(True) == 1
    assert shop.ran == [("a", "1", True)]
    assert "replayed" in outcomes[-1].why


def test_q03_a_bulk_replay_keeps_each_sessions_order(shop):
    sent = [(f"{order}{number}", order) for number in range(10) for order in "xyz"]
    for id_, order in sent:
        shop.send(id_, order, "-1")
    drain(shop.app)
    numbers = [letter.number for letter in shop.dead()]
    for number in numbers:
        shop.edit(number, amount=1)
    random.Random(7).shuffle(numbers)
    outcomes = shop.replay(*numbers)
    assert all(outcome.queued for outcome in outcomes)
    drain(shop.app)
    for order in "xyz":
        ran = [id_ for id_, *_ in shop.ran if id_.startswith(order)]
        assert ran == [id_ for id_, sent_order in sent if sent_order == order]


def test_q09_a_refused_replay_is_reported_and_the_others_go_on(shop):
    for id_ in "abc":
        shop.send(id_, id_, "-1")
    drain(shop.app)
    first, second, third = sorted(letter.number for letter in shop.dead())
    for number in (first, second, third):
        shop.edit(number, amount=1)
    shop.replay(second)
    outcomes = shop.replay(first, second, third, 99, first)
    assert {outcome.number: outcome.queued for outcome in outcomes} == {
        first: True,
        second: False,
        third: True,
        99: False,
    }
    why = {outcome.number: outcome.why for outcome in outcomes}
    assert "queued for a replay already" in why[second]
    assert "no dead letter 99" in why[99]
    drain(shop.app)
    assert sorted(id_ for id_, *_ in shop.ran) == ["a", "b", "c"]


def test_a_replay_that_fails_again_is_a_dead_letter_again(shop):
    number = killed(shop)
    shop.replay(number)
    drain(shop.app)
    letter = shop.app.dead_letter(number)
    assert letter.status == "dead"
    assert letter.history[0]["what"] == "replayed"
    shop.edit(number, amount=1)
    shop.replay(number)
    drain(shop.app)
    assert shop.ran == [("a", "1", True)]


def conflict(shop):
    shop.send("a", "o", "1")
    shop.send("a", "o", "2")
    drain(shop.app)
    (letter,) = shop.dead()
    assert letter.reason == Reason.CONFLICT
    return letter.number


def test_a_conflict_runs_only_under_a_key_of_its_own(shop):
    number = conflict(shop)
    (refused,) = shop.replay(number)
    assert "--as-new KEY" in refused.why
    (refused,) = shop.replay(number, as_new="a")
    assert "no message had" in refused.why
    shop.send("taken", "o", "5")
    drain(shop.app)
    (refused,) = shop.replay(number, as_new="taken")
    assert "known to consumer 'lines' already (done)" in refused.why
    (outcome,) = shop.replay(number, as_new="a2")
    assert outcome.queued
    drain(shop.app)
    assert [(id_, amount) for id_, amount, _ in shop.ran] == [
        ("a", "1"),
        ("taken", "5"),
        ("a", "2"),
    ]
    assert shop.state("a2") == InboxState.DONE


def test_a_new_key_is_a_valid_key_for_one_conflict(shop):
    number = conflict(shop)
    for key in ("", " ", "x" * 513, "a\0b"):
        with pytest.raises(MessageError) as refused:
            shop.replay(number, as_new=key)
        assert refused.value.reason == Reason.BAD_KEY
    with pytest.raises(OperatorError, match="for 2 dead letters"):
        shop.replay(number, number + 1, as_new="b")


def test_a_letter_that_is_no_conflict_keeps_its_key(shop):
    (refused,) = shop.replay(killed(shop), as_new="b")
    assert "needs no new key" in refused.why
    drain(shop.app)
    assert shop.state("b") is None


def test_a_conflict_of_a_business_key_is_edited_to_its_new_key(store):
    shop = Shop(store, key="id")
    number = conflict(shop)
    (refused,) = shop.replay(number, as_new="a2")
    assert "edit the body so that its key is 'a2'" in refused.why
    shop.edit(number, id="a2")
    (outcome,) = shop.replay(number, as_new="a2")
    assert outcome.queued
    drain(shop.app)
    assert [(id_, amount) for id_, amount, _ in shop.ran] == [("a", "1"), ("a2", "2")]


# ---- discard -------------------------------------------------------------------------------------


def test_a_discard_says_who_and_why_and_is_for_good(shop):
    number = killed(shop)
    for by, why in [("", "no use"), (" ", "no use"), (BY, ""), (BY, " \n")]:
        with pytest.raises(OperatorError):
            shop.app.discard_dead_letter(number, by=by, why=why)
    shop.app.discard_dead_letter(number, by=BY, why=" no use ")
    letter = shop.app.dead_letter(number)
    assert letter.status == "discarded"
    (entry,) = letter.history
    assert (entry["by"], entry["why"]) == (BY, "no use")
    (refused,) = shop.replay(number)
    assert "was discarded" in refused.why
    with pytest.raises(OperatorError, match="was discarded"):
        shop.app.discard_dead_letter(number, by=BY, why="again")
    drain(shop.app)
    assert shop.ran == []


def test_a_discarded_message_stays_dead_for_its_resends(shop):
    number = killed(shop)
    shop.app.discard_dead_letter(number, by=BY, why="no use")
    shop.send("a", "o", "-1")
    drain(shop.app)
    assert shop.ran == []
    assert shop.dead() == []


def test_letters_are_found_by_what_they_are(shop):
    for id_, order in [("a", "o"), ("b", "o"), ("c", "p")]:
        shop.send(id_, order, "-1")
    drain(shop.app)
    assert [letter.message_id for letter in shop.dead(session="o")] == [b"a", b"b"]
    assert len(shop.dead(consumer="lines", reason="rejected")) == 3
    assert shop.dead(reason="conflict") == []
    assert len(shop.dead(limit=2)) == 2
    assert shop.dead(consumer="nobody") == []
