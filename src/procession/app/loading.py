"""Sends a file line by line, and goes on where an interrupted send stopped.

Each line is one message, 1,000 in a transaction, and how far the file was sent is kept in that same
transaction: whatever happens, each line is sent once. Message ids are the file's name and the
line's number, or a field, so a file that is sent anew takes no second effect either. A file whose
sent lines are not what they were is refused: nobody could tell which of its lines are new.
"""

from __future__ import annotations

import csv
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TextIO

import msgspec

from procession.app.application import SEND_CHUNK, App
from procession.errors import ConfigurationError, MessageError
from procession.message import Outgoing
from procession.runtime.drive import drive

Make = Callable[[str, str], Outgoing]
"""Makes a message of a JSON text and a message id."""
SUM_BITS = 32
_SYNTAX = msgspec.json.Decoder(msgspec.Raw)


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a file: lines that were sent now, and those sent before."""

    now: int
    before: int


def send_file(  # noqa: PLR0913  keyword-only, with defaults
    app: App,
    path: Path,
    *,
    form: Literal["lines", "csv"],
    make: Make,
    queue: str,
    id_field: str | None = None,
    again: bool = False,
    told: Callable[[int], object] = lambda _bytes: None,
) -> Sent:
    """Send each line of a file as a message; resume a send that was interrupted.

    Args:
        path: a file of JSON objects, one a line, or of CSV with a header line.
        make: makes the message.
        queue: where it goes; part of what identifies the send.
        id_field: the field that holds the message id; by default `<file name>/<line number>`.
        again: forget how far an earlier send came.
        told: called with the bytes read so far, for a progress bar.

    Raises:
        ConfigurationError: the file cannot be read, its sent lines were changed, or a line is not
            of its form; the line is named, and what stands before it is sent.
        MessageError: a message cannot be sent; likewise.
    """
    publisher = app.publisher()
    try:
        # What is no UTF-8 is told with its line, when its turn comes.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            mark = _mark(path, queue)
            lines = _Lines(file, path)
            limit = app.settings.payload_max
            rows = _csv(lines, path, limit) if form == "csv" else _json(lines, path)
            before = 0 if again else _pass(rows, lines, drive(publisher.marked(mark)), path)
            now = 0
            messages = _messages(rows, lines, path, make, id_field)
            while True:
                chunk: list[Outgoing] = []
                reached = lines.mark
                failed: Exception | None = None
                try:
                    for message in islice(messages, SEND_CHUNK):
                        chunk.append(message)  # what came before a fault is kept
                        reached = lines.mark
                except (ConfigurationError, MessageError) as error:
                    failed = error
                if chunk:
                    drive(publisher.publish_marked(chunk, mark=mark, number=reached))
                    now += len(chunk)
                    with suppress(OSError):
                        told(file.tell())
                if failed is not None:
                    raise failed
                if not chunk:
                    return Sent(now, before)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error


class _Lines:
    """Reads a file line by line, and adds up what it has read.

    Attributes:
        number: of the last line that was read, from 1.
        sum: checksum of all lines so far, without their ends: the last one may get one later.
    """

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file = file
        self._path = path
        self.number = 0
        self.sum = 0

    def __iter__(self) -> Iterator[str]:
        # readline instead of iteration, so that the position in the file can be told.
        while line := self._file.readline():
            self.number += 1
            try:
                text = line.rstrip("\r\n").encode()
            except UnicodeEncodeError as error:
                raise ConfigurationError(
                    f"{self._path}, line {self.number} is not UTF-8 (byte "
                    f"{ord(line[error.start]) & 0xFF:#x}): write the file in UTF-8"
                ) from error
            self.sum = zlib.crc32(b"\n", zlib.crc32(text, self.sum))
            yield line

    @property
    def mark(self) -> int:
        """How far it was read, and what was read, in one number."""
        return self.number << SUM_BITS | self.sum


def _pass(rows: Iterator[str], lines: _Lines, mark: int, path: Path) -> int:
    """Read past what an earlier send sent; return how many lines that were."""
    before = mark >> SUM_BITS
    while lines.number < before and next(rows, None) is not None:
        pass
    if before and lines.mark != mark:
        raise ConfigurationError(
            f"{path} was changed since its first {before:,} lines were sent: which of its lines "
            "are new cannot be told. Send the new ones as a file of another name, or the whole "
            "file with --again: a line whose message id was sent before then takes no effect"
        )
    return before


def _mark(path: Path, queue: str) -> str:
    """Name this file for this queue: another file of the same name has another first line."""
    with path.open("rb") as file:
        first = file.readline(65_536)
    return f"{queue}/{path.name}/{hashlib.sha256(first).hexdigest()[:16]}"


def _messages(
    rows: Iterator[str], lines: _Lines, path: Path, make: Make, id_field: str | None
) -> Iterator[Outgoing]:
    for text in rows:
        where = f"{path}, line {lines.number}"
        try:
            key = _key(text, id_field, where) if id_field else f"{path.name}/{lines.number}"
            message = make(text, key)
        except MessageError as error:
            raise MessageError(error.reason, f"{where}: {error.detail}") from error
        yield message


def _key(text: str, field: str, where: str) -> str:
    found = msgspec.json.decode(text)
    value = found.get(field) if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        is_ = "is missing" if value is None else f"is {value!r}, neither text nor a whole number"
        raise ConfigurationError(f"{where}: field {field!r} {is_}; it is to be the message id")
    return str(value)


def _json(lines: _Lines, path: Path) -> Iterator[str]:
    for line in lines:
        if not line.strip():
            continue
        try:
            _SYNTAX.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{path}, line {lines.number} is no JSON: {error}") from error
        except RecursionError as error:
            raise ConfigurationError(
                f"{path}, line {lines.number} is nested too deep to be read safely: flatten it"
            ) from error
        yield line


def _csv(lines: _Lines, path: Path, field_max: int) -> Iterator[str]:
    # A limit of the whole process; a field may be as long as a payload.
    before = csv.field_size_limit()
    csv.field_size_limit(max(before, field_max))
    reader = csv.reader(iter(lines), strict=True)
    try:
        header = next(reader, None) or []
        _check_header(header, path)
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise ConfigurationError(
                    f"{path}, line {lines.number} has {len(row)} cells, the header has "
                    f"{len(header)}"
                )
            yield json.dumps(dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise ConfigurationError(f"{path}, line {lines.number} is no CSV: {error}") from error
    finally:
        csv.field_size_limit(before)


def _check_header(header: list[str], path: Path) -> None:
    twice = sorted({name for name in header if header.count(name) > 1 and name})
    fault = None
    if not header:
        fault = "it is empty"
    elif not all(name.strip() for name in header):
        fault = f"column {next(n for n, name in enumerate(header, 1) if not name.strip())} has none"
    elif twice:
        fault = f"{', '.join(map(repr, twice))} stands there twice"
    if fault:
        raise ConfigurationError(f"{path}: the first line must name each column once; {fault}")
