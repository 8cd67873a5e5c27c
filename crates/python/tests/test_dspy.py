"""Interpreters for DSPy, with DSPy and CPython as they are; `cargo xtask cpython` runs these."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if not os.environ.get("AFRESH_TEST_CPYTHON"):
    pytest.skip("SKIPPED: CPython takes minutes to compile; `cargo xtask cpython` runs these", allow_module_level=True)
dspy: Any = pytest.importorskip("dspy", reason="SKIPPED: dspy is not installed")
pytestmark = pytest.mark.filterwarnings("default")

from afresh.dspy import Interpreter, interpreter_factory  # noqa: E402


@pytest.fixture(scope="module")
def factory() -> Callable[[], Interpreter]:
    return interpreter_factory(setup="import numpy, pandas", timeout=10)


@pytest.fixture
def interpreter(factory: Callable[[], Interpreter]) -> Iterator[Interpreter]:
    with factory() as interpreter:
        yield interpreter


def test_it_is_what_dspy_asks_for(interpreter: Interpreter) -> None:
    from dspy.primitives.code_interpreter import CodeExecutionError, CodeInterpreter, CodeInterpreterError, FinalOutput

    assert isinstance(interpreter, CodeInterpreter)
    assert interpreter.execute("x = y + 1\nx", {"y": 41}) == 42
    assert interpreter.execute("print('printed')") == "printed"
    assert interpreter.execute("z = 1") is None
    assert "a" in interpreter.execute("pandas.DataFrame({'a': [1]})")
    with pytest.raises(SyntaxError):
        interpreter.execute("1 +")
    with pytest.raises(CodeExecutionError, match="ZeroDivisionError"):
        interpreter.execute("1 / 0")
    # The error is undone, and the session continues.
    with pytest.raises(CodeExecutionError, match="undone"):
        interpreter.execute("x = 0\nwhile True: pass")
    assert interpreter.execute("SUBMIT(x)") == FinalOutput({"output": 42})
    interpreter.tools["add"] = lambda a, b: a + b
    interpreter.output_fields = [{"name": "answer"}]
    assert interpreter.execute("SUBMIT(answer=add(1, b=2))") == FinalOutput({"answer": 3})
    with pytest.raises(CodeExecutionError, match="do not match"):
        interpreter.execute("SUBMIT(other=1)")
    with pytest.raises(ValueError, match="identifiers"):
        interpreter.execute("1", {"SUBMIT": 1})
    interpreter.shutdown()
    with pytest.raises(CodeInterpreterError):
        interpreter.execute("1")


@pytest.mark.parametrize(
    "change",
    ["m.output = 5", "m.output = {'other': 1}", "del sys.modules['afresh_dspy']"],
)
def test_code_cannot_submit_what_was_not_asked_for(interpreter: Interpreter, change: str) -> None:
    from dspy.primitives.code_interpreter import CodeExecutionError, FinalOutput

    code = f"import sys\nm = sys.modules['afresh_dspy']\n{change}\nraise m.Submission"
    with pytest.raises(CodeExecutionError, match="the submission"):
        interpreter.execute(code)
    assert interpreter._sandbox is not None
    kept = len(interpreter._sandbox.tree())
    assert interpreter.execute("sys.modules['afresh_dspy'] = m\nSUBMIT(1)") == FinalOutput({"output": 1})
    assert len(interpreter._sandbox.tree()) == kept


def test_rlm_works_in_it(factory: Callable[[], Interpreter]) -> None:
    from dspy.utils import DummyLM

    steps = [
        {"reasoning": "look", "code": "n = len(context)\nprint(n)"},
        {"reasoning": "done", "code": "SUBMIT(answer=str(n))"},
    ]
    with dspy.context(lm=DummyLM(steps), interpreter_factory=factory):
        assert dspy.RLM("context -> answer", max_iters=4)(context="x" * 1234).answer == "1234"
