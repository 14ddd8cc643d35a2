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
from procession.core.inbox import Verdict
from procession.errors import (
    ConfigurationError,
    Conflict,
    KeyDead,
    KeyWaits,
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
from procession.library import Inbox, Outbox
from procession.message import Message
from procession.outcome import Cause, End, Reject, Retry, Standing
from procession.telemetry import Event, Instrument

__version__ = "0.1.0"

__all__ = [
    "App",
    "Cause",
    "ConfigurationError",
    "Conflict",
    "ConsumerDefinition",
    "Context",
    "End",
    "Event",
    "Inbox",
    "Instrument",
    "KeyDead",
    "KeyWaits",
    "Message",
    "MessageError",
    "OperatorError",
    "Outbox",
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
    "Verdict",
]
