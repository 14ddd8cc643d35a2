"""Every message takes effect once, and each key's messages in order, on your own database.

Example:
    >>> from procession import App, Context
    >>> app = App("shop", store="sqlite:///shop.db")
    >>> @app.consumer("orders", name="orders", session="id")
    ... def order(payload: dict, ctx: Context) -> None:
    ...     ctx.write("INSERT INTO orders (id) VALUES (:id)", id=payload["id"])
"""

from procession.app import App, ConsumerDefinition
from procession.config import RetryPolicy, Settings
from procession.errors import (
    ConfigurationError,
    MessageError,
    OperatorError,
    ProcessionError,
    Reason,
    SessionLost,
    StoreUnavailable,
    TransactionMisuse,
    TransientError,
)
from procession.flows.context import Context
from procession.message import Message
from procession.outcome import Cause, End, Reject, Retry, Standing
from procession.telemetry import Event, Instrument

__version__ = "0.1.0"

__all__ = [
    "App",
    "Cause",
    "ConfigurationError",
    "ConsumerDefinition",
    "Context",
    "End",
    "Event",
    "Instrument",
    "Message",
    "MessageError",
    "OperatorError",
    "ProcessionError",
    "Reason",
    "Reject",
    "Retry",
    "RetryPolicy",
    "SessionLost",
    "Settings",
    "Standing",
    "StoreUnavailable",
    "TransactionMisuse",
    "TransientError",
]
