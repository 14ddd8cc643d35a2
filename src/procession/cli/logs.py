"""The log of `procession run`, on standard error: lines for people, or JSON lines for machines.

It is set up before the app is imported, so an app that configures logging itself has the last word.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from procession.cli.terminal import masked, printable
from procession.errors import ConfigurationError

LEVELS = ("debug", "info", "warning", "error", "critical")


def set_up(level: str, *, as_json: bool) -> None:
    """Send the log to standard error.

    Raises:
        ConfigurationError: there is no such level.
    """
    if level.lower() not in LEVELS:
        raise ConfigurationError(f"log level {level!r}: it is one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else Lines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _moment(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _plain(value: Any) -> Any:
    """Return a field's value as JSON has it: keys are text, several parts joined by `/`."""
    match value:
        case dict():
            return {_key(key): _plain(member) for key, member in value.items()}
        case list() | tuple():
            return [_plain(member) for member in value]
        case _:
            return value


def _key(key: object) -> str:
    parts = key if isinstance(key, tuple) else (key,)
    return "/".join(str(part) for part in parts if part is not None)


class Lines(logging.Formatter):
    """One line a record, and a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        at = _moment(record).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        text = printable(masked(record.getMessage()))
        line = f"{at}Z {record.levelname:<7} [{record.process}] {record.name}: {text}"
        if record.exc_info:
            line += "\n" + printable(masked(self.formatException(record.exc_info)), keep="\n\t")
        return line


class JsonLines(logging.Formatter):
    """One JSON object a record; an event's fields stand in `fields`, its name in `event`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        document: dict[str, Any] = {
            "at": _moment(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
        }
        fields = getattr(record, "procession", None)
        if isinstance(fields, dict) and isinstance(record.args, tuple) and record.args:
            document |= {"event": str(record.args[0]), "fields": _plain(fields)}
        else:
            document["message"] = record.getMessage()
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return masked(json.dumps(document, default=str))
