"""The fixture of the pytest plugin."""

from procession import App, Context


def test_the_fixture_runs_an_app_until_the_test_ends(procession_run):
    app = App("t", store="sqlite:///never-made.db")

    @app.consumer("payments", name="book")
    def book(payload: dict, ctx: Context):
        ctx.write("INSERT INTO booked (id) VALUES (:id)", payload)

    t = procession_run(app, setup="CREATE TABLE booked (id)")
    first = t.send("payments", {"id": 1})
    t.redeliver(first)
    t.drain()
    assert t.connection.execute("SELECT id FROM booked").fetchall() == [(1,)]
