"""Decides what a message's dedup key and session key are. Never invents one: no key is an error.

Keys are opaque: compared byte for byte in UTF-8, never normalised, trimmed or folded. `"7"` and the
int 7 are one key. Message id, fields, headers and functions are the sources; what a broker gives to
a delivery is refused at registration, because it changes when the message comes again.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from types import MappingProxyType
from typing import Any, TypeAlias

from procession.errors import ConfigurationError, MessageError, Reason

KEY_BYTES_MAX = 512
"""Bytes of a key in UTF-8, on every store alike."""

HASH_CHARS = 64
"""Length of a key that was hashed: SHA-256 in hexadecimal."""

KeySpec: TypeAlias = str | Sequence[str] | Callable[[Any], object]
"""How a key is declared: a dotted path into the payload or `header:<name>`; several of them; or a
function of the payload."""

KeyFunction: TypeAlias = Callable[[object, object, Mapping[str, str]], bytes]
"""`(payload, message id, headers) -> key`."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
"""For rules that read none."""

_HEADER = "header:"
_MISSING = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


# ---- values --------------------------------------------------------------------------------------


def encode_key(value: object, *, what: str, reason: Reason) -> bytes:
    r"""Return a key as its bytes, or refuse it.

    Args:
        value: str, int, UUID, or bytes in UTF-8.
        what: what the key is, for the error: "message id", "session key".
        reason: the dead letter's reason if it is refused.

    Raises:
        MessageError: for None, an empty or blank key, NUL, a lone surrogate, bytes that are no
            UTF-8, more than 512 bytes, and any other type (bool and float too).

    Example:
        >>> encode_key("caf\u00e9 ", what="message id", reason=Reason.BAD_KEY)
        b'caf\xc3\xa9 '
    """
    if type(value) is str and _is_plain(value) and len(value) <= KEY_BYTES_MAX:
        return value.encode()
    return _fitting(_key_text(value, what, reason).encode(), what, reason)


def _is_plain(text: str) -> bool:
    """Whether the text is a good key at the first look, as nearly all are."""
    return text.isascii() and text.isprintable() and text.strip() != ""


def _fitting(encoded: bytes, what: str, reason: Reason) -> bytes:
    if len(encoded) > KEY_BYTES_MAX:
        raise MessageError(
            reason,
            f"the {what} has {len(encoded)} bytes in UTF-8 and at most {KEY_BYTES_MAX} are kept "
            f"(it begins with {encoded[:40]!r}); shorten it, or declare the rule with hashed=True",
        )
    return encoded


def hash_key(value: object, *, what: str = "key", reason: Reason = Reason.BAD_KEY) -> bytes:
    """Return a key of any length as at most 512 bytes: too long ones as their SHA-256.

    A key of up to 512 bytes stays readable as it is, a longer one becomes 64 hexadecimal digits. A
    short key that looks like such a hash is hashed as well, so that it cannot pass for the long
    key it would be the hash of.

    Raises:
        MessageError: as `encode_key`, but for the length.

    Example:
        >>> len(hash_key("x" * 10_000)), hash_key("order-7")
        (64, b'order-7')
    """
    return _hashed_if_long(_key_text(value, what, reason).encode())


def _hashed_if_long(encoded: bytes) -> bytes:
    looks_hashed = len(encoded) == HASH_CHARS and not encoded.strip(b"0123456789abcdef")
    if len(encoded) > KEY_BYTES_MAX or looks_hashed:
        return hashlib.sha256(encoded).hexdigest().encode()
    return encoded


def _key_text(value: object, what: str, reason: Reason) -> str:
    match value:
        case str():
            text = str.__str__(value)
        case uuid.UUID():
            text = str(value)
        case bytes():
            try:
                text = value.decode()
            except UnicodeDecodeError as fault:
                raise MessageError(
                    reason,
                    f"the {what} is {len(value)} bytes that are no UTF-8 ({value[:40]!r}); "
                    "send it as hexadecimal or Base64 text",
                ) from fault
        case int() if not isinstance(value, bool):
            text = _int_text(value, what, reason)
        case None:
            raise MessageError(
                reason, f"there is no {what} (None); send one, or declare a rule that yields one"
            )
        case _:
            raise MessageError(
                reason,
                f"the {what} is of type {type(value).__name__}; a key is a str, int, UUID or bytes",
            )
    if not text or text.isspace():
        raise MessageError(
            reason,
            f"the {what} is {'blank' if text else 'empty'} ({len(text)} characters); "
            "messages without a key must not share one: send a real key",
        )
    if "\0" in text:
        raise MessageError(
            reason, f"the {what} has a NUL at character {text.index(chr(0))}; send it without"
        )
    if not text.isascii():
        _refuse_surrogates(text, what, reason)
    return text


def _int_text(value: int, what: str, reason: Reason) -> str:
    try:
        return int.__repr__(value)
    except ValueError as fault:  # more digits than the interpreter writes
        raise MessageError(
            reason, f"the {what} is an int of {value.bit_length()} bits; send a shorter key"
        ) from fault


def _refuse_surrogates(text: str, what: str, reason: Reason) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise MessageError(
            reason,
            f"the {what} has a lone surrogate at character {fault.start} of {len(text)}, which "
            "UTF-8 cannot carry; decode the text properly where it enters the sender",
        ) from fault


# ---- fields --------------------------------------------------------------------------------------


def field(payload: object, path: str, *, reason: Reason = Reason.NO_KEY) -> object:
    """Return the value at a dotted path of a payload: mappings by key, all else by attribute.

    Args:
        payload: a mapping, msgspec struct, dataclass, pydantic model or any object with attributes.
        path: `"order_id"`, `"order.id"`.
        reason: the error's reason.

    Raises:
        ConfigurationError: the path is none.
        MessageError: the field is missing or None.

    Example:
        >>> field({"order": {"id": 7}}, "order.id")
        7
    """
    value = path_reader(path, reason=reason)(payload)
    if value is None:
        raise _absent(payload, f"field {path!r}", "is None", reason)
    return value


@functools.lru_cache(maxsize=1024)
def path_reader(path: str, *, reason: Reason) -> Callable[..., object]:
    """Return a function that reads a dotted path, None included; it raises `MessageError` with the
    reason where the field is missing. Remembered by path, so it is cheap to ask for.

    Raises:
        ConfigurationError: an empty path or part, a part with white space, or a dunder name.
    """
    names = path.split(".")
    if not all(names) or any(name.startswith("__") or name.split() != [name] for name in names):
        raise ConfigurationError(
            f"field path {path!r}: write field names joined by dots, as in 'order.id'; "
            "for anything else pass a function"
        )

    # The second parameter, a message's headers, lets a policy call it like any other source.
    def read_one(payload: object, _: object = None) -> object:
        kind: Any = type(payload)
        try:
            # As `_member`, without the call.
            if kind is dict or _is_mapping(kind):
                return payload[path]  # type: ignore[index]  # it is a mapping
            return getattr(payload, path)
        except _MISSING as fault:
            raise _absent(payload, f"field {path!r}", "is missing", reason) from fault

    def read(payload: object, _: object = None) -> object:
        value = payload
        try:
            for name in names:
                value = _member(value, name)
        except _MISSING as fault:
            raise _absent(payload, f"field {path!r}", "is missing", reason) from fault
        return value

    return read_one if len(names) == 1 else read


def _member(holder: Any, name: str) -> object:
    # A mapping is never asked by attribute: a key named "items" would find the method.
    kind: Any = type(holder)
    if kind is dict or _is_mapping(kind):
        return holder[name]
    return getattr(holder, name)


@functools.lru_cache(maxsize=1024)
def _is_mapping(kind: type) -> bool:
    return issubclass(kind, Mapping)


def _absent(payload: object, what: str, how: str, reason: Reason) -> MessageError:
    return MessageError(
        reason,
        f"{what} of the payload ({type(payload).__name__}) {how}; "
        "the sender must fill it, or the rule must name another",
    )


# ---- policies ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyPolicy:
    """A declared rule that yields a message's key. Two are equal if they were declared alike.

    Attributes:
        spec: None for the message id, a tuple of paths, or the user's function.
        hashed: keys that are too long are hashed, not refused.
        description: for errors and reports, as in `dedup key from order_id`.
        key: the rule itself: `key(payload, message_id, headers)` returns the key's bytes or raises
            `MessageError`. What the rule does not read may be None or `NO_HEADERS`.
    """

    spec: tuple[str, ...] | Callable[[Any], object] | None
    hashed: bool
    description: str
    key: KeyFunction = dataclass_field(compare=False, repr=False)

    @property
    def needs_payload(self) -> bool:
        """Whether the body must be decoded to know the key."""
        if isinstance(self.spec, tuple):
            return not all(path.startswith(_HEADER) for path in self.spec)
        return self.spec is not None


def key_policy(spec: KeySpec | None, *, hashed: bool = False) -> KeyPolicy:
    r"""Return the rule for a consumer's dedup key.

    Args:
        spec: None for the producer's message id; a dotted path into the payload, or
            `"header:<name>"`; a sequence of them for a compound key, joined by `|` so that no two
            different ones meet (a `|` or `\` inside of a part is escaped); or a function of the
            decoded payload.
        hashed: keys of more than 512 bytes are hashed (see `hash_key`), not refused.

    Raises:
        ConfigurationError: the rule is none, or it names what a broker assigns to a delivery, in
            any spelling (`deliveryCount`, `x-opt-enqueued-time`, `header:LockToken`). A field of
            such a name that the producer sets itself is declared by a function.

    The rule raises `MessageError`: `no-key` where the source is missing, None or empty, `bad-key`
    where `encode_key` refuses the value.

    Example:
        >>> rule = key_policy(["account", "entry"])
        >>> rule.key({"account": "a|1", "entry": 7}, None, NO_HEADERS)
        b'a\\|1|7'
    """
    form = _Form("dedup key", Reason.NO_KEY, Reason.BAD_KEY, hashed=hashed)
    if spec is None:
        form.what = "message id"
        return KeyPolicy(None, hashed, form.what, lambda _, message_id, __: form.key(message_id))
    return _policy(spec, form, _BROKER_NAMES)


def session_policy(spec: KeySpec, *, hashed: bool = False) -> KeyPolicy:
    """Return the rule for a queue's session key: as `key_policy`, with the reason `bad-session`.

    A correlation id or a partition may name a session, since messages share it on purpose; what
    differs with each delivery may not.

    Raises:
        ConfigurationError: as `key_policy`.

    Example:
        >>> session_policy("order_id").key({"order_id": 7}, None, NO_HEADERS)
        b'7'
    """
    form = _Form("session key", Reason.BAD_SESSION, Reason.BAD_SESSION, hashed=hashed)
    return _policy(spec, form, _BROKER_NAMES.keys() - _SHARED_NAMES)


class _Form:
    """What a rule's values must look like: checks them and gives them their bytes."""

    __slots__ = ("absent", "bad", "hashed", "what")

    def __init__(self, what: str, absent: Reason, bad: Reason, *, hashed: bool) -> None:
        self.what = what
        self.absent = absent
        self.bad = bad
        self.hashed = hashed

    def text(self, value: object) -> str:
        if type(value) is bytes and value.isascii():
            value = value.decode()
        if type(value) is str and _is_plain(value):
            return value
        missing = value is None or (isinstance(value, str | bytes) and not value)
        return _key_text(value, self.what, self.absent if missing else self.bad)

    def key(self, value: object) -> bytes:
        if type(value) is str and _is_plain(value) and len(value) < HASH_CHARS:
            return value.encode()
        encoded = self.text(value).encode()
        if len(encoded) < HASH_CHARS:
            return encoded
        return _hashed_if_long(encoded) if self.hashed else _fitting(encoded, self.what, self.bad)


def _policy(spec: KeySpec, form: _Form, refused: Collection[str]) -> KeyPolicy:
    if callable(spec):
        form.what += f" from {getattr(spec, '__qualname__', type(spec).__qualname__)}"
        if inspect.iscoroutinefunction(spec):
            raise ConfigurationError(f"{form.what}: a key function is a plain def")
        return KeyPolicy(spec, form.hashed, form.what, _by_function(spec, form))
    paths = _paths(spec, form.what)
    form.what += f" from {' and '.join(paths)}"
    for path in paths:
        _refuse_broker_names(path, form.what, refused)
    readers = [_reader(path, form) for path in paths]
    key = _by_part(readers[0], form) if len(readers) == 1 else _by_parts(readers, form)
    return KeyPolicy(paths, form.hashed, form.what, key)


def _paths(spec: object, what: str) -> tuple[str, ...]:
    paths = (spec,) if isinstance(spec, str) else spec
    if not (isinstance(paths, Sequence) and paths and all(isinstance(p, str) for p in paths)):
        raise ConfigurationError(
            f"{what} rule {spec!r}: pass a field path ('order.id'), a list of them, or a function"
        )
    if len(set(paths)) < len(paths):
        raise ConfigurationError(f"{what} rule {spec!r} names a field twice; name each once")
    return tuple(paths)


_Reader: TypeAlias = Callable[[object, Mapping[str, str]], object]


def _reader(path: str, form: _Form) -> _Reader:
    if not path.startswith(_HEADER):
        return path_reader(path, reason=form.absent)
    name = path.removeprefix(_HEADER)
    if not name or name != name.strip():
        raise ConfigurationError(f"{form.what}: write the header's name, as in 'header:tenant'")
    return lambda _, headers: headers.get(name)


def _by_part(read: _Reader, form: _Form) -> KeyFunction:
    return lambda payload, _, headers: form.key(read(payload, headers))


def _by_parts(readers: Sequence[_Reader], form: _Form) -> KeyFunction:
    def key(payload: object, _: object, headers: Mapping[str, str]) -> bytes:
        parts = [form.text(read(payload, headers)) for read in readers]
        # Every | that joins is bare and every other is escaped, so the parts can be told again.
        return form.key("|".join([p.replace("\\", r"\\").replace("|", r"\|") for p in parts]))

    return key


def _by_function(function: Callable[[Any], object], form: _Form) -> KeyFunction:
    def key(payload: object, _: object, __: object) -> bytes:
        try:
            value = function(payload)
        except _MISSING as fault:
            raise MessageError(
                form.absent,
                f"the {form.what} failed on the payload ({type(payload).__name__}): "
                f"{type(fault).__name__}; the sender must fill what it reads",
            ) from fault
        return form.key(value)

    return key


# ---- names that are no keys ----------------------------------------------------------------------

_SHARED = "is shared by messages that belong together, so all but the first would be duplicates"
_LOCK = "is new at each delivery, so no redelivery would be recognised"
_COUNT = "goes up with each delivery, so no redelivery would be recognised"
_POSITION = "is given by the broker, so a message that its producer sends again has another"
_TIME = "is the broker's clock, so a message that its producer sends again has another"

_BROKER_NAMES: Mapping[str, str] = {
    name: why
    for why, names in {
        _SHARED: "correlation correlationid partition partitionid partitionnumber",
        _LOCK: "ackid consumertag deliveryid deliverytag leaseid lockedat lockeduntil lockid "
        "locktoken popreceipt receipthandle",
        _COUNT: "attempt attemptcount attemptnumber attempts deathcount deliveries "
        "deliveryattempt deliveryattempts deliverycount deliverynumber dequeuecount "
        "numdelivered receivecount reconsumetimes redelivered redeliveries redeliverycount "
        "retries retrycount retrynumber",
        _POSITION: "commitlogoffset enqueuedsequencenumber logoffset logposition offset "
        "offsetmsgid partitionoffset partitionposition queueoffset seq seqno seqnum seqnumber "
        "sequence sequenceid sequenceno sequencenum sequencenumber streamoffset "
        "streamsequence",
        _TIME: "enqueuedat enqueuedon enqueuedtime enqueuedtimestamp enqueuetime "
        "enqueuetimestamp queuedat receivedat receivedon receivedtime receivedtimestamp "
        "receivetime receivetimestamp senttimestamp storetime storetimestamp",
    }.items()
    for name in names.split()
}
_SHARED_NAMES = frozenset(name for name, why in _BROKER_NAMES.items() if why is _SHARED)

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_MAKER = re.compile(
    "amqp|annotations|approximate|aws|azure|broker|current|eventhubs?|first|headers?|jmsx?|kafka|"
    "last|message|ms|msg|nats|opt|pgmq|propert(y|ies)|queue|rabbitmq|redis|rocketmq|sb|servicebus|"
    "sqs|system|transport|x"
)
_UNIT = re.compile("iso|micros|millis|milliseconds|ms|ns|seconds|us|utc")


def _refuse_broker_names(path: str, what: str, refused: Collection[str]) -> None:
    for part in path.removeprefix(_HEADER).split("."):
        name = _bare_name(part)
        if name in refused:
            raise ConfigurationError(
                f"{what}: {part!r} {_BROKER_NAMES[name]}; use the producer's message id "
                "(key=None) or fields that name the operation, as in ('order_id', 'line'); "
                "if the producer itself sets this field, say so with a function: "
                "key=lambda payload: payload.…"
            )


def _bare_name(part: str) -> str:
    """Return a name without case, joints, what its maker put before it and the unit behind it."""
    words = [word.lower() for word in _WORD.findall(part)]
    while len(words) > 1 and _MAKER.fullmatch(words[0]) and "".join(words) not in _BROKER_NAMES:
        del words[0]
    while len(words) > 1 and _UNIT.fullmatch(words[-1]):
        del words[-1]
    return "".join(words)
