"""Alerts reach every hook, after the commit."""

from procession import App, testing


def test_one_hooks_fault_does_not_keep_the_alert_from_the_next():
    told = []
    app = App("t", store="sqlite:///never-made.db")
    app.consumer("q", name="c")(lambda payload: None)

    @app.on_alert
    def broken(fields):
        raise RuntimeError("as planned")

    @app.on_alert
    def second(fields):
        told.append((fields["what"], fields["key"]))

    with testing.run(app) as t:
        t.send("q", {"n": 1}, message_id="m1")
        t.drain()
        t.redeliver("m1", {"n": 2})
        t.drain()
    assert told == [("conflict", "m1")]
