"""The commands that look after a store: sessions, inbox, prune, purge, doctor, health."""

from __future__ import annotations

import dataclasses
import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from procession.abc import InboxRow, Purged, SessionStatus
from procession.app import App
from procession.app.doctor import Severity, examine
from procession.cli.options import AsJson, Target, examples
from procession.cli.tables import print_table
from procession.cli.target import load, positions
from procession.cli.terminal import complain, printable, say, say_json, text_of
from procession.core.keys import encode_key
from procession.errors import ConfigurationError, Reason
from procession.flows.upkeep import prune_step
from procession.outcome import InboxState
from procession.runtime.drive import drive

LIMIT = 50

inbox = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look up what is remembered of a key."
)


def sessions(
    target: Target = None,
    consumer: Annotated[str | None, typer.Option(help="Only those of this consumer.")] = None,
    session: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = LIMIT,
    as_json: AsJson = False,
) -> None:
    """List sessions with messages waiting, the longest backlog first.

    Messages without a session stand in one line, with - for their session.
    """
    place, _ = positions(target, [], needed=0, usage="procession sessions TARGET")
    app = load(place)
    upkeep = _opened(app)
    key = None if session is None else session.encode()
    found = drive(upkeep.sessions(consumer=consumer, session=key, limit=limit))
    drive(upkeep.close())
    app.close()
    if as_json:
        say_json({"sessions": [_session_document(row) for row in found]})
        return
    if not found:
        say("no message waits")
        return
    print_table(
        ["Backlog", "Held", "Head age s", "State", "Dead letters", "Consumer", "Session"],
        [
            [
                row.backlog,
                row.held,
                round(row.head_age_ms / 1000),
                _standing(row),
                row.dead_letters,
                row.consumer,
                text_of(row.session),
            ]
            for row in found
        ],
        numbers=[0, 1, 2, 4],
    )


@inbox.command("show", epilog=examples("procession inbox show orders:app order-7 --json"))
def show(
    target: Target = None,
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="The dedup key.", show_default=False)
    ] = None,
    consumer: Annotated[str | None, typer.Option(help="Only as this consumer has it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how the message of a key ended, for each consumer.

    Exit code 1 where no consumer remembers the key.
    """
    place, (wanted,) = positions(target, [key], needed=1, usage="procession inbox show TARGET KEY")
    checked = encode_key(wanted, what="key", reason=Reason.BAD_KEY).decode()
    app = load(place)
    names = [consumer] if consumer else [s.consumer for s in app.status() if s.consumer]
    found = {name: row for name in names if (row := app.recorded(name, checked)) is not None}
    app.close()
    if as_json:
        say_json({"key": checked, "rows": [_inbox_document(n, row) for n, row in found.items()]})
    elif found:
        print_table(
            ["Consumer", "State", "Ended", "Recorded", "Fingerprint"],
            [
                [
                    name,
                    InboxState(row.state).name.lower(),
                    row.end,
                    _moment(row.recorded_ms),
                    row.fingerprint[:8].hex(),
                ]
                for name, row in found.items()
            ],
        )
    else:
        complain(f"no consumer remembers key {printable(checked)!r}: it never ended, or is pruned")
    raise typer.Exit(0 if found else 1)


def prune(target: Target = None, as_json: AsJson = False) -> None:
    """Forget keys past their retention, now; running workers do it by themselves.

    What a dead letter, a held or a waiting message may still ask for is kept.
    """
    place, _ = positions(target, [], needed=0, usage="procession prune TARGET")
    app = load(place)
    upkeep = _opened(app)
    total = drive(upkeep.prunable(retention_ms=app.settings.retention_ms))
    forgotten = 0
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("pruning", total=total or None)
        while (removed := drive(prune_step(upkeep, app.settings))) is not None:
            forgotten += removed
            progress.update(bar, advance=removed)
    drive(upkeep.close())
    app.close()
    if as_json:
        say_json({"older_than_retention": total, "forgotten": forgotten})
    else:
        say(f"{forgotten:,} keys forgotten, of {total:,} past their retention")


def purge(
    target: Target = None,
    consumer: Annotated[str | None, typer.Option(help="Of this consumer.")] = None,
    key: Annotated[str | None, typer.Option(help="Erase all that is kept of this key.")] = None,
    session: Annotated[
        str | None,
        typer.Option(help="Erase what waits and what died of this session, with their keys."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Erase a key or a session, for privacy: waiting messages, dead letters, remembered keys.

    A later copy of an erased message would run again. Keys that are done know no session: erase
    those by key.
    """
    place, _ = positions(
        target, [], needed=0, usage="procession purge TARGET --consumer NAME --key KEY"
    )
    if consumer is None or (key is None) == (session is None):
        raise ConfigurationError("give --consumer, and either --key or --session")
    what = f"key {key}" if key is not None else f"session {session}"
    if not yes and not typer.confirm(f"Erase {printable(what)} of {printable(consumer)}?"):
        raise typer.Exit(1)
    app = load(place)
    upkeep = _opened(app)
    if key is not None:
        purged = drive(upkeep.purge_key(consumer, key.encode()))
    else:
        purged = drive(upkeep.purge_session(consumer, str(session).encode()))
    drive(upkeep.close())
    app.close()
    _tell_purged(purged, as_json=as_json)


def doctor(target: Target = None, as_json: AsJson = False) -> None:
    """Look at settings, retention, disk, workers and backlog, and say what is wrong.

    Exit code 1 where something is wrong, 0 where all is well or only worth a look.
    """
    place, _ = positions(target, [], needed=0, usage="procession doctor TARGET")
    app = load(place)
    app.open()
    found = examine(app)
    app.close()
    if as_json:
        say_json({"findings": [dataclasses.asdict(finding) for finding in found]})
    else:
        print_table(
            ["Severity", "What", "Said"],
            [[finding.severity.value, finding.what, finding.said] for finding in found],
        )
    wrong = any(finding.severity is Severity.WRONG for finding in found)
    raise typer.Exit(1 if wrong else 0)


def health(target: Target = None, as_json: AsJson = False) -> None:
    """Say whether the store answers and a worker runs; for probes.

    Exit code 0 where both hold, 1 where no worker has a lease, 3 where the store does not answer.
    """
    place, _ = positions(target, [], needed=0, usage="procession health TARGET")
    app = load(place)
    app.open()
    registry = drive(app.store.workers())
    known, expired = drive(registry.known()), drive(registry.expired())
    drive(registry.close())
    app.close()
    running = sorted(set(known) - set(expired))
    if as_json:
        say_json({"healthy": bool(running), "workers": running, "vanished": sorted(expired)})
    else:
        say(f"{len(running)} workers run, {len(expired)} have vanished")
    raise typer.Exit(0 if running else 1)


def add_to(commands: typer.Typer) -> None:
    """Add these commands to the command line."""
    commands.add_typer(inbox, name="inbox")
    for command, *shown in (
        (sessions, "procession sessions orders:app", "procession sessions --session order-7"),
        (prune, "procession prune orders:app"),
        (purge, "procession purge orders:app --consumer orders --key order-7"),
        (doctor, "procession doctor orders:app", "procession doctor orders:app --json"),
        (health, "procession health orders:app"),
    ):
        commands.command(epilog=examples(*shown))(command)


def _opened(app: App) -> Any:
    app.open()
    return drive(app.store.upkeep())


def _standing(row: SessionStatus) -> str:
    if row.retrying:
        return "retrying"
    return "running" if row.holder else "waiting"


def _session_document(row: SessionStatus) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "session": text_of(row.session), "state": _standing(row)}


def _inbox_document(consumer: str, row: InboxRow) -> dict[str, Any]:
    return {
        "consumer": consumer,
        "state": InboxState(row.state).name.lower(),
        "ended": row.end,
        "recorded": _moment(row.recorded_ms),
        "fingerprints": [
            row.fingerprint[start : start + 32].hex()
            for start in range(0, len(row.fingerprint), 32)
        ],
        "out_of_order": row.out_of_order,
    }


def _moment(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat()


def _tell_purged(purged: Purged, *, as_json: bool) -> None:
    if as_json:
        say_json(dataclasses.asdict(purged))
        return
    say(
        f"{purged.messages} waiting messages, {purged.dead_letters} dead letters and "
        f"{purged.inbox} remembered keys erased"
    )
