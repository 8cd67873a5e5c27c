"""An executor for smolagents: ``CodeAgent(tools, model, executor=SandboxExecutor(warm))``.

The code of the agent runs in a sandbox with all of Python. The agent's tools run in this process, and code calls them
by name. Code that exceeds its time limit is undone.
"""

from __future__ import annotations

from typing import Any

from smolagents.local_python_executor import CodeOutput, InterpreterError, PythonExecutor

from ._agent import CALL_TIMEOUT, MAX_TEXT, described, shortened, undone
from ._native import Checkpoint
from ._sandbox import Sandbox
from ._tools import Dispatcher
from ._values import Opaque
from ._warm import Warm

__all__ = ["SandboxExecutor"]

_ANSWER = "_afresh_final_answer"
# No `except Exception` of the code catches the end of the run.
_SETUP = f"""
def _afresh_setup():
    class FinalAnswer(BaseException):
        pass
    def final_answer(*arguments, **keywords):
        {_ANSWER}(*arguments, **keywords)
        raise FinalAnswer
    return final_answer
final_answer = _afresh_setup()
"""


class SandboxExecutor(PythonExecutor):  # type: ignore[misc]
    """Executes the code of a `CodeAgent` in a sandbox of a Python guest.

    Args:
        warm: The guest that it starts from: `afresh.linux`, `afresh.image`, or ``afresh.warm("python")``.
        timeout: Time limit in seconds of one execution.
        memory_limit: Maximum memory of the sandbox.
    """

    def __init__(
        self, warm: Warm, *, timeout: float | None = CALL_TIMEOUT, memory_limit: int | str | None = None
    ) -> None:
        self._sandbox = warm.sandbox(timeout=timeout, memory_limit=memory_limit)
        self._answers: list[Any] = []
        # The agent reads the output of failed code here.
        self.state: dict[str, Any] = {"_print_outputs": ""}

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox, to take checkpoints of and to fork."""
        return self._sandbox

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Offers the tools of the agent to its code."""
        offered = dict(tools)
        final = offered.pop("final_answer", None)

        def answer(*arguments: Any, **keywords: Any) -> None:
            value = final(*arguments, **keywords) if final is not None else arguments[0]
            self._answers.append(value)

        offered[_ANSWER] = answer
        dispatcher = Dispatcher(offered)
        self._sandbox._session.offer(dispatcher.names, dispatcher)
        self._sandbox.run_code(_SETUP, name="<setup>").unwrap()

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Sets variables of the code."""
        if variables:
            self._sandbox.apply("lambda given: globals().update(given)", variables)

    def checkpoint(self, name: str = "") -> Checkpoint:
        """Keeps the present state."""
        return self._sandbox.checkpoint(name)

    def rollback(self, to: Checkpoint | str) -> Checkpoint:
        """Goes to a kept state."""
        return self._sandbox.rollback(to)

    def __call__(self, code_action: str) -> CodeOutput:
        """Executes code; raises an `InterpreterError` with the original exception."""
        self._answers.clear()
        result, was_undone = undone(self._sandbox, lambda: self._sandbox.run_code(code_action))
        logs = shortened(result.stdout + result.stderr, MAX_TEXT)
        self.state["_print_outputs"] = logs
        if self._answers:
            return CodeOutput(output=self._answers[-1], logs=logs, is_final_answer=True)
        if result.error is not None:
            raise InterpreterError(described(result.error, was_undone=was_undone))
        value = result.text if isinstance(result.value, Opaque) else result.value
        return CodeOutput(output=value, logs=logs, is_final_answer=False)

    def cleanup(self) -> None:
        """Ends the sandbox."""
        self._sandbox.close()
