"""Puts middlewares around a handler: the first registered is the outermost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from procession.errors import ConfigurationError
from procession.flows.context import Context

Middleware: TypeAlias = Callable[[Any, Context], Generator[None]]
"""A generator function of payload and context with one `yield`."""

Call: TypeAlias = Callable[[Any, Context], Any]


def check_middleware(function: object) -> Middleware:
    """Return the function if it can be a middleware.

    Raises:
        ConfigurationError: it is no generator function.
    """
    if not inspect.isgeneratorfunction(function):
        raise ConfigurationError(
            f"middleware {getattr(function, '__name__', function)!r} is no generator function: "
            "write def name(payload, ctx): …before…; yield; …after…"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"middleware {getattr(function, '__name__', function)!r} must take two arguments, "
            f"payload and context ({error}): write def name(payload, ctx): …before…; yield; …after…"
        ) from error
    return function


def around(call: Call, middlewares: Sequence[Middleware], *, is_async: bool) -> Call:
    """Return the call with the middlewares around it; the call itself where there are none."""
    if not middlewares:
        return call
    blocks = [contextmanager(middleware) for middleware in middlewares]

    def run(payload: Any, context: Context) -> Any:
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block(payload, context))
            return call(payload, context)

    async def run_async(payload: Any, context: Context) -> Any:
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block(payload, context))
            return await call(payload, context)

    return run_async if is_async else run
