"""A worker process for the product tests: `python -m tests.product.child FILE SCENARIO [JSON]`.

It works on FILE until SIGTERM, and dies or stops itself where the scenario says so.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from procession import App, Context, Reject, RetryPolicy, Settings
from procession.stores.sqlite.lane import SqliteLane

SETTINGS = {
    "lease_ms": 800,
    "batch_max": 8,
    "suspect_batch": 4,
    "pause_ms": 20,
    "pause_longest_ms": 100,
    "busy_ms": 2_000,
}


def make_app(file: str | Path, **settings: Any) -> App:
    """Return the app that parent and children share.

    Messages have a session `s` and a number `n`. A handler writes (s, n), and sends one message
    on, which is counted there. `way` says what else it does.
    """
    app = App(
        "product",
        store=f"sqlite:///{file}",
        settings=Settings(**{**SETTINGS, **settings}),
        retry=RetryPolicy(max_attempts=4, first_ms=20, factor=1, jitter=0),
    )
    app.queue("out")

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context) -> None:
        ctx.execute(
            "INSERT INTO effect (s, n, process) VALUES (:s, :n, :process)",
            s=message["s"],
            n=message["n"],
            process=os.getpid(),
        )
        ctx.send("out", {"n": message["n"]})
        WAYS.get(message.get("way", ""), _nothing)(message, ctx)

    @app.consumer("out", name="out")
    def count(message: dict, ctx: Context) -> None:
        ctx.write("INSERT INTO sent (n) VALUES (:n)", n=message["n"])

    return app


def _nothing(message: dict, ctx: Context) -> None: ...


def _fail_once(message: dict, ctx: Context) -> None:
    if ctx.message.attempt < 2:
        raise ValueError("fails until its second lone run")


def _reject(message: dict, ctx: Context) -> None:
    raise Reject("a bad one")


def _die(message: dict, ctx: Context) -> None:
    os._exit(9)


def _sleep(message: dict, ctx: Context) -> None:
    if "flag" in message:
        Path(message["flag"]).touch()
    time.sleep(message["seconds"])


def _stop_once(message: dict, ctx: Context) -> None:
    """Stop this process in mid-transaction, the first time."""
    flag = Path(message["flag"])
    if not flag.exists():
        flag.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


WAYS: dict[str, Callable[[dict, Context], None]] = {
    "fail-once": _fail_once,
    "reject": _reject,
    "die": _die,
    "sleep": _sleep,
    "stop-once": _stop_once,
}


# ---- deaths --------------------------------------------------------------------------------------

POINTS = [
    "after-begin",
    "in-handler",
    "before-flush",
    "in-flush",
    "before-commit",
    "after-commit",
    "before-attempt",
    "after-attempt",
]


def arm(point: str, passes: int) -> None:  # noqa: C901  a list of points
    """Kill this process when the batches' lane has passed a point so many times."""
    left = [passes]

    def strike() -> None:
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def around(name: str, *, before: bool, on: type = SqliteLane) -> None:
        real = getattr(on, name)

        async def struck(self: Any, *arguments: Any, **named: Any) -> Any:
            if before:
                strike()
            result = await real(self, *arguments, **named)
            if not before:
                strike()
            return result

        setattr(on, name, struck)

    match point:
        case "after-begin":
            around("fetch", before=True)
        case "in-handler":
            WAYS[""] = lambda message, ctx: strike()
        case "before-flush":
            around("flush", before=True)
        case "in-flush":
            _strike_in_flush(strike)
        case "before-commit":
            around("commit", before=True)
        case "after-commit":
            around("commit", before=False)
        case "before-attempt":
            around("begin_attempt", before=True)
        case "after-attempt":
            around("begin_attempt", before=False)


def _strike_in_flush(strike: Callable[[], None]) -> None:
    real = SqliteLane._remove

    def removed(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        strike()

    SqliteLane._remove = removed  # type: ignore[method-assign]


def limit_files(flag: Path) -> None:
    """Let no file grow past its size of now, until the flag is there: the disk is full."""
    import threading

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FULL_AT"]), hard))

    def lift() -> None:
        while not flag.exists():
            time.sleep(0.02)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    threading.Thread(target=lift, daemon=True).start()


def main(file: str, scenario: str, text: str = "{}") -> None:
    """Run one scenario."""
    options = json.loads(text)
    app = make_app(file, **options.get("settings", {}))
    match scenario:
        case "work":
            pass
        case "die":
            arm(options["point"], options["passes"])
        case "full":
            limit_files(Path(options["flag"]))
        case "hog":
            hog(app, options["seconds"])
            return
        case "nobody":
            os.setgid(65534)
            os.setuid(65534)
            try:
                app.open()
                app.send("q", {"s": 1, "n": 1})
            except Exception as error:  # noqa: BLE001  told to the parent
                print(type(error).__name__, error, flush=True)  # noqa: T201
            else:
                print("worked", flush=True)  # noqa: T201
            return
    worker = app.worker()
    worker.run()


def hog(app: App, seconds: float) -> None:
    """Write slow transactions one after the other; tell how many, and the longest wait."""
    from procession.runtime.drive import drive

    workers: Any = drive(app.store.workers()) if app.open() is None else None
    until = time.monotonic() + seconds
    done, longest = 0, 0.0
    while time.monotonic() < until:
        asked = time.monotonic()
        with workers.write("hogging") as connection:
            longest = max(longest, time.monotonic() - asked)
            connection.execute("INSERT INTO effect (n) VALUES (0)")
            time.sleep(0.05)
        done += 1
    print(json.dumps({"done": done, "longest": longest}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
