"""Reads SQL text with parameters as `:name`, as all stores take it, and writes it as a driver does.

Strings, quoted identifiers and comments are passed over, so that a colon in one of them is no
parameter, and a word in one of them no keyword.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

_TOKENS = re.compile(
    r"""
    (?P<skip>
        [eE]'(?:[^'\\]|\\.|'')*'            # E'it\'s'
      | '(?:[^']|'')*'                      # 'it''s'
      | "(?:[^"]|"")*"                      # "a name"
      | `[^`]*`                             # `a name`
      | \$(?P<tag>[A-Za-z_]*)\$.*?\$(?P=tag)\$
      | --[^\n]*
      | /\*.*?\*/
      | ::                                  # a cast
      | :=
    )
  | :(?P<name>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<word>[A-Za-z_][A-Za-z0-9_$]*)
  | (?P<other>%)
    """,
    re.VERBOSE | re.DOTALL,
)
CACHED_TEXTS = 1_000


class Parsed(NamedTuple):
    """A statement as it was read.

    Attributes:
        text: as the driver takes it.
        names: the parameters, in the order in which the driver takes them.
        words: every word outside of strings and comments, in upper case.
        first: the first of them, "" where there is none.
    """

    text: str
    names: tuple[str, ...]
    words: frozenset[str]
    first: str


def _read(statement: str, write: Callable[[str], str], percent: str) -> Parsed:
    words: list[str] = []
    names: list[str] = []
    parts: list[str] = []
    start = 0
    for found in _TOKENS.finditer(statement):
        parts.append(statement[start : found.start()])
        start = found.end()
        name = found["name"]
        if name is not None:
            names.append(name)
            parts.append(write(name))
            continue
        if found["word"] is not None:
            words.append(found["word"].upper())
        parts.append(found[0].replace("%", percent))
    parts.append(statement[start:])
    return Parsed("".join(parts), tuple(names), frozenset(words), words[0] if words else "")


@lru_cache(CACHED_TEXTS)
def numbered(statement: str) -> Parsed:
    """Return the statement with `$1`, `$2`, one number a name.

    Example:
        >>> numbered("SELECT :a, :b, :a, 'at 10:30'").text
        "SELECT $1, $2, $1, 'at 10:30'"
    """
    numbers: dict[str, int] = {}

    def write(name: str) -> str:
        return f"${numbers.setdefault(name, len(numbers) + 1)}"

    return _read(statement, write, "%")._replace(names=tuple(numbers))


@lru_cache(CACHED_TEXTS)
def formatted(statement: str) -> Parsed:
    """Return the statement with `%(name)s`, and `%%` for each per cent sign.

    Example:
        >>> formatted("SELECT :a WHERE b LIKE 'x%'").text
        "SELECT %(a)s WHERE b LIKE 'x%%'"
    """
    return _read(statement, lambda name: f"%({name})s", "%%")
