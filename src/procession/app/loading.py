"""Sends a file line by line, and goes on where an interrupted send stopped.

Each line is one message, 1,000 in a transaction, and how far the file was sent is kept in that same
transaction: whatever happens, each line is sent once. Message ids are the file's name and the
line's number, or a field, so a file that is sent anew takes no second effect either.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TextIO

from procession.app.application import SEND_CHUNK, App
from procession.errors import ConfigurationError, MessageError
from procession.message import Outgoing
from procession.runtime.drive import drive

Make = Callable[[str, str], Outgoing]
"""Makes a message of a JSON text and a message id."""


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
        ConfigurationError: the file cannot be read, or a line is not of its form; the line is
            named, and what stands before it is sent.
        MessageError: a message cannot be sent; likewise.
    """
    publisher = app.publisher()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            mark = _mark(path, queue)
            before = 0 if again else drive(publisher.marked(mark))
            rows = _csv(file, path) if form == "csv" else _lines(file, path)
            now = 0
            messages = _messages(rows, path, make, id_field, skip=before)
            while True:
                chunk: list[tuple[int, Outgoing]] = []
                failed: Exception | None = None
                try:
                    for numbered in islice(messages, SEND_CHUNK):
                        chunk.append(numbered)  # noqa: PERF402  what came before a fault is kept
                except (ConfigurationError, MessageError) as error:
                    failed = error
                if chunk:
                    sent = [message for _, message in chunk]
                    drive(publisher.publish_marked(sent, mark=mark, number=chunk[-1][0]))
                    now += len(chunk)
                    with suppress(OSError):
                        told(file.tell())
                if failed is not None:
                    raise failed
                if not chunk:
                    return Sent(now, before)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8: {error}") from error


def _mark(path: Path, queue: str) -> str:
    """Name this file for this queue: another file of the same name has another first line."""
    with path.open("rb") as file:
        first = file.readline(65_536)
    return f"{queue}/{path.name}/{hashlib.sha256(first).hexdigest()[:16]}"


def _messages(
    rows: Iterator[tuple[int, str]], path: Path, make: Make, id_field: str | None, *, skip: int
) -> Iterator[tuple[int, Outgoing]]:
    for number, text in rows:
        if number <= skip:
            continue
        try:
            key = _key(text, id_field) if id_field else f"{path.name}/{number}"
            yield number, make(text, key)
        except MessageError as error:
            raise MessageError(error.reason, f"{path}, line {number}: {error.detail}") from error


def _key(text: str, field: str) -> str:
    found = json.loads(text)
    value = found.get(field) if isinstance(found, dict) else None
    if value is None:
        raise ConfigurationError(f"field {field!r} is missing, which is to be the message id")
    return str(value)


def _lines(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    # readline instead of iteration, so that the position in the file can be told.
    number = 0
    while line := file.readline():
        number += 1
        if not line.strip():
            continue
        try:
            json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"{path}, line {number} is no JSON: {error}") from error
        yield number, line


def _csv(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    reader = csv.reader(iter(file.readline, ""), strict=True)
    try:
        header = next(reader, None)
        if not header or len(set(header)) < len(header):
            raise ConfigurationError(f"{path}: the first line must name each column once")
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise ConfigurationError(
                    f"{path}, line {reader.line_num} has {len(row)} cells, the header has "
                    f"{len(header)}"
                )
            yield reader.line_num, json.dumps(dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise ConfigurationError(f"{path}, line {reader.line_num} is no CSV: {error}") from error
