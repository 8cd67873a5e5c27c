"""Values come back from a guest as they went in."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import uuid
from typing import Any

import afresh
import pytest

THERE_AND_BACK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**53 - 1,
    -(2**53) + 1,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**64,
    -(2**64) - 1,
    2**200 + 12345,
    -(2**200),
    1.5,
    math.inf,
    -math.inf,
    5e-324,
    "",
    "text \N{SNOWMAN} \U0001f600 \0 end",
    b"",
    bytes(range(256)),
    [],
    [1, [2, [3, []]]],
    {},
    {"a": {"b": [None, True]}, "": 0, "__proto__x": 1},
    {1: "one", "two": 2},
    {1, 2, 3},
    datetime.datetime(2026, 11, 22, 12, 30, tzinfo=datetime.timezone.utc),
]


@pytest.mark.parametrize("value", THERE_AND_BACK, ids=repr)
def test_a_value_comes_back_as_it_went_in(sb: afresh.Sandbox, value: Any) -> None:
    back = sb.apply("(value) => value", value)
    assert back == value
    assert type(back) is type(value)


def test_an_invalid_number_is_not_a_number(sb: afresh.Sandbox) -> None:
    assert math.isnan(sb.apply("(value) => value", math.nan))
    assert math.copysign(1, sb.eval("-0")) == -1
    assert math.copysign(1, sb.apply("(value) => value", -0.0)) == -1


def test_tuples_and_data_classes_and_anything_like_them_are_plain_in_a_guest(sb: afresh.Sandbox) -> None:
    @dataclasses.dataclass
    class Point:
        x: int
        y: tuple[int, ...]

    class Array:
        def tolist(self) -> list[int]:
            return [1, 2]

    assert sb.apply("(value) => value", Point(1, (2, 3))) == {"x": 1, "y": [2, 3]}
    assert sb.apply("(value) => value", (1, frozenset([2]))) == [1, {2}]
    assert sb.apply("(value) => value", Array()) == [1, 2]
    assert sb.apply("(value) => value", bytearray(b"ab")) == b"ab"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("() => 1", "function"),
        ("(class Some {})", "function"),
        ("Symbol('some')", "symbol"),
        ("/some/g", "regexp"),
        ("[1, [new Error('some')]][1][0]", "error"),
    ],
)
def test_a_value_that_stays_in_the_guest_has_a_kind_and_a_text(sb: afresh.Sandbox, code: str, kind: str) -> None:
    value = sb.eval(code)
    assert isinstance(value, afresh.Opaque)
    assert value.kind == kind
    assert value.text


def test_decimals_and_uuids_are_text_in_javascript(sb: afresh.Sandbox) -> None:
    given = [decimal.Decimal("-1.50"), uuid.UUID(int=5)]
    assert sb.apply("(value) => value", given) == ["-1.50", "00000000-0000-0000-0000-000000000005"]
    with pytest.raises(afresh.AfreshError, match="43000"):
        sb.apply("(value) => value", 1 + 2j)


def test_dates_that_python_cannot_hold_have_a_text(sb: afresh.Sandbox) -> None:
    assert sb.eval("new Date(NaN)") == afresh.Opaque("date", "Invalid Date")
    assert sb.eval("[new Date(8.64e15)]") == [afresh.Opaque("date", "8640000000000 seconds from 1970-01-01T00:00:00Z")]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("new Map([[{a: 1}, 1], ['b', [2]]])", [({"a": 1}, 1), ("b", [2])]),
        ("new Map([[[{a: 1}], 1]])", [([{"a": 1}], 1)]),
        ("new Map([[1, 'number'], [true, 'truth']])", [(1, "number"), (True, "truth")]),
        ("new Map([[[1], 'a'], [[1], 'b']])", [([1], "a"), ([1], "b")]),
        ("new Map([[[1, [2]], 1], [new Set([3]), 2]])", {(1, (2,)): 1, frozenset([3]): 2}),
        ("new Set([{a: 1}, 2])", [{"a": 1}, 2]),
        ("new Set([1, true])", [1, True]),
        ("new Set([[1], [2]])", {(1,), (2,)}),
    ],
)
def test_no_entry_of_a_map_or_set_is_lost(sb: afresh.Sandbox, code: str, value: Any) -> None:
    assert repr(sb.eval(code)) == repr(value)


def test_numbers_of_any_length_come_back(sb: afresh.Sandbox) -> None:
    result = sb.run_code("10n ** 5000n")
    assert (result.error, result.value, result.text) == (None, 10**5000, hex(10**5000))
    assert sb.eval("-(16n ** 5000n)") == -(16**5000)
    assert sb.eval("[-(2n ** 63n), -(2n ** 63n) - 1n, 255n, -256n, 2n ** 64n - 1n]") == [
        -(2**63),
        -(2**63) - 1,
        255,
        -256,
        2**64 - 1,
    ]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("new Int8Array([-1, 127])", [-1, 127]),
        ("new Uint8ClampedArray([300])", [255]),
        ("new Int16Array([-2])", [-2]),
        ("new Uint16Array([65535])", [65535]),
        ("new Int32Array([-3, 2])", [-3, 2]),
        ("new Uint32Array([4294967295])", [4294967295]),
        ("new Float32Array([1.5, -0.25])", [1.5, -0.25]),
        ("new Float64Array([0.1, Infinity])", [0.1, math.inf]),
        ("new Float64Array([1, 2, 3, 4]).subarray(1, 3)", [2.0, 3.0]),
        ("new BigInt64Array([-5n])", [-5]),
        ("new BigUint64Array([2n ** 64n - 1n])", [2**64 - 1]),
        ("[new Float64Array(0), new Uint8Array(0)]", [[], b""]),
        ("(class Mine extends Int16Array {}).of(1, 2)", [1, 2]),
        ("new Int32Array(1 << 18).fill(7)", [7] * (1 << 18)),
    ],
)
def test_typed_arrays_are_lists_of_numbers(sb: afresh.Sandbox, code: str, value: list[Any]) -> None:
    assert sb.eval(code) == value


def test_a_value_that_contains_itself_is_an_error_on_both_sides(sb: afresh.Sandbox) -> None:
    refers: list[Any] = []
    refers.append(refers)
    with pytest.raises(afresh.MarshalError, match="refers to itself"):
        sb.apply("(value) => value", refers)

    @dataclasses.dataclass
    class Node:
        next: Any = None

    node = Node()
    node.next = node
    with pytest.raises(afresh.MarshalError, match="refers to itself"):
        sb.apply("(value) => value", node)
    with pytest.raises(afresh.ProgramError, match="refers to itself"):
        sb.eval("const a = []; a.push(a); a")
    assert sb.eval("1") == 1


def test_a_value_without_a_plain_form_is_refused_by_name(sb: afresh.Sandbox) -> None:
    with pytest.raises(afresh.MarshalError, match="object"):
        sb.apply("(value) => value", object())
    with pytest.raises(afresh.MarshalError, match="surrogate"):
        sb.apply("(value) => value", "\ud800")
    with pytest.raises(afresh.ProgramError, match="boo"):
        sb.eval("({ get a() { throw new Error('boo') } })")
    for code in ("const a = []; a[4e9] = 1; a", "const b = []; b.length = 4294967295; b"):
        with pytest.raises(afresh.ProgramError, match="elements"):
            sb.eval(code)


def test_a_lone_surrogate_is_replaced(sb: afresh.Sandbox) -> None:
    assert sb.eval("'a' + String.fromCharCode(0xd800)") == "a\N{REPLACEMENT CHARACTER}"


def test_a_program_that_spoils_what_objects_have_in_common_spoils_no_value(sb: afresh.Sandbox) -> None:
    sb.run_code("""
        Object.prototype.toString = () => { throw 1 };
        Array.prototype.map = Array.prototype.push = JSON.stringify = undefined;
        Date.prototype.getTime = () => 'never';
    """)
    assert sb.eval("[1, {a: [new Date(0)]}]")[1]["a"][0].year == 1970
