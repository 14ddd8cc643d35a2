"""Every error that Procession raises, and the closed list of reasons for a dead letter.

The tree tells what to do: a `ConfigurationError` is mended in code, a `MessageError` concerns one
message for ever, a `TransientError` passes by itself and never costs an attempt, `SessionLost`
means that nothing was committed and somebody else goes on, `TransactionMisuse` is a handler that
touched what belongs to the batch.
"""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Why a message became a dead letter. The list is closed; every value is in the glossary."""

    UNDECODABLE = "undecodable"
    INVALID_PAYLOAD = "invalid-payload"
    UNKNOWN_TYPE = "unknown-type"
    NO_KEY = "no-key"
    BAD_KEY = "bad-key"
    BAD_SESSION = "bad-session"
    SESSION_MISMATCH = "session-mismatch"
    TOO_LARGE = "too-large"
    UNSERIALIZABLE = "unserializable"
    CONFLICT = "conflict"
    REJECTED = "rejected"
    FAILED = "failed"
    VANISHED = "vanished"


class ProcessionError(Exception):
    """The root of all errors of this package."""


class ConfigurationError(ProcessionError):
    """The program or its settings are wrong; raised at registration or at start, never later."""


class MessageError(ProcessionError):
    """One message cannot be handled, however often it is tried.

    Args:
        reason: becomes the dead letter's reason.
        detail: what happened, to which field or key, and what to do.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Conflict(MessageError):
    """The key took effect, or is known, with another payload; nothing of this one took effect."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.CONFLICT, detail)


class KeyDead(ProcessionError):
    """The key's message is a dead letter: only an operator's replay runs it."""


class TransientError(ProcessionError):
    """It may work a moment later. Costs no attempt."""


class StoreUnavailable(TransientError):
    """The store cannot be reached or cannot write; receiving pauses and resumes by itself."""


class Contention(TransientError):
    """Another transaction was in the way; the batch was rolled back and runs again."""


class DeferredWriteFailed(TransientError):
    """A deferred statement of an earlier handler of the batch failed, which was seen later; the
    batch was rolled back. Its cause is the driver's own error.

    Args:
        run: the place in the batch of the handler whose statement it was, from 0.
        cause: the driver's error.
    """

    def __init__(self, run: int, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.run = run
        self.__cause__ = cause


class KeyWaits(TransientError):
    """The key's message is held for another run, or in progress elsewhere: no effect yet."""


class SessionLost(ProcessionError):
    """The fence did not hold: another holder owns the session. Nothing was committed."""


class WorkerLost(SessionLost):
    """This worker's lease ended and another worker took over all it had. Nothing was committed."""


class MessageGone(SessionLost):
    """A message of the batch was no longer there at the commit. Nothing was committed."""


class DuplicateKey(ProcessionError):
    """Another transaction recorded one of the batch's keys first. Nothing was committed."""


class TransactionMisuse(ProcessionError):
    """A handler tried to commit, roll back, close, change the schema or touch our own tables."""


class HandlerTimeout(ProcessionError):
    """A handler ran past its limit; its connection was taken from it."""


class OperatorError(ProcessionError):
    """A command of an operator cannot be carried out; the text says why and what can."""
