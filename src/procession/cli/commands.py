"""The commands on an app: run, send, status, migrate, demo; `dead-letters` is in its own module."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import typer
from rich.console import Console
from rich.progress import Progress

import procession
from procession.abc import ConsumerStatus
from procession.app import App
from procession.app.loading import Make, send_file
from procession.cli import logs, metrics, upkeep
from procession.cli.dead_letters import dead_letters
from procession.cli.options import AsJson, Target, examples
from procession.cli.tables import print_table
from procession.cli.target import load, positions
from procession.cli.terminal import masked, printable, say, say_json
from procession.core.canonical import canonical_json
from procession.errors import ConfigurationError, MessageError, Reason
from procession.message import Outgoing
from procession.outcome import End
from procession.runtime.drive import drive
from procession.runtime.health import HOST, HOST_VARIABLE, PORT_VARIABLE, served
from procession.runtime.supervisor import Supervisor

commands = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Message consumers: every message takes effect once, each key's messages in order.",
    epilog="TARGET is module:app, looked for in the current folder first. It may be left out where "
    "the environment variable PROCESSION_APP names it.",
)
commands.add_typer(dead_letters, name="dead-letters")


def _version(wanted: bool) -> None:
    if wanted:
        say(f"procession {procession.__version__}")
        raise typer.Exit


@commands.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


# ---- run -----------------------------------------------------------------------------------------


@commands.command(
    epilog=examples(
        "procession run orders:app",
        "procession run orders:app --processes 4 --log-json 2>> orders.log",
        "procession run orders:app --processes 4 --metrics-port 9464 --health-port 8080",
        "PROCESSION_APP=orders:app procession run",
    )
)
def run(
    target: Target = None,
    processes: Annotated[
        int, typer.Option("--processes", "-p", min=1, max=256, help="How many workers.")
    ] = 1,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning, error or critical.")
    ] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            metavar="PORT",
            envvar="PROCESSION_METRICS_PORT",
            help="Serve Prometheus all workers' metrics, summed, at this port.",
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            envvar="PROCESSION_METRICS_HOST",
            help="Where to listen; by default this host alone.",
        ),
    ] = "127.0.0.1",
    health_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            metavar="PORT",
            envvar=PORT_VARIABLE,
            help="Answer probes at this port: GET /live and GET /ready.",
        ),
    ] = None,
    health_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            envvar=HOST_VARIABLE,
            help="Where to listen; by default this host alone.",
        ),
    ] = HOST,
) -> None:
    """Work until SIGTERM or Ctrl-C.

    All consumers of the app work, and then stop in good order.
    Workers are processes of their own; one that dies or hangs is replaced. A second signal stops
    at once: what was in hand is rolled back and runs again at the next start.

    Exit codes: 0 stopped in good order; 1 a worker had to be killed; 2 wrong configuration; 3 the
    store cannot be reached; 130 stopped at once.
    """
    place, _ = positions(target, [], needed=0, usage="procession run TARGET")
    logs.set_up(log_level, as_json=log_json)
    command = [sys.executable, "-m", "procession.cli", "worker", place, "--log-level", log_level]
    if log_json:
        command.append("--log-json")
    if metrics_port is not None:
        command.append("--metrics")
    with metrics.shared_folder(wanted=metrics_port is not None):
        app = load(place)
        if not app.consumers:
            raise ConfigurationError(f"app {app.name!r} has no consumer: register one to run it")
        app.open()
        # First the metrics: the supervisor tells takeovers to the instrument that the app has then.
        with metrics.served(app, host=metrics_host, port=metrics_port):
            supervisor = Supervisor(
                command,
                app.store,
                settings=app.settings,
                instrument=app.instrument,
                processes=processes,
            )
            with served(supervisor, host=health_host, port=health_port):
                code = supervisor.run()
        app.close()
    raise typer.Exit(code)


# ---- send ----------------------------------------------------------------------------------------


@commands.command(
    epilog=examples(
        """procession send orders:app orders '{"id": 7, "amount": 12.50}'""",
        "procession send orders:app orders --file order.json --id order-7 --after 60",
        "procession send orders:app orders - --header tenant=acme < order.json",
        "procession send orders:app orders --lines orders.jsonl --id-field id",
    )
)
def send(
    target: Target = None,
    queue: Annotated[
        str | None, typer.Argument(metavar="QUEUE", help="Queue or topic.", show_default=False)
    ] = None,
    payload: Annotated[
        str | None,
        typer.Argument(metavar="PAYLOAD", help="JSON; - reads standard input.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the payload from a file.")
    ] = None,
    message_id: Annotated[
        str | None,
        typer.Option("--id", help="Message id: sent again under it, it takes effect once."),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Session key, where the queue has no rule for it.")
    ] = None,
    type_: Annotated[
        str | None, typer.Option("--type", help="Message type, where a consumer takes several.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", help="NAME=VALUE; may be repeated.")
    ] = None,
    after: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Not before so long from now.")
    ] = 0,
    lines: Annotated[
        Path | None, typer.Option(help="Send each line of a file of JSON lines.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Send each row of a CSV file, its cells as text.")
    ] = None,
    id_field: Annotated[
        str | None,
        typer.Option(help="With --lines or --csv: the field that holds the message id."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="With --lines or --csv: do not resume, begin anew.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send one message, and print its message id; or send a file, a message a line.

    The payload is checked first: what its consumer could not read is not sent. A consumer of bytes
    gets them as they are. A file that was interrupted goes on where it stopped, and sends nothing
    twice; message ids are the file's name and the line's number unless --id-field names a field.
    """
    usage = "procession send TARGET QUEUE PAYLOAD"
    place, (name, text) = positions(target, [queue, payload], needed=1, usage=usage)
    app = load(place)
    if lines is not None or csv is not None:
        if text is not None or file is not None or message_id or (lines and csv):
            raise ConfigurationError("with --lines or --csv give neither payload nor --id")
        form: Literal["lines", "csv"] = "lines" if lines is not None else "csv"
        _send_file(
            app,
            lines or csv or Path(),
            form,
            str(name),
            lambda body, key: _outgoing(
                app,
                str(name),
                body.encode(),
                type_=type_,
                message_id=key,
                session=session,
                headers=_headers(header or []),
            ),
            id_field=id_field,
            again=again,
            as_json=as_json,
        )
        return
    outgoing = _outgoing(
        app,
        str(name),
        _body(text, file),
        type_=type_,
        message_id=message_id,
        session=session,
        after=timedelta(seconds=after) if after else None,
        headers=_headers(header or []),
    )
    (receipt,) = drive(app.publisher().publish([outgoing]))
    app.close()
    sent = receipt.message_id.decode()
    if as_json:
        say_json({"queue": name, "message_id": sent, "stored": receipt.stored})
        return
    say(printable(sent))
    if not receipt.stored:
        sys.stderr.write("not stored again: this id was sent within the queue's duplicate window\n")


def _send_file(
    app: App,
    path: Path,
    form: Literal["lines", "csv"],
    queue: str,
    make: Make,
    *,
    id_field: str | None,
    again: bool,
    as_json: bool,
) -> None:
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        size = path.stat().st_size if path.is_file() else None
        bar = progress.add_task(printable(path.name), total=size)
        sent = send_file(
            app,
            path,
            form=form,
            make=make,
            queue=queue,
            id_field=id_field,
            again=again,
            told=lambda position: progress.update(bar, completed=position),
        )
    app.close()
    if as_json:
        say_json({"queue": queue, "sent": sent.now, "lines_before": sent.before})
        return
    resumed = f", after line {sent.before:,} of an earlier send" if sent.before else ""
    say(f"{sent.now:,} messages sent{resumed}")


def _body(payload: str | None, file: Path | None) -> bytes:
    if (payload is None) == (file is None):
        raise ConfigurationError("give the payload once: as PAYLOAD, with --file, or - for stdin")
    if file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
    return sys.stdin.buffer.read() if payload == "-" else str(payload).encode()


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigurationError(f"header {text!r}: write NAME=VALUE")
        headers[name] = value
    return headers


def _outgoing(app: App, queue: str, body: bytes, *, type_: str | None, **options: Any) -> Outgoing:
    """Return the message as the app's own code would send it, with the very JSON that was given."""
    reader = next((c for c in app.consumers.values() if c.queue.name == queue), None)
    payload = None if reader is None else reader.decode(type_ or "", body)
    if type(payload) is not bytes:
        body = canonical_json(body)
        if len(body) > app.settings.payload_max:
            raise MessageError(
                Reason.TOO_LARGE,
                f"the payload has {len(body)} bytes, the limit is {app.settings.payload_max} "
                "(settings.payload_max): send a reference instead",
            )
    outgoing = app.outgoing(queue, json.loads(body) if reader is None else payload, **options)
    # The consumer's type may have defaults, or lack fields; neither changes what is sent.
    outgoing.body = body
    if type_ is not None:
        outgoing.type = type_
    return outgoing


# ---- status --------------------------------------------------------------------------------------


@commands.command(
    epilog=examples("procession status orders:app", "procession status orders:app --json | jq .")
)
def status(target: Target = None, as_json: AsJson = False) -> None:
    """Show what waits, and how messages ended.

    A message is waiting, scheduled (not due yet), or held (behind one of its session that will run
    again) until it ends: processed, duplicate, conflict, stale, expired, dead-lettered, discarded
    or skipped; an end that is not listed has no message. A dead letter that was replayed counts
    again with its new end. --json lists all ends.
    """
    place, _ = positions(target, [], needed=0, usage="procession status TARGET")
    app = load(place)
    found = app.status()
    app.close()
    if as_json:
        say_json(
            {
                "app": app.name,
                "store": masked(app.store_url),
                "consumers": [_status_document(consumer) for consumer in found],
            }
        )
        return
    if not found:
        say(f"app {printable(app.name)} has no consumer")
        return
    print_table(
        [
            "Consumer",
            "Queue",
            "Waiting",
            "Scheduled",
            "Held",
            "Retrying",
            "Dead letters",
            "Reruns",
        ],
        [
            [
                c.consumer,
                c.queue or None,  # a consumer of the library reads none
                c.waiting,
                c.scheduled,
                c.held,
                c.retrying_sessions,
                c.dead_letters,
                c.reruns,
            ]
            for c in found
        ],
        numbers=range(2, 8),
    )
    ended = [
        [consumer.consumer, end, cause or None, number]
        for consumer in found
        for end, causes in _causes(consumer).items()
        for cause, number in causes.items()
    ]
    if ended:
        say()
        print_table(["Consumer", "Ended", "Cause", "Messages"], ended, numbers=[3])


def _causes(consumer: ConsumerStatus) -> dict[str, dict[str, int]]:
    """Return the counts by end, then by cause; every end is there."""
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for end in End:
        counts[end.value] = {}
    for (end_name, cause), number in sorted(consumer.counts.items()):
        counts[end_name][cause] = number
    return counts


def _status_document(consumer: ConsumerStatus) -> dict[str, Any]:
    return {
        "consumer": consumer.consumer,
        "queue": consumer.queue,
        "waiting": consumer.waiting,
        "scheduled": consumer.scheduled,
        "held": consumer.held,
        "retrying_sessions": consumer.retrying_sessions,
        "owned_sessions": consumer.owned_sessions,
        "dead_letters": consumer.dead_letters,
        "reruns": consumer.reruns,
        "ended": {
            end: {
                "total": sum(causes.values()),
                "causes": {cause: number for cause, number in causes.items() if cause},
            }
            for end, causes in _causes(consumer).items()
        },
    }


# ---- migrate -------------------------------------------------------------------------------------


@runtime_checkable
class _Migrated(Protocol):
    """A store whose schema comes in numbered migrations."""

    def missing_migrations(self) -> tuple[int, list[tuple[int, str, str]]]: ...


@commands.command(
    epilog=examples(
        "procession migrate orders:app",
        "procession migrate orders:app --print | sqlite3 orders.db",
    )
)
def migrate(
    target: Target = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the SQL and change nothing.")
    ] = False,
) -> None:
    """Bring the store up to date.

    Makes or changes its tables, and makes queues and subscriptions known to senders.
    """
    place, _ = positions(target, [], needed=0, usage="procession migrate TARGET")
    app = load(place)
    store = app.store
    if not isinstance(store, _Migrated):
        raise ConfigurationError(f"store {app.store_url!r} has no tables: there is nothing to do")
    version, missing = store.missing_migrations()
    if only_print:
        for number, name, text in missing:
            say(f"-- {number:04} {name}\n{text}")
        return
    if missing:
        drive(store.open(migrate="auto"))
        drive(store.close())
    app.open()
    app.close()
    where = printable(masked(app.store_url))
    if missing:
        say(f"{where}: schema version {version} -> {missing[-1][0]}")
    else:
        say(f"{where}: schema version {version} is up to date")


# ---- demo ----------------------------------------------------------------------------------------


@commands.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def demo(context: typer.Context) -> None:
    """Run the demonstration (demo --help)."""
    from procession.demo.__main__ import main as play  # noqa: PLC0415  nobody else needs it

    raise typer.Exit(play(context.args))


upkeep.add_to(commands)
