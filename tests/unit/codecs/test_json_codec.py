"""Bodies are canonical; what cannot be written or read is an error of that one message."""

import dataclasses
import datetime as dt
import enum
import json
import math
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from procession.codecs import JsonCodec
from procession.core.canonical import canonical_json
from procession.core.fingerprints import fingerprint
from procession.errors import ConfigurationError, MessageError, Reason

codec = JsonCodec()


class Colour(enum.Enum):
    RED = "red"


class Payment(msgspec.Struct):
    id: uuid.UUID
    amount: Decimal
    day: dt.date
    at: dt.datetime
    colour: Colour = Colour.RED
    blob: bytes = b"\x00"


@dataclasses.dataclass
class Order:
    number: int
    payments: list[Payment]


class Point(TypedDict):
    x: int


PAYMENT = Payment(
    uuid.UUID(int=7), Decimal("12.50"), dt.date(2024, 1, 2), dt.datetime(2024, 1, 2, tzinfo=dt.UTC)
)


def reason_of(function, *arguments):
    with pytest.raises(MessageError) as caught:
        function(*arguments)
    return caught.value.reason


# ---- encode --------------------------------------------------------------------------------------


def test_K04_equal_numbers_are_equal_bytes():
    bodies = {codec.encode({"amt": amount}) for amount in (1, 1.0, Decimal("1.0"), Decimal("1.00"))}
    assert bodies == {b'{"amt":1}'}
    assert len({codec.encode({"amt": a}) for a in (1, "1", True, None, [1])}) == 5


def test_K05_a_payload_of_all_types_is_written_and_comes_back():
    order = Order(1, [PAYMENT])
    body = codec.encode(order)
    assert b'"amount":12.5,' in body
    assert order == codec.decoder(Order)(body)
    assert canonical_json(body) == body


def test_K05_pydantic_models_are_written_and_come_back():
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):
        id: uuid.UUID
        amount: Decimal
        ratio: float
        at: dt.datetime
        client: str = pydantic.Field(alias="clientName")

    class Holder(msgspec.Struct):
        model: Model

    model = Model(
        id=uuid.UUID(int=1),
        amount=Decimal("1.50"),
        ratio=2.0,
        at=dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
        clientName="c",
    )
    body = codec.encode(model)
    assert b'"clientName":"c"' in body
    assert b'"ratio":2}' in body
    assert model == codec.decoder(Model)(body)
    assert Holder(model) == codec.decoder(Holder)(codec.encode(Holder(model)))
    model.ratio = math.nan
    with pytest.raises(MessageError, match=r"Model\.ratio is nan"):
        codec.encode(model)

    decode = codec.decoder(Model)
    for bad in (b"{", b"\xff", b'{"id":"\xff"}', b'{"ratio":NaN}', b"[" * 10_000):
        assert reason_of(decode, bad) is Reason.UNDECODABLE
    for bad in (b"{}", b"[]", body.replace(b"2024", b"year"), b"1"):
        assert reason_of(decode, bad) is Reason.INVALID_PAYLOAD
    assert reason_of(codec.decoder(Holder), b'{"model":{}}') is Reason.INVALID_PAYLOAD


def test_S01_what_cannot_be_written_is_refused_before_any_effect():
    circular: dict[str, Any] = {}
    circular["self"] = circular
    for value in (object(), {"a": object()}, circular, "\ud800", math.nan, {"a": [math.inf]}):
        assert reason_of(codec.encode, value) is Reason.UNSERIALIZABLE
    assert codec.encode({3, 1, 2}) == b"[1,2,3]"
    assert len(codec.encode("x" * 10_000_000)) == 10_000_002


def test_bytes_are_a_body_already():
    raw = b"\x00\xffnot json"
    assert raw == codec.encode(raw) == codec.decoder(bytes)(raw)


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(trees)
def test_our_body_and_a_foreign_spelling_have_one_fingerprint(tree):
    foreign = json.dumps(tree, indent=1).encode()
    if b"Infinity" in foreign:
        assert reason_of(codec.encode, tree) is Reason.UNSERIALIZABLE
        return
    ours = codec.encode(tree)
    assert fingerprint(ours, canonical=True) == fingerprint(foreign, canonical=False)


class Typed(msgspec.Struct):
    number: int
    text: str
    maybe: int | None
    inner: dict[str, list[int]]
    moment: dt.datetime
    kind: Literal["a", "b"] = "a"


@given(
    st.builds(
        Typed,
        st.integers(),
        st.text(st.characters(codec="utf-8"), max_size=5),
        st.none() | st.integers(),
        st.dictionaries(st.sampled_from(["x", "y:", "null", "."]), st.lists(st.integers())),
        st.datetimes(),
        st.sampled_from(["a", "b"]),
    )
)
def test_a_typed_payload_is_canonical_and_comes_back(payload):
    body = codec.encode(payload)
    assert body == canonical_json(body)
    assert payload == codec.decoder(Typed)(body)


# ---- decode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", [dict, Any, Payment, Order, list[int], Point, str, int])
@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"a":1,}', b'{"zz":"\\ud800"}', b"\xff", b"[" * 10_000, b'{"a":' * 10_000]
)
def test_Q12_what_is_no_json_is_undecodable(type_, body):
    # A typed reader may see the wrong type before the broken syntax: either way it is the message.
    reason = reason_of(codec.decoder(type_), body)
    assert reason in (Reason.UNDECODABLE, Reason.INVALID_PAYLOAD)
    if type_ in (dict, Any) and body[:1] != b"[":
        assert reason is Reason.UNDECODABLE
    assert reason_of(codec.decoder(Any), body) is Reason.UNDECODABLE


@pytest.mark.parametrize(
    ("type_", "body", "detail"),
    [
        (Payment, b"{}", "missing required field `id`"),
        (Order, b'{"number":1,"payments":[{"id":"x"}]}', r"\$\.payments\[0\]\.id"),
        (Order, b'{"number":"1","payments":[]}', r"Expected `int`, got `str` - at `\$\.number`"),
        (Order, b'{"number":1.5,"payments":[]}', r"\$\.number"),
        (int, b'"1"', "Expected `int`"),
        (list[int], b"{}", "Expected `array`"),
    ],
)
def test_K05_a_body_of_another_shape_is_an_invalid_payload_with_its_path(type_, body, detail):
    with pytest.raises(MessageError, match=detail) as caught:
        codec.decoder(type_)(body)
    assert caught.value.reason is Reason.INVALID_PAYLOAD


def test_what_a_payload_class_raises_about_its_data_is_an_invalid_payload():
    class Picky(msgspec.Struct):
        a: int

        def __post_init__(self):
            {}[self.a]

    assert reason_of(codec.decoder(Picky), b'{"a":1}') is Reason.INVALID_PAYLOAD


def test_each_call_makes_a_fresh_object():
    decode = codec.decoder(Order)
    body = codec.encode(Order(1, []))
    one, other = decode(body), decode(body)
    one.payments.append(PAYMENT)
    assert other == Order(1, [])


def test_a_types_decoder_is_made_once():
    assert codec.decoder(Payment) is codec.decoder(Payment)
    unhashable = Annotated[int, msgspec.Meta(extra={"a": 1})]
    assert codec.decoder(unhashable)(b"1") == 1


@pytest.mark.parametrize("type_", ["Order", 5, list["Nowhere"]])  # noqa: F821
def test_a_type_that_no_json_can_become_is_refused_at_once(type_):
    with pytest.raises(ConfigurationError):
        codec.decoder(type_)


def test_decimals_are_exact_where_the_type_says_so():
    body = codec.encode({"amount": Decimal("0.12345678901234567890123")})

    class Amount(msgspec.Struct):
        amount: Decimal

    assert codec.decoder(Amount)(body).amount == Decimal("0.12345678901234567890123")
    large = codec.encode({"n": 2**63 + 1})
    assert codec.decoder(dict)(large) == {"n": 2**63 + 1}


def test_it_is_a_codec():
    from procession.abc import Codec

    as_codec: Codec = codec
    assert as_codec.content_type == "application/json"
