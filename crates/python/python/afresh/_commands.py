"""Commands in a sandbox of a Linux program: processes that run beside its code."""

from __future__ import annotations

import asyncio
import signal as signals
from collections.abc import Mapping, Sequence

from . import _native
from ._process import (
    Away,
    CommandInfo,
    CommandResult,
    OnText,
    Process,
    Streams,
    default_timeout,
    run,
    running,
    wanted,
)


class Command:
    """A command that runs in a sandbox, made by `Commands.start`.

    The sandbox runs only while one of its methods is called, so the command makes progress during `wait`, `poll`,
    other calls of the sandbox, and `Sandbox.proceed`.
    """

    def __init__(self, process: Process) -> None:
        self._process = process

    def __repr__(self) -> str:
        return f"<afresh command {self.pid}>"

    @property
    def pid(self) -> int:
        """Its process number in the sandbox."""
        return self._process.pid

    def wait(self, timeout: float | None = None) -> CommandResult:
        """Lets the sandbox run until the command has ended, for at most ``timeout`` seconds: a `TimeLimitError` is
        raised then, and the command continues with the next call.
        """
        return self._process.wait(timeout, None)

    def poll(self) -> int | None:
        """Lets the sandbox run for a slice of time; the exit status, if the command has ended."""
        return self._process.poll(None)

    def read(self, timeout: float = 1.0) -> str:
        """Output since the last `read`; waits for some for ``timeout`` seconds."""
        return self._process.read(timeout, None)

    def send_signal(self, number: int) -> bool:
        """Sends the command and its descendants a signal; whether it still ran."""
        return self._process.signal(number, None)

    def kill(self) -> bool:
        """Sends SIGKILL."""
        return self.send_signal(signals.SIGKILL)

    def send_stdin(self, data: bytes | str) -> None:
        """Writes to its input, which it has if it was started with ``stdin=True``."""
        self._process.send(data, None)

    def close_stdin(self) -> None:
        """Ends its input."""
        self._process.close(None)


class Commands:
    """Commands of a sandbox: processes that run beside its code, in the same files.

    They are part of its state: a checkpoint keeps them running, a rollback returns to them, and a fork has its own.

    >>> import afresh
    >>> with afresh.linux("python3").sandbox(timeout=30) as sb:
    ...     done = sb.commands.run("cat; echo $HOME; exit 3", stdin="typed\\n")
    ...     cat = sb.commands.start(["cat"], stdin=True)
    ...     cat.send_stdin("hello")
    ...     cat.close_stdin()
    ...     done.exit_code, done.stdout, cat.wait().stdout
    (3, 'typed\\n/home/user\\n', 'hello')
    """

    def __init__(self, session: _native.Session) -> None:
        self._session = session

    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> CommandResult:
        """Runs a command to its end.

        Args:
            command: A line for the shell, or a list of a program and its arguments.
            stdin: Its input; empty if not given.
            cwd: The directory that it starts in; that of the code if not given.
            env: Environment variables in addition to those of the interpreter.
            user: ``"root"`` runs it with the user number 0. It has no more rights,
                except to pass permission bits.
            timeout: Time limit in seconds, in place of that of a call. A command that exceeds it is killed, with a
                `TimeLimitError`, and the sandbox stays usable.
            on_stdout: Called with text of its standard output while it runs.
            on_stderr: The same for its standard error.
        """
        request = wanted(command, cwd=cwd, env=env, stdin=stdin is not None, user=user)
        process = Process.start(self._session, request, Streams(on_stdout, on_stderr), None)
        return run(process, stdin, default_timeout(self._session, timeout), None)

    def start(
        self,
        command: str | Sequence[str],
        *,
        stdin: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tag: str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> Command:
        """Starts a command in the background. With ``stdin`` it has an input to write to."""
        request = wanted(command, cwd=cwd, env=env, stdin=stdin, tag=tag, user=user)
        return Command(Process.start(self._session, request, Streams(on_stdout, on_stderr), None))

    def connect(self, pid: int, *, on_stdout: OnText | None = None, on_stderr: OnText | None = None) -> Command:
        """A command that runs already: in a fork, or in a sandbox that was saved."""
        return Command(Process.connect(self._session, pid, Streams(on_stdout, on_stderr), None))

    def list(self) -> list[CommandInfo]:
        """All running commands."""
        return running(self._session, None)


class AsyncCommand:
    """The asynchronous twin of `Command`."""

    def __init__(self, process: Process, away: Away) -> None:
        self._process = process
        self._away = away

    def __repr__(self) -> str:
        return f"<afresh command {self.pid}>"

    @property
    def pid(self) -> int:
        """As `Command.pid`."""
        return self._process.pid

    async def wait(self, timeout: float | None = None) -> CommandResult:
        """As `Command.wait`."""
        done: CommandResult = await self._away(lambda stopper: self._process.wait(timeout, stopper))
        return done

    async def poll(self) -> int | None:
        """As `Command.poll`."""
        status: int | None = await self._away(self._process.poll)
        return status

    async def read(self, timeout: float = 1.0) -> str:
        """As `Command.read`."""
        text: str = await self._away(lambda stopper: self._process.read(timeout, stopper))
        return text

    async def send_signal(self, number: int) -> bool:
        """As `Command.send_signal`."""
        sent: bool = await self._away(lambda stopper: self._process.signal(number, stopper))
        return sent

    async def kill(self) -> bool:
        """As `Command.kill`."""
        return await self.send_signal(signals.SIGKILL)

    async def send_stdin(self, data: bytes | str) -> None:
        """As `Command.send_stdin`."""
        await self._away(lambda stopper: self._process.send(data, stopper))

    async def close_stdin(self) -> None:
        """As `Command.close_stdin`."""
        await self._away(self._process.close)


class AsyncCommands:
    """The asynchronous twin of `Commands`. Callbacks are called on the event loop."""

    def __init__(self, session: _native.Session, away: Away) -> None:
        self._session = session
        self._away = away

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> CommandResult:
        """As `Commands.run`. The command is killed when the task is cancelled; the sandbox can be used further."""
        request = wanted(command, cwd=cwd, env=env, stdin=stdin is not None, user=user)
        streams = Streams(on_stdout, on_stderr, asyncio.get_running_loop())

        def work(stopper: _native.Stopper) -> CommandResult:
            process = Process.start(self._session, request, streams, stopper)
            return run(process, stdin, default_timeout(self._session, timeout), stopper)

        done: CommandResult = await self._away(work)
        return done

    async def start(
        self,
        command: str | Sequence[str],
        *,
        stdin: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tag: str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
    ) -> AsyncCommand:
        """As `Commands.start`."""
        request = wanted(command, cwd=cwd, env=env, stdin=stdin, tag=tag, user=user)
        streams = Streams(on_stdout, on_stderr, asyncio.get_running_loop())
        process = await self._away(lambda stopper: Process.start(self._session, request, streams, stopper))
        return AsyncCommand(process, self._away)

    async def connect(
        self, pid: int, *, on_stdout: OnText | None = None, on_stderr: OnText | None = None
    ) -> AsyncCommand:
        """As `Commands.connect`."""
        streams = Streams(on_stdout, on_stderr, asyncio.get_running_loop())
        process = await self._away(lambda stopper: Process.connect(self._session, pid, streams, stopper))
        return AsyncCommand(process, self._away)

    async def list(self) -> list[CommandInfo]:
        """As `Commands.list`."""
        listed: list[CommandInfo] = await self._away(lambda stopper: running(self._session, stopper))
        return listed
