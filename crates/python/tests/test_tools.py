"""Tools: host functions that programs call."""

from __future__ import annotations

import asyncio
from typing import Any, Optional

import afresh
import pytest


def add(a: int, b: int = 1) -> int:
    return a + b


def test_a_tool_takes_and_gives_values(js: afresh.Warm) -> None:
    seen: list[Any] = []

    def keep(*values: Any) -> dict[str, Any]:
        seen.extend(values)
        return {"kept": len(seen), "bytes": b"x"}

    with js.sandbox(tools=[add, keep]) as sb:
        assert sb.eval("add(40) + add(0, 1)") == 42
        assert sb.eval("keep([1, {a: null}], 'two', 3.5)") == {"kept": 3, "bytes": b"x"}
    assert seen == [[1, {"a": None}], "two", 3.5]


def test_tools_have_the_names_that_they_are_given(js: afresh.Warm) -> None:
    with js.sandbox(tools={"plus": add}) as sb:
        assert sb.eval("plus.name + plus(1, 2)") == "plus3"
        assert sb.eval("typeof add") == "undefined"
    with pytest.raises(ValueError, match="two words"):
        js.sandbox(tools={"two words": add})
    with pytest.raises(TypeError, match="cannot be called"):
        js.sandbox(tools={"one": 1})  # type: ignore[arg-type]


def test_a_program_sees_what_a_tool_raises_and_the_caller_gets_it_as_the_cause(js: afresh.Warm) -> None:
    class OwnError(Exception):
        pass

    raised = OwnError("no stock")

    def buy() -> None:
        raise raised

    with js.sandbox(tools=[buy]) as sb:
        assert sb.eval("try { buy() } catch (e) { [e.name, e.message, e instanceof Error] }") == [
            "OwnError",
            "no stock",
            True,
        ]
        error = sb.run_code("buy()").error
        assert isinstance(error, afresh.ProgramError)
        assert (error.name, error.message) == ("OwnError", "no stock")
        assert error.__cause__ is raised
        assert error.__cause__.__traceback__ is not None
        assert sb.eval("1") == 1


def test_arguments_are_checked_against_the_signature(js: afresh.Warm) -> None:
    def typed(a: int, b: Optional[str] = None, c: list[int] | None = None, d: float = 0.5) -> list[Any]:  # noqa: UP045
        return [a, b, c, d]

    with js.sandbox(tools=[typed]) as sb:
        assert sb.eval("typed(1, null, [1], 2)") == [1, None, [1], 2]
        for call, why in [
            ("typed('1')", "a is a str, not int"),
            ("typed(true)", "a is a bool, not int"),
            ("typed(1, 2)", "b is a int"),
            ("typed(1, 'x', 'y')", "c is a str"),
            ("typed(1, 'x', [1], 'y')", "d is a str, not float"),
            ("typed()", "missing a required argument"),
            ("typed(1, 'x', [], 1, 1)", "too many positional arguments"),
        ]:
            error = sb.run_code(call).error
            assert isinstance(error, afresh.ProgramError), call
            assert error.name == "TypeError"
            assert why in error.message


def test_what_a_tool_returns_that_cannot_be_carried_is_an_error_of_the_program(js: afresh.Warm) -> None:
    with js.sandbox(tools={"bad": object}) as sb:
        error = sb.run_code("bad()").error
        assert isinstance(error, afresh.ProgramError)
        assert error.name == "MarshalError"


def test_no_program_catches_an_interrupt_of_a_tool(js: afresh.Warm) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with js.sandbox(tools=[interrupt]) as sb:
        clean = sb.checkpoint("clean")
        with pytest.raises(KeyboardInterrupt):
            sb.run_code("try { interrupt() } catch { 'caught' }")
        sb.rollback(clean)
        assert sb.eval("1") == 1


def test_a_tool_may_use_other_sandboxes_and_its_own_is_busy(js: afresh.Warm) -> None:
    def other() -> Any:
        return js.eval("20 + 1")

    def own() -> Any:
        return sb.eval("1")

    with js.sandbox(tools=[other, own]) as sb:
        assert sb.eval("other() * 2") == 42
        error = sb.run_code("own()").error
        assert isinstance(error, afresh.ProgramError)
        assert isinstance(error.__cause__, afresh.BusyError)


def test_tools_stay_through_rollbacks_and_forks(js: afresh.Warm) -> None:
    with js.sandbox(tools=[add]) as sb:
        root = sb.at
        assert sb.eval("add(1)") == 2
        sb.rollback(root)
        assert sb.eval("add(2)") == 3
        assert [fork.eval("add(3)") for fork in sb.fork(2)] == [4, 4]


async def later(value: str) -> str:
    await asyncio.sleep(0)
    return value * 2


def test_an_asynchronous_tool_is_awaited_in_a_plain_sandbox(js: afresh.Warm) -> None:
    with js.sandbox(tools=[later]) as sb:
        assert sb.eval("later('ab')") == "abab"


async def test_an_asynchronous_tool_that_would_wait_for_itself_is_refused(js: afresh.Warm) -> None:
    with js.sandbox(tools=[later]) as sb:
        error = sb.run_code("later('ab')").error
        assert isinstance(error, afresh.ProgramError)
        assert "async_sandbox" in error.message
