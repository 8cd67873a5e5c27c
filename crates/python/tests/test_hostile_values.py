"""Values from hostile guests: refused, or made within the time and memory of their size."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import afresh
import pytest
from afresh import _native


def head(major: int, length: int) -> bytes:
    return bytes([major << 5 | 26]) + struct.pack(">I", length)


def number(value: int) -> bytes:
    """A number as a tagged text of bytes, whatever its size."""
    content = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return b"\xc2" + head(2, len(content)) + content


# Numbers of the same hash: Python's hash of an integer is its remainder by this.
MODULUS = 2**61 - 1


@pytest.mark.parametrize("kind", ["map", "set"])
def test_keys_that_collide_are_refused(kind: str) -> None:
    keys = [number(7 + MODULUS * n) for n in range(1, 20_000)]
    if kind == "map":
        value = head(5, len(keys)) + b"".join(key + b"\xf6" for key in keys)
    else:
        # The tag of sets, 258.
        value = b"\xd9\x01\x02" + head(4, len(keys)) + b"".join(keys)
    with pytest.raises(afresh.MarshalError, match="same hash"):
        _native.decode(value)


def test_keys_that_collide_now_and_then_are_taken() -> None:
    keys = [number(7 + MODULUS * n) for n in range(1, 50)]
    value = head(5, len(keys)) + b"".join(key + b"\xf6" for key in keys)
    assert len(_native.decode(value)) == len(keys)
    # A map with equal keys is a list of pairs.
    value = head(5, 2 * len(keys)) + b"".join(key + b"\xf6" for key in keys + keys)
    assert len(_native.decode(value)) == 2 * len(keys)
    assert len(_native.decode(_native.encode({n: n for n in range(5000)}))) == 5000


def decimal(text: str) -> bytes:
    """A number in tag 65585, as a tuple is an array in tag 65584."""
    return b"\xda\x00\x01\x00\x31" + head(3, len(text)) + text.encode()


@pytest.mark.parametrize("kind", ["map", "set", "tuples"])
def test_keys_whose_comparison_takes_hours_are_refused(kind: str) -> None:
    # Of equal hashes. Python makes a decimal of the integer to compare them.
    keys = [number(5 + (MODULUS << 4_000_000)), decimal("5")]
    if kind == "tuples":
        keys = [b"\xda\x00\x01\x00\x30" + head(4, 1) + key for key in keys]
    if kind == "set":
        value = b"\xd9\x01\x02" + head(4, len(keys)) + b"".join(keys)
    else:
        value = head(5, len(keys)) + b"".join(key + b"\xf6" for key in keys)
    with pytest.raises(afresh.MarshalError, match="decimals"):
        _native.decode(value)
    # The same numbers under names, and short ones as keys, are taken.
    named = head(5, 2) + b"".join(bytes([0x61, 97 + at]) + key for at, key in enumerate(keys))
    assert len(_native.decode(named)) == 2
    short = [number(5 + MODULUS), decimal("5")]
    assert len(_native.decode(head(5, 2) + b"".join(key + b"\xf6" for key in short))) == 2


SEEDS = [
    _native.encode({"a": [1, -2, 2**70, -(2**70), 1.5, None, True, b"bytes", "text \u00e9"], (1, 2): {3, "x"}, 4: {}}),
    # An imaginary number, packed numbers, a date, an opaque value, a tuple.
    b"\xd9\xa7\xf8\x82\xf9\x3c\x00\xf9\x40\x00",
    b"\x83\xc1\xfb\x41\xd9\x00\x00\x00\x00\x00\x00\xd8\x27\x82\x61a\x61b\xc2\x42\x01\x00",
]


def test_any_bytes_are_a_value_or_an_error_within_their_memory() -> None:
    draw = random.Random(11)
    taken = 0
    tracemalloc.start()
    try:
        for _ in range(4000):
            value = bytearray(draw.choice(SEEDS))
            for _ in range(draw.randrange(4)):
                at = draw.randrange(len(value))
                match draw.randrange(4):
                    case 0:
                        value[at] = draw.randrange(256)
                    case 1:
                        value[at] ^= 1 << draw.randrange(8)
                    case 2:
                        del value[at:]
                    case _:
                        value[at:at] = draw.choice([b"\x9b" + b"\xff" * 8, b"\xba\xff\xff\xff\xff", b"\x81" * 80])
                if not value:
                    break
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                _native.decode(bytes(value))
                taken += 1
            except (afresh.MarshalError, TypeError):
                pass
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 256 * len(value) + (64 << 10), bytes(value).hex()
    finally:
        tracemalloc.stop()
    assert taken > 500, taken


@pytest.mark.parametrize("parts", [(b"\xa2\x01", b"\x01\xf6"), (b"\xa1", b"\xf6"), (b"\xd9\x01\x02\x82", b"\xf6")])
def test_nested_maps_and_sets_that_become_lists_are_read_once(parts: tuple[bytes, bytes]) -> None:
    begin, end = parts
    # Reading each level twice would take 2**60 steps.
    value = _native.decode(begin * 60 + b"\xf6" + end * 60)
    depth = 0
    while isinstance(value, (list, tuple)):
        value, depth = next((part for part in value if isinstance(part, (list, tuple))), None), depth + 1
    assert depth >= 60


class Changing:
    """A value whose plain form is made by code that first changes its container."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change

    def tolist(self) -> int:
        self.change()
        return 1


def both(value: object) -> object:
    return _native.decode(_native.encode(value))


@pytest.mark.parametrize("change", [lambda some: some.append(9), lambda some: some.clear()])
def test_a_list_that_changes_while_it_is_encoded_has_its_first_parts(change: Callable[[Any], object]) -> None:
    values: list[object] = []
    values.extend([Changing(lambda: change(values)), 2, 3])
    assert both(values) == [1, 2, 3]


@pytest.mark.parametrize(
    "change", [lambda some: some.update(z=9), lambda some: some.clear(), lambda some: some.pop("b")]
)
def test_a_dictionary_that_changes_while_it_is_encoded_has_its_first_parts(change: Callable[[Any], object]) -> None:
    pairs: dict[str, object] = {}
    pairs.update(a=Changing(lambda: change(pairs)), b=2, c=3)
    assert both(pairs) == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize("change", [lambda some: some.add(9), lambda some: some.clear()])
def test_a_set_that_changes_while_it_is_encoded_has_its_first_parts(change: Callable[[Any], object]) -> None:
    parts: set[object] = set()
    parts.update([Changing(lambda: change(parts)), 2, 3])
    assert both(parts) == {1, 2, 3}
