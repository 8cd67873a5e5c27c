"""Sandboxes that start warm, fork, and roll back in microseconds.

Warm an interpreter once, then start every sandbox from a pristine copy of it:

>>> import afresh
>>> js = afresh.warm("js", setup="const greet = (name) => `hello, ${name}`")
>>> with js.sandbox(timeout=5) as sb:
...     sb.eval("greet('you')")
'hello, you'

A sandbox is a live guest: `Sandbox.checkpoint` keeps its state, `Sandbox.rollback` returns to any kept state, and
`Sandbox.fork` makes sandboxes that continue from the present one. Each costs time for the changes only, however large
the guest is.
"""

from __future__ import annotations

import atexit
import os

from . import _native
from ._commands import AsyncCommand, Command
from ._cost import CallCost
from ._exec import async_exec, exec  # noqa: A004
from ._files import FileInfo
from ._linux import image, linux
from ._native import Checkpoint, __version__
from ._ports import AsyncPort, Port, PortConnection, Response
from ._process import CommandInfo, CommandResult
from ._result import Result
from ._rich import RichResult
from ._sandbox import AsyncSandbox, Sandbox
from ._terminal import AsyncTerminal, Terminal
from ._tree import Difference, State, Tree
from ._values import UNDEFINED, Opaque
from ._warm import Warm, cache_dir, load, warm
from .errors import (
    AfreshError,
    BusyError,
    CommandError,
    GuestError,
    MarshalError,
    OpenError,
    ProgramError,
    SaveError,
    SessionError,
    StoppedError,
    TimeLimitError,
)

__all__ = [
    "UNDEFINED",
    "AfreshError",
    "AsyncCommand",
    "AsyncPort",
    "AsyncSandbox",
    "AsyncTerminal",
    "BusyError",
    "CallCost",
    "Checkpoint",
    "Command",
    "CommandError",
    "CommandInfo",
    "CommandResult",
    "Difference",
    "FileInfo",
    "GuestError",
    "MarshalError",
    "Opaque",
    "OpenError",
    "Port",
    "PortConnection",
    "ProgramError",
    "Response",
    "Result",
    "RichResult",
    "Sandbox",
    "SaveError",
    "SessionError",
    "State",
    "StoppedError",
    "Terminal",
    "TimeLimitError",
    "Tree",
    "Warm",
    "__version__",
    "async_exec",
    "cache_dir",
    "exec",
    "image",
    "linux",
    "load",
    "warm",
]

# Before the interpreter ends the threads that run guests, those guests have to end.
atexit.register(_native.end_calls)
os.register_at_fork(after_in_child=_native.forget_calls)
