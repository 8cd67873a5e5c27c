"""The code interpreter of `langchain-quickjs` on warm guests.

``from afresh.langchain import CodeInterpreterMiddleware``: it is that package's middleware, unmodified, with its three
modes (``thread``, ``turn``, ``call``), its tools and subagents, over `afresh.quickjs`. Each interpreter is a sandbox
forked from one warm guest, and code that is cut short is undone. Programs that import ``langchain_quickjs`` itself
still get it over ``quickjs_rs``. Tools that a program calls at the same time run one after the other.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import quickjs

if TYPE_CHECKING:
    CodeInterpreterMiddleware = Any
    PTCOption = Any

__all__ = ["CodeInterpreterMiddleware", "PTCOption"]

_THEIRS = "langchain_quickjs"
_ENGINE = "quickjs_rs"
_lock = threading.Lock()
_copy: ModuleType | None = None


def _is_theirs(name: str) -> bool:
    return name == _ENGINE or name.split(".", 1)[0] == _THEIRS


def _load() -> ModuleType:
    """A copy of their package of our own, which finds this one's interface where it looks for its engine."""
    global _copy  # noqa: PLW0603
    with _lock:
        if _copy is None:
            before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_theirs(name)}
            sys.modules[_ENGINE] = quickjs
            try:
                _copy = importlib.import_module(_THEIRS)
            except ModuleNotFoundError as error:
                if error.name != _THEIRS:
                    raise
                raise ModuleNotFoundError(
                    "langchain-quickjs is not installed: `pip install langchain-quickjs` adds it", name=_THEIRS
                ) from None
            finally:
                for name in [name for name in sys.modules if _is_theirs(name)]:
                    del sys.modules[name]
                sys.modules.update(before)
        return _copy


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_load(), name)
