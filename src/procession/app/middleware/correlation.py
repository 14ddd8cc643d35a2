"""Makes the message in hand known to code that has no context: correlation id and message id."""

from __future__ import annotations

from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from procession.flows.context import Context

CORRELATION_HEADER = "correlation-id"


@dataclass(frozen=True, slots=True)
class InHand:
    """The message that this thread or task handles."""

    consumer: str
    message_id: str
    correlation_id: str


in_hand: ContextVar[InHand | None] = ContextVar("procession_in_hand", default=None)
"""Read it in log filters and clients; None outside of handlers."""


def correlation(_payload: Any, ctx: Context) -> Generator[None]:
    """Set `in_hand` for the run. A message without a correlation id is its own, and so is one whose
    headers another program wrote and nobody can read.

    Example:
        >>> from procession import App
        >>> from procession.app.middleware import correlation
        >>> app = App("doc", store="memory://")
        >>> _ = app.middleware(correlation)
    """
    message = ctx.message
    found = message.header(CORRELATION_HEADER) or message.id
    token = in_hand.set(InHand(ctx.consumer, message.id, found))
    try:
        yield
    finally:
        in_hand.reset(token)


def correlation_headers() -> dict[str, str]:
    """Return the correlation id of the message in hand as a header, for `app.on_send`: what a
    handler sends then carries on the correlation id of what it handles.

    Example:
        >>> from procession import App
        >>> from procession.app.middleware import correlation, correlation_headers
        >>> app = App("doc", store="memory://")
        >>> _ = app.middleware(correlation)
        >>> _ = app.on_send(correlation_headers)
    """
    message = in_hand.get()
    return {} if message is None else {CORRELATION_HEADER: message.correlation_id}
