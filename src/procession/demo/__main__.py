"""`procession demo`: the ledgers of a retailer, with crashes and resends on purpose.

Exits with 0 where our own tables agree with the files, with 1 where anything in them differs or any
work does not come to its end, with 2 where it was asked for something that cannot be done.
"""

import argparse
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from procession.errors import ProcessionError

DIFFERENT: Final = 1
REFUSED: Final = 2
KILLS_MAX: Final = 100
PROCESSES_MAX: Final = 16
EXAMPLES: Final = Path("examples", "ledger")
# One day of them, which the package brings along.
SHIPPED: Final = Path(__file__).with_name("data")
MODES: Final = {
    "naive": ["naive"],
    "single": ["single"],
    "convoy": ["convoy"],
    "all": ["naive", "single", "convoy"],
}
# As a shell counts: 128 and the signal's number.
INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM
PIPE_CLOSED: Final = 128 + signal.SIGPIPE

DESCRIPTION: Final = """\
Splits a retailer's daily ledgers into transactions and applies each of them once and in order,
on one SQLite file, while ledgers and transactions are sent twice, one is changed, one is damaged
and worker processes are killed. Then compares the tables with the files. Before that it lets two
kinds of consumers without an inbox count the first days' ledgers, and shows what they count.
"""
EPILOG: Final = """\
examples:
  procession demo
  procession demo --mode naive
  procession demo --kills 10 --processes 3 --seed 7
  procession demo --data my/ledgers --database demo.db
  procession demo --json 2>/dev/null | python -m json.tool

modes:
  naive   competing consumers, no inbox: what comes again counts again, orders out of sequence
  single  a single consumer, no inbox: in sequence, and what comes again still counts again
  convoy  ours, an inbox and sessions: no differences, or the exit code is 1
  all     one after another

FOLDER holds *.csv or *.csv.gz files with the columns InvoiceNo, StockCode, Quantity and UnitPrice.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with these arguments; return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        import rich  # noqa: F401, PLC0415  an extra: where it is missing, that is said in words
    except ImportError:
        return _refuse("the demo needs rich: pip install 'procession[cli]'")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a narrow encoding lacks is told by its number, not by a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("interrupted: all workers have ended", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads no further has seen enough. Python would complain when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(arguments: argparse.Namespace) -> int:
    from procession.demo.fleet import FleetError  # noqa: PLC0415  these need rich
    from procession.demo.modes import Mode, database_of, play  # noqa: PLC0415
    from procession.demo.report import show  # noqa: PLC0415
    from procession.demo.run import Options, StalledError  # noqa: PLC0415
    from procession.demo.sums import show_sums  # noqa: PLC0415
    from procession.demo.voice import Voice  # noqa: PLC0415

    wanted = [Mode(name) for name in MODES[arguments.mode]]
    with ExitStack() as stack:
        try:
            database = _database(arguments.database, stack)
            files = [database_of(mode, database) for mode in wanted]
            _refuse_taken(files)
            options = Options(
                data=arguments.data or _ledgers(),
                database=database,
                seed=arguments.seed,
                kills=arguments.kills,
                processes=arguments.processes,
            )
            voice = Voice(sys.stderr if arguments.json else sys.stdout)
            with voice:
                outcome = play(options, wanted, voice)
        except (ValueError, ProcessionError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            return _refuse(str(error))
        except (StalledError, FleetError) as error:
            print(f"the demo did not come to its end: {error}", file=sys.stderr)
            return DIFFERENT
        if outcome.ours is not None:
            show(outcome.ours.result, voice.console)
        show_sums(outcome, voice.console)
        if arguments.json:
            print(json.dumps(outcome.as_json(), indent=2), flush=True)
        if arguments.database is not None:
            voice.console.print(f"kept: {', '.join(map(str, files))}")
    return 0 if outcome.ok else DIFFERENT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procession demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="the ledgers, a file a day (default: the repository's examples/ledger in a clone of "
        "it, else the one day that comes with the package)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="all",
        help="which consumers are to count: see below (default: all)",
    )
    parser.add_argument(
        "--database",
        type=Path,
        metavar="FILE",
        help="a new file for all tables, kept for a look with sqlite3, with NAME-naive and "
        "NAME-single beside it for the other modes (default: files that are removed)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of what goes wrong, and where (default: 1)"
    )
    parser.add_argument(
        "--kills",
        type=_between(0, KILLS_MAX),
        default=3,
        metavar="N",
        help="how many workers are killed with SIGKILL in mid-run (default: 3)",
    )
    parser.add_argument(
        "--processes",
        type=_between(1, PROCESSES_MAX),
        default=2,
        metavar="N",
        help="how many workers there are at a time (default: 2)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on standard output, all else on standard error",
    )
    return parser


def _between(low: int, high: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return number


def _ledgers() -> Path:
    """Return the repository's ledgers, found from this file or from the current folder, or the
    package's own day.
    """
    candidates = (Path(__file__).parents[3] / EXAMPLES, EXAMPLES)
    return next((folder for folder in candidates if folder.is_dir()), SHIPPED)


def _database(wanted: Path | None, stack: ExitStack) -> Path:
    """Return where the tables go."""
    if wanted is None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="procession-demo-"))
        return Path(folder) / "demo.db"
    if not wanted.parent.is_dir():
        raise ValueError(f"{wanted}: its folder does not exist")
    return wanted.absolute()


def _refuse_taken(files: Sequence[Path]) -> None:
    """Refuse a database that exists already, before another one is begun."""
    for file in files:
        if file.exists():
            raise ValueError(
                f"{file} exists already: the demo counts from nothing, so name a new file"
            )


def _refuse(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return REFUSED


def _terminate(_number: int, _frame: object) -> None:
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
