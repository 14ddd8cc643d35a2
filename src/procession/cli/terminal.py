"""What is printed, and how: no control character and no password of anybody's reaches a terminal.

Needs nothing but the standard library, so that an error can be told where the rest is missing.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import unicodedata
from typing import Any

# A password in a URL ends at the last @ before the host's end: some are not percent-encoded.
_IN_URL = re.compile(r"(\w[\w+.-]*://[^\s:/@'\"]*):[^\s'\"]*@")
_IN_QUERY = re.compile(r"(?i)([?&;](?:password|passwd|pwd|sslpassword|secret|token)=)[^\s&;'\"]+")
# Invisible, harmless, and part of how scripts and emoji are written.
_JOINERS = "\u200c\u200d"


def masked(text: str) -> str:
    """Return the text with the passwords of its URLs hidden.

    Example:
        >>> masked("store postgresql://ada:secret@db/orders is away")
        'store postgresql://ada:***@db/orders is away'
    """
    return _IN_QUERY.sub(r"\1***", _IN_URL.sub(r"\1:***@", text))


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with everything escaped that could steer a terminal.

    Args:
        text: anybody's.
        keep: characters that stay, such as a newline where lines are wanted.

    Example:
        >>> printable("a\x1b[2Jb\n")
        'a\\x1b[2Jb\\n'
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        or character in keep
        or character in _JOINERS
        or unicodedata.category(character) == "Zs"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def text_of(key: bytes | None) -> str | None:
    r"""Return a key as text; bytes that are no UTF-8 as `\xff`."""
    return None if key is None else key.decode(errors="backslashreplace")


def say(text: str = "") -> None:
    """Print lines of our own, with users' data already made printable."""
    sys.stdout.write(text + "\n")


def say_json(document: Any) -> None:
    """Print one JSON document. It is ASCII, so nothing in it can steer a terminal."""
    say(json.dumps(document, indent=2))


def complain(text: str) -> None:
    """Tell an error: one line on standard error."""
    line = " ".join(masked(text).split("\n"))
    # Nobody may be there to read it; the exit code says it, too.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"procession: {printable(line)}\n")
        sys.stderr.flush()
