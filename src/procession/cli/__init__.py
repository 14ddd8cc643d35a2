"""The command `procession`: operators' work on an app, from a terminal or a script.

Whatever goes wrong is one line on standard error and an exit code: 1 the operation was refused, 2
the program or its settings are wrong, 3 the store cannot be reached now.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

from procession.cli.terminal import complain
from procession.errors import ConfigurationError, ProcessionError, TransientError

EXIT_REFUSED = 1
EXIT_CONFIGURATION = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130
_OUTPUT_FAULTS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    Args:
        arguments: without the program's name; by default those of this process.

    Example:
        >>> main(["--version"])
        procession 0.1.0
        0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _replace_closed()
    try:
        code = _run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has enough.
        _drop_output()
        return EXIT_REFUSED
    except OSError as error:
        if error.errno not in _OUTPUT_FAULTS or error.filename is not None:
            raise
        _drop_output()
        complain(f"the output cannot be written: {error.strerror}; what was asked for is done")
        return EXIT_REFUSED
    except ProcessionError as error:
        complain(str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _replace_closed() -> None:
    """Write to nobody where a stream was closed before the program began, as by `>&-`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123


def _drop_output() -> None:
    """See to it that what is left in the buffer does not fail at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["worker"]:
        # Started by `procession run`, never by people; it needs nothing that only a terminal needs.
        from procession.cli.worker import work  # noqa: PLC0415

        return work(arguments[1:])
    try:
        from procession.cli.commands import commands  # noqa: PLC0415
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        raise ConfigurationError(
            f"the commands need {package}, which is not installed: pip install 'procession[cli]'"
        ) from error
    try:
        commands(arguments, prog_name="procession")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def exit_code(error: ProcessionError) -> int:
    """Return what a script is told of an error."""
    match error:
        case ConfigurationError():
            return EXIT_CONFIGURATION
        case TransientError():
            return EXIT_UNAVAILABLE
        case _:
            return EXIT_REFUSED
