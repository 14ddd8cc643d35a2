"""A handler as registered: what it takes, and how it is called."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from procession.app.middleware import Middleware, around
from procession.app.resources import Resources
from procession.codecs.json import JsonCodec
from procession.errors import ConfigurationError
from procession.flows.context import Context

Handler = Callable[..., Any]
CONTEXT_NAMES = ("ctx", "context")


class HandlerCall:
    """Calls one handler with what it takes; implements `procession.flows.batch.Invoke`.

    Attributes:
        payload_type: what the body is decoded to.
        decode: makes a fresh payload of a body.
    """

    __slots__ = (
        "_call",
        "_context_name",
        "_function",
        "_wanted",
        "_what",
        "decode",
        "is_async",
        "payload_type",
    )

    def __init__(self, function: Handler, what: str) -> None:
        self._function = function
        self._what = what
        self.is_async = inspect.iscoroutinefunction(function)
        self.payload_type, self._context_name, self._wanted = _signature(function, what)
        self.decode = JsonCodec().decoder(self.payload_type)
        self._call = self._plain_call()

    def __call__(self, payload: Any, context: Context, /) -> Any:
        """Run the handler, with its middlewares around it."""
        return self._call(payload, context)

    def bind(self, middlewares: Sequence[Middleware], resources: Resources) -> None:
        """Put middlewares around it and give it the open resources it asks for.

        Raises:
            ConfigurationError: it asks for a resource that is not there.
        """
        for name, wanted in self._wanted.items():
            if wanted not in resources:
                raise ConfigurationError(
                    f"{self._what}: parameter {name!r} asks for a {wanted.__name__}, and there is "
                    "no such resource: make one with @app.resource, or give it a default"
                )
        call = self._plain_call()
        if self._wanted:
            call = self._call_with(
                {name: resources.get(wanted) for name, wanted in self._wanted.items()}
            )
        self._call = around(call, middlewares, is_async=self.is_async)

    def _plain_call(self) -> Callable[[Any, Context], Any]:
        if self._context_name is not None:
            return self._function
        function = self._function
        return lambda payload, _context: function(payload)

    def _call_with(self, values: dict[str, Any]) -> Callable[[Any, Context], Any]:
        function, context_name = partial(self._function, **values), self._context_name
        if context_name is None:
            return lambda payload, _context: function(payload)
        return lambda payload, context: function(payload, **{context_name: context})


def _signature(function: Handler, what: str) -> tuple[Any, str | None, dict[str, type]]:
    """Return the payload type, the context's parameter, and the types of wanted resources."""
    if not callable(function):
        raise ConfigurationError(f"{what} is not callable")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{what} is a generator: write a plain or an async function")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise ConfigurationError(f"{what}: its annotations cannot be read: {error}") from error
    wanted = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not wanted or wanted[0].kind is wanted[0].KEYWORD_ONLY:
        raise ConfigurationError(
            f"{what} must take (payload), (payload, ctx), and then the resources it needs"
        )
    payload, *others = wanted
    payload_type = hints.get(payload.name, Any)
    if payload_type is Context:
        raise ConfigurationError(f"{what}: the payload comes first, then the context")
    context_name: str | None = None
    resources: dict[str, type] = {}
    for place, parameter in enumerate(others):
        hint = hints.get(parameter.name)
        if hint is Context or (hint is None and (place == 0 or parameter.name in CONTEXT_NAMES)):
            context_name = parameter.name
        elif isinstance(hint, type):
            resources[parameter.name] = hint
        else:
            raise ConfigurationError(
                f"{what}: parameter {parameter.name!r} must be annotated with Context or with the "
                "class of a resource"
            )
    return payload_type, context_name, resources
