"""Sandboxes: live guests that take checkpoints, roll back and fork."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import Any, TypeAlias

from . import _arguments, _native
from ._call_threads import CALLS, CLOSES
from ._commands import AsyncCommands, Commands
from ._delivery import LoopDelivery, pending
from ._files import Files
from ._native import Checkpoint
from ._ports import AsyncPort, Port
from ._process import proceed
from ._result import Result, result
from ._running_call import RunningCall
from ._terminal import AsyncTerminal, Terminal
from ._terminal import start as start_terminal
from ._tree import Difference, Tree, tree
from .errors import SessionError

OnOutput: TypeAlias = Callable[[str, str], object]

_STREAMS = {1: "stdout", 2: "stderr"}


def _sink(on_output: OnOutput | None) -> _native.Sink | None:
    if on_output is None:
        return None
    return lambda stream, text: on_output(_STREAMS.get(stream, "stdout"), text)


def _loop_sink(on_output: OnOutput) -> _native.Sink:
    """The same on the running event loop."""
    delivery = LoopDelivery(asyncio.get_running_loop())

    def deliver(stream: int, text: str) -> _native.Pending | None:
        return pending(delivery.send(lambda: on_output(_STREAMS.get(stream, "stdout"), text), len(text)))

    return deliver


class _Sandbox:
    """The common part of both kinds of sandboxes."""

    def __init__(self, session: _native.Session) -> None:
        self._session = session

    def stop(self) -> None:
        """Stops the call that is under way, from any thread; it ends with a `StoppedError`: within 10 ms, and in a
        Linux program within some 20 ms.

        Afterwards the sandbox has to be rolled back, unless the call was one of `commands`, `port` or `terminal`.
        """
        self._session.stop()

    @property
    def failed(self) -> str | None:
        """Why the sandbox takes no calls until it is rolled back; ``None`` when it does."""
        return self._session.failed()

    @property
    def at(self) -> Checkpoint:
        """The state that it stands on: the last checkpoint, or what it was rolled back to, saved in or forked in.

        A state without a name leaves the tree once no sandbox stands on it. `checkpoint` keeps one.
        """
        return self._session.at()

    def tree(self) -> Tree:
        """Every state that it and its relatives can go to."""
        return tree(self._session)

    def diff(self, one: Checkpoint | str, two: Checkpoint | str) -> Difference:
        """The difference of two states.

        >>> import afresh
        >>> with afresh.warm("js").sandbox() as sb:
        ...     one = sb.checkpoint("one")
        ...     _ = sb.run_code("globalThis.x = new Array(10000).fill(7)")
        ...     two = sb.checkpoint("two")
        ...     sb.diff(one, two).pages > 10, bool(sb.diff(one, one))
        (True, False)
        """
        pages, count, runs, state = self._session.diff(one, two)
        return Difference(pages, count, tuple(runs), state)

    @property
    def files(self) -> Files:
        """Its files, to be read and written between two calls."""
        return Files(self._session)

    def drop(self, checkpoint: Checkpoint | str) -> None:
        """Forgets a checkpoint. States that were made from it stay."""
        self._session.drop(checkpoint)


class Sandbox(_Sandbox):
    """A live guest, made by `Warm.sandbox`. Each call continues from the state that the last one left.

    A sandbox runs one call at a time: a second one is refused with a `BusyError`. Forks are separate sandboxes, and
    each can run in a separate thread.

    >>> import afresh
    >>> with afresh.warm("js").sandbox() as sb:
    ...     _ = sb.run_code("let x = 1")
    ...     clean = sb.checkpoint("clean")
    ...     _ = sb.run_code("x = 1000")
    ...     _ = sb.rollback(clean)
    ...     sb.eval("x + 1")
    2
    """

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes it and stops a call that is under way. Forks stay open. A tool may close its own sandbox."""
        self._session.close()

    def run_code(
        self,
        code: str,
        *,
        name: str = "<sandbox>",
        timeout: float | None = None,
        on_output: OnOutput | None = None,
    ) -> Result:
        """Runs code and returns what it gave; what the program throws is in the result, not raised.

        Args:
            code: What to run. The value of its last expression is the result's.
            name: Its name in tracebacks.
            timeout: Maximum seconds of this call, which replaces that of the sandbox; ``None`` keeps that. Code that
                runs longer ends with a `TimeLimitError` in the result, and the sandbox has to be rolled back then.
            on_output: Called with ``"stdout"`` or ``"stderr"`` and a piece of text while the program prints it.

        Raises:
            SessionError: The sandbox is closed, busy, or failed earlier.
            KeyboardInterrupt: As anywhere; the guest was stopped, and the sandbox has to be rolled back.

        >>> import afresh
        >>> with afresh.warm("js").sandbox() as sb:
        ...     r = sb.run_code("console.log('hello'); ({ answer: [6 * 7, 'yes'] })")
        ...     print(r.value, r.stdout.strip())
        ...     print(sb.run_code("null.x").error)
        {'answer': [42, 'yes']} hello
        TypeError: cannot read property 'x' of null
            at <eval> (<sandbox>:1:1)
        """
        limit, code = _arguments.seconds(timeout), _arguments.text(code, "code")
        return result(self._session.run(0, code, name, None, _sink(on_output), None, False, limit))

    def eval(self, code: str, *, timeout: float | None = None) -> Any:
        """The value that code gives; raises what the program throws. ``timeout`` is as for `run_code`.

        >>> import afresh
        >>> with afresh.warm("js").sandbox() as sb:
        ...     sb.eval("[1, 2, 3].map(n => n * n)")
        [1, 4, 9]
        """
        return self.run_code(code, timeout=timeout).unwrap()

    def apply(self, function: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Calls a function, given as an expression in the language of the guest, with Python values.

        ``timeout`` is as for `run_code`.

        >>> import afresh
        >>> with afresh.warm("js").sandbox() as sb:
        ...     sb.apply("(a, b) => a.concat(b)", [1, 2], [3])
        [1, 2, 3]
        """
        return self.apply_result(function, *arguments, timeout=timeout).unwrap()

    def apply_result(self, function: str, *arguments: Any, timeout: float | None = None) -> Result:
        """As `apply`, but gives the whole result: an error of the function is in it, and so is that of ``timeout``."""
        given = _native.encode(list(arguments))
        function = _arguments.text(function, "a function")
        limit = _arguments.seconds(timeout)
        return result(self._session.run(2, function, "<sandbox>", given, None, None, False, limit))

    def call(self, export: str, input: bytes = b"", *, timeout: float | None = None) -> bytes:
        """Calls an export that takes and gives bytes: for guests that are no interpreters.

        ``timeout`` is as for `run_code`, and its `TimeLimitError` is raised.
        """
        return self._session.call(export, input, None, _arguments.seconds(timeout))

    @property
    def commands(self) -> Commands:
        """Commands in a sandbox of a Linux program: processes beside its code."""
        return Commands(self._session)

    def port(self, number: int) -> Port:
        """A port within a sandbox of a Linux program, for requests to a server in it."""
        return Port(self._session, number)

    def terminal(
        self,
        rows: int = 24,
        cols: int = 80,
        *,
        command: str | Sequence[str] | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Terminal:
        """Starts a program in a new terminal of a sandbox of a Linux program: a shell, if no command is given."""
        return Terminal(start_terminal(self._session, command, (rows, cols), cwd=cwd, env=env))

    def proceed(self, seconds: float) -> None:
        """Lets background work of a Linux program run for so many seconds, or until all of it waits for the host."""
        proceed(self._session, seconds, None)

    def checkpoint(self, name: str = "") -> Checkpoint:
        """Keeps the present state. Costs what changed since the last one."""
        return self._session.checkpoint(name)

    def rollback(self, to: Checkpoint | str) -> Checkpoint:
        """Goes to any state of the tree: back, forward or across, also after a call was cut short."""
        return self._session.rollback(to)

    def fork(self, count: int = 1) -> list[Sandbox]:
        """Sandboxes that start from the present state. One that is not called costs next to nothing.

        >>> import afresh
        >>> with afresh.warm("js").sandbox() as sb:
        ...     _ = sb.run_code("let tries = 0")
        ...     a, b = sb.fork(2)
        ...     _ = a.run_code("tries += 10")
        ...     a.eval("tries"), b.eval("tries"), a.eval("Math.random()") == b.eval("Math.random()")
        (10, 0, False)
        """
        return [Sandbox(session) for session in self._session.fork(_arguments.count(count))]

    def save(self, to: str | os.PathLike[str]) -> str:
        """Saves what it became since it was last saved there, durably; `afresh.load` opens it. Returns an id.

        ``to`` is a directory, an archive (``.afresh``), or a remote (``s3://``, ``gs://``, ``az://``, ``oci://``), with
        ``@NAME`` behind it where it has names. In a directory the first time takes a snapshot, unless the sandbox
        was loaded from one there; from then on it costs what changed, so that every turn can be saved. Elsewhere each
        is a separate snapshot.

        >>> import afresh, tempfile
        >>> with tempfile.TemporaryDirectory() as dir, afresh.warm("js").sandbox() as sb:
        ...     for _ in range(3):
        ...         _ = sb.run_code("globalThis.turns = (globalThis.turns ?? 0) + 1")
        ...         _ = sb.save(f"{dir}/store@agent")
        ...     with afresh.load(f"{dir}/store@agent").sandbox() as again:
        ...         again.eval("turns")
        3
        """
        return self._session.save(os.fspath(to))

    def delta(self, since: Checkpoint | str) -> bytes:
        """The changes since a state of its tree, smaller than whole pages; `apply_delta` applies them elsewhere.

        >>> import afresh
        >>> warm = afresh.warm("js", setup="globalThis.log = []")
        >>> with warm.sandbox() as sb:
        ...     start = sb.at
        ...     _ = sb.run_code("log.push('hello')")
        ...     delta = sb.delta(start)
        >>> with warm.apply(delta) as other:
        ...     len(delta) < 20000, other.eval("log")
        (True, ['hello'])
        """
        return self._session.delta(since)

    def apply_delta(self, delta: bytes) -> Checkpoint:
        """Goes to the state that a delta makes of the present one, which must be equal to the one it was made since."""
        return self._session.apply(delta)


class AsyncSandbox(_Sandbox):
    """The asynchronous twin of `Sandbox`. The guest runs in a thread, so it does not block the event loop.

    Cancelling a task stops the guest within 10 ms, also in a tool; the sandbox has to be rolled back then. Asynchronous
    tools are awaited on the calling loop, others run on separate threads.

    >>> import afresh, asyncio
    >>> async def main():
    ...     async def add(a: int, b: int) -> int:
    ...         await asyncio.sleep(0)
    ...         return a + b
    ...     async with afresh.warm("js").async_sandbox(tools=[add]) as sb:
    ...         return (await sb.run_code("add(40, 2)")).value
    >>> asyncio.run(main())
    42
    """

    def __init__(self, session: _native.Session, executor: Executor | None) -> None:
        super().__init__(session)
        self._executor = executor or CALLS
        self._running: set[RunningCall] = set()
        self._closed = False
        self._process = os.getpid()

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes it and stops a call that is under way. Forks stay open."""
        self._closed = True
        self._session.stop()
        for running in list(self._running):
            if not running.refuse(SessionError("this sandbox is closed")):
                await running.ended()
        if self._process != os.getpid():
            # A child of a fork has no threads, and its loop is that of its parent.
            self._session.close()
            return
        await RunningCall(lambda _: self._session.close()).complete(CLOSES)

    async def _away(self, work: Callable[[_native.Stopper], Any]) -> Any:
        """Works in a thread, with the task's context, and stops that when the task is cancelled."""
        if self._closed:
            raise SessionError("this sandbox is closed")
        running = RunningCall(work)
        self._running.add(running)
        try:
            return await running.run(self._executor)
        finally:
            self._running.discard(running)

    async def run_code(
        self,
        code: str,
        *,
        name: str = "<sandbox>",
        timeout: float | None = None,
        on_output: OnOutput | None = None,
    ) -> Result:
        """As `Sandbox.run_code`. ``on_output`` is called on the event loop; a guest that prints faster waits for it."""
        sink = None if on_output is None else _loop_sink(on_output)
        limit, code = _arguments.seconds(timeout), _arguments.text(code, "code")
        outcome = await self._away(lambda stopper: self._session.run(0, code, name, None, sink, stopper, False, limit))
        return result(outcome)

    async def eval(self, code: str, *, timeout: float | None = None) -> Any:
        """As `Sandbox.eval`."""
        return (await self.run_code(code, timeout=timeout)).unwrap()

    async def apply(self, function: str, *arguments: Any, timeout: float | None = None) -> Any:
        """As `Sandbox.apply`."""
        return (await self.apply_result(function, *arguments, timeout=timeout)).unwrap()

    async def apply_result(self, function: str, *arguments: Any, timeout: float | None = None) -> Result:
        """As `Sandbox.apply_result`."""
        given, function = _native.encode(list(arguments)), _arguments.text(function, "a function")
        limit = _arguments.seconds(timeout)
        outcome = await self._away(
            lambda stopper: self._session.run(2, function, "<sandbox>", given, None, stopper, False, limit)
        )
        return result(outcome)

    async def call(self, export: str, input: bytes = b"", *, timeout: float | None = None) -> bytes:
        """As `Sandbox.call`."""
        limit = _arguments.seconds(timeout)
        answer: bytes = await self._away(lambda stopper: self._session.call(export, input, stopper, limit))
        return answer

    @property
    def commands(self) -> AsyncCommands:
        """As `Sandbox.commands`."""
        return AsyncCommands(self._session, self._away)

    def port(self, number: int) -> AsyncPort:
        """As `Sandbox.port`."""
        return AsyncPort(self._session, number, self._away)

    async def terminal(
        self,
        rows: int = 24,
        cols: int = 80,
        *,
        command: str | Sequence[str] | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> AsyncTerminal:
        """As `Sandbox.terminal`."""
        process = await self._away(
            lambda stopper: start_terminal(self._session, command, (rows, cols), cwd=cwd, env=env, stopper=stopper)
        )
        return AsyncTerminal(process, self._away)

    async def proceed(self, seconds: float) -> None:
        """As `Sandbox.proceed`."""
        await self._away(lambda stopper: proceed(self._session, seconds, stopper))

    async def checkpoint(self, name: str = "") -> Checkpoint:
        """As `Sandbox.checkpoint`."""
        kept: Checkpoint = await self._away(lambda _: self._session.checkpoint(name))
        return kept

    async def rollback(self, to: Checkpoint | str) -> Checkpoint:
        """As `Sandbox.rollback`."""
        reached: Checkpoint = await self._away(lambda _: self._session.rollback(to))
        return reached

    async def fork(self, count: int = 1) -> list[AsyncSandbox]:
        """As `Sandbox.fork`."""
        number = _arguments.count(count)
        forks: list[_native.Session] = await self._away(lambda _: self._session.fork(number))
        return [AsyncSandbox(session, self._executor) for session in forks]

    async def save(self, to: str | os.PathLike[str]) -> str:
        """As `Sandbox.save`."""
        saved: str = await self._away(lambda _: self._session.save(os.fspath(to)))
        return saved
