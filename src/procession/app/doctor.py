"""Looks at an app and its store as an experienced operator would, and says what it sees.

Changes nothing. Each finding has a severity: `ok`, `look` (somebody should), or `wrong`.
"""

from __future__ import annotations

import enum
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from procession.abc import ConsumerStatus
from procession.app.application import App
from procession.outcome import End
from procession.runtime.drive import drive

DISK_FREE_SHARE = 0.1
HEAD_AGE_MS_MAX = 15 * 60_000
DUPLICATES_SHARE_MAX = 0.2
DUPLICATES_COUNTED_MIN = 100
DAY_MS = 86_400_000


class Severity(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    LOOK = "look"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    severity: Severity
    said: str


def examine(app: App) -> list[Finding]:
    """Return what there is to say; the store is opened, its schema checked.

    Raises:
        ConfigurationError, StoreUnavailable: the store cannot be used at all; the text says why.
    """
    return [
        *_settings(app),
        *_retention(app),
        *_disk(app),
        *_workers(app),
        *_consumers(app),
    ]


def _settings(app: App) -> Iterator[Finding]:
    settings = app.settings
    yield Finding(
        "lease",
        Severity.OK,
        f"{settings.lease_ms:,} ms, renewed each {settings.renew_ms:,} ms: a vanished worker's "
        f"work is free {settings.lease_ms:,} ms later at the latest",
    )
    hangs = settings.handler_limit_ms >= settings.lease_ms
    yield Finding(
        "handler limit",
        Severity.LOOK if hangs else Severity.OK,
        f"{settings.handler_limit_ms:,} ms"
        + (
            ": not below the lease, so a hanging handler may lose it before it is stopped"
            if hangs
            else f", below the lease of {settings.lease_ms:,} ms"
        ),
    )
    slow_stop = settings.stop_ms < settings.handler_limit_ms
    yield Finding(
        "stop",
        Severity.LOOK if slow_stop else Severity.OK,
        f"{settings.stop_ms:,} ms for the running batch"
        + (": below the handler limit, so a stop may cut a handler off" if slow_stop else ""),
    )


def _retention(app: App) -> Iterator[Finding]:
    settings = app.settings
    upkeep = drive(app.store.upkeep())
    try:
        old = drive(upkeep.prunable(retention_ms=settings.retention_ms))
    finally:
        drive(upkeep.close())
    yield Finding(
        "retention",
        Severity.OK,
        f"keys are kept {settings.retention_ms / DAY_MS:g} days, at least the "
        f"{settings.resend_horizon_ms / DAY_MS:g} days in which a producer may send again, and "
        f"longer while messages wait or a dead letter is open; {old:,} are older now",
    )


def _disk(app: App) -> Iterator[Finding]:
    path = app.database
    if path is None:
        return
    usage = shutil.disk_usage(path.resolve().parent)
    share = usage.free / usage.total
    yield Finding(
        "disk",
        Severity.OK if share >= DISK_FREE_SHARE else Severity.LOOK,
        f"{usage.free / 2**30:,.1f} GiB free of {usage.total / 2**30:,.1f} GiB "
        f"({share:.0%}); the database has {path.stat().st_size / 2**20:,.1f} MiB",
    )


def _workers(app: App) -> Iterator[Finding]:
    registry = drive(app.store.workers())
    try:
        expired = drive(registry.expired())
        known = drive(registry.known())
    finally:
        drive(registry.close())
    running = len(known) - len(expired)
    yield Finding(
        "workers",
        Severity.OK if running else Severity.LOOK,
        f"{running} with a lease" if running else "none runs: start one with `procession run`",
    )
    if expired:
        yield Finding(
            "vanished workers",
            Severity.LOOK,
            f"{len(expired)} whose lease has ended; the next running worker takes over from them",
        )


def _consumers(app: App) -> Iterator[Finding]:
    for status in app.status():
        name = status.consumer or status.queue
        if status.consumer is not None and status.consumer not in app.consumers:
            waits = status.waiting + status.held + status.scheduled
            yield Finding(
                f"consumer {name}",
                Severity.WRONG if waits else Severity.LOOK,
                f"is in the store but not in this code; {waits:,} of its messages wait. A name is "
                "part of the dedup keys: give it back, or take it out for good",
            )
            continue
        yield from _backlog(name, status)


def _backlog(name: str, status: ConsumerStatus) -> Iterator[Finding]:
    age_ms = status.head_age_ms or 0
    old = age_ms > HEAD_AGE_MS_MAX
    yield Finding(
        f"backlog of {name}",
        Severity.LOOK if old else Severity.OK,
        f"{status.waiting:,} waiting, {status.held:,} held, {status.scheduled:,} scheduled; the "
        f"oldest was sent {age_ms / 1000:,.0f} s ago",
    )
    if status.dead_letters:
        yield Finding(
            f"dead letters of {name}",
            Severity.LOOK,
            f"{status.dead_letters:,} wait for a decision: procession dead-letters list",
        )
    ended = sum(status.counts.values())
    for (end, cause), number in sorted(status.counts.items()):
        if end != End.DUPLICATE or number < DUPLICATES_COUNTED_MIN:
            continue
        share = number / ended
        if share > DUPLICATES_SHARE_MAX:
            yield Finding(
                f"duplicates of {name}",
                Severity.LOOK,
                f"{share:.0%} of all ended messages were duplicates ({cause}): {_fault(cause)}",
            )


def _fault(cause: str) -> str:
    match cause:
        case "resent":
            return "a producer sends the same messages again; look at its retries"
        case "redelivered" | "lock_expired":
            return "acknowledgements come too late; raise the broker's lock duration"
        case "concurrent":
            return "copies meet at the same moment; look for two producers of one message"
        case _:
            return "somebody replays what took effect already"
