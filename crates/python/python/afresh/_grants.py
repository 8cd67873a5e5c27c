"""Grants and limits of a Linux program."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from . import _native
from ._sizes import size
from .errors import OpenError

# Bytes that its processes may map, and of the files that it may write.
_MEMORY = 4 << 30
_STORAGE = 1 << 30


def options(
    *,
    dirs: Iterable[str | os.PathLike[str]] = (),
    net: Iterable[str | Mapping[str, Any]] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    memory_limit: int | str | None = None,
    storage_limit: int | str | None = None,
    start: float | None = None,
) -> _native.ProgramOptions:
    """Grants and limits of a Linux program, as the native half reads them."""
    if isinstance(dirs, str | os.PathLike) or isinstance(net, str):
        raise TypeError("`dirs` and `net` are lists: dirs=['.'], net=['api.example.org:443']")
    return {
        "env": list((env or {}).items()),
        "dirs": [_directory(path) for path in dirs],
        "net": [_grant(one) for one in net],
        "cwd": cwd,
        "memory": size(memory_limit) or _MEMORY,
        "storage": size(storage_limit) or _STORAGE,
        "start": start,
    }


def _grant(net: str | Mapping[str, Any]) -> str:
    if isinstance(net, str):
        return net
    if not isinstance(net, Mapping):
        raise TypeError(f"a grant in `net` is 'NAME:PORT' or a dict with 'to', not {net!r}")
    return json.dumps(dict(net), default=os.fspath)


def _directory(path: str | os.PathLike[str]) -> str:
    given = os.fspath(path)
    found = os.path.realpath(given)
    if not os.path.exists(found):
        raise OpenError(f"the directory {given!r} cannot be granted: it does not exist on this host")
    return found


def here(granted: Iterable[str]) -> str | None:
    """The present directory, if a program that was granted these may read it."""
    present = os.path.realpath(os.getcwd())
    inside = any(os.path.commonpath([present, path]) == path for path in granted)
    return present if inside else None
