"""Values that Python has no type for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final


@final
class Undefined:
    """JavaScript's ``undefined``, where it must differ from ``None``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNDEFINED"

    def __bool__(self) -> bool:
        return False


UNDEFINED: Final = Undefined()


@dataclass(frozen=True, slots=True)
class Opaque:
    """Something that stays in the guest: a function, a symbol, a promise, an object without a plain form.

    Attributes:
        kind: Its kind, in one word.
        text: How the guest shows it.
    """

    kind: str
    text: str

    def __repr__(self) -> str:
        return f"<{self.kind}: {self.text}>"
