"""Finds the app that a command is about: `module:app`, with the current folder on the path."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from procession.app import App
from procession.errors import ConfigurationError, ProcessionError

ENVIRONMENT = "PROCESSION_APP"
_SHAPE = re.compile(r"[^\s:{}\[\]\"']+:[A-Za-z_][\w.]*")


def positions(
    target: str | None, rest: Sequence[str | None], *, needed: int, usage: str
) -> tuple[str, list[str | None]]:
    """Return the target and as many arguments as were declared after it.

    The target may be left out where the environment names it; what stands in its place is then the
    first of the others.

    Args:
        target: the first argument.
        rest: the others; None where one is missing.
        needed: how many of the others there must be.
        usage: how the command is called, for the error.

    Raises:
        ConfigurationError: too few or too many were given.
    """
    given = [argument for argument in (target, *rest) if argument is not None]
    default = os.environ.get(ENVIRONMENT)
    if given and (default is None or _SHAPE.fullmatch(given[0])):
        found = given.pop(0)
    elif default is not None:
        found = default
    else:
        raise ConfigurationError(
            f"which app? Write {usage}, or name it in the environment: {ENVIRONMENT}=module:app"
        )
    if not needed <= len(given) <= len(rest):
        raise ConfigurationError(f"write {usage}")
    return found, [*given, *[None] * (len(rest) - len(given))]


def load(target: str) -> App:
    """Import the app.

    Raises:
        ConfigurationError: the target is not written `module:app`, the module cannot be imported,
            there is no `App` under that name, or its store dies with each process.
    """
    name, _, path = target.partition(":")
    if not _SHAPE.fullmatch(target):
        raise ConfigurationError(
            f"{target!r} names no app: write module:app, as in orders:app for `app` in orders.py"
        )
    if name.endswith(".py") or "/" in name:
        proposal = name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigurationError(
            f"{target!r} names a file: write the module's name, as in {proposal}:{path}"
        )
    folder = str(Path.cwd())
    if not {"", folder} & set(sys.path):
        sys.path.insert(0, folder)
    module = _import(name)
    found: object = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if isinstance(found, App):
        if found.store.features.durable:
            return found
        raise ConfigurationError(
            f"{target!r} keeps its messages in the memory of one process, where no command finds "
            "them: give it a store on disk, as in store='sqlite:///orders.db'"
        )
    known = sorted(other for other, value in vars(module).items() if isinstance(value, App))
    has = f"it has {', '.join(f'{name}:{other}' for other in known)}" if known else "it has no App"
    is_ = "there is none" if found is None else f"it is a {type(found).__name__}"
    raise ConfigurationError(f"{target!r} is no procession.App ({is_}; {has})")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise ConfigurationError(
                f"there is no module {missing!r} in {Path.cwd()} or installed: call this where "
                "the app's code is"
            ) from error
        raise ConfigurationError(
            f"module {name!r} cannot be imported: it needs {missing!r}, which is not installed "
            f"({_place(error)})"
        ) from error
    except ProcessionError as error:
        raise ConfigurationError(f"{error} ({_place(error)})") from error
    except SystemExit as error:
        raise ConfigurationError(
            f"module {name!r} ends the program when it is imported ({_place(error)}): put what it "
            'runs under if __name__ == "__main__":'
        ) from error
    except Exception as error:
        text = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigurationError(
            f"module {name!r} cannot be imported: {type(error).__name__}: {text} ({_place(error)})"
        ) from error


def _place(error: BaseException) -> str:
    """Return where it was raised: the deepest line of the user's own code, if there is one."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    ours = str(Path(__file__).parent.parent)
    installed = [str(Path(sys.prefix)), str(Path(sys.base_prefix)), ours]
    own = [f for f in frames if not any(f.filename.startswith(folder) for folder in installed)]
    if not frames:
        return "no line is known"
    at = (own or frames)[-1]
    return f"{at.filename}, line {at.lineno}"
