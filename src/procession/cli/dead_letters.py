"""`procession dead-letters`: look at what could not be handled, and decide about it."""

from __future__ import annotations

import base64
import enum
import getpass
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from procession.abc import DeadLetterFilter, DeadLetterRecord
from procession.app import App
from procession.cli.options import AsJson, Target, examples
from procession.cli.tables import print_table
from procession.cli.target import load, positions
from procession.cli.terminal import printable, say, say_json, text_of
from procession.errors import ConfigurationError, OperatorError, Reason
from procession.flows.dead_letters import Replay, check_waits

BODY_CHARS = 20_000
HISTORY_CHARS = 400
HEX_BYTES = 512
HEX_LINE = 16
LIMIT = 1_000

dead_letters = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show, edit, replay and discard dead letters.",
)

Number = Annotated[
    str | None, typer.Argument(metavar="NUMBER", help="As `list` shows it.", show_default=False)
]
Consumer = Annotated[str | None, typer.Option(help="Only those of this consumer.")]
Session = Annotated[str | None, typer.Option(help="Only those of this session.")]
ReasonGiven = Annotated[
    str | None, typer.Option("--reason", help="Only those with this reason, as in `conflict`.")
]
By = Annotated[str | None, typer.Option("--by", help="Who decides; by default the system's user.")]


class Status(enum.StrEnum):
    """What `list` shows: the statuses of a dead letter, or all."""

    DEAD = "dead"
    QUEUED = "queued"
    REPLAYED = "replayed"
    DISCARDED = "discarded"
    ALL = "all"


def _who(by: str | None) -> str:
    if by is not None:
        return by
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in many containers
        return f"uid {os.getuid()}"


def _number(text: str | None) -> int:
    try:
        return int(str(text))
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is no number of a dead letter") from error


def _letters(target: str | None, numbers: list[str] | None, usage: str) -> tuple[str, list[int]]:
    """Return the target and the numbers; the first number may stand in the target's place."""
    place, rest = positions(target, [*(numbers or []), None], needed=0, usage=usage)
    return place, [_number(text) for text in rest if text is not None]


def _filter(
    consumer: str | None,
    session: str | None,
    reason: str | None,
    status: Status = Status.DEAD,
    limit: int = LIMIT,
) -> DeadLetterFilter:
    if reason is not None and reason not in list(Reason):
        raise ConfigurationError(f"reason {reason!r}: it is one of {', '.join(Reason)}")
    return DeadLetterFilter(
        consumer=consumer,
        session=session,
        reason=reason,
        status=None if status is Status.ALL else status.value,
        limit=limit,
    )


# ---- looking -------------------------------------------------------------------------------------


@dead_letters.command(
    "list",
    epilog=examples(
        "procession dead-letters list orders:app",
        "procession dead-letters list orders:app --consumer ledger --reason conflict --json",
        "procession dead-letters list orders:app --status all",
    ),
)
def list_(
    target: Target = None,
    consumer: Consumer = None,
    session: Session = None,
    reason: ReasonGiven = None,
    status: Annotated[
        Status, typer.Option(help="dead are those that wait for a decision.")
    ] = Status.DEAD,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = LIMIT,
    as_json: AsJson = False,
) -> None:
    """List dead letters.

    In order of consumer, session and position in the queue.
    """
    place, _ = positions(target, [], needed=0, usage="procession dead-letters list TARGET")
    wanted = _filter(consumer, session, reason, status, limit)
    app = load(place)
    found = app.dead_letters(wanted)
    app.close()
    if as_json:
        say_json([_document(record) for record in found])
        return
    if not found:
        say("no dead letters")
        return
    print_table(
        ["No.", "Consumer", "Session", "Key", "Status", "Died", "Reason", "Detail"],
        [
            [
                str(record.number),
                record.consumer,
                text_of(record.session),
                text_of(record.key),
                record.status,
                _time(record.died_at_ms)[:-4],
                record.reason,
                record.detail,
            ]
            for record in found
        ],
        numbers=[0],
    )
    if len(found) == limit:
        sys.stderr.write(f"these are {limit}; there may be more: see --limit\n")


@dead_letters.command(
    epilog=examples(
        "procession dead-letters show orders:app 3",
        "procession dead-letters show orders:app 3 --json | jq -r .body",
    )
)
def show(target: Target = None, number: Number = None, as_json: AsJson = False) -> None:
    """Show all that is kept of a dead letter."""
    usage = "procession dead-letters show TARGET NUMBER"
    place, (wanted,) = positions(target, [number], needed=1, usage=usage)
    letter = _number(wanted)
    app = load(place)
    record = app.dead_letter(letter)
    app.close()
    if as_json:
        say_json(_document(record))
        return
    for name, value in [
        ("Number", record.number),
        ("Status", record.status),
        ("Consumer", record.consumer),
        ("Queue", record.queue),
        ("Session", text_of(record.session)),
        ("Key", text_of(record.key)),
        ("Message id", text_of(record.message_id)),
        ("Type", record.type or None),
        ("Reason", record.reason),
        ("Detail", record.detail),
        ("Attempts", record.attempts),
        ("Copies", record.copies),
        ("Position", record.position),
        ("Sent", _time(record.sent_at_ms)),
        ("Died", _time(record.died_at_ms)),
    ]:
        say(f"{name + ':':<12}{'-' if value is None else printable(str(value))}")
    for name, text in record.headers.items():
        say(f"{'Header:':<12}{printable(name)}: {printable(text)}")
    for index, error in enumerate(record.errors, 1):
        say(f"{f'Error {index}:':<12}{printable(error)}")
    for entry in record.history:
        say(f"{'History:':<12}{_entry(entry)}")
    say(f"Body ({len(record.body):,} bytes):\n{_shown(record.body)}")


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _entry(entry: Any) -> str:
    said = dict(entry)
    at, what = said.pop("at_ms", None), said.pop("what", "")
    rest = " ".join(f"{name}={_short(repr(value))}" for name, value in said.items())
    return printable(f"{'' if at is None else _time(at)} {what} {rest}".strip())


def _short(text: str) -> str:
    more = len(text) - HISTORY_CHARS
    return text if more <= 0 else f"{text[:HISTORY_CHARS]}… ({more:,} more characters: see --json)"


def _shown(body: bytes) -> str:
    """Return a body for a terminal: JSON in lines, other text as it is, else hexadecimal."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return _hexadecimal(body)
    try:
        text = msgspec.json.format(text, indent=2)
    except msgspec.DecodeError:
        if "\0" in text:
            return _hexadecimal(body)
    shown = printable(text[:BODY_CHARS], keep="\n\t")
    more = len(text) - BODY_CHARS
    return shown if more <= 0 else f"{shown}\n… {more:,} more characters: see --json"


def _hexadecimal(body: bytes) -> str:
    lines = [
        f"{start:06x}  {body[start : start + HEX_LINE].hex(' '):<48} "
        + "".join(
            chr(byte) if 0x20 <= byte < 0x7F else "."  # noqa: PLR2004  what ASCII can show
            for byte in body[start : start + HEX_LINE]
        )
        for start in range(0, min(len(body), HEX_BYTES), HEX_LINE)
    ]
    if len(body) > HEX_BYTES:
        lines.append(f"… {len(body) - HEX_BYTES:,} more bytes: see --json")
    return "\n".join(lines)


def _document(record: DeadLetterRecord) -> dict[str, Any]:
    try:
        body, encoding = record.body.decode(), "utf-8"
    except UnicodeDecodeError:
        body, encoding = base64.b64encode(record.body).decode(), "base64"
    return {
        "number": record.number,
        "status": record.status,
        "consumer": record.consumer,
        "queue": record.queue,
        "session": text_of(record.session),
        "key": text_of(record.key),
        "message_id": text_of(record.message_id),
        "type": record.type,
        "reason": record.reason,
        "detail": record.detail,
        "attempts": record.attempts,
        "errors": list(record.errors),
        "copies": record.copies,
        "position": record.position,
        "headers": dict(record.headers),
        "fingerprint": None if record.fingerprint is None else record.fingerprint.hex(),
        "sent_at_ms": record.sent_at_ms,
        "died_at_ms": record.died_at_ms,
        "history": [dict(entry) for entry in record.history],
        "body": body,
        "body_encoding": encoding,
    }


# ---- deciding ------------------------------------------------------------------------------------


@dead_letters.command(
    epilog=examples(
        """procession dead-letters edit orders:app 3 --body '{"id": 7, "amount": 12}'""",
        "procession dead-letters edit orders:app 3 --file mended.json",
        "EDITOR=nano procession dead-letters edit orders:app 3",
    )
)
def edit(
    target: Target = None,
    number: Number = None,
    body: Annotated[str | None, typer.Option(help="The new body, as JSON.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read it from a file; - is stdin.")
    ] = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Mend the body of a dead letter.

    Without --body or --file it is opened in $EDITOR.
    The new body is checked as its consumer would. Key and session stay. A replay then runs it.
    """
    usage = "procession dead-letters edit TARGET NUMBER"
    place, (wanted,) = positions(target, [number], needed=1, usage=usage)
    letter = _number(wanted)
    if body is not None and file is not None:
        raise ConfigurationError("give the new body once: --body or --file")
    new = _given(body, file)
    app = load(place)
    record = app.dead_letter(letter)
    if record.consumer not in app.consumers:
        sys.stderr.write(
            f"consumer {record.consumer!r} is not in this app: the body is not checked\n"
        )
    if new is None:
        check_waits(record)
        new = _edited(record)
        if new == record.body:
            say(f"dead letter {letter} is unchanged")
            return
    app.edit_dead_letter(letter, new, by=_who(by))
    app.close()
    if as_json:
        say_json({"number": letter, "edited": True})
    else:
        say(f"dead letter {letter} is edited; it runs again when you replay it")


def _given(body: str | None, file: Path | None) -> bytes | None:
    if body is not None:
        return body.encode()
    if file is None:
        return None
    if str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error


def _edited(record: DeadLetterRecord) -> bytes:
    """Return the body as the operator leaves it in an editor."""
    try:
        text = record.body.decode()
    except UnicodeDecodeError as error:
        raise OperatorError(
            f"the body of dead letter {record.number} is no text: give the new one with --file"
        ) from error
    try:
        shown = msgspec.json.format(text, indent=2) + "\n"
    except msgspec.DecodeError:
        shown = text
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="procession-") as folder:
        path = Path(folder) / f"dead-letter-{record.number}.json"
        path.write_text(shown, encoding="utf-8", newline="")
        try:
            code = subprocess.run([*shlex.split(editor), str(path)], check=False).returncode  # noqa: S603  the user's editor
        except OSError as error:
            raise OperatorError(f"editor {editor!r} cannot be started: {error.strerror}") from error
        if code:
            raise OperatorError(
                f"editor {editor!r} ended with exit code {code}: nothing is changed"
            )
        edited = path.read_bytes()
    return record.body if edited == shown.encode() else edited


@dead_letters.command(
    epilog=examples(
        "procession dead-letters replay orders:app 3 4 5",
        "procession dead-letters replay orders:app --all --consumer ledger --reason failed",
        "procession dead-letters replay orders:app 6 --as-new order-7-corrected",
    )
)
def replay(
    target: Target = None,
    numbers: Annotated[
        list[str] | None,
        typer.Argument(metavar="NUMBER", help="As `list` shows them.", show_default=False),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="All that wait for a decision, as the filters say.")
    ] = False,
    consumer: Consumer = None,
    session: Session = None,
    reason: ReasonGiven = None,
    limit: Annotated[int, typer.Option(min=1, help="With --all: at most so many.")] = LIMIT,
    as_new: Annotated[
        str | None, typer.Option(metavar="KEY", help="The key under which a conflict runs.")
    ] = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Run dead letters again.

    Each runs in its session, in the order they had there.
    Safe to repeat: what was replayed is not run twice. Exits 1 if any of them is refused; the
    others are replayed all the same.
    """
    usage = "procession dead-letters replay TARGET NUMBER... (or --all)"
    place, letters = _letters(target, numbers, usage)
    filtered = any(given is not None for given in (consumer, session, reason))
    if all_ == bool(letters):
        raise ConfigurationError(f"write {usage}")
    if filtered and not all_:
        raise ConfigurationError("--consumer, --session and --reason go with --all")
    wanted = _filter(consumer, session, reason, limit=limit)
    app = load(place)
    if all_:
        letters = [record.number for record in app.dead_letters(wanted)]
    outcomes = app.replay_dead_letters(letters, by=_who(by), as_new=as_new) if letters else []
    app.close()
    _tell(outcomes, as_json=as_json)
    if all_ and len(letters) == limit:
        sys.stderr.write(f"these were {limit}; there may be more: see --limit\n")
    if not all(outcome.queued for outcome in outcomes):
        raise typer.Exit(1)


def _tell(outcomes: Sequence[Replay], *, as_json: bool) -> None:
    if as_json:
        say_json(
            {
                "queued": [outcome.number for outcome in outcomes if outcome.queued],
                "refused": [
                    {"number": outcome.number, "why": outcome.why}
                    for outcome in outcomes
                    if not outcome.queued
                ],
            }
        )
        return
    for outcome in outcomes:
        if outcome.queued:
            say(f"{outcome.number}: queued again")
        else:
            say(f"{outcome.number}: refused: {printable(outcome.why)}")
    if not outcomes:
        say("no dead letters")


@dead_letters.command(
    epilog=examples('procession dead-letters discard orders:app 3 --why "test order of QA"')
)
def discard(
    target: Target = None,
    numbers: Annotated[
        list[str] | None,
        typer.Argument(metavar="NUMBER", help="As `list` shows them.", show_default=False),
    ] = None,
    why: Annotated[str, typer.Option(help="The reason, kept with it. Required.")] = "",
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """End dead letters for good.

    They will never run, and stay readable, with who and why.
    """
    usage = "procession dead-letters discard TARGET NUMBER... --why REASON"
    place, letters = _letters(target, numbers, usage)
    if not letters or not why.strip():
        raise ConfigurationError(f"write {usage}: whoever looks for it later will ask why")
    app = load(place)
    refused = _discard(app, letters, by=_who(by), why=why)
    app.close()
    if as_json:
        say_json(
            {
                "discarded": [number for number in letters if number not in refused],
                "refused": [{"number": number, "why": text} for number, text in refused.items()],
            }
        )
    else:
        for number in letters:
            text = refused.get(number)
            said = "discarded" if text is None else f"refused: {printable(text)}"
            say(f"{number}: {said}")
    if refused:
        raise typer.Exit(1)


def _discard(app: App, numbers: Sequence[int], *, by: str, why: str) -> dict[int, str]:
    refused = {}
    for number in numbers:
        try:
            app.discard_dead_letter(number, by=by, why=why)
        except OperatorError as error:
            refused[number] = str(error)
    return refused
