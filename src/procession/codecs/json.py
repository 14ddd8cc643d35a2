"""Writes payloads as canonical JSON and reads JSON as the type that a handler takes.

Whatever cannot be written exactly, or read as the type, is an error of that one message, before any
handler runs; nothing is coerced, rounded or left out in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from procession.core.canonical import TYPES_CACHED_MAX, canonical_value
from procession.errors import ConfigurationError, MessageError, Reason

# What validators and `__post_init__` of a user's type raise about data.
_DATA_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)

_SYNTAX = msgspec.json.Decoder(msgspec.Raw)


class JsonCodec:
    """The default codec. Has no state; one serves every thread.

    Example:
        >>> codec = JsonCodec()
        >>> codec.encode({"qty": 2.0, "id": "a"})
        b'{"id":"a","qty":2}'
        >>> codec.decoder(dict)(b'{"id":"a","qty":2}')
        {'id': 'a', 'qty': 2}
    """

    content_type = "application/json"

    def encode(self, payload: object) -> bytes:
        """Return the payload's canonical JSON: equal payloads give equal bytes.

        Numbers, dates, keys and types: see `canonical_value`. `bytes` are a body already and
        returned as they are, as `decoder(bytes)` reads them; bytes in a field are Base64.

        Raises:
            MessageError: `unserializable`, naming the field.

        Example:
            >>> JsonCodec().encode({"amount": 12.50})
            b'{"amount":12.5}'
        """
        if type(payload) is bytes:
            return payload
        return canonical_value(payload)

    def decoder(self, type_: Any) -> Callable[[bytes], Any]:
        """Return a function that reads a body as the type, a fresh object at each call.

        Args:
            type_: a msgspec struct, dataclass, TypedDict, pydantic model, `dict`, `Any`, or
                anything else that msgspec decodes; `bytes` for the body as it is.

        Where a type says `Decimal`, numbers are exact; where it says nothing (`dict`, `Any`), they
        are int and float, and a whole number is an int, however it was written. Types are checked,
        not coerced: "1" is no int. Of equal keys the last one counts; only a fingerprint refuses
        them. Each type's function is made once.

        Raises:
            ConfigurationError: at once, for a type that no JSON can become.
            MessageError: from the function: `undecodable` for what is no JSON, `invalid-payload`
                for JSON that is not of the type, with the path to the first fault.

        Example:
            >>> JsonCodec().decoder(list[int])(b"[1, 2]")
            [1, 2]
        """
        try:
            hash(type_)
        except TypeError:  # an annotation that holds a dict or a list
            return _decoder(type_)
        return _cached_decoder(type_)


def _decoder(type_: Any) -> Callable[[bytes], Any]:
    if type_ is bytes:
        return _as_it_is
    if hasattr(type_, "model_validate_json"):
        return _safe(functools.partial(_decode_model, type_), type_)
    try:
        return _safe(msgspec.json.Decoder(type_, dec_hook=_decode_foreign).decode, type_)
    except (NameError, TypeError, ValueError) as fault:
        raise ConfigurationError(
            f"{type_!r} cannot be read from JSON: {fault}; take a dataclass, a msgspec struct, a "
            "pydantic model or dict"
        ) from fault


_cached_decoder = functools.lru_cache(maxsize=TYPES_CACHED_MAX)(_decoder)


def _as_it_is(body: bytes) -> bytes:
    return body


def _decode_model(model: Any, body: bytes) -> Any:
    # pydantic would read NaN and Infinity, which JSON has not.
    _SYNTAX.decode(body)
    return model.model_validate_json(body.decode())


def _decode_foreign(type_: Any, value: Any) -> Any:
    """Read a field whose type msgspec does not know: a pydantic model inside of another type."""
    if hasattr(type_, "model_validate"):
        return type_.model_validate(value)
    raise NotImplementedError


def _safe(decode: Callable[[bytes], Any], type_: Any) -> Callable[[bytes], Any]:
    name = getattr(type_, "__name__", str(type_))

    def decode_body(body: bytes) -> Any:
        try:
            return decode(body)
        except msgspec.ValidationError as fault:
            raise _invalid(name, str(fault)) from fault
        except (msgspec.DecodeError, UnicodeDecodeError) as fault:
            raise MessageError(
                Reason.UNDECODABLE,
                f"the body ({len(body)} bytes) is no JSON: {fault}; the sender must write RFC 8259 "
                "in UTF-8, or the consumer take `bytes`",
            ) from fault
        except RecursionError as fault:
            raise MessageError(
                Reason.UNDECODABLE,
                f"the body ({len(body)} bytes) is nested too deep to be read safely; "
                "the sender must flatten it",
            ) from fault
        except _DATA_FAULTS as fault:
            raise _invalid(name, f"{type(fault).__name__}: {fault}") from fault

    return decode_body


def _invalid(name: str, fault: str) -> MessageError:
    return MessageError(
        Reason.INVALID_PAYLOAD,
        f"the body is JSON but no {name}: {fault}; mend the sender, or edit and replay",
    )
