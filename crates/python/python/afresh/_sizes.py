"""Sizes as people write them."""

from __future__ import annotations

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size(given: int | str | None) -> int | None:
    """Bytes.

    >>> size("64MiB"), size("1.5 KB"), size(4096), size(None)
    (67108864, 1500, 4096, None)
    >>> size("a lot")
    Traceback (most recent call last):
    ValueError: 'a lot' is no size: give bytes as a number, or text like '64MiB'
    """
    if given is not None and not isinstance(given, int | str):
        raise TypeError(f"a size is a number of bytes, or text like '64MiB', not {given!r}")
    if given is None or isinstance(given, int):
        if given is not None and given <= 0:
            raise ValueError(f"{given} bytes are too few")
        return given
    text = given.strip()
    digits = text.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz").strip()
    unit = text[len(digits) :].strip().upper()
    try:
        bytes_ = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError):
        raise ValueError(f"{given!r} is no size: give bytes as a number, or text like '64MiB'") from None
    if bytes_ <= 0:
        raise ValueError(f"{given!r} are too few bytes")
    return bytes_
