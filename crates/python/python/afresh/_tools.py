"""Tools: host functions that a program calls.

A tool is any callable with a name. Its arguments come as Python values, checked against its annotations where they name
plain types; what it returns goes back, and what it raises is an error that the program may catch. An asynchronous tool
is awaited: on the caller's event loop in an asynchronous sandbox, on a separate loop in a plain one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from ._call_threads import pending
from ._threads import start

Tool: TypeAlias = Callable[..., Any]
Tools: TypeAlias = Mapping[str, Tool] | Iterable[Tool]

_PLAIN = (bool, int, float, str, bytes, list, dict, set, type(None))


@dataclass(frozen=True, slots=True)
class _OfferedTool:
    function: Tool
    signature: inspect.Signature | None
    annotations: dict[str, Any]


def _offer(name: str, function: Tool) -> _OfferedTool:
    if not callable(function):
        raise TypeError(f"the tool {name!r} is a {type(function).__name__}, which cannot be called")
    if not name.isidentifier():
        raise ValueError(f"{name!r} cannot be the name of a tool: programs call it by a plain name")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    try:
        annotations = get_type_hints(function)
    except (TypeError, NameError, AttributeError):
        annotations = {}
    return _OfferedTool(function, signature, annotations)


def named(tools: Tools | None) -> dict[str, Tool]:
    """The tools by their names.

    >>> named([len])
    {'len': <built-in function len>}
    """
    if tools is None:
        return {}
    if isinstance(tools, Mapping):
        return dict(tools)
    found: dict[str, Tool] = {}
    for tool in tools:
        name = getattr(tool, "__name__", None) or getattr(tool, "name", None)
        if not isinstance(name, str):
            raise TypeError(f"{tool!r} has no name: give tools as a dictionary from names to functions")
        found[name] = tool
    return found


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value is of a type, where that is a plain one; more is the tool's own matter."""
    if wanted is Any or wanted is inspect.Parameter.empty:
        return True
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(wanted))
    plain = origin or wanted
    if plain not in _PLAIN:
        return True
    if plain is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if plain is int and isinstance(value, bool):
        return False
    return isinstance(value, plain)


class Dispatcher:
    """Calls tools for one sandbox and its forks.

    A tool whose call may have to end before the tool does runs on a separate thread, with the caller's context. That is
    every tool of an asynchronous sandbox, of a call with a time limit, and of a guest on a daemon thread, which the
    interpreter ends without notice. Any other tool runs on the thread that called the guest.
    """

    def __init__(
        self,
        tools: Tools | None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._offered = {name: _offer(name, tool) for name, tool in named(tools).items()}
        self._loop = loop

    @property
    def names(self) -> list[str]:
        """The names that programs call."""
        return list(self._offered)

    def __call__(
        self, name: str, arguments: list[Any], keywords: dict[str, Any] | None, is_limited: bool = False
    ) -> Any:
        """The tool's result, or a `_native.Pending` for it. `is_limited` is whether the call has a time limit."""
        offered = self._offered.get(name)
        if offered is None:
            raise NameError(f"there is no tool {name!r}; there are {', '.join(self._offered) or 'none'}")
        given = keywords or {}
        _check(name, offered, arguments, given)
        function = functools.partial(offered.function, *arguments, **given)
        if self._loop is not None:
            if inspect.iscoroutinefunction(offered.function):
                future = asyncio.run_coroutine_threadsafe(function(), self._loop)
                return pending(future, future.cancel)
            return start(functools.partial(_settle, function, self._loop))
        if is_limited or threading.current_thread().daemon:
            return start(functools.partial(_settle, function, None))
        result = function()
        return _run(result) if inspect.isawaitable(result) else result


def _check(name: str, offered: _OfferedTool, arguments: list[Any], given: dict[str, Any]) -> None:
    """Checks arguments against the signature and its plain annotations."""
    if offered.signature is None:
        return
    try:
        bound = offered.signature.bind(*arguments, **given)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None
    for parameter, value in bound.arguments.items():
        wanted = offered.annotations.get(parameter, Any)
        kind = offered.signature.parameters[parameter].kind
        several = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if not several and not _fits(value, wanted):
            shown = getattr(wanted, "__name__", str(wanted))
            raise TypeError(f"{name}(): {parameter} is a {type(value).__name__}, not {shown}")


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _settle(function: Callable[[], Any], loop: asyncio.AbstractEventLoop | None) -> Any:
    """Calls a function on a separate thread, and awaits its result if that is awaitable."""
    result = function()
    if not inspect.isawaitable(result):
        return result
    if loop is not None:
        return asyncio.run_coroutine_threadsafe(_awaited(result), loop).result()
    return asyncio.run(_awaited(result))


def _run(awaitable: Any) -> Any:
    """Awaits on a new event loop, on this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_awaited(awaitable))
    if inspect.iscoroutine(awaitable):
        awaitable.close()
    raise RuntimeError(
        "an asynchronous tool was called from a plain sandbox on an event loop's own thread, which would wait for "
        "itself: use `async_sandbox`"
    )
