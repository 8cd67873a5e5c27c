"""Warm guests: opened once, ready for any number of sandboxes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from . import _arguments, _languages, _native
from ._grants import options
from ._map import async_map_inputs, map_inputs
from ._packages import package_files
from ._result import Result, result
from ._sandbox import AsyncSandbox, Sandbox
from ._sizes import size
from ._tools import Dispatcher, Tools
from .errors import OpenError

OUTPUT = 16 << 20
RESULT = 128 << 20
# Bytes of files of a Wasm guest.
_STORAGE = 64 << 20


def cache_dir() -> Path:
    """Where compiled guests are kept between runs: ``$AFRESH_CACHE``, or ``afresh`` in the user's cache directory."""
    given = os.environ.get("AFRESH_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "afresh"


class Warm:
    """A guest in its warm state, made by `afresh.warm`, `afresh.linux`, `afresh.image` or `afresh.load`.

    Every sandbox starts from it, and so does every call of `run_code` and `call` here, whatever the last one did.
    Usable from any thread.

    >>> import afresh
    >>> js = afresh.warm("js", setup="globalThis.count = 41")
    >>> js.run_code("++count").value, js.run_code("++count").value
    (42, 42)
    """

    def __init__(self, native: _native.Warm, name: str) -> None:
        self._native = native
        self._name = name

    def __repr__(self) -> str:
        return f"<afresh.Warm {self._name!r}, a {self._native.kind}>"

    def run_code(self, code: str, *, name: str = "<sandbox>", timeout: float | None = None) -> Result:
        """Runs code from the warm state, and forgets what it did.

        ``timeout`` is the maximum seconds of this call. ``None`` keeps the limit of the warm guest. Code that runs
        longer ends with a `TimeLimitError` in the result.
        """
        return result(self._native.run(_arguments.text(code, "code"), name, _arguments.seconds(timeout)))

    def eval(self, code: str, *, timeout: float | None = None) -> Any:
        """The value that code gives from the warm state; raises what the program throws.

        ``timeout`` is as for `run_code`.
        """
        return self.run_code(code, timeout=timeout).unwrap()

    def call(self, export: str, input: bytes = b"", *, timeout: float | None = None) -> bytes:
        """Calls an export that takes and gives bytes, from the warm state, and forgets what it did.

        ``timeout`` is as for `run_code`, and its `TimeLimitError` is raised.
        """
        return self._native.call(export, input, _arguments.seconds(timeout))

    def _session(
        self,
        dispatcher: Dispatcher,
        seconds: tuple[float | None, float | None],
        memory_limit: int | str | None,
        output_limit: int | str,
        result_limit: int | str,
    ) -> _native.Session:
        names = dispatcher.names
        dispatch = dispatcher if names else None
        output, given = size(output_limit) or OUTPUT, size(result_limit) or RESULT
        timeout, cpu_limit = map(_arguments.seconds, seconds)
        return self._native.session(names, dispatch, timeout, cpu_limit, size(memory_limit), output, given)

    def sandbox(
        self,
        *,
        timeout: float | None = None,
        cpu_limit: float | None = None,
        memory_limit: int | str | None = None,
        output_limit: int | str = OUTPUT,
        result_limit: int | str = RESULT,
        tools: Tools | None = None,
    ) -> Sandbox:
        """A live guest, which starts from the warm state. Its first call makes it.

        Args:
            timeout: Maximum seconds of a call. A longer one ends with a `TimeLimitError`, and the sandbox has to be
                rolled back then. The ``timeout`` of a call replaces it.
            cpu_limit: Maximum seconds of CPU time of one call, counted as `CallCost.cpu`: time in which the guest waits
                does not count. A call that uses more ends as with ``timeout``. Commands of a Linux sandbox have no such
                limit.
            memory_limit: Maximum memory of the guest, in bytes or as text like ``"64MiB"``.
            output_limit: Maximum bytes kept of each stream; output beyond that is dropped, and the result says so.
            result_limit: Maximum memory of the Python objects made of one result, or of one tool's arguments.
            tools: Functions that programs may call by their names, as a list or as a dictionary. With a timeout they
                run on separate threads, and one that does not return in time is abandoned: it gets an ``AbandonedCall``
                exception, and its result is dropped.

        >>> import afresh
        >>> def price(item: str) -> float:
        ...     return {"apple": 0.5}[item]
        >>> with afresh.warm("js").sandbox(timeout=5, memory_limit="64MiB", tools=[price]) as sb:
        ...     sb.eval("price('apple') * 6")
        3
        """
        dispatcher = Dispatcher(tools)
        return Sandbox(self._session(dispatcher, (timeout, cpu_limit), memory_limit, output_limit, result_limit))

    def async_sandbox(
        self,
        *,
        timeout: float | None = None,
        cpu_limit: float | None = None,
        memory_limit: int | str | None = None,
        output_limit: int | str = OUTPUT,
        result_limit: int | str = RESULT,
        tools: Tools | None = None,
        executor: Executor | None = None,
    ) -> AsyncSandbox:
        """As `sandbox`, for an event loop: guests run in the threads of ``executor``, or of the package.

        At most 64 calls run at a time in threads of the package, and others wait in order. A call that waits for a tool
        or for background work is not counted. In an ``executor`` it keeps its thread, so that a tool which needs
        another of them may wait for itself. Has to be called where the event loop runs.
        """
        dispatcher = Dispatcher(tools, asyncio.get_running_loop())
        session = self._session(dispatcher, (timeout, cpu_limit), memory_limit, output_limit, result_limit)
        return AsyncSandbox(session, executor)

    def apply(
        self,
        delta: bytes,
        *,
        timeout: float | None = None,
        cpu_limit: float | None = None,
        memory_limit: int | str | None = None,
        output_limit: int | str = OUTPUT,
        result_limit: int | str = RESULT,
        tools: Tools | None = None,
    ) -> Sandbox:
        """A sandbox in the state that a delta makes of the warm state: `Sandbox.delta` since the first state made it.

        The other arguments are as for `sandbox`.
        """
        sandbox = self.sandbox(
            timeout=timeout,
            cpu_limit=cpu_limit,
            memory_limit=memory_limit,
            output_limit=output_limit,
            result_limit=result_limit,
            tools=tools,
        )
        sandbox.apply_delta(delta)
        return sandbox

    def map(
        self,
        code: str,
        inputs: Iterable[Any],
        *,
        concurrency: int | None = None,
        timeout: float | None = None,
        cpu_limit: float | None = None,
        memory_limit: int | str | None = None,
        output_limit: int | str = OUTPUT,
        result_limit: int | str = RESULT,
        tools: Tools | None = None,
    ) -> list[Result]:
        """Calls a function with each input, each time from the warm state, in several sandboxes at once.

        Args:
            code: The function, as an expression in the language of the guest. It takes one argument.
            inputs: The arguments, one for each call.
            concurrency: How many sandboxes run at a time; the number of processors if not set.

        The other arguments are as for `sandbox`. Results come in the order of the inputs. A failed call has its
        error in its own result, and the others continue.

        >>> import afresh
        >>> js = afresh.warm("js", setup="const half = (n) => { if (n % 2) throw new RangeError('odd'); return n / 2 }")
        >>> [r.value if r.error is None else r.error.name for r in js.map("half", [2, 3, 4])]
        [1, 'RangeError', 2]
        """

        def sandbox() -> Sandbox:
            return self.sandbox(
                timeout=timeout,
                cpu_limit=cpu_limit,
                memory_limit=memory_limit,
                output_limit=output_limit,
                result_limit=result_limit,
                tools=tools,
            )

        return map_inputs(sandbox, code, list(inputs), concurrency)

    async def async_map(
        self,
        code: str,
        inputs: Iterable[Any],
        *,
        concurrency: int | None = None,
        timeout: float | None = None,
        cpu_limit: float | None = None,
        memory_limit: int | str | None = None,
        output_limit: int | str = OUTPUT,
        result_limit: int | str = RESULT,
        tools: Tools | None = None,
        executor: Executor | None = None,
    ) -> list[Result]:
        """As `map`, for an event loop."""

        def sandbox() -> AsyncSandbox:
            return self.async_sandbox(
                timeout=timeout,
                cpu_limit=cpu_limit,
                memory_limit=memory_limit,
                output_limit=output_limit,
                result_limit=result_limit,
                tools=tools,
                executor=executor,
            )

        return await async_map_inputs(sandbox, code, list(inputs), concurrency)

    def save(self, to: str | os.PathLike[str]) -> str:
        """Saves the warm state as a snapshot, which `afresh.load` opens anywhere; returns its id.

        ``to`` is a directory, an archive (``.afresh``), or a remote (``s3://``, ``gs://``, ``az://``, ``oci://``), with
        ``@NAME`` behind it where it has names.

        >>> import afresh, tempfile, os
        >>> folder = tempfile.TemporaryDirectory()
        >>> there = os.path.join(folder.name, "warm.afresh")
        >>> _ = afresh.warm("js", setup="globalThis.x = 20").save(there)
        >>> afresh.load(there).eval("x + 1")
        21
        >>> folder.cleanup()
        """
        return self._native.save(os.fspath(to))


def warm(
    guest: str | os.PathLike[str],
    *,
    setup: str | None = None,
    calls: Sequence[tuple[str, bytes]] = (),
    timeout: float | None = None,
    memory_limit: int | str | None = None,
    storage_limit: int | str | None = None,
    packages: Iterable[str | os.PathLike[str]] = (),
    cache: str | os.PathLike[str] | None = None,
) -> Warm:
    """Opens a guest and warms it up.

    Args:
        guest: A language (``"js"``, or ``"python"``, which is CPython with numpy and pandas, the extra
            ``afresh[python]``), the path of a Wasm module or component or of a micro-VM program, or a snapshot: a
            directory, an archive or a remote, with ``@NAME`` behind it where it has names. `linux` and `image` open
            interpreters that are Linux programs.
        setup: Code that an interpreter runs once; what it leaves is what every sandbox starts from.
        calls: Calls that warm a guest up that is no interpreter: names of exports, and the bytes that each is given.
        timeout: Time limit in seconds of each `run_code` and `call` of this object.
        memory_limit: Maximum memory for those.
        storage_limit: Maximum bytes of files of a sandbox: 64 MiB for a Wasm guest if not set, and as for `linux`
            otherwise.
        packages: Packages without compiled modules that the language ``"python"`` can import: wheels, directories,
            modules, or names of distributions that are installed here. What they need has to be given as well. They
            become files of the guest, so snapshots contain them.
        cache: Where compiled code is kept; if not set, what `cache_dir` says. The files are native code, so the
            directory must be the user's own.

    Raises:
        OpenError: The guest cannot be opened, or its warm-up failed.
        ProgramError: The setup raised an error.
    """
    return _warmed(
        guest,
        setup=setup,
        calls=calls,
        timeout=timeout,
        memory_limit=memory_limit,
        storage_limit=storage_limit,
        packages=packages,
        cache=cache,
        linux=options(memory_limit=memory_limit, storage_limit=storage_limit),
    )


def _warmed(
    guest: str | os.PathLike[str],
    *,
    setup: str | None,
    calls: Sequence[tuple[str, bytes]],
    timeout: float | None,
    memory_limit: int | str | None,
    storage_limit: int | str | None,
    packages: Iterable[str | os.PathLike[str]],
    cache: str | os.PathLike[str] | None,
    linux: _native.ProgramOptions,
) -> Warm:
    """Opens a guest; ``linux`` are the grants of a Linux program."""
    name = os.fspath(guest)
    language = _languages.find(name)
    kept = os.fspath(cache) if cache is not None else str(cache_dir())
    limit, timeout = size(memory_limit), _arguments.seconds(timeout)
    precompiled = _languages.precompiled()
    storage = size(storage_limit)
    imports = package_files(packages, storage or _STORAGE)
    if imports and (language is None or language.name != "python"):
        raise ValueError(f"{name!r} imports no packages: the language 'python' does, and snapshots contain theirs")

    def opened(setup: str | None) -> Warm:
        if language is None:
            warm_up = list(calls)
            if setup is not None:
                warm_up.append(_languages.setup_call(setup))
            below = _languages.python_below()
            with _languages.announcing(name, Path(kept)):
                native = _native.Warm.open(
                    name,
                    None,
                    warm_up,
                    kept,
                    limit,
                    timeout,
                    OUTPUT,
                    RESULT,
                    None,
                    {"below": below, "files": [], "storage": storage},
                    (),
                    linux,
                    precompiled,
                    False,
                )
        else:
            wasm = language.module()
            compiled = language.announce(Path(kept))
            native = _native.Warm.open(
                language.name,
                wasm,
                language.warm_up(setup),
                kept,
                limit,
                timeout,
                OUTPUT,
                RESULT,
                language.stack,
                {"below": language.below, "files": imports, "storage": storage or _STORAGE},
                language.env,
                None,
                precompiled,
                False,
            )
            compiled()
        if storage is not None and native.kind in ("machine", "component"):
            raise ValueError(f"{name!r} has no files that a `storage_limit` could limit: leave it out")
        return Warm(native, name)

    if language is None and name.isidentifier() and not os.path.exists(name):
        raise OpenError(f"{name!r} is neither a language, which are 'js' and 'python', nor a file")
    if language is not None and calls:
        raise ValueError(f"{name!r} is a language, which is warmed up by `setup`, not by `calls`")
    try:
        return opened(setup)
    except OpenError:
        if setup is None or language is None:
            raise
        # The guest reports only that the setup failed; running it again shows why.
        with opened(None).sandbox() as again:
            again.run_code(setup, name="<setup>").unwrap()
        raise


def load(
    snapshot: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    dirs: Iterable[str | os.PathLike[str]] = (),
    net: Iterable[str | Mapping[str, Any]] = (),
    memory_limit: int | str | None = None,
    storage_limit: int | str | None = None,
) -> Warm:
    """Opens a snapshot that `Warm.save` or `Sandbox.save` made, here or on another machine.

    Pages come as they are touched, so a large one answers as soon as a small one.

    Args:
        snapshot: The snapshot.
        cache: As for `warm`.
        dirs: Host directories that a Linux program may read: at least those that it was warmed with, and that of its
            interpreter where that is no system directory. Snapshots do not contain host files.
        net: Servers that a Linux program may connect to, as for `linux`.
        memory_limit: Most memory, as for `linux`.
        storage_limit: Maximum bytes of files of a sandbox, as for `warm`. Files of the snapshot count, but one that has
            more opens, and its sandboxes keep the room that they had, up to the limit.
    """
    grants = options(dirs=dirs, net=net, memory_limit=memory_limit, storage_limit=storage_limit)
    return _warmed(
        snapshot,
        setup=None,
        calls=(),
        timeout=None,
        memory_limit=memory_limit,
        storage_limit=storage_limit,
        packages=(),
        cache=cache,
        linux=grants,
    )
