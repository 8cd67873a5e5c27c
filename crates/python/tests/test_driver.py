"""The guest's half of the language `python`, which is plain Python, on the host."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Iterator
from typing import Any

import afresh
import pytest
from afresh import _driver as driver
from afresh import _marshal, _native


class Host:
    """Takes frames, as the native half does."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.answer = b""

    def __call__(self, frame: bytes) -> bytes:
        self.frames.append(bytes(frame))
        return self.answer if frame[0] == driver.TOOL else b""

    def run(self, source: str, *, what: int = driver.RUN, **given: Any) -> Any:
        """The result of a request: its value, or the error's four parts."""
        frame, succeeded = driver.evaluate(driver.request(what, source, **given))
        assert frame[0] == driver.ANSWER
        answer = _native.decode(frame[1:])
        assert (answer[0] == 0) == succeeded
        return answer[1] if succeeded else answer[1:]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host()
    monkeypatch.setattr(driver, "_call", host)
    monkeypatch.setattr(sys, "modules", {**sys.modules, "__main__": type(sys)("__main__")})
    yield host
    driver._offer(driver.NONE_GIVEN)


def test_the_value_is_that_of_the_last_expression(host: Host) -> None:
    for source, value in [
        ("1 + 1", 2),
        ("x = 1; x + 1", 2),
        ("def double(n):\n    return 2 * n\ndouble(21)", 42),
        ("pass", None),
        ("", None),
        ("# nothing", None),
        ("x == 1", True),
        ("for i in range(3):\n    i", None),
        ("(\n1,\n2)", (1, 2)),
        ("'a = b'", "a = b"),
    ]:
        assert host.run(source) == value, source
    assert host.run("x") == 1


def test_values_are_carried_as_they_are(host: Host) -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, 678)
    for value in [
        None,
        True,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        10**40,
        -(10**40),
        1.5,
        float("inf"),
        "naïve ✓",
        b"\x00\xff",
        1 + 2j,
        [],
        [1, "two", None],
        list(range(1000)),
        [x / 3 for x in range(1000)],
        [2**70] * 20,
        [True, 1] * 20,
        (1, (2,), ()),
        {"a": {1: [2]}, (1, 2): "tuple"},
        {1, 2},
        now,
        now.replace(tzinfo=datetime.timezone.utc),
        now.date(),
    ]:
        sys.modules["__main__"].__dict__["value"] = value
        found = host.run("value")
        assert found == value
        assert type(found) is type(value)


def test_values_of_the_host_are_read(host: Host) -> None:
    day = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
    for value in [
        None,
        True,
        False,
        0,
        23,
        24,
        -300,
        2**40,
        10**40,
        -(10**40),
        1.5,
        "✓",
        b"\xff",
        [1, [2]],
        {"a": {1: 2}},
    ]:
        assert _marshal.read(_native.encode(value), 0)[0] == value
    assert _marshal.read(_native.encode([{1, 2}, day, (3,)]), 0)[0] == [{1, 2}, day, [3]]
    del host


def test_values_without_a_plain_form_stay_and_have_a_text(host: Host) -> None:
    @dataclasses.dataclass
    class Point:
        x: int
        y: int

    class Shy:
        def __repr__(self) -> str:
            raise ValueError

    main = sys.modules["__main__"].__dict__
    main.update(point=Point(1, 2), shy=Shy())
    assert host.run("point") == {"x": 1, "y": 2}
    assert host.run("shy") == afresh.Opaque("Shy", "<Shy, whose repr raised ValueError>")
    assert host.run("len") == afresh.Opaque("builtin_function_or_method", "<built-in function len>")
    host.run("a = []; a.append(a)")
    assert host.run("a")[0] == "MarshalError"


def test_errors_say_where_in_the_program_they_happened(host: Host) -> None:
    name, message, told, number = host.run("def f():\n    return 1 / 0\nf()", name="cell.py")
    assert (name, message, number) == ("ZeroDivisionError", "division by zero", None)
    assert 'File "cell.py", line 2, in f' in told
    assert "return 1 / 0" in told
    assert host.run("def (")[0] == "SyntaxError"
    assert host.run("1 +")[0] == "SyntaxError"
    assert host.run("eval('1 +')")[0] == "SyntaxError"
    assert list(host.run("import sys; sys.exit(3)")[:2]) == ["SystemExit", "3"]
    assert host.run("raise KeyboardInterrupt")[0] == "KeyboardInterrupt"


def test_functions_are_applied_and_modules_are_their_own(host: Host) -> None:
    given = _native.encode([[1, 2], [3]])
    assert host.run("lambda a, b: a + b", what=driver.APPLY, arguments=given) == [1, 2, 3]
    assert host.run("inside = 1", what=driver.MODULE) is None
    assert host.run("inside")[0] == "NameError"


def test_tools_are_known_while_they_are_offered(host: Host) -> None:
    offered = _native.encode(["add", "len"])
    host.answer = b"\x82\x00\x18\x2a"
    assert host.run("add(1, b=[2])", tools=offered) == 42
    assert host.frames[-1][0] == driver.TOOL
    assert host.frames[-1][1:] == b"\x83" + _native.encode("add") + _native.encode([1]) + _native.encode({"b": [2]})
    assert host.run("len('abc')", tools=offered) == 42
    host.answer = b"\x84\x01" + _native.encode("KeyError") + _native.encode("gone") + b"\x07"
    assert host.run("add()", tools=offered)[::3] == ["KeyError", 7]
    assert (
        host.run("try:\n    add()\nexcept KeyError as error:\n    caught = str(error)\ncaught", tools=offered)
        == "'gone'"
    )
    host.answer = b"\x84\x01" + _native.encode("Strange") + _native.encode("why") + b"\x08"
    assert host.run("add()", tools=offered) == [
        "Strange",
        "why",
        host.run("add()", tools=offered)[2],
        8,
    ]
    # Tools are removed, and the names that they hid are back.
    assert host.run("len('abc')") == 3
    assert host.run("add")[0] == "NameError"


def test_a_clone_draws_its_own_numbers_and_continues_with_them(host: Host) -> None:
    host.run("import random")
    drawn = set()
    for clone in range(50):
        given: dict[str, Any] = {"generation": clone + 1000, "entropy": clone.to_bytes(16, "little")}
        drawn |= {host.run("random.random()", **given), host.run("random.random()", **given)}
    assert len(drawn) == 100
    assert len({driver._scattered(number) for number in range(100_000)}) == 100_000
    called: list[int] = []
    driver.on_clone(lambda: called.append(1))
    try:
        host.run("0", generation=1, entropy=bytes(16))
        host.run("0", generation=1, entropy=bytes(16))
    finally:
        driver._on_clone.clear()
    assert called == [1]
