"""Interpreters for DSPy's code-executing modules (``dspy.RLM`` and its like), each a sandbox of one warm CPython.

```python
import afresh.dspy

dspy.configure(interpreter_factory=afresh.dspy.interpreter_factory(setup="import numpy, pandas"))
```

Promises: each interpreter starts from the warm state in microseconds, and none sees another's. Code that is cut
short by a time limit or a trap is undone: the interpreter continues from its last state, where others end. May break
it: tools, which are the caller's own functions and run in its process.

It is made for DSPy 3.4's ``CodeInterpreter``.
"""

from __future__ import annotations

import contextlib
import keyword
from collections.abc import Callable, Mapping
from typing import Any

from . import _warm
from ._result import Result
from ._sandbox import Sandbox
from ._sizes import size
from ._tools import Dispatcher
from ._values import Opaque
from .errors import AfreshError, ProgramError

__all__ = ["Interpreter", "interpreter_factory"]

# The guest's helper for the program: how it submits.
_SUBMIT = '''
def _afresh_submit():
    import sys, types
    module = sys.modules.setdefault("afresh_dspy", types.ModuleType("afresh_dspy"))
    module.names = None

    class Submission(BaseException):
        """Ends the code that submits."""

    def SUBMIT(*values, **named):
        """Ends the work with its outputs."""
        if module.names is None:
            if len(values) != 1 or named:
                raise TypeError("SUBMIT requires one output value")
            module.output = {"output": values[0]}
        else:
            if values and named:
                raise TypeError("SUBMIT accepts positional or keyword values, not both")
            given = dict(zip(module.names, values)) if values else named
            if set(given) != set(module.names) or len(values) > len(module.names):
                raise TypeError("SUBMIT fields do not match the configured output fields")
            module.output = given
        raise Submission

    module.Submission, module.SUBMIT = Submission, SUBMIT
    return SUBMIT
SUBMIT = _afresh_submit()
del _afresh_submit
'''
_RESERVED = frozenset({"SUBMIT", "__builtins__"})


def _check(names: Mapping[str, Any], what: str) -> None:
    wrong = [name for name in names if not name.isidentifier() or keyword.iskeyword(name) or name in _RESERVED]
    if wrong:
        raise ValueError(f"{what} must be Python's identifiers that nothing else means; these are not: {wrong}")


def _plain(value: Any) -> Any:
    """A value that stays in the guest, in its printed form."""
    return value.text if isinstance(value, Opaque) else value


class Interpreter:
    """One session of code: each execution continues from the state that the last one left. Made by
    `interpreter_factory`.

    Attributes:
        tools: Functions that code may call by their names; may be changed between executions.
        output_fields: The outputs that ``SUBMIT`` takes, each a dictionary with its ``name``; any one, if ``None``.
    """

    execution_instructions = (
        "Code runs as Python 3.15 in a sandbox with numpy, pandas and scipy, without network, threads or processes. "
        "State, imports, functions and variables persist for this session. Files are the session's own. Host tools and "
        "SUBMIT are available as global functions."
    )

    def __init__(
        self,
        warm: _warm.Warm,
        tools: Mapping[str, Callable[..., Any]] | None = None,
        output_fields: list[dict[str, Any]] | None = None,
        *,
        timeout: float | None = None,
        memory_limit: int | str | None = None,
    ) -> None:
        self.tools: dict[str, Callable[..., Any]] = dict(tools or {})
        self.output_fields = output_fields
        self._warm = warm
        self._timeout = timeout
        self._memory_limit = size(memory_limit)
        self._sandbox: Sandbox | None = None
        self._offered: dict[str, Callable[..., Any]] = {}
        self._told: list[str] | None = None
        self._ended = False

    def __enter__(self) -> Interpreter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __call__(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """As `execute`."""
        return self.execute(code, variables)

    def start(self) -> None:
        """Makes the sandbox, unless it is there."""
        from dspy.primitives.code_interpreter import CodeInterpreterError  # noqa: PLC0415

        if self._ended:
            raise CodeInterpreterError("the session has been shut down; make a new interpreter")
        if self._sandbox is None:
            self._sandbox = self._warm.sandbox(timeout=self._timeout, memory_limit=self._memory_limit)
            self._sandbox.run_code(_SUBMIT, name="<submit>").unwrap()

    def execute(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """Runs code and returns what it gave: its last value, or else what it printed, or what it submitted.

        Raises:
            SyntaxError: The code is no Python.
            CodeExecutionError: It failed, or was cut short; then it is undone.
            CodeInterpreterError: The sandbox cannot be used.
        """
        from dspy.primitives.code_interpreter import (  # noqa: PLC0415
            CodeExecutionError,
            CodeInterpreterError,
            FinalOutput,
        )

        _check(self.tools, "names of tools")
        _check(variables or {}, "names of variables")
        try:
            self.start()
            sandbox = self._sandbox
            if sandbox is None:
                raise CodeInterpreterError("the session has no sandbox")
            self._offer(sandbox)
            if variables:
                sandbox.apply("lambda given: globals().update(given)", variables)
            before = sandbox.checkpoint()
            try:
                result = sandbox.run_code(code, name="<interpreter>")
                submitted = self._submitted(sandbox, result)
            finally:
                if sandbox.failed is not None:
                    sandbox.rollback(before)
                with contextlib.suppress(AfreshError):
                    sandbox.drop(before)
        except AfreshError as error:
            raise CodeInterpreterError(str(error)) from error
        if submitted is not None:
            return FinalOutput(submitted)
        if isinstance(result.error, ProgramError):
            if result.error.name == "SyntaxError":
                raise SyntaxError(result.error.message)
            raise CodeExecutionError(f"{result.error.name}: {result.error.message}") from result.error
        if result.error is not None:
            raise CodeExecutionError(f"{result.error}; what it did is undone") from result.error
        printed = (result.stdout + result.stderr).rstrip("\n")
        return _plain(result.value) if result.value is not None else printed or None

    def _offer(self, sandbox: Sandbox) -> None:
        """Makes known what the code may call and submit."""
        if self.tools != self._offered:
            dispatcher = Dispatcher(self.tools)
            sandbox._session.offer(dispatcher.names, dispatcher if self.tools else None)
            self._offered = dict(self.tools)
        names = None if self.output_fields is None else [field["name"] for field in self.output_fields]
        if names != self._told:
            sandbox.apply("lambda names: setattr(__import__('afresh_dspy'), 'names', names)", names)
            self._told = names

    def _submitted(self, sandbox: Sandbox, result: Result) -> dict[str, Any] | None:
        """The outputs that the code submitted, if it did. The code can change the guest's half, so they are checked."""
        from dspy.primitives.code_interpreter import CodeExecutionError  # noqa: PLC0415

        if not isinstance(result.error, ProgramError) or result.error.name != "Submission":
            return None
        read = sandbox.run_code("__import__('afresh_dspy').output", name="<submission>")
        if read.error is not None:
            reason = read.error.message if isinstance(read.error, ProgramError) else read.error
            raise CodeExecutionError(f"the submission cannot be read: {reason}") from read.error
        names = {"output"} if self._told is None else set(self._told)
        if not isinstance(read.value, dict) or set(read.value) != names:
            raise CodeExecutionError(f"the submission has other fields than {sorted(names)}: end the code with SUBMIT")
        return {name: _plain(value) for name, value in read.value.items()}

    def shutdown(self) -> None:
        """Ends the session."""
        self._ended = True
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def interpreter_factory(
    warm: _warm.Warm | None = None,
    *,
    setup: str | None = None,
    tools: Mapping[str, Callable[..., Any]] | None = None,
    timeout: float | None = None,
    memory_limit: int | str | None = None,
) -> Callable[[], Interpreter]:
    """A function that makes interpreters, for ``dspy.configure`` or a module's own ``interpreter_factory``.

    Args:
        warm: The CPython that they start from; if not given, the language ``python``, warmed now with ``setup``.
        setup: Code that it runs once.
        tools: Functions that every interpreter offers.
        timeout: Time limit in seconds of one execution.
        memory_limit: Most memory.
    """
    if warm is not None and setup is not None:
        raise ValueError("a guest that is warm has run its setup: give one of `warm` and `setup`")
    there = warm if warm is not None else _warm.warm("python", setup=setup)

    def make() -> Interpreter:
        return Interpreter(there, tools, timeout=timeout, memory_limit=memory_limit)

    make.execution_instructions = Interpreter.execution_instructions  # type: ignore[attr-defined]
    return make
