"""The statements of `stores/sql/postgres`, as the pipeline and as cursors take them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from procession.stores.postgres.wire import BINARY, TEXT
from procession.stores.sql.files import DEFAULT_PREFIX, migrations, named_statements, renamed
from procession.stores.sql.named import formatted, numbered

# What is bytes, or an array, goes in the binary format; its cast says so in the text.
_BINARY = re.compile(r":(\w+)::(?:bytea|\w+\[\])")
_INDEX = re.compile(r"^(CREATE (?:UNIQUE )?INDEX )(\S+)", re.MULTILINE)


class Statement:
    """One statement for the pipeline.

    Attributes:
        text: with `$1`, `$2`.
        formats: of the parameters.
    """

    __slots__ = ("_names", "formats", "text")

    def __init__(self, source: str) -> None:
        parsed = numbered(source)
        binary = set(_BINARY.findall(source))
        self.text = parsed.text.encode()
        self._names = parsed.names
        self.formats = [BINARY if name in binary else TEXT for name in parsed.names]

    def bind(self, values: Mapping[str, Any], **common: Any) -> list[bytes | None]:
        """Return the values in the order of the parameters."""
        bound: list[bytes | None] = []
        for name in self._names:
            value = values[name] if name in values else common[name]
            if value is None or type(value) is bytes:
                bound.append(value)
            elif value is True or value is False:
                bound.append(b"t" if value else b"f")
            else:
                bound.append(str(value).encode())
        return bound


@cache
def statements(prefix: str = DEFAULT_PREFIX, schema: str = "") -> dict[str, Statement]:
    """Return the statements for the pipeline, by name."""
    return {
        name: Statement(renamed(text, prefix, schema))
        for name, text in named_statements("postgres").items()
    }


@cache
def texts(prefix: str = DEFAULT_PREFIX, schema: str = "") -> dict[str, str]:
    """Return the statements for the driver's cursors, by name."""
    return {
        name: formatted(renamed(text, prefix, schema)).text
        for name, text in named_statements("postgres").items()
    }


def migration_texts(prefix: str, schema: str) -> tuple[tuple[int, str, str], ...]:
    """Return the migrations as (number, name, SQL). Each records its number."""
    found = []
    for number, name, text in migrations("postgres"):
        record = (
            f"INSERT INTO {DEFAULT_PREFIX}meta (name, value) VALUES ('schema', {number}) "
            "ON CONFLICT (name) DO UPDATE SET value = excluded.value;\n"
        )
        # An index lies in its table's schema, and is named without it.
        own = _INDEX.sub(lambda match: match[1] + match[2].replace(DEFAULT_PREFIX, "\0"), text)
        made = renamed(own + "\n" + record, prefix, schema).replace("\0", prefix)
        found.append((number, name, made))
    return tuple(found)


SCHEMA_VERSION = max(number for number, _, _ in migrations("postgres"))
