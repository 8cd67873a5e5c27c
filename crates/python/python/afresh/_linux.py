"""Linux programs as guests: interpreters of the host, and of OCI images."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import _native
from ._grants import here, options
from ._warm import OUTPUT, RESULT, Warm, cache_dir
from .errors import OpenError

# Seconds that an interpreter has to report its own directories.
_REPORT_TIMEOUT = 30
_INTERPRETER = re.compile(r"python(\d+(\.\d+)*t?)?")
# Host directories that every program may read anyway.
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REPORT = "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix]))"


def find_program(name: str) -> str:
    """The path of a program of the host."""
    found = shutil.which(name)
    if found is None:
        raise OpenError(f"the program {name!r} was not found: it must be in PATH, or be the path of an executable")
    return os.path.abspath(found)


def _interpreter(name: str) -> tuple[str, list[str]]:
    """The file of a Python interpreter, and the directories that it needs.

    An interpreter in a directory of `PATH` reports them itself, so shims of version managers are resolved. Another one
    may be a stranger's file, and is not run on the host.
    """
    path = find_program(name)
    if not _INTERPRETER.fullmatch(Path(path).name):
        raise OpenError(
            f"the program {name!r} evaluates no code that is known: `afresh.linux` takes a Python interpreter, such as "
            "'python3'. `afresh.exec` runs any program once, and `sandbox.commands.run` within a sandbox"
        )
    if os.path.dirname(path) not in map(os.path.abspath, os.get_exec_path()):
        return path, _prefixes(Path(path))
    try:
        done = subprocess.run(
            [path, "-I", "-c", _REPORT], capture_output=True, text=True, timeout=_REPORT_TIMEOUT, check=True
        )
        executable, *prefixes = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise OpenError(f"the interpreter {path} does not run on this host: {error}") from error
    return executable, _granted(prefixes)


def _granted(prefixes: list[str]) -> list[str]:
    """The directories that have to be granted: the others are in every guest."""
    return sorted({prefix for prefix in prefixes if not prefix.startswith(_SYSTEM)})


def _has_library(prefix: Path) -> bool:
    """Whether Python's standard library is below a directory."""
    return any(prefix.glob("lib/python3*/os.py"))


def _prefixes(path: Path) -> list[str]:
    """The directories that an interpreter needs, from its place and its virtual environment's configuration."""
    root = path.parent.parent
    base = path.resolve().parent.parent
    try:
        lines = (root / "pyvenv.cfg").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition("=")
        if key.strip().lower() == "home":
            base = Path(value.strip()).resolve().parent
    if not base.is_absolute() or not _has_library(base):
        raise OpenError(
            f"the interpreter {path} has no standard library at {base}: name one in PATH, or in a virtual environment"
        )
    return _granted([str(root), str(base)] if lines else [str(base)])


def _environment(executable: str, granted: list[str]) -> dict[str, str]:
    """The environment of an interpreter."""
    variables = {"PATH": f"{os.path.dirname(executable)}:{_PATH}"}
    # Some distributions of Python find their own library only through it.
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    own = [path for path in libraries if any(path.startswith(f"{prefix}/") for prefix in granted)]
    if own:
        variables["LD_LIBRARY_PATH"] = ":".join(own)
    return variables


def _enter(directory: str) -> str:
    """A setup that goes to a directory and imports from there. It defines no name."""
    return f"__import__('os').chdir({directory!r}); __import__('sys').path.insert(0, {directory!r})"


def _opened(
    reference: str,
    given: _native.ProgramOptions,
    *,
    language: str,
    cwd: str | os.PathLike[str] | None,
    setup: str | None,
    cache: str | os.PathLike[str] | None,
    timeout: float | None,
) -> Warm:
    first = [] if cwd is None else [_enter(os.fspath(cwd))]
    kept = os.fspath(cache) if cache is not None else str(cache_dir())

    def opened(setups: list[str]) -> Warm:
        native = _native.Warm.program(reference, language, setups, kept, given, (timeout, OUTPUT, RESULT))
        return Warm(native, reference)

    if setup is None:
        return opened(first)
    try:
        return opened([*first, setup])
    except OpenError:
        # The guest ends where a setup raises. Run as other code, it reports the exception.
        with opened(first).sandbox(timeout=given["start"] or _START) as again:
            again.run_code(setup, name="<setup>").unwrap()
        raise


# Seconds of a warm-up.
_START = 60.0


def linux(
    program: str | os.PathLike[str] = "python3",
    *,
    setup: str | None = None,
    dirs: Iterable[str | os.PathLike[str]] = (),
    net: Iterable[str | Mapping[str, Any]] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    setup_timeout: float = _START,
    memory_limit: int | str | None = None,
    storage_limit: int | str | None = None,
) -> Warm:
    """Warms up a Python interpreter of the host, unmodified, as a Linux program in a sandbox.

    Its sandboxes have their own processes, files and loopback network (`Sandbox.commands`, `Sandbox.port`,
    `Sandbox.terminal`) in addition to what all sandboxes have. Every system call is served by afresh: neither root nor
    a container is needed.

    Args:
        program: The interpreter, by its name in PATH or its path: ``"python3"``, or that of a virtual environment with
            its packages.
        setup: Code that it runs once; what it leaves is what every sandbox starts from.
        dirs: Host directories that the sandbox may read, at their own paths. It sees its own changes to them, which
            never reach the host. Their files must not change while the guest is in use.
        net: Servers that it may connect to: ``"api.example.org:443"``, ``"*.example.org:*"``, ``"192.0.2.7:5432"``, or
            ``"db:5432=127.0.0.1:5433"`` for one that is elsewhere. None by default. A dict is a rule for HTTP requests:
            ``{"to": "api.example.org:443", "methods": ["GET"], "paths": ["/v1/**"]}``.
        env: Environment variables of the interpreter and its commands. PATH begins with the directory of the
            interpreter if it is not among them.
        cwd: The directory that code and commands start in, within the sandbox; the present directory if ``dirs``
            contain it, and ``/home/user`` otherwise.
        timeout: Time limit in seconds of each `run_code` of this object.
        setup_timeout: Time limit in seconds of the start of the interpreter and the setup.
        memory_limit: Maximum memory that its processes map together; 4 GiB if not set.
        storage_limit: Maximum bytes of files that a sandbox writes; 1 GiB if not set.

    Raises:
        OpenError: There is no such interpreter, or this host cannot run Linux guests; the error names what the host
            forbids, and what to allow.
        ProgramError: The setup raised an error.
        TimeLimitError: The interpreter or its setup was not ready in time.

    >>> import afresh
    >>> warm = afresh.linux("python3", setup="import json, os")
    >>> with warm.sandbox(timeout=30) as sb:
    ...     _ = sb.run_code("x = 20")
    ...     clean = sb.checkpoint()
    ...     _ = sb.run_code("x = 0; os.remove('/etc/hosts')")
    ...     _ = sb.rollback(clean)
    ...     sb.eval("x + 1"), sb.commands.run("echo hello | tr a-z A-Z").stdout
    (21, 'HELLO\\n')
    """
    executable, own = _interpreter(os.fspath(program))
    given = options(
        dirs=dirs,
        net=net,
        env={**_environment(executable, own), **(env or {})},
        memory_limit=memory_limit,
        storage_limit=storage_limit,
        start=setup_timeout,
    )
    if cwd is None:
        cwd = here(given["dirs"])
    given["dirs"] += own
    return _opened(executable, given, language="python", cwd=cwd, setup=setup, cache=None, timeout=timeout)


def image(
    reference: str | os.PathLike[str],
    *,
    language: str = "python",
    setup: str | None = None,
    dirs: Iterable[str | os.PathLike[str]] = (),
    net: Iterable[str | Mapping[str, Any]] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    setup_timeout: float = _START,
    memory_limit: int | str | None = None,
    storage_limit: int | str | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Warm:
    """Warms up the interpreter of a container image, as `linux` does with one of the host.

    Args:
        reference: ``oci://REGISTRY/NAME:TAG``, a directory in the OCI layout, or a tar of one or of ``docker save``,
            with ``@NAME`` behind it where it holds several.
        language: ``"python"``: the image must have ``python3`` in its PATH.
        cache: The directory for fetched images; if not set, what `cache_dir` says.

    The other arguments are as for `linux`; ``dirs`` are host directories that the image sees in addition to its own.
    """
    text = os.fspath(reference)
    if not text.startswith("oci://") and not os.path.exists(text) and not os.path.exists(text.rpartition("@")[0]):
        raise OpenError(
            f"there is no image at {text!r}: give oci://REGISTRY/NAME:TAG, a directory in the OCI layout, or a tar"
        )
    given = options(
        dirs=dirs, net=net, env=env, memory_limit=memory_limit, storage_limit=storage_limit, start=setup_timeout
    )
    if cwd is None:
        cwd = here(given["dirs"])
    return _opened(text, given, language=language, cwd=cwd, setup=setup, cache=cache, timeout=timeout)
