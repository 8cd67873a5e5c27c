"""The interface of `quickjs-rs` on warm guests: ``import afresh.quickjs as quickjs_rs``.

Each context is a separate sandbox, forked from one warm guest. A snapshot holds the whole state, closures and pending
promises included, and restores in another process, too. An evaluation that is cut short by a time limit or a trap
leaves no trace: the context is as it was before.

Not there: a dictionary of globals, loaders of modules, and TypeScript. Contexts may be used from any thread;
`ThreadWorker` is there for those who bring them one.

>>> with Runtime() as runtime, runtime.new_context() as ctx:
...     ctx.eval("const numbers = [1, 2, 3]; numbers.map(n => n * n)")
[1, 4, 9]
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import os
import struct
import tempfile
from collections.abc import Callable
from enum import IntFlag
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from . import _languages, _native
from ._result import Result, result
from ._sandbox import AsyncSandbox
from ._tools import Dispatcher
from ._values import UNDEFINED, Opaque, Undefined
from ._warm import Warm, load, warm
from ._worker import ThreadWorker
from .errors import AfreshError, GuestError, ProgramError, StoppedError, TimeLimitError

__all__ = [
    "UNDEFINED",
    "ConcurrentEvalError",
    "Context",
    "DeadlockError",
    "Handle",
    "HostCancellationError",
    "HostError",
    "InterruptError",
    "InvalidHandleError",
    "JSError",
    "MarshalError",
    "MemoryLimitError",
    "QuickJSError",
    "Runtime",
    "Snapshot",
    "SourceTransform",
    "ThreadWorker",
    "TimeoutError",
    "Undefined",
]

_MAGIC = b"AFQS"
_VERSION = 1
_HEADER = struct.Struct("<4sI32sQ")
_FAILED = "Host function failed"
# As the guest counts them.
_SCRIPT, _MODULE, _APPLY, _PLAIN, _KEPT = 0, 1, 2, 3, 5


class QuickJSError(Exception):
    """The base of every error here."""


class JSError(QuickJSError):
    """An uncaught exception of the program: ``name``, ``message``, ``stack``."""

    def __init__(self, name: str, message: str, stack: str | None = None) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message
        self.stack = stack


class HostError(JSError):
    """A host exception, as a program sees it."""


class MarshalError(QuickJSError):
    """A value cannot be carried: a function, or one that refers to itself."""


class InterruptError(QuickJSError):
    """The evaluation was interrupted by its host."""


class TimeoutError(InterruptError):  # noqa: A001
    """The context's time limit passed."""


class MemoryLimitError(QuickJSError):
    """The runtime's memory limit was reached."""


class InvalidHandleError(QuickJSError):
    """A handle is used that is disposed, or another context's."""


class HostCancellationError(QuickJSError):
    """The task that evaluates was cancelled."""


class ConcurrentEvalError(QuickJSError):
    """Two evaluations at once, or an asynchronous function in a plain evaluation."""


class DeadlockError(QuickJSError):
    """The program waits for a promise that nothing settles."""


class SourceTransform(IntFlag):
    """Transformations of scripts before they are evaluated.

    Every context lets scripts declare their outermost names again, so that the flag changes nothing.
    """

    NONE = 0
    TOP_LEVEL_CONST_TO_VAR = 8


@lru_cache(maxsize=1)
def _interpreter() -> Warm:
    return warm("js")


@lru_cache(maxsize=1)
def _build() -> bytes:
    """The identity of the guest: a digest of its bytes."""
    language = _languages.find("js")
    if language is None:
        raise QuickJSError("the language js is not in this installation")
    return hashlib.sha256(Path(language.module()).read_bytes()).digest()


class Snapshot:
    """A context's whole state, as bytes."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)

    def to_bytes(self) -> bytes:
        """The bytes, for `from_bytes`."""
        return self._data

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Snapshot:
        """A snapshot of such bytes. They are checked when they are restored."""
        return cls(bytes(data))

    def __repr__(self) -> str:
        return f"Snapshot(size={len(self._data)})"


def _checked(snapshot: Snapshot) -> bytes:
    """The state in a snapshot; raises `ValueError` if it is invalid."""
    data = snapshot.to_bytes()
    if len(data) < _HEADER.size:
        raise ValueError(f"the snapshot's length is {len(data)}, less than a header has")
    magic, version, build, size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("the snapshot's magic is wrong: these bytes are no snapshot")
    if version != _VERSION:
        raise ValueError(f"the snapshot's format version is {version}; this package reads {_VERSION}")
    if build != _build():
        raise ValueError("the snapshot's build_id is another guest's: make it anew with this version of the package")
    if len(data) - _HEADER.size != size:
        raise ValueError(f"the snapshot's length is {len(data) - _HEADER.size}, and its header says {size}")
    return data[_HEADER.size :]


class Runtime:
    """The common part of contexts: their limits."""

    def __init__(
        self,
        *,
        memory_limit: int | None = 64 << 20,
        stack_limit: int | None = None,
        transform_flags: SourceTransform = SourceTransform.NONE,
    ) -> None:
        # The engine has a separate stack, and a trap at its end.
        del stack_limit
        self._memory_limit = memory_limit
        self._transform_flags = SourceTransform(transform_flags)
        self._contexts: list[Context] = []
        self._closed = False

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes it with its contexts."""
        for context in list(self._contexts):
            context.close()
        self._closed = True

    def new_context(self, *, timeout: float = 5.0) -> Context:
        """A new context. ``timeout`` is the limit of one evaluation, in seconds."""
        if self._closed:
            raise QuickJSError("runtime is closed")
        context = Context(self, timeout=timeout)
        self._contexts.append(context)
        return context

    def _own(self, context: Context) -> None:
        if self._closed:
            raise QuickJSError("runtime is closed")
        if not isinstance(context, Context):
            raise TypeError("ctx must be a Context")
        context._open()
        if context._runtime is not self:
            raise QuickJSError("context belongs to a different runtime")

    def restore_snapshot(self, snapshot: Snapshot, ctx: Context, *, inject_globals: bool = True) -> None:
        """Replaces the state of a context by a snapshot's; without ``inject_globals`` it is only checked."""
        self._own(ctx)
        if not isinstance(snapshot, Snapshot):
            raise TypeError("snapshot must be a Snapshot")
        state = _checked(snapshot)
        if inject_globals:
            ctx._restore(state)

    def create_snapshot(self, ctx: Context) -> Snapshot:
        """As `Context.create_snapshot`."""
        self._own(ctx)
        return ctx.create_snapshot()

    async def create_snapshot_async(self, ctx: Context, *, timeout: float | None = None) -> Snapshot:
        """As `Context.create_snapshot_async`."""
        self._own(ctx)
        return await ctx.create_snapshot_async(timeout=timeout)


class Context:
    """A context: its global object, and the host functions that it knows."""

    def __init__(self, runtime: Runtime, *, timeout: float = 5.0) -> None:
        self._runtime = runtime
        self._timeout = timeout
        self._closed = False
        self._modules = False
        self._in_flight = False
        self._pending_tasks: dict[int, asyncio.Task[Any]] = {}
        self._functions: dict[str, tuple[Callable[..., Any], bool]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warm = _interpreter()
        self._session = self._begin()

    def _begin(self) -> _native.Session:
        memory = self._runtime._memory_limit
        return self._warm._native.session([], None, self._timeout, None, memory, 16 << 20, 128 << 20)

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes it."""
        if not self._closed:
            self._closed = True
            self._session.close()
            if self in self._runtime._contexts:
                self._runtime._contexts.remove(self)

    def _open(self) -> None:
        if self._closed:
            raise QuickJSError("context is closed")

    def register(self, name: str, fn: Callable[..., Any], *, is_async: bool | None = None) -> None:
        """Makes a host function a global function."""
        self._open()
        waits = inspect.iscoroutinefunction(fn) if is_async is None else is_async
        self._functions[name] = (fn, waits)
        self._session.offer(list(self._functions), self._call)

    def function(
        self, fn: Callable[..., Any] | None = None, *, name: str | None = None, is_async: bool | None = None
    ) -> Any:
        """`register` as a decorator."""

        def keep(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.register(name or fn.__name__, fn, is_async=is_async)
            return fn

        return keep if fn is None else keep(fn)

    def _call(self, name: str, arguments: list[Any], _: dict[str, Any] | None, is_limited: bool = False) -> Any:
        """Calls a function for the guest, which learns no more than that it failed."""
        fn, waits = self._functions[name]
        if waits and self._loop is None:
            raise HostError("HostError", _FAILED) from ConcurrentEvalError(
                "sync ctx.eval dispatched a registered async host function; use ctx.eval_async"
            )
        if waits:

            async def call(*arguments: Any) -> Any:
                try:
                    return await fn(*arguments)
                except Exception as error:
                    raise _Sanitised(_FAILED) from error

            return Dispatcher({"fn": call}, self._loop)("fn", arguments, None, is_limited)
        try:
            return fn(*arguments)
        except Exception as error:
            raise _Sanitised(_FAILED) from error

    def _evaluate(self, what: int, code: str, name: str, stopper: _native.Stopper | None) -> Result:
        before = self._session.at()
        kept = self._session.checkpoint("")
        if kept != before and self._session.tree()[0][0] != before:
            self._session.drop(before)
        done = result(self._session.run(what, code, name, None, None, stopper, True))
        if self._session.failed() is not None:
            self._session.rollback(kept)
        return done

    def _value(self, done: Result) -> Any:
        """The value, or the error as the interface has it."""
        error = done.error
        if isinstance(error, ProgramError):
            cause = error.__cause__
            if isinstance(cause, _Sanitised | HostError) and cause.__cause__ is not None:
                raise cause.__cause__
            raise _as_theirs(error)
        if isinstance(error, TimeLimitError):
            raise TimeoutError(str(error)) from error
        if isinstance(error, StoppedError):
            raise InterruptError(str(error)) from error
        if isinstance(error, GuestError):
            raise JSError("InternalError", str(error)) from error
        if error is not None:
            raise error
        if _has_opaque(done.value):
            raise MarshalError(f"the value cannot be carried: {done.text}")
        return None if done.value is UNDEFINED else done.value

    def eval(self, code: str, *, module: bool = False, filename: str = "<eval>") -> Any:
        """The value that a script gives."""
        self._open()
        if self._in_flight:
            raise ConcurrentEvalError("eval_async is in flight on this context")
        self._modules |= module
        return self._value(self._evaluate(_MODULE if module else _PLAIN, code, filename, None))

    async def eval_async(
        self, code: str, *, module: bool = False, timeout: float | None = None, filename: str = "<eval>"
    ) -> Any:
        """The value of a script that may await, and call asynchronous host functions."""
        return await self._awaited(_MODULE if module else _SCRIPT, code, filename, timeout)

    async def _awaited(self, what: int, code: str, filename: str, timeout: float | None) -> Any:
        self._open()
        if self._in_flight:
            raise ConcurrentEvalError("another eval_async is already in flight on this context")
        self._modules |= what == _MODULE
        self._in_flight = True
        self._loop = asyncio.get_running_loop()
        away = AsyncSandbox(self._session, None)
        try:
            evaluation = away._away(lambda stopper: self._evaluate(what, code, filename, stopper))
            return self._value(await asyncio.wait_for(evaluation, timeout))
        except asyncio.TimeoutError as error:
            raise TimeoutError("eval_async exceeded its deadline") from error
        finally:
            self._in_flight = False
            self._loop = None

    async def eval_handle_async(
        self, code: str, *, module: bool = False, timeout: float | None = None, filename: str = "<eval>"
    ) -> Handle:
        """A handle to the value that a script gives. Its declarations stay; a promise is replaced by its result."""
        if module:
            await self._awaited(_MODULE, code, filename, timeout)
            return Handle(self, self._kept("() => undefined"))
        await self._awaited(_KEPT, code, filename, timeout)
        take = f"() => {{ const at = {_PLACE}, value = globalThis[at]; delete globalThis[at]; return value; }}"
        return Handle(self, self._kept(take))

    def eval_handle(self, code: str, *, module: bool = False, filename: str = "<eval>") -> Handle:
        """A handle to the value that code gives. Its own `let` and `const` end with it, as in an indirect `eval`."""
        self._open()
        if not module:
            return Handle(self, self._kept("(code) => (0, eval)(code)", code))
        self.eval(code, module=True, filename=filename)
        return Handle(self, self._kept("() => undefined"))

    def _apply(self, function: str, *arguments: Any) -> Any:
        """Calls a function with values, where handles stand for their values."""
        self._open()
        plain = [argument._number if isinstance(argument, Handle) else argument for argument in arguments]
        held = [at for at, argument in enumerate(arguments) if isinstance(argument, Handle)]
        given = _native.encode([plain, held])
        source = f"(plain, held) => {{ {_TABLE} for (const at of held) plain[at] = table.get(plain[at]); {function} }}"
        encoded = self._session.run(_APPLY, source, "<handle>", given, None, None, True)
        return self._value(result(encoded))

    def _kept(self, function: str, *arguments: Any) -> int:
        """The number under which what a function gives is kept."""
        number: int = self._apply(f"const value = ({function})(...plain); return keep(value);", *arguments)
        return number

    def _quiescent(self) -> None:
        self._open()
        if self._modules:
            raise NotImplementedError("a context that evaluated a module has no snapshot")
        if self._in_flight:
            raise ConcurrentEvalError("cannot snapshot while eval_async is in flight")
        if self._pending_tasks:
            raise QuickJSError("cannot snapshot while async host tasks are pending")

    def create_snapshot(self) -> Snapshot:
        """The whole state, between evaluations."""
        self._quiescent()
        with tempfile.TemporaryDirectory(prefix="afresh-") as folder:
            there = os.path.join(folder, "state.afresh")
            try:
                self._session.save(there)
            except AfreshError as error:
                raise QuickJSError(str(error)) from error
            state = Path(there).read_bytes()
        return Snapshot(_HEADER.pack(_MAGIC, _VERSION, _build(), len(state)) + state)

    async def create_snapshot_async(self, *, timeout: float | None = None) -> Snapshot:
        """As `create_snapshot`."""
        del timeout
        return self.create_snapshot()

    def _restore(self, state: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="afresh-") as folder:
            there = os.path.join(folder, "state.afresh")
            Path(there).write_bytes(state)
            try:
                restored = load(there)
            except AfreshError as error:
                raise ValueError(f"the snapshot cannot be restored: {error}") from error
        before, self._warm = self._session, restored
        self._session = self._begin()
        if self._functions:
            self._session.offer(list(self._functions), self._call)
        before.close()


# Where the guest leaves the value of a script that stays, and finds that of a promise.
_PLACE = 'Symbol.for("afresh.value")'
# The place where a context keeps the values of handles, with the rest of its state.
_TABLE = """
    const { table, keep } = (globalThis[Symbol.for("afresh.handles")] ??= (() => {
        const table = new Map();
        let last = 0;
        return { table, keep: (value) => { table.set(++last, value); return last; } };
    })());
"""


class Handle:
    """Holds on to a value that stays in its context."""

    def __init__(self, context: Context, number: int) -> None:
        self._context = context
        self._number = number
        self._disposed = False

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.dispose()

    @property
    def disposed(self) -> bool:
        """Whether it holds nothing any more."""
        return self._disposed

    def dispose(self) -> None:
        """Lets go of the value."""
        if not self._disposed:
            self._disposed = True
            if not self._context._closed:
                self._context._apply("table.delete(plain[0]);", self._number)

    def _live(self, *others: Any) -> None:
        for handle in (self, *(other for other in others if isinstance(other, Handle))):
            if handle._disposed:
                raise InvalidHandleError("handle is disposed")
            if handle._context is not self._context:
                raise InvalidHandleError("handle belongs to a different context")
        if self._context._closed:
            raise InvalidHandleError("handle's owning context is closed")

    def _kept(self, function: str, *arguments: Any) -> Handle:
        self._live(*arguments)
        return Handle(self._context, self._context._kept(function, self, *arguments))

    @property
    def type_of(self) -> str:
        """Its type in one word."""
        self._live()
        kind = "v === null ? 'null' : Array.isArray(v) ? 'array' : typeof v"
        text: str = self._context._apply(f"const v = plain[0]; return {kind};", self)
        return text

    def is_promise(self) -> bool:
        """Whether it is a promise."""
        self._live()
        return bool(self._context._apply("return plain[0] instanceof Promise;", self))

    async def await_promise(self, *, timeout: float | None = None) -> Handle:
        """A handle to the result of the promise."""
        if not self.is_promise():
            raise QuickJSError("the handle holds no promise")
        self._context._apply(f"globalThis[{_PLACE}] = plain[0];", self)
        return await self._context.eval_handle_async(f"globalThis[{_PLACE}]", timeout=timeout)

    def get(self, key: str) -> Handle:
        """A property."""
        return self._kept("(value, key) => value[key]", key)

    def get_index(self, index: int) -> Handle:
        """An element."""
        return self._kept("(value, index) => value[index]", index)

    def set(self, key: str, value: Any) -> None:
        """Sets a property."""
        self._live(value)
        self._context._apply("plain[0][plain[1]] = plain[2];", self, key, value)

    def has(self, key: str) -> bool:
        """Whether there is such a property, and it is not ``undefined``."""
        self._live()
        return bool(self._context._apply("return plain[0][plain[1]] !== undefined;", self, key))

    def call(self, *arguments: Any) -> Handle:
        """Calls it as a function."""
        return self._kept("(value, ...rest) => value(...rest)", *arguments)

    def call_method(self, name: str, *arguments: Any) -> Handle:
        """Calls one of its methods."""
        return self._kept("(value, name, ...rest) => value[name](...rest)", name, *arguments)

    def new(self, *arguments: Any) -> Handle:
        """Makes an object of it, a class."""
        return self._kept("(value, ...rest) => new value(...rest)", *arguments)

    def dup(self) -> Handle:
        """A second handle to the same value."""
        return self._kept("(value) => value")

    def to_python(self) -> Any:
        """The value as a Python value."""
        self._live()
        return self._context._apply("return plain[0];", self)


class _Sanitised(Exception):  # noqa: N818
    """A host exception, as a guest sees it."""


# The guest's name for it.
_Sanitised.__name__ = "HostError"


def _has_opaque(value: Any) -> bool:
    if isinstance(value, Opaque):
        return True
    if isinstance(value, dict):
        return any(_has_opaque(part) for part in value.values())
    return isinstance(value, list | set) and any(_has_opaque(part) for part in value)


def _as_theirs(error: ProgramError) -> QuickJSError:
    if error.name == "MarshalError":
        return MarshalError(error.message)
    if error.name == "DeadlockError":
        return DeadlockError(error.message)
    if error.name == "InternalError" and "out of memory" in error.message:
        return MemoryLimitError(error.message)
    return JSError(error.name, error.message, error.traceback)
