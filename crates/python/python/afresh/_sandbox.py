"""Sandboxes: live guests that take checkpoints, roll back and fork."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from types import TracebackType
from typing import Any, TypeAlias

from . import _native
from ._files import Files
from ._native import Checkpoint
from ._result import Result, result
from ._tools import Dispatcher
from ._tree import Difference, Tree, tree

OnOutput: TypeAlias = Callable[[str, str], object]

_STREAMS = {1: "stdout", 2: "stderr"}


def _sink(on_output: OnOutput | None) -> _native.Sink | None:
    if on_output is None:
        return None
    return lambda stream, text: on_output(_STREAMS.get(stream, "stdout"), text)


class _Sandbox:
    """What both kinds of sandboxes have."""

    def __init__(self, session: _native.Session, dispatcher: Dispatcher | None) -> None:
        self._session = session
        self._dispatcher = dispatcher

    def stop(self) -> None:
        """Stops the call that is under way, from any thread; it ends within 10 ms with a `StoppedError`.

        Afterwards the sandbox has to be rolled back.
        """
        self._session.stop()

    @property
    def failed(self) -> str | None:
        """Why the sandbox takes no calls until it is rolled back; ``None`` when it does."""
        return self._session.failed()

    @property
    def at(self) -> Checkpoint:
        """The state that it stands on: the last checkpoint, or what it was rolled back to or forked from."""
        return self._session.at()

    def tree(self) -> Tree:
        """Every state that it and its relatives can go to."""
        return tree(self._session)

    def diff(self, one: Checkpoint | str, two: Checkpoint | str) -> Difference:
        """In what two states differ.

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
    """A live guest, made by `Warm.sandbox`. What one call leaves the next one finds.

    A sandbox belongs to whoever calls it: two calls at the same time are refused with a `BusyError`. Forks are
    sandboxes of their own, and each can run in a thread of its own.

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
        """Ends it; a call that is under way is stopped. Its forks go on."""
        self._session.close()

    def run_code(self, code: str, *, name: str = "<sandbox>", on_output: OnOutput | None = None) -> Result:
        """Runs code and returns what it gave; what the program throws is in the result, not raised.

        Args:
            code: What to run. The value of its last expression is the result's.
            name: What tracebacks call it.
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
        return result(self._session.run(0, code, name, None, _sink(on_output), None, False))

    def eval(self, code: str) -> Any:
        """The value that code gives; raises what the program throws.

        >>> import afresh
        >>> with afresh.warm("js").sandbox() as sb:
        ...     sb.eval("[1, 2, 3].map(n => n * n)")
        [1, 4, 9]
        """
        return self.run_code(code).unwrap()

    def apply(self, function: str, *arguments: Any) -> Any:
        """Calls a function, given as an expression of the guest's language, with Python values.

        >>> import afresh
        >>> with afresh.warm("js").sandbox() as sb:
        ...     sb.apply("(a, b) => a.concat(b)", [1, 2], [3])
        [1, 2, 3]
        """
        given = _native.encode(list(arguments))
        return result(self._session.run(2, function, "<sandbox>", given, None, None, False)).unwrap()

    def call(self, export: str, input: bytes = b"") -> bytes:
        """Calls an export that takes and gives bytes: for guests that are no interpreters."""
        return self._session.call(export, input, None)

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
        return [Sandbox(session, self._dispatcher) for session in self._session.fork(count)]

    def save(self, to: str | os.PathLike[str]) -> str:
        """Saves what it became since it was last saved there, durably; `afresh.load` opens it. Returns an id.

        ``to`` is a directory, an archive (``.afresh``), or a remote (``s3://``, ``gs://``, ``az://``, ``oci://``), with
        ``@NAME`` behind it where it has names. In a directory the first time takes a snapshot, unless the sandbox
        was loaded from one there; from then on it costs what changed, so that every turn can be saved. Elsewhere
        each is a snapshot of its own.

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
        """What it became since a state of its tree, below the page: `apply_delta` applies it to an equal state.

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
    """The asynchronous twin of `Sandbox`. The guest runs in a thread, so the event loop goes on meanwhile.

    Cancelling a task stops the guest within 10 ms; the sandbox has to be rolled back then. Asynchronous tools are
    awaited on the loop that calls.

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

    def __init__(
        self,
        session: _native.Session,
        dispatcher: Dispatcher | None,
        executor: Executor | None,
    ) -> None:
        super().__init__(session, dispatcher)
        self._executor = executor
        # The call that is under way, and the thread that it runs in.
        self._running: asyncio.Future[Any] | None = None
        self._thread: int | None = None

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
        """Ends it; a call that is under way is stopped. Its forks go on."""
        self._session.stop()
        running = self._running
        if running is not None:
            await self._end(running)
        self._session.close()

    async def _away(self, work: Callable[[_native.Stopper], Any]) -> Any:
        """Works in a thread, and stops that when the task is cancelled."""
        stopper = _native.Stopper()

        def there() -> Any:
            self._thread = threading.get_ident()
            try:
                return work(stopper)
            finally:
                self._thread = None

        future = asyncio.get_running_loop().run_in_executor(self._executor, there)
        self._running = future
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stopper.stop()
            await self._end(future)
            raise
        finally:
            if self._running is future:
                self._running = None

    async def _end(self, future: asyncio.Future[Any]) -> None:
        """Waits for a call that was stopped; a tool that it waits for is cancelled."""
        while not future.done():
            if self._dispatcher is not None and self._thread is not None:
                self._dispatcher.cancel(self._thread)
            await asyncio.wait([future], timeout=0.005)
        if not future.cancelled():
            future.exception()

    async def run_code(self, code: str, *, name: str = "<sandbox>", on_output: OnOutput | None = None) -> Result:
        """As `Sandbox.run_code`. ``on_output`` is called on the event loop."""
        loop = asyncio.get_running_loop()
        told: OnOutput | None = None
        if on_output is not None:
            tell = on_output
            told = lambda stream, text: loop.call_soon_threadsafe(tell, stream, text)  # noqa: E731
        sink = _sink(told)
        outcome = await self._away(lambda stopper: self._session.run(0, code, name, None, sink, stopper, False))
        return result(outcome)

    async def eval(self, code: str) -> Any:
        """As `Sandbox.eval`."""
        return (await self.run_code(code)).unwrap()

    async def apply(self, function: str, *arguments: Any) -> Any:
        """As `Sandbox.apply`."""
        given = _native.encode(list(arguments))
        outcome = await self._away(
            lambda stopper: self._session.run(2, function, "<sandbox>", given, None, stopper, False)
        )
        return result(outcome).unwrap()

    async def call(self, export: str, input: bytes = b"") -> bytes:
        """As `Sandbox.call`."""
        answer: bytes = await self._away(lambda stopper: self._session.call(export, input, stopper))
        return answer

    async def checkpoint(self, name: str = "") -> Checkpoint:
        """As `Sandbox.checkpoint`."""
        return self._session.checkpoint(name)

    async def rollback(self, to: Checkpoint | str) -> Checkpoint:
        """As `Sandbox.rollback`."""
        return self._session.rollback(to)

    async def fork(self, count: int = 1) -> list[AsyncSandbox]:
        """As `Sandbox.fork`."""
        forks = self._session.fork(count)
        return [AsyncSandbox(session, self._dispatcher, self._executor) for session in forks]

    async def save(self, to: str | os.PathLike[str]) -> str:
        """As `Sandbox.save`."""
        saved: str = await self._away(lambda _: self._session.save(os.fspath(to)))
        return saved
