"""A worker of the demo that applies a line of each ledger twice: the comparison must find it."""

import sys

from procession import Context
from procession.demo import app, worker
from procession.demo.ledgers import RawLine

_apply = app.apply


def apply_twice(raw: RawLine, ctx: Context) -> None:
    _apply(raw, ctx)
    if raw.line_number == 5:
        _apply(raw, ctx)


app.apply = apply_twice

if __name__ == "__main__":
    worker.main(sys.argv[1:])
