"""Things that live as long as a worker: engines, clients, caches. Opened once, closed in reverse.

A resource is a function that returns a value, or a generator function that yields one and cleans
up behind its `yield`. A handler gets it by annotating a parameter with the resource's type.
"""

from __future__ import annotations

import collections.abc
import inspect
import typing
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from procession.errors import ConfigurationError

Factory = Callable[[], Any]


class Resources:
    """The resources of an app.

    `open` and `close` are called by whoever runs the app, on one thread; `get` on any.
    """

    def __init__(self) -> None:
        self._factories: dict[type, Factory] = {}
        self._hooks: list[Callable[[], Generator[None]]] = []
        self._values: dict[type, Any] = {}
        self._stack: ExitStack | None = None

    def add(self, factory: Factory) -> type:
        """Register a resource; return its type.

        Raises:
            ConfigurationError: its return annotation names no class, or one that is taken.
        """
        name = getattr(factory, "__name__", repr(factory))
        if inspect.iscoroutinefunction(factory) or inspect.isasyncgenfunction(factory):
            raise ConfigurationError(
                f"resource {name!r} is async: a resource is shared by lanes whose loops differ; "
                "make it in a plain function, and open connections inside the handler's loop"
            )
        made = typing.get_type_hints(factory).get("return")
        if inspect.isgeneratorfunction(factory):
            if typing.get_origin(made) not in (
                collections.abc.Generator,
                collections.abc.Iterator,
                collections.abc.Iterable,
            ):
                raise ConfigurationError(
                    f"resource {name!r} yields: annotate it as -> Generator[TheType]"
                )
            made = typing.get_args(made)[0]
        if not isinstance(made, type) or made is type(None):
            raise ConfigurationError(
                f"resource {name!r} does not say what it makes: annotate its return with a class, "
                "which is how handlers ask for it"
            )
        if made in self._factories:
            raise ConfigurationError(f"there is a resource of type {made.__name__} already")
        self._factories[made] = factory
        return made

    def add_hook(self, hook: Callable[[], Generator[None]]) -> None:
        """Register a lifespan hook: code before its `yield` runs at start, behind it at stop."""
        if not inspect.isgeneratorfunction(hook):
            raise ConfigurationError(
                f"lifespan {getattr(hook, '__name__', hook)!r} is no generator function: write "
                "def name(): …start…; yield; …stop…"
            )
        self._hooks.append(hook)

    def __contains__(self, wanted: object) -> bool:
        return wanted in self._factories

    def get(self, wanted: type) -> Any:
        """Return the resource of a type.

        Raises:
            ConfigurationError: there is none, or the app does not run.
        """
        if wanted not in self._values:
            known = ", ".join(sorted(made.__name__ for made in self._factories)) or "none"
            raise ConfigurationError(
                f"there is no open resource of type {wanted.__name__} (registered: {known})"
            )
        return self._values[wanted]

    def open(self) -> None:
        """Run the hooks' starts, then make the resources, in order of registration. Harmless
        twice. What was opened is closed again if a later one fails."""
        if self._stack is not None:
            return
        with ExitStack() as stack:
            for hook in self._hooks:
                stack.enter_context(contextmanager(hook)())
            for made, factory in self._factories.items():
                if inspect.isgeneratorfunction(factory):
                    self._values[made] = stack.enter_context(contextmanager(factory)())
                else:
                    self._values[made] = factory()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close all, the last opened first. Harmless twice."""
        stack, self._stack = self._stack, None
        self._values.clear()
        if stack is not None:
            stack.close()
