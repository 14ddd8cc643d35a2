"""One message has one fingerprint, whoever wrote it; another message has another."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import procession
from procession.core.fingerprints import fingerprint, fingerprint_of_fields, matches
from procession.errors import ConfigurationError, MessageError, Reason


def test_K01_reordered_and_spaced_bodies_have_one_fingerprint():
    bodies = [b'{"a":1,"b":[1,2]}', b' { "b" : [ 1 , 2 ] ,\n"a" : 1.0 } ']
    assert len({fingerprint(body, canonical=False) for body in bodies}) == 1
    assert fingerprint(b'{"b":[2,1],"a":1}', canonical=False) != fingerprint(
        bodies[0], canonical=False
    )


SCRIPT = """
import msgspec
from procession.core.canonical import canonical_value
from procession.core.fingerprints import fingerprint, fingerprint_of_fields
tags = {"red", "green", "blue", "ochre", "cyan"}
value = {"a": 1, "b": [1, 2], "tags": tags, "pairs": {frozenset({"x", "y"}), frozenset({"z"})}}
print(fingerprint(canonical_value(value), canonical=True).hex())
print(fingerprint(b'{"b": [1,2], "a": 1}', canonical=False).hex())
print(fingerprint_of_fields(value, ["tags", "a"]).hex())
"""


def test_K01_every_process_finds_the_same_fingerprint_whatever_its_hash_seed():
    root = str(Path(procession.__path__[0]).parent)

    def run(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        return subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True
        ).stdout

    first, second = run("1"), run("2")
    assert len(first.split()) == 3
    assert first == second


def test_K04_a_number_through_javascript_is_the_same_message():
    of = {body: fingerprint(body, canonical=False) for body in (b'{"n":1}', b'{"n":1.0}')}
    assert len(set(of.values())) == 1
    others = {fingerprint(body, canonical=False) for body in (b'{"n":"1"}', b'{"n":true}')}
    assert len(others | set(of.values())) == 3


def test_K16_differences_at_any_depth_count():
    bodies = [
        b'{"t":1,"p":{"id":"x"}}',
        b'{"t":1,"p":{"id":"y"}}',
        b'{"t":1,"p":{"a":{"b":{"c":{"d":{"e":1}}}}}}',
        b'{"t":1,"p":{"a":{"b":{"c":{"d":{"e":2}}}}}}',
        b'{"t":1,"p":{"a":{"b":{"c":{"d":[{"e":2}]}}}}}',
        b'{"t":1,"p":{"a":{"b":{"c":{"d":[{"e":2},{}]}}}}}',
    ]
    assert len({fingerprint(body, canonical=False) for body in bodies}) == len(bodies)


def test_canonical_and_raw_bodies_are_hashed_as_they_stand():
    raw = b"\x00\xffnot json"
    assert len(fingerprint(raw, canonical=True)) == 32
    with pytest.raises(MessageError) as caught:
        fingerprint(raw, canonical=False)
    assert caught.value.reason is Reason.UNDECODABLE
    assert fingerprint(b'{"a":1}', canonical=True) == fingerprint(b'{"a":1.0}', canonical=False)


# ---- chosen fields -------------------------------------------------------------------------------


class Customer(msgspec.Struct):
    id: str
    note: str | None = None


class Order(msgspec.Struct):
    number: int
    customer: Customer
    tries: int = 0


def test_chosen_fields_alone_decide():
    fields = ["number", "customer.id"]
    one = fingerprint_of_fields(Order(1, Customer("c")), fields)
    assert one == fingerprint_of_fields(Order(1, Customer("c", "x"), tries=5), fields)
    assert one == fingerprint_of_fields({"number": 1.0, "customer": {"id": "c"}}, fields[::-1])
    assert one != fingerprint_of_fields(Order(2, Customer("c")), fields)
    assert one != fingerprint_of_fields(Order(1, Customer("d")), fields)
    assert one != fingerprint_of_fields(Order(1, Customer("c")), ["number"])


def test_a_chosen_field_may_be_none_but_not_missing():
    assert len(fingerprint_of_fields({"a": None}, ["a"])) == 32
    with pytest.raises(MessageError, match=r"'b\.c'") as caught:
        fingerprint_of_fields({"a": 1, "b": {}}, ["a", "b.c"])
    assert caught.value.reason is Reason.INVALID_PAYLOAD


@pytest.mark.parametrize("fields", [[], (), "number", ["a..b"], [""]])
def test_fields_that_name_nothing_are_refused(fields):
    with pytest.raises(ConfigurationError):
        fingerprint_of_fields({"number": 1}, fields)


# ---- what is recorded ----------------------------------------------------------------------------

prints = st.binary(min_size=32, max_size=32)


@given(st.lists(prints, max_size=4), prints)
def test_a_fingerprint_matches_exactly_those_recorded(recorded, candidate):
    assert matches(b"".join(recorded), candidate) == (candidate in recorded)
    for one in recorded:
        assert matches(b"".join(recorded), one)


def test_a_fingerprint_across_two_recorded_ones_does_not_match():
    recorded = bytes(range(64))
    assert not matches(recorded, recorded[16:48])


@pytest.mark.parametrize(("recorded", "candidate"), [(b"a" * 33, b"a" * 32), (b"a" * 32, b"a")])
def test_a_length_that_no_fingerprint_has_is_an_error(recorded, candidate):
    with pytest.raises(ValueError, match="32 bytes"):
        matches(recorded, candidate)
