"""The options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="The app, as module:app; or set PROCESSION_APP.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def examples(*lines: str) -> str:
    """Return an epilog that shows commands, a line each."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
