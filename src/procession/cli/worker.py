"""One worker process of `procession run`: works until its supervisor says stop, or is gone."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from procession.cli import exit_code, logs, metrics
from procession.cli.target import load
from procession.errors import ProcessionError


def work(arguments: Sequence[str]) -> int:
    """Run the worker; return its exit code."""
    parser = argparse.ArgumentParser(prog="procession worker")
    parser.add_argument("target")
    parser.add_argument("--worker-id")
    parser.add_argument("--lifeline", type=int)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-json", action="store_true")
    parser.add_argument("--metrics", action="store_true")
    options = parser.parse_args(arguments)
    logs.set_up(options.log_level, as_json=options.log_json)
    try:
        return _work(options)
    except ProcessionError as error:
        # In the log, whose every line may have to be JSON.
        logging.getLogger("procession").critical("the worker cannot work: %s", error)
        return exit_code(error)


def _work(options: argparse.Namespace) -> int:
    app = load(options.target)
    if options.metrics:
        metrics.count(app)
    worker = app.worker(worker_id=options.worker_id)
    worker.stop_with_parent(options.lifeline)
    try:
        worker.run()
    except SystemExit:
        # Python waits at its end for threads, and those of the hung handlers never end.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(worker.exit_code)
    app.close()
    return 0
