"""Keys are opaque bytes, one for one message; a missing key is never a key."""

import dataclasses
import enum
import types
import uuid

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from procession.core.keys import (
    KEY_BYTES_MAX,
    NO_HEADERS,
    encode_key,
    field,
    hash_key,
    key_policy,
    session_policy,
)
from procession.errors import ConfigurationError, MessageError, Reason

key_texts = st.text(min_size=1, max_size=20).filter(
    lambda text: not text.isspace() and "\0" not in text
)


class Kind(enum.StrEnum):
    SALE = "sale"


def encode(value):
    return encode_key(value, what="message id", reason=Reason.BAD_KEY)


def key_of(spec, payload, message_id=None, headers=NO_HEADERS, *, hashed=False):
    return key_policy(spec, hashed=hashed).key(payload, message_id, headers)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("order-7", b"order-7"),
        (7, b"7"),
        (-(2**70), b"-1180591620717411303424"),
        (uuid.UUID(int=5), b"00000000-0000-0000-0000-000000000005"),
        (b"abc", b"abc"),
        (Kind.SALE, b"sale"),
        ("a/b\\c?d#e", b"a/b\\c?d#e"),
    ],
)
def test_K05_str_int_uuid_and_bytes_are_keys(value, key):
    assert encode(value) == key
    assert key_of("id", {"id": value}) == key


def test_K11_keys_are_opaque():
    keys = [
        "caf\u00e9",
        "cafe\u0301",
        "ABC",
        "abc",
        "\u00e0bc",
        "abc ",
        " abc",
        "a\u200bbc",
        "\u202eabc",
    ]
    encoded = [encode(key) for key in keys]
    assert len(set(encoded)) == len(keys)
    assert keys == [key.decode() for key in encoded]


@pytest.mark.parametrize("value", [None, "", "   ", "\t\n", "\u3000\u00a0", b"", b"  "])
def test_K02_no_key_is_refused_and_never_shared(value):
    with pytest.raises(MessageError, match="message id") as caught:
        encode(value)
    assert caught.value.reason is Reason.BAD_KEY


@pytest.mark.parametrize("value", [[], {}, (), ["a"], 1.5, True, False, object(), {"a": 1}])
def test_K02_what_is_no_key_is_refused_with_its_type(value):
    with pytest.raises(MessageError, match=f"of type {type(value).__name__}"):
        encode(value)


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ("a\0b", "NUL at character 1"),
        ("\x00", "NUL"),
        ("ab\ud800c", "lone surrogate at character 2 of 4"),
        (b"\xff\xfe", "no UTF-8"),
        pytest.param(10**5000, "bits", id="digits"),
        (10**600, "601 bytes"),
    ],
)
def test_K11_what_no_store_can_keep_is_refused(value, detail):
    with pytest.raises(MessageError, match=detail):
        encode(value)
    with pytest.raises(MessageError):
        key_of("id", {"id": value})


@pytest.mark.parametrize("unit", ["x", "\u00e9", "\u20ac", "\U0001f600"])
def test_K09_the_limit_counts_bytes_and_a_longer_key_is_refused(unit):
    size = len(unit.encode())
    longest = unit * (KEY_BYTES_MAX // size) + "y" * (KEY_BYTES_MAX % size)
    assert len(encode(longest)) == KEY_BYTES_MAX
    assert key_of("id", {"id": longest}) == longest.encode()
    for refused in (encode, lambda key: key_of("id", {"id": key})):
        with pytest.raises(MessageError, match=r"has 513 bytes .* at most 512 .* hashed=True"):
            refused(longest + "y")


@pytest.mark.parametrize("length", [191, 255, 256, 511, 512, 513, 1024, 10_000])
def test_K09_hashed_keys_with_one_prefix_never_collide(length):
    one, other = "x" * (length - 1) + "a", "x" * (length - 1) + "b"
    assert len({hash_key(one), hash_key(other), hash_key("x" * (length - 1))}) == 3
    assert hash_key(one) == hash_key(one) == key_of("id", {"id": one}, hashed=True)
    assert len(hash_key(one)) == (64 if length > KEY_BYTES_MAX else length)


def test_K09_a_short_key_cannot_pass_for_the_hash_of_a_long_one():
    long_key = "x" * 600
    forged = hash_key(long_key).decode()
    assert hash_key(forged) != hash_key(long_key)
    assert key_of("id", {"id": forged}, hashed=True) != key_of("id", {"id": long_key}, hashed=True)
    assert len(hash_key(forged)) == 64


@pytest.mark.parametrize("value", [None, "", " ", "a\0" * 400, "\ud800" * 600, 1.5])
def test_K09_hashing_makes_no_bad_key_good(value):
    with pytest.raises(MessageError):
        hash_key(value)


@given(st.text() | st.integers() | st.binary())
def test_a_key_is_refused_or_kept_byte_for_byte(value):
    try:
        key = encode(value)
    except MessageError:
        return
    expected = value if isinstance(value, bytes) else str(value).encode()
    assert expected == key == key_of("id", {"id": value}) == key_of(None, None, value)


# ---- fields --------------------------------------------------------------------------------------


class Inner(msgspec.Struct):
    id: str | None = "i"
    items: str = "method's name"


class Outer(msgspec.Struct):
    inner: Inner | None


@dataclasses.dataclass
class Plain:
    inner: object


@pytest.mark.parametrize("holder", [Outer, Plain, lambda inner: {"inner": inner}])
@pytest.mark.parametrize(
    "inner",
    [Inner(), {"id": "i"}, types.MappingProxyType({"id": "i"}), types.SimpleNamespace(id="i")],
)
def test_a_field_is_read_from_structs_dataclasses_mappings_and_objects(holder, inner):
    assert field(holder(inner), "inner.id") == "i"
    assert key_of("inner.id", holder(inner)) == b"i"


def test_a_mapping_is_read_by_key_even_where_a_method_has_the_name():
    assert field({"items": 1}, "items") == 1
    assert field(types.MappingProxyType({"keys": 2}), "keys") == 2
    with pytest.raises(MessageError):
        field({}, "items")


@pytest.mark.parametrize(
    "payload",
    [
        *({}, {"inner": None}, {"inner": {}}, {"inner": {"id": None}}, {"inner": [1]}),
        *(None, 5, "text", b"raw", Outer(None), Outer(Inner(None)), Plain({})),
    ],
)
def test_K02_a_missing_field_is_no_key(payload):
    for read in (lambda: field(payload, "inner.id"), lambda: key_of("inner.id", payload)):
        with pytest.raises(MessageError) as caught:
            read()
        assert caught.value.reason is Reason.NO_KEY
    with pytest.raises(MessageError) as caught:
        session_policy("inner.id").key(payload, None, NO_HEADERS)
    assert caught.value.reason is Reason.BAD_SESSION


@pytest.mark.parametrize(
    "path", ["", ".", "a.", ".a", "a..b", "a b", " a", "__class__", "a.__dict__"]
)
def test_a_path_that_is_none_is_refused_at_registration(path):
    for declare in (key_policy, session_policy, lambda p: key_policy(["x", p])):
        with pytest.raises(ConfigurationError):
            declare(path)


# ---- policies ------------------------------------------------------------------------------------


def test_K15_the_default_key_is_the_producers_message_id_and_nothing_else():
    policy = key_policy(None)
    assert policy.key({"id": "x"}, b"m-1", NO_HEADERS) == b"m-1"
    assert not policy.needs_payload
    for absent in (None, "", b""):
        with pytest.raises(MessageError) as caught:
            policy.key({"id": "x"}, absent, NO_HEADERS)
        assert caught.value.reason is Reason.NO_KEY


@pytest.mark.parametrize("value", [None, "", b""])
def test_K02_an_empty_value_is_no_key_and_a_blank_one_a_bad_key(value):
    for spec in ("id", ["id", "other"], lambda payload: payload["id"]):
        with pytest.raises(MessageError) as caught:
            key_of(spec, {"id": value, "other": 1})
        assert caught.value.reason is Reason.NO_KEY
        with pytest.raises(MessageError) as caught:
            key_of(spec, {"id": " \t", "other": 1})
        assert caught.value.reason is Reason.BAD_KEY


def test_K02_a_function_that_yields_no_key_or_fails_on_the_payload_is_an_error_of_the_message():
    for value in ([], {}, 1.5):
        with pytest.raises(MessageError) as caught:
            key_of(lambda _, value=value: value, {})
        assert caught.value.reason is Reason.BAD_KEY
    for function in (lambda p: p["x"]["y"], lambda p: p.y, lambda p: p + 1, lambda p: int("x")):
        with pytest.raises(MessageError, match="failed on the payload") as caught:
            key_of(function, {})
        assert caught.value.reason is Reason.NO_KEY


def test_a_header_is_a_key():
    headers = {"tenant": "t-1"}
    policy = key_policy("header:tenant")
    assert policy.key(None, None, headers) == b"t-1"
    assert not policy.needs_payload
    assert key_of(["header:tenant", "id"], {"id": 7}, headers=headers) == b"t-1|7"
    assert key_policy(["header:tenant", "id"]).needs_payload
    with pytest.raises(MessageError) as caught:
        policy.key(None, None, {})
    assert caught.value.reason is Reason.NO_KEY


parts = st.lists(st.text("ab|\\", min_size=1, max_size=4) | key_texts, min_size=2, max_size=4)


@given(parts, parts)
def test_compound_keys_are_equal_exactly_if_their_parts_are(one, other):
    def key(values):
        names = [f"f{number}" for number in range(len(values))]
        return key_of(names, dict(zip(names, values, strict=True)), hashed=True)

    assert (one == other) == (key(one) == key(other))


def test_compound_parts_cannot_slide():
    assert key_of(["a", "b"], {"a": "a", "b": "bc"}) != key_of(["a", "b"], {"a": "ab", "b": "c"})
    assert key_of(["a", "b"], {"a": "x|", "b": "y"}) != key_of(["a", "b"], {"a": "x", "b": "|y"})
    backslashes = [{"a": "a\\", "b": "b|c"}, {"a": "a|b\\", "b": "c"}]
    assert key_of(["a", "b"], backslashes[0]) != key_of(["a", "b"], backslashes[1])


def test_K09_a_compound_key_has_the_same_limit():
    payload = {"a": "x" * 300, "b": "y" * 300}
    with pytest.raises(MessageError, match="601 bytes"):
        key_of(["a", "b"], payload)
    assert len(key_of(["a", "b"], payload, hashed=True)) == 64


def test_rules_declared_alike_are_equal():
    def function(payload):
        return payload["id"]

    assert key_policy("id") == key_policy(["id"])
    assert key_policy(["a", "b"]) == key_policy(("a", "b"))
    assert key_policy(["a", "b"]) != key_policy(["b", "a"])
    assert key_policy("id") != key_policy("id", hashed=True)
    assert key_policy(function) == key_policy(function) != key_policy(lambda p: p["id"])
    assert session_policy("id") == session_policy("id")


async def coroutine_function(payload):
    return payload


@pytest.mark.parametrize(
    "spec", [[], (), 5, b"id", [1], ["a", None], ["a", "a"], {"a"}, coroutine_function, "header:"]
)
def test_a_rule_that_is_none_is_refused_at_registration(spec):
    with pytest.raises(ConfigurationError):
        key_policy(spec)
    with pytest.raises(ConfigurationError):
        session_policy(spec)


def test_a_session_rule_needs_a_source():
    with pytest.raises(ConfigurationError):
        session_policy(None)


# ---- names that are no keys ----------------------------------------------------------------------

OF_A_DELIVERY = """
    lock_token lockToken LOCK-TOKEN x-opt-lock-token delivery_count deliveryCount JMSXDeliveryCount
    x-delivery-count delivery_id DeliveryTag delivery-tag sequence_number sequenceNumber
    SequenceNumber x-opt-sequence-number enqueuedSequenceNumber offset kafka_offset x-opt-offset
    queueOffset offsetMsgId partition_offset partition_position enqueued_time enqueuedTimeUtc
    EnqueuedTimeUTC x-opt-enqueued-time enqueued_at received_at receivedTime received-timestamp
    attempt attempts attemptNumber retry_count redelivered reconsumeTimes receipt_handle
    ReceiptHandle ApproximateReceiveCount nats-sequence message.lockToken meta.delivery_count
    offset.value
"""
OF_A_BUSINESS = """
    id order_id orderId account.number payment_attempt_id offset_account message_id partition_key
    received_amount sequence_of_events lock delivery.address x_ref correlated first last time _id
    header:ce-id
"""
SHARED = (
    "correlation_id correlationId CorrelationID correlation-id x-correlation-id JMSCorrelationID"
)


@pytest.mark.parametrize(
    "name", [*OF_A_DELIVERY.split(), *SHARED.split(), "partition", "meta.correlation_id"]
)
def test_a_key_that_names_what_the_broker_assigns_is_refused_at_registration(name):
    for spec in (name, f"header:{name}", ["order_id", name], f"envelope.{name}.value"):
        with pytest.raises(ConfigurationError, match=r"use the producer's message id.*lambda"):
            key_policy(spec)


@pytest.mark.parametrize("name", OF_A_DELIVERY.split())
def test_a_session_that_names_what_differs_with_each_delivery_is_refused(name):
    with pytest.raises(ConfigurationError):
        session_policy(name)


def test_a_session_may_be_named_by_what_messages_share():
    for name in SHARED.split():
        assert session_policy(f"header:{name}").key(None, None, {name: "c"}) == b"c"


@pytest.mark.parametrize("name", OF_A_BUSINESS.split())
def test_names_of_business_fields_are_keys(name):
    assert key_policy(name).spec == (name,)


def test_a_function_may_read_a_field_of_any_name():
    assert key_of(lambda ledger: ledger["sequence_number"], {"sequence_number": 4}) == b"4"
