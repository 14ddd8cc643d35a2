"""Equal JSON has one text, different JSON never; what readers could take differently is refused."""

import dataclasses
import datetime as dt
import enum
import json
import math
import uuid
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procession.core.canonical import canonical_json, canonical_value
from procession.errors import MessageError, Reason

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


def model(tree):
    """A hashable stand-in in which JSON values are equal if and only if JSON says so."""
    if isinstance(tree, dict):
        return ("object", frozenset((key, model(value)) for key, value in tree.items()))
    if isinstance(tree, list):
        return ("array", tuple(model(item) for item in tree))
    if isinstance(tree, bool) or tree is None or isinstance(tree, str):
        return (type(tree).__name__, tree)
    return ("number", Fraction(repr(tree)))


def shuffled(tree, rng):
    """The same tree as another writer may spell it."""
    space = rng.choice(["", " ", "\n\t"])
    if isinstance(tree, dict):
        members = list(tree.items())
        rng.shuffle(members)
        return (
            "{"
            + ",".join(
                f"{space}{json.dumps(key, ensure_ascii=rng.random() < 0.5)}{space}:"
                f"{shuffled(value, rng)}"
                for key, value in members
            )
            + space
            + "}"
        )
    if isinstance(tree, list):
        return "[" + ",".join(space + shuffled(item, rng) for item in tree) + space + "]"
    if isinstance(tree, int) and not isinstance(tree, bool):
        return rng.choice([f"{tree}", f"{tree}.0", f"{tree}e0", f"{tree * 10}.00E-1"])
    return json.dumps(tree, ensure_ascii=rng.random() < 0.5)


# ---- foreign text --------------------------------------------------------------------------------


@given(trees, st.randoms(use_true_random=False))
def test_K01_key_order_white_space_and_spelling_never_change_the_text(tree, rng):
    assert canonical_json(shuffled(tree, rng).encode()) == canonical_json(json.dumps(tree).encode())


def test_K01_the_order_of_an_array_does():
    assert canonical_json(b"[1,2]") != canonical_json(b"[2,1]")


@given(trees, trees)
def test_K16_texts_are_equal_exactly_if_the_values_are(one, other):
    texts = [canonical_json(json.dumps(tree).encode()) for tree in (one, other)]
    assert (model(one) == model(other)) == (texts[0] == texts[1])


@given(trees)
def test_canonical_text_is_idempotent_and_means_the_same(tree):
    text = canonical_json(json.dumps(tree).encode())
    assert text == canonical_json(text)
    assert model(tree) == model(json.loads(text))


@pytest.mark.parametrize(
    ("spellings", "text"),
    [
        (["1", "1.0", "1.00", "1e0", "1E+0", "10e-1", "0.1e1", "100.00e-2"], "1"),
        (["0.10", "0.1", "1e-1", "0.01E1"], "0.1"),
        (["0", "-0", "0.0", "-0.0", "0e5", "-0.000e-999999999", "0e9" + "9" * 50], "0"),
        (["-1.50", "-15e-1"], "-1.5"),
        (["1200", "1.2e3", "1200.0"], "1200"),
        (["0.000001", "1e-6", "0.0000010"], "0.000001"),
        (["0.0000001", "1e-7", "10e-8"], "1e-7"),
        (["-0.00000012", "-1.2E-7", "-12.0e-8"], "-1.2e-7"),
        (["123.4560e1", "1234.56", "1234.5600"], "1234.56"),
        (["10.000005", "1000000.5e-5"], "10.000005"),
        (["1e-999999999", "0.1e-999999998"], "1e-999999999"),
        (["9223372036854775809"], "9223372036854775809"),
        (["1" + "0" * 40, "1e40", "1.0E+40"], "1" + "0" * 40),
        (["1" + "0" * 400, "1" + "0" * 400 + ".0"], "1" + "0" * 400),
        (["0.12345678901234567890123456789"], "0.12345678901234567890123456789"),
        (["1.7976931348623157e308"], "17976931348623157" + "0" * 292),
    ],
)
def test_K04_equal_numbers_are_equal_text_and_none_is_rounded(spellings, text):
    assert {text.encode()} == {canonical_json(spelling.encode()) for spelling in spellings}


def test_K04_number_string_and_true_stay_three_values():
    assert len({canonical_json(body) for body in (b"1", b'"1"', b"true", b"[1]", b"null")}) == 5


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30))
def test_K04_every_spelling_of_a_decimal_is_one_text(number):
    spellings = [f"{number:f}", f"{number:e}", f"{number:E}", f"{number}"]
    texts = {canonical_json(spelling.encode()) for spelling in spellings}
    assert len(texts) == 1
    assert number == Decimal(texts.pop().decode())


@pytest.mark.parametrize("body", [b"1e999999999", b"1e310", b"-1E+400", b"1e9" + b"9" * 5000])
def test_K04_an_exponent_that_would_need_memory_is_refused(body):
    with pytest.raises(MessageError, match="exponent") as caught:
        canonical_json(body)
    assert caught.value.reason is Reason.UNDECODABLE


def test_K11_strings_keep_their_code_points():
    composed, decomposed = '"caf\u00e9"'.encode(), '"cafe\u0301"'.encode()
    assert canonical_json(composed) == composed
    assert canonical_json(decomposed) == decomposed
    invisible = '"a\u200b\u202eb\U0001f600"'.encode()
    assert canonical_json(invisible) == invisible


def test_escapes_are_spellings():
    assert canonical_json(b'"\\u0041\\/\\ud83d\\ude00\\u003a"') == '"A/\U0001f600:"'.encode()
    assert canonical_json(b'{"\\u003a":1,"b:":"::"}') == b'{":":1,"b:":"::"}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"NaN",
        b'{"a":Infinity}',
        b"[-Infinity]",
        b'"\\ud800"',
        b'{"\\udc00":1}',
        b'"\\ud800\\u0041"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b"\xef\xbb\xbf1",
        '{"a":1}'.encode("utf-16"),
        b"01",
        b"1.",
        b"[1,]",
        b"{'a':1}",
        b"1 2",
        b'"a\x01"',
        b"9" * 5000,
    ],
)
def test_what_is_no_json_is_undecodable(body):
    with pytest.raises(MessageError, match="the sender must") as caught:
        canonical_json(body)
    assert caught.value.reason is Reason.UNDECODABLE


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":2}',
        b'{"a":1,"b":{"x":[{"k":1,"k":1}]}}',
        b'{"a":1,"\\u0061":2}',
        b'{"a":"::","a":":"}',
        b'{"a":":","a":"\\u003a"}',
        b'{"a":"\\u003a:","a":1,"b":"\\u003A"}',
        b'{"":0,"":0}',
    ],
)
def test_the_same_key_twice_is_refused(body):
    with pytest.raises(MessageError, match="the same key twice") as caught:
        canonical_json(body)
    assert caught.value.reason is Reason.UNDECODABLE


@given(
    st.lists(
        st.tuples(st.text(':a\\u03"', max_size=3), st.text(":a\\u03", max_size=3)), max_size=5
    ),
    st.booleans(),
)
def test_the_same_key_twice_is_found_whatever_colons_and_escapes_stand_around(pairs, escaped):
    def spell(text):
        plain = json.dumps(text)
        return plain.replace(":", "\\u003a") if escaped else plain

    body = ("{" + ",".join(f"{spell(key)}:{spell(value)}" for key, value in pairs) + "}").encode()
    if len(dict(pairs)) == len(pairs):
        assert dict(pairs) == json.loads(canonical_json(body))
    else:
        with pytest.raises(MessageError, match="twice"):
            canonical_json(body)


@pytest.mark.parametrize("depth", [10_000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_is_refused_and_the_interpreter_lives(depth, opening, closing):
    for body in (opening * depth + b"1" + closing * depth, b'[{"a":1,"a":2},' + opening * depth):
        with pytest.raises(MessageError) as caught:
            canonical_json(body)
        assert caught.value.reason is Reason.UNDECODABLE


# ---- values --------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Share(enum.Enum):
    HALF = 0.50


class Level(enum.IntEnum):
    LOW = 1


class Kind(enum.StrEnum):
    SALE = "sale"


class Line(msgspec.Struct):
    sku: str
    price: float


class Count(msgspec.Struct, frozen=True, rename="camel", tag="count", omit_defaults=True):
    how_many: int
    of_what: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    number: int
    lines: list[Line]
    extra: Any = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (-0.0, "0"),
        (1e16, "10000000000000000"),
        (1e-7, "1e-7"),
        (2**63 + 1, "9223372036854775809"),
        (10**400, "1" + "0" * 400),
        (Decimal("1.00"), "1"),
        (Decimal("1E+5"), "100000"),
        (Decimal("-0.00"), "0"),
        (Decimal("12345678901234567890.10"), "12345678901234567890.1"),
        (True, "true"),
        (None, "null"),
        ("caf\u00e9", '"caf\u00e9"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (dt.date(2024, 1, 2), '"2024-01-02"'),
        (dt.datetime(2024, 1, 2, 3, 4, 5), '"2024-01-02T03:04:05"'),  # noqa: DTZ001
        (dt.datetime(2024, 1, 2, tzinfo=dt.UTC), '"2024-01-02T00:00:00Z"'),
        (b"\x00\xff", '"AP8="'),
        (Colour.RED, '"red"'),
        (Share.HALF, "0.5"),
        (Level.LOW, "1"),
        (Kind.SALE, '"sale"'),
        ((1, 2.0), "[1,2]"),
        ({"b": 1, "a": {"d": 2.50, "c": [None]}}, '{"a":{"c":[null],"d":2.5},"b":1}'),
        ({2: "b", 10: "a", uuid.UUID(int=0): 1}, None),
        ({Colour.RED: 1}, '{"red":1}'),
        ({3.0, 20, Decimal("1.0")}, "[1,20,3]"),
        ({frozenset({"b", "a"}), frozenset({"c"})}, '[["a","b"],["c"]]'),
        (Line("a", 2.0), '{"price":2,"sku":"a"}'),
        (Count(3), '{"howMany":3,"type":"count"}'),
        ([Count(3.0)], '[{"howMany":3,"type":"count"}]'),
        (Count(3.0), '{"howMany":3,"type":"count"}'),
        (Order(1, [Line("a", 2.5)]), '{"extra":null,"lines":[{"price":2.5,"sku":"a"}],"number":1}'),
        (Order(1, [], {"x": 1.0}), '{"extra":{"x":1},"lines":[],"number":1}'),
        (msgspec.Raw(b'{"b": 1.0, "a": 2}'), '{"a":2,"b":1}'),
    ],
)
def test_K05_every_plain_type_has_one_text(value, text):
    written = canonical_value(value)
    assert written == canonical_json(written)
    if text is not None:
        assert written.decode() == text


@given(trees)
def test_a_value_and_its_foreign_text_agree(tree):
    assert canonical_value(tree) == canonical_json(json.dumps(tree).encode())


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_comes_back(number):
    text = canonical_value([number])
    assert [number] == msgspec.json.decode(text, type=list[float])


def test_a_value_is_never_changed_by_being_written():
    order = Order(1, [Line("a", 2.0)], [1.0, {"x": Decimal("1.0")}])
    canonical_value(order)
    assert order == Order(1, [Line("a", 2.0)], [1.0, {"x": Decimal("1.0")}])
    assert type(order.extra[0]) is float


def test_K05_one_instant_in_two_zones_is_two_values():
    utc = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
    berlin = utc.astimezone(dt.timezone(dt.timedelta(hours=1)))
    assert utc == berlin
    assert canonical_value(utc) != canonical_value(berlin)


class Annotated(msgspec.Struct):
    number: int
    maybe: int | None = None
    inner: list["Annotated"] = []


@pytest.mark.parametrize(
    "value", [Annotated(math.nan), Annotated(1, math.nan), Annotated(1, 2, [Annotated(math.inf)])]
)
def test_K04_nan_in_an_ints_place_is_refused_though_msgspec_writes_null(value):
    with pytest.raises(MessageError, match="JSON has not"):
        canonical_value(value)


def test_K04_a_float_in_an_ints_place_is_written_as_the_int():
    assert canonical_value(Annotated(1)) == canonical_value(Annotated(1.0))


class Unknown:
    def __repr__(self) -> str:
        raise RuntimeError("a repr that fails")

    __str__ = __repr__


circular: list[Any] = [1, {"again": []}]
circular[1]["again"].append(circular)
deep: Any = 1
for _ in range(10_000):
    deep = [deep]


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (math.nan, "float is nan"),
        ({"a": [1, math.inf]}, "dict.a[1] is inf"),
        (Order(1, [Line("a", 1), Line("b", -math.inf)]), "Order.lines[1].price is -inf"),
        ({"a": Decimal("NaN")}, "dict.a is no finite number"),
        (Order(1, [], Unknown()), "Order.extra is of type Unknown"),
        ({"a": {"b": [object()]}}, "dict.a.b[0] is of type object"),
        ({"a": 1j}, "dict.a is of type complex"),
        ({"a": "x\ud800"}, "dict.a holds a lone surrogate"),
        (Line("\udfff", 1), "Line.sku holds a lone surrogate"),
        ({"\ud800": 1}, "dict holds a lone surrogate"),
        ({1: "a", "1": "b"}, "dict has two keys that JSON writes alike, '1'"),
        ({Colour.RED: 1, "red": 2}, "dict has two keys that JSON writes alike"),
        ({1.5: 2}, "dict has a key of type float"),
        ({True: 2}, "dict has a key of type bool"),
        ({None: 2}, "dict has a key of type NoneType"),
        ([{(1, 2): 2}], "list[0] has a key of type tuple"),
        (circular, "list[1].again[0] refers back"),
        (deep, "is nested too deep"),
        (10**5000, "could not be written"),
        (msgspec.Raw(b'{"a":1,"a":2}'), "the same key twice"),
        ([msgspec.UNSET], "list[0] is of type UnsetType"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_S01_what_has_no_json_is_refused_naming_the_field(value, detail):
    with pytest.raises(MessageError) as caught:
        canonical_value(value)
    assert caught.value.reason is Reason.UNSERIALIZABLE
    assert detail in caught.value.detail


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=4), scalars, max_size=6), st.randoms())
def test_K01_the_order_of_a_mapping_never_changes_the_text(mapping, rng):
    members = list(mapping.items())
    rng.shuffle(members)
    assert canonical_value(mapping) == canonical_value(dict(members))
