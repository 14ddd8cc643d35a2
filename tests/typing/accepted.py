"""What type checkers must accept: the public API as users write it."""

from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from procession import App, Context, Reject, Retry, RetryPolicy, Settings, testing

app = App("typed", store="sqlite:///typed.db", settings=Settings(batch_max=10))


class Placed(msgspec.Struct):
    order_id: str
    amount: int


@dataclass
class Cancelled:
    order_id: str


class Client:
    def call(self) -> None: ...


@app.resource
def client() -> Generator[Client]:
    yield Client()


@app.lifespan
def life() -> Generator[None]:
    yield


@app.middleware
def around(payload: object, ctx: Context) -> Generator[None]:
    yield


app.topic("orders", session="order_id", duplicate_window=timedelta(minutes=5))


@app.consumer("orders", name="billing", retry=RetryPolicy(max_attempts=3))
def bill(order: Placed, ctx: Context, client: Client) -> None:
    total: int = ctx.execute("SELECT 1").fetchone()[0]
    ctx.write("UPDATE t SET n = :n", n=total)
    with ctx.savepoint():
        ctx.execute("SELECT :id", {"id": order.order_id})
    key: str = ctx.send("receipts", {"id": order.order_id}, after=timedelta(seconds=1))
    if not key:
        raise Reject("never")
    raise Retry(after=timedelta(seconds=5))


@bill.on(Cancelled)
async def cancel(order: Cancelled) -> None: ...


@app.on_alert
def alert(fields: object) -> None: ...


def program() -> None:
    sent: str = app.send("orders", Placed("a", 1), message_id="m")
    number: int = app.send_many("orders", [Placed("a", 1)], identify=lambda placed: placed.order_id)
    with testing.run(app, setup="CREATE TABLE t (n)") as t:
        again: str = t.redeliver(sent)
        handled: int = t.drain()
        print(again, handled, number, t.dead_letters[0].reason)


async def embedded() -> None:
    async with app as running:
        running.send("orders", b"raw")
