"""The common part of the adapters to agent frameworks: the tools of one sandbox, as functions that return text.

Promises: calls of several threads run one after the other. Code that is cut short is undone, so the sandbox takes the
next call. An error is in the text, for the model to read. May break it: a caller that uses the same sandbox directly.
"""

from __future__ import annotations

import contextlib
import posixpath
import threading
from collections.abc import Callable
from typing import Any

from ._native import Checkpoint
from ._result import Result
from ._sandbox import Sandbox
from ._warm import Warm
from .errors import AfreshError, ProgramError

# Seconds of one call, and characters of one text, where nothing else is set.
CALL_TIMEOUT = 60.0
MAX_TEXT = 50_000
# Checkpoints that a model may keep at a time, each with the pages that changed, and characters of a
# name.
MAX_CHECKPOINTS = 100
MAX_NAME = 200
# Relative paths of files begin here, where commands start too.
HOME = "/home/user"

INSTRUCTIONS = (
    "You have a sandbox. Variables, files and processes stay between calls. Take a `checkpoint` before a risky step, "
    "and `rollback` to it if the step fails."
)


def absolute(path: str) -> str:
    """A path from the root.

    >>> absolute("a/../b"), absolute("/tmp/x")
    ('/home/user/b', '/tmp/x')
    """
    return posixpath.normpath(posixpath.join(HOME, path))


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Text without its middle, if it is long."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def undone(sandbox: Sandbox, run: Callable[[], Result]) -> tuple[Result, bool]:
    """A result, and whether it was undone: code that is cut short leaves the state before it."""
    before = sandbox.checkpoint()
    try:
        result = run()
        failed = sandbox.failed is not None
        if failed:
            sandbox.rollback(before)
        return result, failed
    finally:
        # The next call takes it anew. A tool may have closed the sandbox.
        with contextlib.suppress(AfreshError):
            sandbox.drop(before)


class SandboxTools:
    """Tools for a model over one sandbox."""

    def __init__(self, sandbox: Sandbox, *, has_commands: bool) -> None:
        self._sandbox = sandbox
        self._has_commands = has_commands
        self._lock = threading.Lock()
        self._names: dict[str, Checkpoint] = {}

    @classmethod
    def of(
        cls, warm: Warm, *, timeout: float | None = CALL_TIMEOUT, memory_limit: int | str | None = None
    ) -> SandboxTools:
        """The tools of a new sandbox."""
        sandbox = warm.sandbox(timeout=timeout, memory_limit=memory_limit)
        return cls(sandbox, has_commands=warm._native.kind == "program")

    def functions(self) -> list[Callable[..., str]]:
        """All tools."""
        commands = [self.run_command] if self._has_commands else []
        return [
            self.run_code,
            *commands,
            self.read_file,
            self.write_file,
            self.list_files,
            self.checkpoint,
            self.rollback,
        ]

    def run_code(self, code: str) -> str:
        """Run code in the sandbox. The value of its last expression is returned, with its output.

        Args:
            code: The code.
        """
        return self._guarded(lambda: self._run_code(code))

    def run_command(self, command: str) -> str:
        """Run a shell command in the sandbox to its end, and return its output and exit code.

        Args:
            command: A line for the shell.
        """

        def run() -> str:
            done = self._sandbox.commands.run(command)
            parts = [done.stdout, done.stderr, "" if done.exit_code == 0 else f"exit code {done.exit_code}"]
            return "\n".join(part.rstrip("\n") for part in parts if part)

        return self._guarded(run)

    def read_file(self, path: str) -> str:
        """Read a text file of the sandbox.

        Args:
            path: Its path.
        """
        return self._guarded(lambda: self._sandbox.files.read(absolute(path)).decode(errors="replace"))

    def write_file(self, path: str, content: str) -> str:
        """Write a text file of the sandbox.

        Args:
            path: Its path. Missing directories are made.
            content: Its whole content.
        """

        def write() -> str:
            self._sandbox.files.write(absolute(path), content)
            return f"wrote {len(content.encode())} bytes"

        return self._guarded(write)

    def list_files(self, path: str = ".") -> str:
        """List the names in a directory of the sandbox.

        Args:
            path: Its path.
        """
        return self._guarded(lambda: "\n".join(self._sandbox.files.list(absolute(path))))

    def checkpoint(self, name: str) -> str:
        """Save the present state of the sandbox: variables, files and processes.

        Args:
            name: A name to roll back to. An earlier checkpoint of this name is forgotten.
        """

        def keep() -> str:
            if len(name) > MAX_NAME:
                return f"error: the name has more than {MAX_NAME} characters: give a shorter one"
            if name not in self._names and len(self._names) >= MAX_CHECKPOINTS:
                return f"error: there are {MAX_CHECKPOINTS} checkpoints, the maximum: use one of their names again"
            former = self._names.get(name)
            self._names[name] = self._sandbox.checkpoint(name)
            if former is not None:
                # The host may have dropped it.
                with contextlib.suppress(AfreshError):
                    self._sandbox.drop(former)
            return f"saved {name}"

        return self._guarded(keep)

    def rollback(self, name: str) -> str:
        """Return the sandbox to a saved state.

        Args:
            name: The name of a checkpoint.
        """

        def go() -> str:
            if name not in self._names:
                return f"error: there is no checkpoint {name!r}; there are: {', '.join(self._names) or 'none'}"
            self._sandbox.rollback(self._names[name])
            return f"the sandbox is in the state {name}"

        return self._guarded(go)

    def close(self) -> None:
        """Ends the sandbox."""
        self._sandbox.close()

    def _run_code(self, code: str) -> str:
        result, was_undone = undone(self._sandbox, lambda: self._sandbox.run_code(code))
        parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
        if result.error is not None:
            parts.append(described(result.error, was_undone=was_undone))
        elif result.value is not None:
            parts.append(result.text)
        return "\n".join(part for part in parts if part)

    def _guarded(self, work: Callable[[], str]) -> str:
        with self._lock:
            try:
                return shortened(work())
            except AfreshError as error:
                return f"error: {error}"


def described(error: BaseException, *, was_undone: bool) -> str:
    """An error for a model."""
    if isinstance(error, ProgramError) and error.traceback:
        return error.traceback.rstrip("\n")
    suffix = "; its changes are undone" if was_undone else ""
    return f"{type(error).__name__}: {error}{suffix}"


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of the arguments of a tool, which are all text.

    >>> schema(SandboxTools.list_files)["required"], sorted(schema(SandboxTools.write_file)["properties"])
    ([], ['content', 'path'])
    """
    import inspect  # noqa: PLC0415

    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    return {
        "type": "object",
        "properties": {one.name: {"type": "string"} for one in parameters},
        "required": [one.name for one in parameters if one.default is inspect.Parameter.empty],
    }
