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
from ._native import Checkpoint, __version__
from ._result import Result
from ._sandbox import AsyncSandbox, Sandbox
from ._tree import Difference, State, Tree
from ._values import UNDEFINED, Opaque
from ._warm import Warm, cache_dir, load, warm
from .errors import (
    AfreshError,
    BusyError,
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
    "AsyncSandbox",
    "BusyError",
    "Checkpoint",
    "Difference",
    "GuestError",
    "MarshalError",
    "Opaque",
    "OpenError",
    "ProgramError",
    "Result",
    "Sandbox",
    "SaveError",
    "SessionError",
    "State",
    "StoppedError",
    "TimeLimitError",
    "Tree",
    "Warm",
    "__version__",
    "cache_dir",
    "load",
    "warm",
]

# Before the interpreter ends the threads that run guests, those guests have to end.
atexit.register(_native.end_calls)
os.register_at_fork(after_in_child=_native.forget_calls)
