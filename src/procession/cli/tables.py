"""Columns of text: each row stays on one line; on a terminal too narrow for that, a line a cell."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from procession.cli.terminal import printable, say

GAP = "  "
CELL_COLUMNS = 40
LAST_COLUMNS = 24
MIN_COLUMNS = 8


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[int] = ()
) -> None:
    """Print rows below their headers; users' data in them is made printable.

    On a terminal long cells are cut: in a file, and with `--json`, everything is there. Where the
    columns do not fit, each cell has a line of its own, and nothing is cut.

    Args:
        headers: of the columns.
        rows: cells; None is shown as `-`.
        numbers: which columns hold numbers.
    """
    on_terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, highlight=False, emoji=False, soft_wrap=True)
    cells = [[_cell(cell, cut=on_terminal) for cell in row[:-1]] for row in rows]
    widths = [
        max(cell_len(text) for text in column) for column in zip(headers[:-1], *cells, strict=True)
    ]
    taken = sum(widths) + len(GAP) * len(widths)
    if on_terminal and taken + min(LAST_COLUMNS, _longest(headers, rows)) > console.width:
        _print_stacked(console, headers, rows)
        return
    room = max(LAST_COLUMNS, console.width - taken)
    last = [_cell(row[-1], cut=on_terminal, columns=room) for row in rows]
    widths.append(max(cell_len(text) for text in (headers[-1], *last)))
    lines = [[*row, end] for row, end in zip(cells, last, strict=True)]
    if on_terminal:
        console.print(Text(_line(headers, widths, numbers), style="bold"))
    else:
        say(_line(headers, widths, numbers))
    for line in lines:
        say(_line(line, widths, numbers))


def _longest(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> int:
    return max(
        cell_len(text) for text in (headers[-1], *(_cell(row[-1], cut=False) for row in rows))
    )


def _print_stacked(
    console: Console, headers: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    label = max(cell_len(header) for header in headers) + len(GAP)
    room = max(MIN_COLUMNS, console.width - label)
    for number, row in enumerate(rows):
        if number:
            say()
        for header, value in zip(headers, row, strict=True):
            shown = f"{value:,}" if isinstance(value, int) else _cell(value, cut=False)
            begin = header
            for part in Text(shown).wrap(console, room) or [Text("")]:
                say((begin + " " * (label - cell_len(begin)) + part.plain).rstrip())
                begin = ""


def _line(texts: Sequence[str], widths: Sequence[int], numbers: Sequence[int]) -> str:
    padded = [
        " " * (width - cell_len(text)) + text
        if index in numbers
        else text + " " * (width - cell_len(text))
        for index, (text, width) in enumerate(zip(texts, widths, strict=True))
    ]
    return GAP.join(padded).rstrip()


def _cell(value: object, *, cut: bool, columns: int = CELL_COLUMNS) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}" if cut else str(value)
    text = printable(str(value))
    if not cut or cell_len(text) <= columns:
        return text
    return set_cell_size(text, columns - 1).rstrip() + "…"
