"""Payloads that are pydantic models: sent, checked, and handed over as such."""

from decimal import Decimal

from pydantic import BaseModel, field_validator

from procession import App, testing


class Payment(BaseModel):
    id: str
    account: str
    amount: Decimal

    @field_validator("amount")
    @classmethod
    def positive(cls, value):
        if value <= 0:
            raise ValueError("must be above zero")
        return value


def new_app(seen):
    app = App("t", store="sqlite:///never-made.db")

    @app.consumer("payments", name="book", session="account", key="id")
    def book(payment: Payment):
        seen.append(payment)

    return app


def test_a_model_arrives_as_it_was_sent():
    seen = []
    with testing.run(new_app(seen)) as t:
        t.send("payments", Payment(id="p1", account="a", amount=Decimal("1.50")))
        t.send("payments", Payment(id="p1", account="a", amount=Decimal("1.50")))
        t.drain()
        assert t.status["book"].counts == {("processed", ""): 1, ("duplicate", "resent"): 1}
    assert [(p.id, p.amount) for p in seen] == [("p1", Decimal("1.50"))]


def test_a_model_that_refuses_is_a_dead_letter_that_names_the_field():
    with testing.run(new_app([])) as t:
        t.send("payments", {"id": "p1", "account": "a", "amount": "-1"})
        t.drain()
        (letter,) = t.dead_letters
        assert letter.reason == "invalid-payload"
        assert "amount" in letter.detail
