"""An app in which every kind of thing happens that is to be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.driving import Driver, new_app

from procession import App, Context, Reject

ENDED = {("processed", ""): 5, ("duplicate", "resent"): 1, ("dead-lettered", ""): 3}
FAILED_RUNS = 4  # one in company, three alone


def shop(folder: Path, **options: Any) -> App:
    """One consumer `bills` of the queue `orders`, which does what the order says."""
    app = new_app(folder, **options)

    @app.consumer("orders", name="bills", session="client")
    def bill(order: dict, ctx: Context) -> None:
        match order.get("do"):
            case "fail":
                raise ValueError("no such client")
            case "reject":
                raise Reject("already paid")

    return app


def play(app: App) -> None:
    """Four that end well, a duplicate, a conflict, a rejection, and one that fails three times."""
    headers = {"correlation-id": "trip-7"}
    for number in range(4):
        app.send("orders", {"client": f"c{number}"}, message_id=f"m{number}", headers=headers)
    app.send("orders", {"client": "d"}, message_id="twice")
    app.send("orders", {"client": "d"}, message_id="twice")
    app.send("orders", {"client": "e"}, message_id="m0")
    app.send("orders", {"client": "f", "do": "reject"}, message_id="refused", headers=headers)
    app.send("orders", {"client": "g", "do": "fail"}, message_id="bad", headers=headers)
    with Driver(app) as driver:
        driver.run()
