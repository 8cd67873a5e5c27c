"""Languages: guests that come with the package, and how each is warmed up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import _native
from .errors import OpenError

_GUESTS = Path(__file__).resolve().parent / "guests"


def setup_call(code: str) -> tuple[str, bytes]:
    """The call that runs a setup, and fails when the setup does."""
    return ("evaluate", _native.encode([4, [], code, "<setup>", []]))


@dataclass(frozen=True, slots=True)
class Language:
    """A guest that comes with the package."""

    name: str
    file: Path
    stack: int | None = None

    def module(self) -> str:
        """Where its module is."""
        if not self.file.is_file():
            raise OpenError(
                f"the guest of the language {self.name!r} is not in this installation ({self.file}): install the "
                "package from a wheel"
            )
        return str(self.file)

    def warm_up(self, setup: str | None) -> list[tuple[str, bytes]]:
        """The calls that warm it up."""
        calls = [("warm", b"")]
        if setup is not None:
            calls.append(setup_call(setup))
        return calls


def find(name: str) -> Language | None:
    """The language of this name."""
    if name == "js":
        return Language("js", _GUESTS / "js.wasm")
    if name == "python":
        raise OpenError(
            "the language 'python' is not part of this version: 'js' is; any other guest that exports `evaluate` is "
            "given by its path"
        )
    return None
