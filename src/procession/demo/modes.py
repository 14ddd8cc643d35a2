"""Plays the demo: consumers as people write them first, then ours, each explained and measured.

What cannot be done at all is refused before any of them begins. Each has its own database, so none
sees what another has done.
"""

import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

from procession.demo import check
from procession.demo.app import LEASE_MS
from procession.demo.naive import NaiveRun, first_ledgers
from procession.demo.producer import counted
from procession.demo.run import Options, Prepared, prepare, run
from procession.demo.sums import Counted, Ours, Outcome
from procession.demo.tally import pounds, tally
from procession.demo.voice import Voice

Files: TypeAlias = Mapping[check.Place, check.Line]

COMPETING_PROCESSES_MIN: Final = 2


class Mode(StrEnum):
    """A kind of consumer."""

    NAIVE = "naive"
    SINGLE = "single"
    CONVOY = "convoy"


EXPLAINED: Final = {
    Mode.NAIVE: (
        "Competing consumers: each takes the next message of one queue, commits its effect, and "
        "then deletes it from the queue. They have no inbox and no sessions, so what comes again "
        "counts again, and the lines of an order are applied in whatever order they are ready."
    ),
    Mode.SINGLE: (
        "A single consumer: the same loop in one process, which always takes the oldest message, "
        "so that each order's lines keep their sequence. It has no inbox either, so what is sent "
        "twice, or was done but not deleted when the process died, counts again."
    ),
    Mode.CONVOY: (
        "Procession: an inbox and one session an order, with the mark, the effect and the removal "
        "from the queue in one transaction. So what comes again has no effect, and each order's "
        "lines keep their sequence, however many processes work and whichever is killed."
    ),
}


def play(options: Options, wanted: Sequence[Mode], voice: Voice) -> Outcome:
    """Run these kinds of consumers one after another.

    Raises:
        ValueError: the ledgers or the database's name do not do; nothing has begun.
        StalledError, FleetError: the work does not come to its end.
        ProcessionError: the database cannot be used, or a ledger cannot be sent.
        OSError: a file cannot be read.
    """
    began_s = time.monotonic()
    prepared = prepare(options)
    books = prepared.books
    voice.say(
        f"{counted(len(books.ledgers), 'ledger')}, "
        f"{counted(len(books.lines), 'transaction')}, "
        f"{counted(len(books.invoices), 'invoice')}; seed {options.seed}; "
        f"{counted(options.processes, 'worker process', 'es')}, leases of {LEASE_MS / 1000:g} s"
    )
    files = check.read_folder(options.data)
    modes: dict[str, Counted] = {}
    ours: Ours | None = None
    for mode in wanted:
        voice.explain(EXPLAINED[mode])
        if mode is Mode.CONVOY:
            modes[mode], ours = _convoy(options, prepared, files, voice)
        else:
            modes[mode] = _naive(mode, options, prepared, files, voice)
    return Outcome(
        input={
            "ledgers": len(books.ledgers),
            "transactions": len(books.lines),
            "invoices": len(books.invoices),
            "processes": options.processes,
            "seed": options.seed,
        },
        modes=modes,
        ours=ours,
        seconds=time.monotonic() - began_s,
    )


def database_of(mode: Mode, database: Path) -> Path:
    """Return where a kind of consumer has its tables; ours has the file that was asked for.

    >>> str(database_of(Mode.NAIVE, Path("demo.db")))
    'demo-naive.db'
    """
    if mode is Mode.CONVOY:
        return database
    return database.with_name(f"{database.stem}-{mode}{database.suffix}")


def _naive(mode: Mode, options: Options, prepared: Prepared, files: Files, voice: Voice) -> Counted:
    processes = 1 if mode is Mode.SINGLE else max(COMPETING_PROCESSES_MIN, options.processes)
    database = database_of(mode, options.database)
    naive = NaiveRun(mode, prepared.books, prepared.plan, processes=processes)
    naive.run(database, voice, Random(options.seed))  # noqa: S311  chooses victims
    made = tally(database, files, naive.ledgers)
    voice.say(
        f"{mode}: {pounds(made.true_total_thousandths)} pounds in the files, "
        f"{pounds(made.counted_total_thousandths)} counted; "
        f"{made.orders_out_of_sequence:,} of {counted(made.orders, 'order')} out of sequence"
    )
    return Counted(tally=made, processes=processes, kills=naive.kills, seconds=naive.seconds)


def _convoy(
    options: Options, prepared: Prepared, files: Files, voice: Voice
) -> tuple[Counted, Ours]:
    result = run(options, prepared, voice)
    first, every = (
        tally(options.database, files, ledgers)
        for ledgers in (first_ledgers(prepared.books), list(prepared.books.ledgers))
    )
    return (
        Counted(
            tally=first, processes=options.processes, kills=result.kills, seconds=result.seconds
        ),
        Ours(result=result, tally=every),
    )
