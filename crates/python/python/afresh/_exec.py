"""One run of a Linux program, from its start to its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import _native
from ._call_threads import PROGRAMS
from ._cost import command_cost
from ._grants import here, options
from ._linux import find_program
from ._process import CommandResult, OnText, Streams
from ._running_call import RunningCall
from ._sizes import size
from ._warm import OUTPUT

_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": "/home/user",
    "LANG": "C.UTF-8",
}


def _run(
    command: Sequence[str],
    given: _native.ProgramOptions,
    *,
    stdin: bytes | str,
    timeout: float | None,
    output_limit: int | str,
    streams: Streams,
    stopper: _native.Stopper | None = None,
) -> CommandResult:
    if isinstance(command, str) or not command:
        raise TypeError("a command is a list of its program and its arguments: ['sh', '-c', '…'] runs a shell")
    program = find_program(command[0])
    data = stdin.encode() if isinstance(stdin, str) else bytes(stdin)
    sink = streams.sink()
    status, out, err, truncated, cost = _native.run_program(
        program, list(command[1:]), given, data, timeout, size(output_limit) or OUTPUT, sink, stopper
    )
    stdout, stderr = out.decode(errors="replace"), err.decode(errors="replace")
    return CommandResult(status, stdout, stderr, truncated, command_cost(cost, len(data)))


def _given(
    dirs: Iterable[str | os.PathLike[str]],
    net: Iterable[str | Mapping[str, Any]],
    *,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    memory_limit: int | str | None,
    storage_limit: int | str | None,
) -> _native.ProgramOptions:
    given = options(
        dirs=dirs,
        net=net,
        env={**_ENVIRONMENT, **(env or {})},
        memory_limit=memory_limit,
        storage_limit=storage_limit,
    )
    given["cwd"] = os.fspath(cwd) if cwd is not None else here(given["dirs"])
    return given


def exec(  # noqa: A001
    command: Sequence[str],
    *,
    stdin: bytes | str = b"",
    dirs: Iterable[str | os.PathLike[str]] = (),
    net: Iterable[str | Mapping[str, Any]] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    memory_limit: int | str | None = None,
    storage_limit: int | str | None = None,
    output_limit: int | str = OUTPUT,
    on_stdout: OnText | None = None,
    on_stderr: OnText | None = None,
) -> CommandResult:
    """Runs a program of the host once in a pristine sandbox, from its start to its end, as ``afresh exec`` does.

    Args:
        command: The program, by its name in PATH or its path, and its arguments.
        stdin: Its standard input.
        dirs: Host directories that it may read, at their own paths. Its changes end with it.
        net: Servers that it may connect to, as for `linux`.
        env: Environment variables in addition to PATH, HOME and LANG.
        cwd: The directory that it starts in; the present one if ``dirs`` contain it, and ``/`` otherwise.
        timeout: Time limit in seconds. A program that exceeds it is killed, with a `TimeLimitError`.
        memory_limit: Maximum memory that its processes map together; 4 GiB if not set.
        storage_limit: Maximum bytes of files that it writes; 1 GiB if not set.
        output_limit: Maximum bytes kept of each stream.
        on_stdout: Called with text of its standard output while it runs.
        on_stderr: The same for its standard error.

    Raises:
        OpenError: There is no such program, it cannot be loaded, or this host cannot run Linux guests.

    >>> import afresh
    >>> done = afresh.exec(["sh", "-c", "tr a-z A-Z; echo bad >&2; exit 3"], stdin="hello")
    >>> done.exit_code, done.stdout, done.stderr
    (3, 'HELLO', 'bad\\n')
    """
    given = _given(dirs, net, env=env, cwd=cwd, memory_limit=memory_limit, storage_limit=storage_limit)
    streams = Streams(on_stdout, on_stderr)
    return _run(command, given, stdin=stdin, timeout=timeout, output_limit=output_limit, streams=streams)


async def async_exec(
    command: Sequence[str],
    *,
    stdin: bytes | str = b"",
    dirs: Iterable[str | os.PathLike[str]] = (),
    net: Iterable[str | Mapping[str, Any]] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    memory_limit: int | str | None = None,
    storage_limit: int | str | None = None,
    output_limit: int | str = OUTPUT,
    on_stdout: OnText | None = None,
    on_stderr: OnText | None = None,
) -> CommandResult:
    """As `exec`, for an event loop. The program is killed when the task is cancelled.

    At most 64 programs run at a time, and others wait in order.
    """
    given = _given(dirs, net, env=env, cwd=cwd, memory_limit=memory_limit, storage_limit=storage_limit)
    streams = Streams(on_stdout, on_stderr, asyncio.get_running_loop())
    run = RunningCall(
        lambda stopper: _run(
            command,
            given,
            stdin=stdin,
            timeout=timeout,
            output_limit=output_limit,
            streams=streams,
            stopper=stopper,
        )
    )
    done: CommandResult = await run.run(PROGRAMS)
    return done
