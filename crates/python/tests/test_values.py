"""Values come back from a guest as they went in."""

from __future__ import annotations

import dataclasses
import datetime
import math
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
        ("[1, [new Error('some')]][1][0]", "error"),
    ],
)
def test_a_value_that_stays_in_the_guest_has_a_kind_and_a_text(sb: afresh.Sandbox, code: str, kind: str) -> None:
    value = sb.eval(code)
    assert isinstance(value, afresh.Opaque)
    assert value.kind == kind
    assert value.text


def test_a_value_that_contains_itself_is_an_error_on_both_sides(sb: afresh.Sandbox) -> None:
    refers: list[Any] = []
    refers.append(refers)
    with pytest.raises(afresh.MarshalError, match="refers to itself"):
        sb.apply("(value) => value", refers)
    with pytest.raises(afresh.ProgramError, match="refers to itself"):
        sb.eval("const a = []; a.push(a); a")
    assert sb.eval("1") == 1


def test_a_value_without_a_plain_form_is_refused_by_name(sb: afresh.Sandbox) -> None:
    with pytest.raises(afresh.MarshalError, match="object"):
        sb.apply("(value) => value", object())


def test_a_lone_surrogate_is_replaced(sb: afresh.Sandbox) -> None:
    assert sb.eval("'a' + String.fromCharCode(0xd800)") == "a\N{REPLACEMENT CHARACTER}"


def test_a_program_that_spoils_what_objects_have_in_common_spoils_no_value(sb: afresh.Sandbox) -> None:
    sb.run_code("""
        Object.prototype.toString = () => { throw 1 };
        Array.prototype.map = Array.prototype.push = JSON.stringify = undefined;
        Date.prototype.getTime = () => 'never';
    """)
    assert sb.eval("[1, {a: [new Date(0)]}]")[1]["a"][0].year == 1970
