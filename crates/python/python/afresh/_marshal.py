"""Values between host and guest, as CBOR: the part of the guest's half of ``python`` that writes and reads them.

The guest runs this file and then `_driver.py` in one module, whose names they share. On the host `_driver` imports it.

Promises: a value of any type can be written. One without a form in CBOR is its type and its own text. May break it: a
class whose methods do not do what those of its base class do.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable
from typing import Any

# How deep a value may be nested.
DEEPEST = 120
# Lists of at least this length are checked for a single element type.
LONG = 16


class MarshalError(Exception):
    """A value cannot be carried between host and guest."""


def _head(out: bytearray, major: int, number: int) -> None:
    major <<= 5
    if number < 24:
        out.append(major | number)
    elif number < 0x100:
        out += bytes((major | 24, number))
    elif number < 0x10000:
        out.append(major | 25)
        out += number.to_bytes(2, "big")
    elif number < 0x100000000:
        out.append(major | 26)
        out += number.to_bytes(4, "big")
    else:
        out.append(major | 27)
        out += number.to_bytes(8, "big")


def _write_int(out: bytearray, value: int) -> None:
    if 0 <= value < 24:
        out.append(value)
    elif -(1 << 63) <= value < 1 << 63:
        if value >= 0:
            _head(out, 0, value)
        else:
            _head(out, 1, ~value)
    else:
        # A bignum: tagged as positive, or as negative, which stores -1 - value.
        out.append(0xC2 if value >= 0 else 0xC3)
        value = value if value >= 0 else ~value
        _write_bytes(out, value.to_bytes((value.bit_length() + 7) // 8, "big"))


def _write_bytes(out: bytearray, value: Any) -> None:
    _head(out, 2, len(value))
    out += value


def _write_str(out: bytearray, value: str) -> None:
    try:
        text = value.encode()
    except UnicodeEncodeError:
        text = value.encode(errors="backslashreplace")
    _head(out, 3, len(text))
    out += text


def _write_list(out: bytearray, value: Any, depth: int) -> None:
    if len(value) >= LONG:
        kinds = set(map(type, value))
        if kinds == {float}:
            # As in memory: 64 bits, little-endian.
            out += b"\xd8\x56"
            return _write_bytes(out, array("d", value).tobytes())
        if kinds == {int}:
            try:
                numbers = array("q", value).tobytes()
            except OverflowError:
                pass
            else:
                out += b"\xd8\x4f"
                return _write_bytes(out, numbers)
    _head(out, 4, len(value))
    for part in value:
        write(out, part, depth + 1)
    return None


def _write_tuple(out: bytearray, value: tuple[Any, ...], depth: int) -> None:
    # A private tag on a list.
    out += b"\xda\x00\x01\x00\x30"
    _head(out, 4, len(value))
    for part in value:
        write(out, part, depth + 1)


def _write_dict(out: bytearray, value: Any, depth: int) -> None:
    _head(out, 5, len(value))
    for key, part in value.items():
        write(out, key, depth + 1)
        write(out, part, depth + 1)


def _write_set(out: bytearray, value: Any, depth: int) -> None:
    out += b"\xd9\x01\x02"
    _head(out, 4, len(value))
    for part in value:
        write(out, part, depth + 1)


def _write_float(out: bytearray, value: float) -> None:
    out.append(0xFB)
    out += struct.pack(">d", value)


def _write_complex(out: bytearray, value: complex) -> None:
    out += b"\xd9\xa7\xf8\x82"
    _write_float(out, value.real)
    _write_float(out, value.imag)


def _standard(out: bytearray, value: Any) -> bool:
    """Appends a date, a time, a decimal number or a UUID, if that is what it is."""
    dates, decimal, uuid = map(sys.modules.get, ("datetime", "decimal", "uuid"))
    if dates is not None and isinstance(value, dates.date):
        if type(value).__name__ == "NaTType":
            # The missing time of pandas, which is no date.
            return False
        out += b"\xc0" if isinstance(value, dates.datetime) else b"\xd9\x03\xec"
        _write_str(out, value.isoformat())
    elif decimal is not None and isinstance(value, decimal.Decimal):
        out += b"\xda\x00\x01\x00\x31"
        _write_str(out, decimal.Decimal.__str__(value))
    elif uuid is not None and isinstance(value, uuid.UUID):
        out += b"\xd8\x25"
        _write_bytes(out, value.bytes)
    else:
        return False
    return True


def _other(out: bytearray, value: Any, depth: int) -> None:
    """Less frequent types."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.generic):
            item = value.item()
            if not isinstance(item, numpy.generic):
                return write(out, item, depth)
        elif isinstance(value, numpy.ndarray):
            return write(out, value.tolist(), depth)
    # A subclass of a known type is written as that type.
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(out, kind(value))
    for kind, nested in _NESTED.items():
        if isinstance(value, kind):
            return nested(out, value, depth)
    if _standard(out, value):
        return None
    fields = getattr(type(value), "__dataclass_fields__", None)
    if isinstance(fields, dict):
        return _write_dict(out, {name: getattr(value, name, None) for name in fields}, depth)
    # It stays here: its type, and how it shows itself.
    out += b"\xd8\x27\x82"
    _write_str(out, type(value).__name__)
    return _write_str(out, shown(value))


_PLAIN: dict[type, Callable[[bytearray, Any], None]] = {
    type(None): lambda out, _: out.append(0xF6),
    bool: lambda out, value: out.append(0xF5 if value else 0xF4),
    int: _write_int,
    float: _write_float,
    str: _write_str,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    complex: _write_complex,
}
_NESTED: dict[type, Callable[[bytearray, Any, int], None]] = {
    list: _write_list,
    tuple: _write_tuple,
    dict: _write_dict,
    set: _write_set,
    frozenset: _write_set,
}


def write(out: bytearray, value: Any, depth: int = 0) -> None:
    """Appends a value."""
    kind = type(value)
    plain = _PLAIN.get(kind)
    if plain is not None:
        return plain(out, value)
    if depth > DEEPEST:
        raise MarshalError(f"the value is nested deeper than {DEEPEST} levels, or refers to itself")
    return _NESTED.get(kind, _other)(out, value, depth)


def read(data: bytes, at: int) -> tuple[Any, int]:
    """A value from the host, and the position of the next."""
    first = data[at]
    major, info, at = first >> 5, first & 31, at + 1
    if major == 7:
        if info == 27:
            return struct.unpack_from(">d", data, at)[0], at + 8
        return {20: False, 21: True}.get(info), at
    number = info
    if info >= 24:
        size = 1 << (info - 24)
        number = int.from_bytes(data[at : at + size], "big")
        at += size
    if major == 0:
        return number, at
    if major == 1:
        return ~number, at
    if major == 2:
        return data[at : at + number], at + number
    if major == 3:
        return data[at : at + number].decode(), at + number
    if major == 4:
        parts = []
        for _ in range(number):
            part, at = read(data, at)
            parts.append(part)
        return parts, at
    if major == 5:
        pairs = []
        for _ in range(number):
            key, at = read(data, at)
            part, at = read(data, at)
            pairs.append((key, part))
        try:
            return {_hashable(key): part for key, part in pairs}, at
        except TypeError:
            # Maps of JavaScript may have objects as keys.
            return pairs, at
    return _tagged(number, *read(data, at))


def _hashable(key: Any) -> Any:
    if isinstance(key, (list, tuple)):
        return tuple(map(_hashable, key))
    return frozenset(key) if isinstance(key, set) else key


def _tagged(tag: int, value: Any, at: int) -> tuple[Any, int]:
    if tag == 2:
        return int.from_bytes(value, "big"), at
    if tag == 3:
        return ~int.from_bytes(value, "big"), at
    if tag == 258:
        try:
            return set(map(_hashable, value)), at
        except TypeError:
            return value, at
    if tag == 65584:
        return tuple(value), at
    if tag == 43000:
        return complex(*value), at
    if tag == 37:
        from uuid import UUID  # noqa: PLC0415

        return UUID(bytes=value), at
    if tag == 65585:
        from decimal import Decimal  # noqa: PLC0415

        return Decimal(value), at
    if tag in (0, 1, 1004):
        from datetime import date, datetime, timezone  # noqa: PLC0415

        if tag == 1:
            return datetime.fromtimestamp(value, timezone.utc), at
        return (datetime if tag == 0 else date).fromisoformat(value), at
    raise MarshalError(f"the host sent values of an unknown kind (tag {tag})")


def shown(value: Any) -> str:
    """How a value shows itself, whatever it does when it is asked."""
    try:
        return repr(value)
    except Exception as error:
        if isinstance(error, ValueError) and isinstance(value, int):
            # Python limits the digits of a number that it shows.
            return hex(value)
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
