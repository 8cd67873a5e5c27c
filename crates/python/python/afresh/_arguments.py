"""Checks of arguments, whose errors name the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

# Maximum of a timeout: the native half counts in moments of a clock, which end.
MAX_SECONDS = 1_000_000_000


def text(given: Any, name: str) -> str:
    """An argument that is text.

    >>> text(b"x = 1", "code")
    Traceback (most recent call last):
    TypeError: code is text (str), not bytes
    """
    if not isinstance(given, str):
        raise TypeError(f"{name} is text (str), not {type(given).__name__}")
    return given


def seconds(given: Any) -> float | None:
    """A timeout.

    >>> seconds(None), seconds(5)
    (None, 5.0)
    >>> seconds("5")
    Traceback (most recent call last):
    TypeError: a timeout is a number of seconds, not '5'
    >>> seconds(0)
    Traceback (most recent call last):
    ValueError: a timeout of 0 s is invalid: give seconds above 0
    >>> seconds(float("inf"))
    Traceback (most recent call last):
    ValueError: a timeout of inf s is invalid: give at most 1000000000 s
    """
    if given is None:
        return None
    if isinstance(given, str | bytes) or not hasattr(given, "__float__"):
        raise TypeError(f"a timeout is a number of seconds, not {given!r}")
    try:
        length = float(given)
    except OverflowError:
        length = math.inf
    if not length > 0:
        raise ValueError(f"a timeout of {given} s is invalid: give seconds above 0")
    if length > MAX_SECONDS:
        raise ValueError(f"a timeout of {length} s is invalid: give at most {MAX_SECONDS} s")
    return length


def variables(given: Mapping[str, str] | None) -> dict[str, str]:
    """Environment variables.

    >>> variables({"N": 1})
    Traceback (most recent call last):
    TypeError: the environment variable N is text (str), not int
    """
    pairs = (given or {}).items()
    return {text(name, "a variable's name"): text(value, f"the environment variable {name}") for name, value in pairs}


def command(given: Any) -> None:
    """Refuses what is no command.

    >>> command(b"ls")
    Traceback (most recent call last):
    TypeError: a command is text for the shell, or a list of a program and its arguments, not bytes
    """
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise TypeError(
            f"a command is text for the shell, or a list of a program and its arguments, not {type(given).__name__}"
        )


def count(given: int) -> int:
    """A number of forks.

    >>> count(-1)
    Traceback (most recent call last):
    ValueError: -1 forks are too few
    """
    if given < 0:
        raise ValueError(f"{given} forks are too few")
    return given


def port(number: int) -> int:
    """The number of a port.

    >>> port(65536)
    Traceback (most recent call last):
    ValueError: a port is a number from 1 to 65535, not 65536
    """
    if not isinstance(number, int) or not 0 < number < 1 << 16:
        raise ValueError(f"a port is a number from 1 to 65535, not {number!r}")
    return number
