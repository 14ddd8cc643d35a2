"""Gives equal JSON one text: keys in order, no white space, every number exact and written one way.

Two retries of one message, spelled by two writers, must have one fingerprint; two messages that
differ anywhere must not. `canonical_json` reads foreign text, `canonical_value` writes Python
values. Neither ever rounds a number, normalises a string, or keeps one of two equal keys.

The rule for numbers, alike for integers, decimals and floats (a float is the decimal that its
`repr` shows): equal numbers are equal text.

- They are written out, without zeros at their end: `1`, `1.0`, `1.00` and `1e0` are `1`, `0.10` is
  `0.1`, `-0.0` is `0`, `2e3` is `2000`.
- Below 1e-6 they are one digit, the rest and the exponent: `1e-7`, `1.25e-30`.
- A number that would need more than 309 zeros to be written out (1e310: past what a double can
  hold) is refused, and so is an exponent of more than 20 characters: no number grows by more than
  that.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import json
import math
import operator
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from procession.errors import MessageError, Reason

ZEROS_MAX = 309
"""Zeros that a number may gain when its exponent is written out: what the largest double needs."""

EXPONENT_CHARS_MAX = 20
"""Characters of a number's exponent."""

LOCATE_DEPTH_MAX = 64
"""Levels that the search for a faulty field descends; the error names the field it reached."""

TYPES_CACHED_MAX = 1024
"""Payload types whose shape is remembered; beyond it the least used one is worked out again."""

# ---- numbers -------------------------------------------------------------------------------------


def _number(text: str) -> str:
    """Return the one spelling of a decimal number: a JSON literal, or `str` of a finite Decimal."""
    if "e" in text or "E" in text or "0.00000" in text:  # the latter may be below 1e-6
        return _number_by_digits(text)
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _number_by_digits(text: str) -> str:
    sign = "-" if text.startswith("-") else ""
    mantissa, _, exponent = text.lower().lstrip("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return "0"
    if len(exponent) > EXPONENT_CHARS_MAX:
        raise ValueError(f"a number has an exponent of {len(exponent)} characters")
    # The power of ten of the first digit that counts, as in d.ddd * 10^power.
    power = int(exponent or "0") + len(digits) - len(fraction) - 1
    digits = digits.rstrip("0")
    rest = digits[1:]
    if power < -6:  # noqa: PLR2004  1e-6 is the smallest that is written out
        return f"{sign}{digits[0]}{'.' if rest else ''}{rest}e{power}"
    if power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    if power - len(rest) > ZEROS_MAX and exponent:
        raise ValueError(f"a number has the exponent {exponent}; at most {ZEROS_MAX} is exact")
    whole = digits[: power + 1].ljust(power + 1, "0")
    fraction = digits[power + 1 :]
    return f"{sign}{whole}{'.' if fraction else ''}{fraction}"


def _raw_number(text: str) -> msgspec.Raw:
    return msgspec.Raw(_number(text).encode())


# ---- foreign text --------------------------------------------------------------------------------


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        unseen = set(members)
        for key, _ in pairs:
            if key not in unseen:
                raise ValueError(f"an object has the same key twice: {key[:100]!r}")
            unseen.remove(key)
    return members


_ENCODER = msgspec.json.Encoder(order="sorted", decimal_format="number")
_DECODER = msgspec.json.Decoder(float_hook=_raw_number)
_DECODER_OF_UNIQUE_KEYS = json.JSONDecoder(object_pairs_hook=_members, parse_float=_raw_number)


def canonical_json(body: bytes) -> bytes:
    r"""Return the one text of all JSON texts that mean the same as `body`.

    Order of keys, white space, escapes and the spelling of numbers make no difference; everything
    else does, the order of arrays too. Strings keep their code points: composed and decomposed
    forms of a letter stay two texts. Idempotent.

    Args:
        body: one JSON value in UTF-8, without a byte order mark.

    Raises:
        MessageError: `undecodable`, for what is no JSON, or what two readers could take
            differently: invalid UTF-8, a lone surrogate, NaN or Infinity, the same key twice in an
            object, a number past the module's rule or an integer of thousands of digits, nesting
            deeper than the interpreter's recursion limit.

    Close to RFC 8785 (JCS), but JCS rounds every number to a double: sums and ids do not survive
    that.

    Example:
        >>> canonical_json(rb'{"b": [1.0, 2e2], "a": 0.10, "\u0041": 12345678901234567891}')
        b'{"A":12345678901234567891,"a":0.1,"b":[1,200]}'
    """
    try:
        text = _ENCODER.encode(_DECODER.decode(body))
        # msgspec keeps the last of two equal keys. Each key it drops takes its colon along, and
        # colons inside of strings are as many on both sides unless one was written as an escape.
        if body.count(b":") != text.count(b":") or b"\\u003" in body:
            text = _ENCODER.encode(_DECODER_OF_UNIQUE_KEYS.decode(body.decode()))
    except RecursionError as fault:
        raise MessageError(
            Reason.UNDECODABLE,
            f"the JSON body ({len(body)} bytes) is nested too deep to be read safely; "
            "the sender must flatten it",
        ) from fault
    except (msgspec.DecodeError, ValueError) as fault:
        raise MessageError(
            Reason.UNDECODABLE,
            f"the body ({len(body)} bytes) is no JSON that all readers take alike: {fault}; "
            "the sender must write RFC 8259 in UTF-8, with each key of an object once",
        ) from fault
    return text


# ---- values --------------------------------------------------------------------------------------


class _NoJsonError(ValueError):
    """A value has no exact JSON. The message goes on after the field's name: 'is …'."""


_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MessageError,
    RecursionError,
    TypeError,
    ValueError,
)
_MOMENTS = (dt.date, dt.time, dt.timedelta)
_LEAVES = frozenset({str, int, bool, type(None), bytes, uuid.UUID, dt.datetime, *_MOMENTS})


def canonical_value(value: object) -> bytes:
    """Return the canonical JSON of a Python value: what `canonical_json` makes of any spelling.

    Takes None, bool, int, float, Decimal (a number), str, UUID, dates and times, bytes (Base64),
    enums (their value), lists, tuples, sets (ordered by their elements' texts), mappings,
    dataclasses, msgspec structs, attrs classes, and pydantic models (what `model_dump` gives in
    JSON mode, so a Decimal in one is a string). Keys are strings, or ints, UUIDs, dates and enums
    that become one. Dates and times stay as written: a naive one stays naive, and one instant in
    two zones is two values.

    What is annotated without room for a fraction is written at once, in about a microsecond; there
    a float in an int's place, which Python does not prevent, shows by its point and NaN by its
    null, and only then is the value walked through.

    Raises:
        MessageError: `unserializable`, naming the field, for anything else: NaN and Infinity, lone
            surrogates, other types, circular values, two keys of a mapping with one text.

    Example:
        >>> canonical_value({"b": decimal.Decimal("1.50"), "a": {2.0, 10}})
        b'{"a":[10,2],"b":1.5}'
    """
    kind: Any = type(value)
    try:
        if _is_annotated_exact(kind):
            text = _ENCODER.encode(value)
            if b"." not in text and b"null" not in text:
                return text
        return _ENCODER.encode(_exact(value))
    except _FAULTS as fault:
        raise MessageError(Reason.UNSERIALIZABLE, _explain(value)) from fault


def _exact(value: Any) -> Any:
    """Return the value itself, or one whose numbers stand as the text that they shall have."""
    kind: Any = type(value)
    if kind in _LEAVES:
        return value
    if kind is float and math.isfinite(value):
        return _raw_number(repr(value))
    if kind is dict:
        return _exact_mapping(value)
    if isinstance(value, list | tuple):
        items = [item if type(item) in _LEAVES else _exact(item) for item in value]
        return items if any(map(operator.is_not, items, value)) else value
    names = _field_names(kind)
    return _exact_scalar(value) if names is None else _exact_fields(value, names)


def _exact_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    members = {}
    for key, member in value.items():
        text = key if type(key) is str else _key_text(key)
        if text in members:
            raise _NoJsonError(f"has two keys that JSON writes alike, {text[:100]!r}: keep one")
        members[text] = member if type(member) in _LEAVES else _exact(member)
    return members


def _key_text(key: object) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return int.__repr__(key)
    if isinstance(key, uuid.UUID | dt.date):
        return str(msgspec.to_builtins(key))
    raise _NoJsonError(f"has a key of type {type(key).__name__}: keys are strings in JSON")


def _exact_fields(value: Any, names: tuple[str, ...]) -> Any:
    changed = {}
    for name in names:
        member = getattr(value, name)
        if type(member) not in _LEAVES:
            exact = _exact(member)
            if exact is not member:
                changed[name] = exact
    if not changed:
        return value
    # A copy, so that msgspec still renames, tags and leaves out what the class tells it to.
    value = copy.copy(value)
    set_field = msgspec.structs.force_setattr if isinstance(value, msgspec.Struct) else _set_field
    for name, member in changed.items():
        set_field(value, name, member)
    return value


def _set_field(value: object, name: str, member: object) -> None:
    object.__setattr__(value, name, member)  # also where the class is frozen


def _exact_scalar(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            raise _NoJsonError(f"is {float(value)}, which JSON has not: send None, or no field")
        case float():
            return _raw_number(float.__repr__(value))
        case decimal.Decimal() if not value.is_finite():
            raise _NoJsonError("is no finite number: send None, or leave the field out")
        case decimal.Decimal():
            return _raw_number(str(value))
        case enum.Enum():
            return _exact(value.value)
        case str():
            return str.__str__(value)
        case int():
            return int.__add__(value, 0)
        case set() | frozenset():
            return [msgspec.Raw(text) for text in sorted(_ENCODER.encode(_exact(v)) for v in value)]
        case Mapping():
            return _exact_mapping(value)
        case msgspec.Raw():
            return msgspec.Raw(canonical_json(bytes(value)))
    dump = _model_dump(value)
    return value if dump is None else _exact(dump(mode="json", by_alias=True))


def _model_dump(value: object) -> Callable[..., Any] | None:
    """Return a pydantic model's own way out; pydantic is never imported for it."""
    return getattr(value, "model_dump", None) if hasattr(type(value), "model_dump") else None


# ---- what is known of a type ---------------------------------------------------------------------

_EXACT = (
    msgspec.inspect.NoneType,
    msgspec.inspect.BoolType,
    msgspec.inspect.IntType,
    msgspec.inspect.StrType,
    msgspec.inspect.BytesType,
    msgspec.inspect.UUIDType,
    msgspec.inspect.DateTimeType,
    msgspec.inspect.DateType,
    msgspec.inspect.TimeType,
    msgspec.inspect.TimeDeltaType,
    msgspec.inspect.EnumType,  # msgspec knows those of str and of int
    msgspec.inspect.LiteralType,
)


@functools.lru_cache(maxsize=TYPES_CACHED_MAX)
def _is_annotated_exact(kind: type) -> bool:
    """Tell whether msgspec's text of this type, as annotated, is canonical as it stands."""
    try:
        waiting = [msgspec.inspect.type_info(kind)]
    except (NameError, *_FAULTS):  # not a type that msgspec can describe
        return False
    seen = set()
    while waiting:
        match waiting.pop():
            case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType() as info:
                waiting.append(info.item_type)
            case msgspec.inspect.DictType(key_type=msgspec.inspect.StrType()) as info:
                waiting.append(info.value_type)
            case msgspec.inspect.UnionType() as info:
                waiting.extend(info.types)
            case msgspec.inspect.StructType() | msgspec.inspect.DataclassType() as info:
                if info.cls not in seen:
                    seen.add(info.cls)
                    waiting.extend(field.type for field in info.fields)
            case info if not isinstance(info, _EXACT):
                return False
    return True


@functools.lru_cache(maxsize=TYPES_CACHED_MAX)
def _field_names(kind: type) -> tuple[str, ...] | None:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if hasattr(kind, "__attrs_attrs__"):
        return tuple(field.name for field in kind.__attrs_attrs__)
    return None


# ---- naming the faulty field ---------------------------------------------------------------------


def _explain(value: object) -> str:
    """Say which field has no JSON, why, and what to do: descend to the first child that has none.

    Never asks a user's object for its text: that may fail as well.
    """
    path, above = type(value).__name__, [value]
    for _ in range(LOCATE_DEPTH_MAX):
        faulty = next(((step, c) for step, c in _children(value) if _fault(c) is not None), None)
        if faulty is None:
            break
        step, value = faulty
        path += step
        if any(value is holder for holder in above):
            return f"{path} refers back to a value that holds it: JSON has no cycles, send an id"
        above.append(value)
    return f"{path} {_reason(value, _fault(value))}"


def _fault(value: object) -> Exception | None:
    try:
        _ENCODER.encode(_exact(value))
    except _FAULTS as fault:
        return fault
    return None


def _children(value: Any) -> list[tuple[str, object]]:
    kind: Any = type(value)
    names = _field_names(kind)
    if names is not None:
        return [(f".{name}", getattr(value, name, None)) for name in names]
    match value:
        case Mapping():
            return [(f".{key}", v) for key, v in value.items() if isinstance(key, str)]
        case list() | tuple() | set() | frozenset():
            return [(f"[{number}]", item) for number, item in enumerate(value)]
    dump = _model_dump(value)
    try:
        return [] if dump is None else _children(dump(mode="json", by_alias=True))
    except _FAULTS:
        return []


def _reason(value: object, fault: Exception | None) -> str:
    match fault:
        case _NoJsonError():
            return str(fault)
        case MessageError():
            return f"is raw JSON, and {fault.detail}"
        case UnicodeEncodeError():
            return (
                "holds a lone surrogate, which UTF-8 cannot carry: "
                "decode the text where it enters the program with errors='replace'"
            )
        case RecursionError():
            return "is nested too deep: flatten it"
        case TypeError():
            return (
                f"is of type {type(value).__name__}, which JSON has not: send its fields as a "
                "dataclass or dict, or its text"
            )
        case _:
            return f"could not be written ({type(fault).__name__}): send a plain value instead"
