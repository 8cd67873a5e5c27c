"""Terminals in a sandbox of a Linux program."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import _native
from ._files import Files
from ._process import Away, CommandResult, Process, Streams, wanted
from .errors import SessionError, TimeLimitError

_SHELLS = ("/bin/bash", "/bin/sh")


def start(
    session: _native.Session,
    command: str | Sequence[str] | None,
    size: tuple[int, int],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    stopper: _native.Stopper | None = None,
) -> Process:
    """Starts a command in a new terminal: a shell, if none is given."""
    if not all(0 < number < 1 << 16 for number in size):
        raise ValueError(f"a terminal of {size[0]} rows and {size[1]} columns is invalid")
    if command is None:
        files = Files(session)
        command = [next((shell for shell in _SHELLS if files.exists(shell)), _SHELLS[-1])]
    variables = {"TERM": "xterm-256color", **(env or {})}
    request = wanted(command, cwd=cwd, env=variables, stdin=False, size=size)
    return Process.start(session, request, Streams(), stopper)


def read_until(process: Process, text: str, timeout: float, stopper: _native.Stopper | None) -> str:
    """Output up to some text that is in it."""
    shown, until, limit = "", time.monotonic() + timeout, process.session.output_limit
    while text not in shown:
        left = until - time.monotonic()
        if left <= 0 or process.ended() is not None:
            raise TimeLimitError(f"the terminal did not show {text!r} within {timeout} s, but {shown!r}")
        shown += process.read(left, stopper)
        if len(shown) > limit:
            raise SessionError(f"the terminal showed more than {limit} characters, and {text!r} was not among them")
    return shown


class Terminal:
    """A terminal of a sandbox, with a program in it, made by `Sandbox.terminal`.

    >>> import afresh
    >>> with afresh.linux("python3").sandbox() as sb, sb.terminal(rows=40, cols=120) as term:
    ...     term.write("stty size; exit 7\\n")
    ...     done = term.wait(timeout=30)
    ...     done.exit_code, "40 120" in done.stdout
    (7, True)
    """

    def __init__(self, process: Process) -> None:
        self._process = process

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The number of its first process."""
        return self._process.pid

    def write(self, data: bytes | str) -> None:
        """Types."""
        self._process.send(data, None)

    def read(self, timeout: float = 1.0) -> str:
        """Output since the last read; waits for some for ``timeout`` seconds."""
        return self._process.read(timeout, None)

    def read_until(self, text: str, timeout: float = 10.0) -> str:
        """Output up to and including a text; a `TimeLimitError` if the text does not arrive."""
        return read_until(self._process, text, timeout, None)

    def resize(self, rows: int, cols: int) -> None:
        """Sets its size."""
        self._process.resize(rows, cols, None)

    def wait(self, timeout: float | None = None) -> CommandResult:
        """Lets the sandbox run until the program has ended."""
        return self._process.wait(timeout, None)

    def close(self) -> None:
        """Kills the program in it."""
        self._process.kill()


class AsyncTerminal:
    """The asynchronous twin of `Terminal`."""

    def __init__(self, process: Process, away: Away) -> None:
        self._process = process
        self._away = away

    async def __aenter__(self) -> AsyncTerminal:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pid(self) -> int:
        """As `Terminal.pid`."""
        return self._process.pid

    async def write(self, data: bytes | str) -> None:
        """As `Terminal.write`."""
        await self._away(lambda stopper: self._process.send(data, stopper))

    async def _text(self, work: Any) -> str:
        text: str = await self._away(work)
        return text

    async def read(self, timeout: float = 1.0) -> str:
        """As `Terminal.read`."""
        return await self._text(lambda stopper: self._process.read(timeout, stopper))

    async def read_until(self, text: str, timeout: float = 10.0) -> str:
        """As `Terminal.read_until`."""
        return await self._text(lambda stopper: read_until(self._process, text, timeout, stopper))

    async def resize(self, rows: int, cols: int) -> None:
        """As `Terminal.resize`."""
        await self._away(lambda stopper: self._process.resize(rows, cols, stopper))

    async def wait(self, timeout: float | None = None) -> CommandResult:
        """As `Terminal.wait`."""
        done: CommandResult = await self._away(lambda stopper: self._process.wait(timeout, stopper))
        return done

    async def close(self) -> None:
        """As `Terminal.close`."""
        await self._away(lambda stopper: self._process.signal(signal.SIGKILL, stopper))
