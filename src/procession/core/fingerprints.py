"""Decides by 32 bytes whether two bodies under one key are one message or a conflict.

Never by a part of the body, unless its fields were named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from procession.core.canonical import canonical_json, canonical_value
from procession.core.keys import path_reader
from procession.errors import ConfigurationError, Reason

FINGERPRINT_BYTES = 32
"""Length of one fingerprint: SHA-256."""


def fingerprint(body: bytes, *, canonical: bool) -> bytes:
    """Return the SHA-256 of a body, 32 bytes.

    Args:
        body: the body as it travels.
        canonical: True for what our own codec wrote and for raw bytes, hashed as they stand; False
            for foreign JSON, which is brought to its canonical text first.

    Raises:
        MessageError: `undecodable`, for foreign JSON that has no canonical text.

    Example:
        >>> ours = fingerprint(b'{"amount":1}', canonical=True)
        >>> ours == fingerprint(b'{ "amount": 1.0 }', canonical=False)
        True
    """
    return hashlib.sha256(body if canonical else canonical_json(body)).digest()


def fingerprint_of_fields(payload: object, fields: Sequence[str]) -> bytes:
    """Return the fingerprint of the named fields alone, 32 bytes; the others may change.

    The order in which the fields are named makes no difference. A field may be None, but not
    missing.

    Args:
        payload: the decoded payload.
        fields: one or more dotted paths into it, as in `keys.field`.

    Raises:
        ConfigurationError: no field is named, or a path is none.
        MessageError: `invalid-payload` where a field is missing, `unserializable` where its value
            has no JSON.

    Example:
        >>> first = fingerprint_of_fields({"id": 7, "tries": 1}, ["id"])
        >>> first == fingerprint_of_fields({"id": 7, "tries": 2}, ["id"])
        True
    """
    if isinstance(fields, str) or not fields:
        raise ConfigurationError(
            f"fingerprint fields {fields!r}: name one or more, as in ['order_id', 'lines']; "
            "of no field at all, every payload would be the same"
        )
    chosen = {path: path_reader(path, reason=Reason.INVALID_PAYLOAD)(payload) for path in fields}
    return hashlib.sha256(canonical_value(chosen)).digest()


def matches(recorded: bytes, candidate: bytes) -> bool:
    """Tell whether a fingerprint is among the recorded ones.

    Args:
        recorded: none, one or more fingerprints of 32 bytes, side by side: an edited message keeps
            the old and the new one.
        candidate: one fingerprint.

    Raises:
        ValueError: a length that no fingerprints have.

    Example:
        >>> matches(b"a" * 32 + b"b" * 32, b"b" * 32)
        True
    """
    if recorded == candidate and len(candidate) == FINGERPRINT_BYTES:
        return True
    if len(recorded) % FINGERPRINT_BYTES or len(candidate) != FINGERPRINT_BYTES:
        raise ValueError(
            f"fingerprints have {FINGERPRINT_BYTES} bytes each; recorded are {len(recorded)}, "
            f"compared with {len(candidate)}"
        )
    starts = range(0, len(recorded), FINGERPRINT_BYTES)
    return any(recorded[start : start + FINGERPRINT_BYTES] == candidate for start in starts)
