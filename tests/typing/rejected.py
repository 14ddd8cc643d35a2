"""What type checkers must refuse: each line with an error is expected to be one, and an unused
ignore is an error of its own."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from procession import App, Context, Retry, RetryPolicy, Settings

App("typed", store="sqlite:///t.db", migrate="sometimes")  # type: ignore[arg-type]
App("typed", store=7)  # type: ignore[arg-type]
App()  # type: ignore[call-arg]
Settings(batch_max="many")  # type: ignore[arg-type]
Settings(batches=7)  # type: ignore[call-arg]
RetryPolicy(5)  # type: ignore[call-arg]
Retry(after="soon")  # type: ignore[arg-type]

app = App("typed", store="sqlite:///t.db")
app.consumer("q", name="c", on_poison="panic")  # type: ignore[arg-type]
app.consumer("q", name="c", on_conflict="ignore")  # type: ignore[arg-type]
app.consumer("q", name="c", commit="never")  # type: ignore[arg-type]
app.send("q")  # type: ignore[call-arg]
app.send("q", {}, message_id=7)  # type: ignore[arg-type]
app.middleware(print)  # type: ignore[arg-type]


@app.consumer("q", name="c")
def handle(payload: dict[str, int], ctx: Context) -> None:
    ctx.commit()  # type: ignore[attr-defined]
    ctx.send("q", {}, after=5)  # type: ignore[arg-type]
    ctx.message.id = "other"  # type: ignore[misc]
    ctx.execute(7)  # type: ignore[arg-type]
