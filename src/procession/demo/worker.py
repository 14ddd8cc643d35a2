"""One worker process of the demo: runs all consumers until told to stop, or until it is killed.

Tells its parent over standard output, a JSON line each, under which name it works, what hangs, and
why it pauses. Of its messages it tells nothing: what it was about to tell when it was killed would
be lost.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from procession import Event
from procession.demo.app import build_app

_TOLD: Final = {Event.WORKER_STARTED, Event.LANE_HUNG, Event.STORE_UNAVAILABLE}
_TEXT_CHARS: Final = 300


class ParentInstrument:
    """Writes the few events that the database does not hold to standard output."""

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        """See `procession.Instrument`."""
        if event in _TOLD:
            told = {name: str(value)[:_TEXT_CHARS] for name, value in fields.items()}
            line = json.dumps({**told, "event": event.value, "process": os.getpid()}) + "\n"
            # One write, shorter than a pipe's atomic size: lines of several workers never mix.
            os.write(sys.stdout.fileno(), line.encode())


def main(arguments: Sequence[str]) -> None:
    """Work on DATABASE for the process PARENT; a message may take ATTEMPTS lone runs."""
    database, parent, attempts = arguments
    app = build_app(Path(database), attempts=int(attempts), instruments=[ParentInstrument()])
    worker = app.worker()
    worker.stop_with_parent()
    # The parent may have died before its id could be read.
    if os.getppid() == int(parent):
        worker.run()
    app.close()


if __name__ == "__main__":
    main(sys.argv[1:])
