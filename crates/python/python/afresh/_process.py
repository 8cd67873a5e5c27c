"""A command of a sandbox of a Linux program: how it is started, waited for and ended."""

from __future__ import annotations

import asyncio
import base64
import codecs
import json
import signal as signals
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeAlias

from . import _arguments, _native
from ._call_threads import waiting
from ._cost import NO_COST, CallCost, command_cost
from ._delivery import LoopDelivery, pending
from ._result import result
from .errors import AfreshError, CommandError, GuestError, ProgramError, SessionError, TimeLimitError

OnText: TypeAlias = Callable[[str], object]

# Runs work in a thread, which a cancelled task stops.
Away: TypeAlias = Callable[[Callable[[_native.Stopper], Any]], Any]

_SHELL = "/bin/sh"
_USER = "user"
# The operations that start a command, by its user.
_STARTS = {_USER: "start", "root": "start as root"}
# Exit statuses of commands that cannot be started, as those of shells, by the error.
_NOT_STARTED = {"FileNotFoundError": 127, "NotADirectoryError": 127, "PermissionError": 126, "OSError": 126}
# Seconds of one wait for background work.
_WAIT = 0.05
# Maximum bytes of input in one request.
_PIECE = 64 << 10


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    Attributes:
        exit_code: Its exit status; negative for the signal that ended it.
        stdout: Its standard output, or what its terminal showed.
        stderr: Its standard error.
        truncated: Whether it printed more than is kept.
        cost: The use of its sandbox while it ran: times, memory and bytes.
    """

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool = False
    cost: CallCost = field(default=NO_COST, compare=False)

    def check(self) -> CommandResult:
        """This result; raises a `CommandError` if the command failed."""
        if self.exit_code != 0:
            raise CommandError(self.exit_code, self.stdout, self.stderr)
        return self

    def _repr_html_(self) -> str:
        parts = [f"<pre>{escape(self.stdout)}</pre>"] if self.stdout else []
        if self.stderr:
            parts.append(f'<pre style="color:#b00">{escape(self.stderr)}</pre>')
        parts.append(f"<small>exit code {self.exit_code}</small>")
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """A running command.

    Attributes:
        pid: Its process number.
        command: Its program and arguments.
        cwd: The directory that it was started in, if it was given.
        env: The environment variables that it was given.
        tag: Its tag, if it was given.
    """

    pid: int
    command: list[str]
    cwd: str | None
    env: dict[str, str] = field(default_factory=dict)
    tag: str | None = None


class Streams:
    """Decodes the two streams of a command, and delivers text to callbacks: on an event loop, if one is given."""

    def __init__(
        self,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._on = (on_stdout, on_stderr)
        self._delivery = None if loop is None else LoopDelivery(loop)
        # Done once the event loop has caught up.
        self._caught_up: Future[None] | None = None
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2)]

    def sink(self) -> _native.Sink | None:
        """The function that takes text of the streams 1 and 2, if there are callbacks."""
        return None if self._on == (None, None) else (lambda stream, text: pending(self._deliver(stream - 1, text)))

    def take(self, stream: int, data: bytes, *, last: bool) -> str:
        """The text of the next bytes, which is delivered."""
        text = self._decoders[stream].decode(data, final=last)
        if text:
            self._caught_up = self._deliver(stream, text) or self._caught_up
        return text

    def catch_up(self, seconds: float) -> bool:
        """Waits until an event loop that is behind has called the callbacks; ``False`` if it still is behind."""
        if self._caught_up is not None:
            with waiting():
                done = wait([self._caught_up], seconds).done
            if not done:
                return False
        self._caught_up = None
        return True

    def _deliver(self, stream: int, text: str) -> Future[None] | None:
        on = self._on[stream]
        if on is None:
            return None
        if self._delivery is not None:
            return self._delivery.send(lambda: on(text), len(text))
        on(text)
        return None


def operate(session: _native.Session, stopper: _native.Stopper | None, op: str, **wanted: Any) -> Any:
    """An operation of commands, guest side: its answer."""
    return result(_native.command(session, json.dumps({"op": op, **wanted}), stopper)).unwrap()


def _damaged(what: str) -> GuestError:
    return GuestError(f"the guest side of commands gave a damaged answer to {what}: its code may have changed it")


def running(session: _native.Session, stopper: _native.Stopper | None) -> list[CommandInfo]:
    """All running commands."""
    listed = operate(session, stopper, "list")
    try:
        return [_info(one) for one in listed]
    except (TypeError, KeyError, AttributeError) as error:
        raise _damaged("a list") from error


def _info(listed: dict[str, Any]) -> CommandInfo:
    config = listed["config"]
    return CommandInfo(
        int(listed["pid"]),
        [config["cmd"], *config.get("args", [])],
        config.get("cwd"),
        config.get("envs", {}),
        listed.get("tag"),
    )


def wanted(
    command: str | Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: bool,
    size: tuple[int, int] | None = None,
    tag: str | None = None,
    user: str | None = None,
) -> dict[str, Any]:
    """The request that starts a command. Text is a line of the shell."""
    _arguments.command(command)
    words = [_SHELL, "-c", command] if isinstance(command, str) else [str(word) for word in command]
    if not words:
        raise ValueError(
            "a command is text for the shell, or a list of a program and its arguments; this list is empty"
        )
    operation = _STARTS.get(user or _USER)
    if operation is None:
        raise ValueError(f"commands run as {_USER!r} or 'root', not as {user!r}")
    return {
        "op": operation,
        "cmd": words[0],
        "args": words[1:],
        "cwd": cwd,
        "envs": _arguments.variables(env),
        "stdin": stdin,
        "size": size,
        "tag": tag,
    }


class Process:
    """A command of a sandbox: the common part of `Command` and `AsyncCommand`."""

    def __init__(self, session: _native.Session, pid: int, serial: int, streams: Streams, *, stdin: bool) -> None:
        self.session = session
        self.pid = pid
        self._serial = serial
        self._streams = streams
        self._stdin = stdin
        self._forget(0)

    def _forget(self, moves: int) -> None:
        self._moves = moves
        self._parts: tuple[list[str], list[str]] = ([], [])
        # Characters that may still be kept of each stream.
        self._room = [self.session.output_limit] * 2
        self._truncated = False
        # Bytes of output that were dropped here, and of input.
        self._dropped = self._given = 0
        self._ended: int | None = None
        self._cost = NO_COST

    @classmethod
    def start(
        cls,
        session: _native.Session,
        request: dict[str, Any],
        streams: Streams,
        stopper: _native.Stopper | None,
    ) -> Process:
        """Starts a command."""
        outcome, serial = _native.start_command(session, json.dumps(request), stopper)
        try:
            pid = result(outcome).unwrap()
        except ProgramError as error:
            if error.name == "FileNotFoundError" and repr(_SHELL) in error.message:
                raise SessionError(
                    f"the sandbox has no {_SHELL}, which runs commands that are text: give a list of a program and its "
                    "arguments, or use an image with a shell"
                ) from error
            if request["op"] == _STARTS["root"] and error.name == "KeyError":
                # The guest side takes the operation for one on a running command, and misses its
                # number.
                raise SessionError(
                    "an earlier version saved this sandbox, and it cannot run commands as 'root': run them as 'user', "
                    "or make a new sandbox"
                ) from error
            status = _NOT_STARTED.get(error.name)
            if status is not None:
                # The traceback of the guest side is nothing that a caller can correct.
                raise CommandError(status, "", error.message) from None
            raise
        if not isinstance(pid, int) or serial == 0:
            raise _damaged("a start")
        return cls(session, pid, serial, streams, stdin=bool(request["stdin"] or request["size"]))

    @classmethod
    def connect(cls, session: _native.Session, pid: int, streams: Streams, stopper: _native.Stopper | None) -> Process:
        """A command that runs already."""
        if all(info.pid != pid for info in running(session, stopper)):
            raise _gone(pid)
        return cls(session, pid, _native.adopt_command(session, pid), streams, stdin=True)

    def collect(self) -> tuple[str, str]:
        """Takes output since the last time, and delivers it."""
        taken = _native.take_output(self.session, self.pid, self._serial)
        if taken is None:
            raise _gone(self.pid)
        out, err, truncated, ended, moves = taken
        if moves != self._moves:
            self._forget(moves)
        last = ended is not None
        texts = [self._streams.take(stream, data, last=last) for stream, data in enumerate((out, err))]
        for stream, text in enumerate(texts):
            kept = text[: self._room[stream]]
            self._parts[stream].append(kept)
            self._room[stream] -= len(kept)
            self._dropped += len(text[len(kept) :].encode())
        self._truncated |= truncated or self._dropped > 0
        self._ended = ended
        spent = _native.command_cost(self.session, self.pid, self._serial) if last else None
        if spent is not None:
            self._cost = command_cost(spent, self._given, self._dropped)
        return texts[0], texts[1]

    def ended(self) -> CommandResult | None:
        """Its result, if it has ended."""
        if self._ended is None:
            return None
        out, err = ("".join(parts) for parts in self._parts)
        return CommandResult(self._ended, out, err, self._truncated, self._cost)

    def poll(self, stopper: _native.Stopper | None) -> int | None:
        """Lets the sandbox run for a slice; the exit status, if it has ended."""
        self.collect()
        if self.ended() is None:
            _native.drive(self.session, 0, stopper, True)
            self.collect()
        return self._ended

    def wait(self, timeout: float | None, stopper: _native.Stopper | None) -> CommandResult:
        """Lets the sandbox run until the command has ended."""
        _native.begin_wait(self.session)
        until = None if timeout is None else time.monotonic() + timeout
        return self.wait_until(until, timeout, stopper)

    def wait_until(self, until: float | None, timeout: float | None, stopper: _native.Stopper | None) -> CommandResult:
        """As `wait`, up to a moment."""
        while True:
            self.collect()
            done = self.ended()
            if done is not None:
                return done
            self._catch_up(until, timeout, stopper)
            if not self._slice(until, timeout, stopper):
                self._check_progress(stopper)

    def _left(self, until: float | None, timeout: float | None) -> float:
        """The seconds of the next wait."""
        left = _WAIT if until is None else min(_WAIT, until - time.monotonic())
        if left <= 0:
            raise TimeLimitError(f"the command {self.pid} ran longer than {timeout} s")
        return left

    def _catch_up(self, until: float | None, timeout: float | None, stopper: _native.Stopper | None) -> None:
        """Waits for callbacks on an event loop that is behind. The sandbox does not run meanwhile."""
        while not self._streams.catch_up(self._left(until, timeout)):
            _native.check_wait(self.session, stopper)

    def _slice(self, until: float | None, timeout: float | None, stopper: _native.Stopper | None) -> bool:
        """Lets the sandbox run for a slice; whether it may do something by itself afterwards."""
        with waiting():
            return _native.drive(self.session, self._left(until, timeout), stopper)

    def feed(
        self, data: bytes | str, until: float | None, timeout: float | None, stopper: _native.Stopper | None
    ) -> None:
        """Writes all of its input as it reads it, and ends that. Unread output is dropped."""
        given = data.encode() if isinstance(data, str) else bytes(data)
        at, goes_on = 0, True
        while at < len(given):
            piece = base64.b64encode(given[at : at + _PIECE]).decode()
            fed = operate(self.session, stopper, "feed", pid=self.pid, data=piece)
            self.collect()
            self._catch_up(until, timeout, stopper)
            if fed is None or fed is False:
                break
            if not isinstance(fed, int) or not 0 <= fed <= _PIECE:
                raise _damaged("its input")
            at += fed
            self._given += fed
            if fed == 0 and not goes_on:
                self._check_progress(stopper)
            goes_on = fed > 0 or self._slice(until, timeout, stopper)
        operate(self.session, stopper, "close", pid=self.pid)

    def _check_progress(self, stopper: _native.Stopper | None) -> None:
        """Raises an error where a wait would never end: all processes wait for the host."""
        self.collect()
        if self.ended() is not None:
            return
        if all(info.pid != self.pid for info in running(self.session, stopper)):
            self.collect()
            if self.ended() is None:
                raise _gone(self.pid)
            return
        if not _native.drive(self.session, 0, stopper):
            self.collect()
            if self.ended() is None:
                raise SessionError(
                    f"the command {self.pid} waits for something that only the host can give, such as input "
                    "(`send_stdin`, `close_stdin`) or a connection (`sandbox.port`)"
                )

    def read(self, timeout: float, stopper: _native.Stopper | None) -> str:
        """Output since the last read; waits for some."""
        _native.begin_wait(self.session)
        until = time.monotonic() + timeout
        while True:
            text = "".join(self.collect())
            left = until - time.monotonic()
            if text or self.ended() is not None or left <= 0:
                return text
            with waiting():
                goes_on = _native.drive(self.session, min(_WAIT, left), stopper)
            if not goes_on:
                return "".join(self.collect())

    def signal(self, number: int, stopper: _native.Stopper | None) -> bool:
        """Sends it and its descendants a signal; whether it still ran."""
        self.collect()
        if self.ended() is not None:
            return False
        return bool(operate(self.session, stopper, "signal", pid=self.pid, signal=int(number)))

    def kill(self) -> None:
        """Ends it, where another error is on its way already."""
        try:
            self.signal(signals.SIGKILL, None)
        except AfreshError:
            # The sandbox is closed or failed, and its processes have ended.
            return

    def send(self, data: bytes | str, stopper: _native.Stopper | None) -> None:
        """Writes to its input."""
        if not self._stdin:
            raise SessionError(f"the command {self.pid} has no input: start it with stdin=True")
        given = data.encode() if isinstance(data, str) else bytes(data)
        if not operate(self.session, stopper, "input", pid=self.pid, data=base64.b64encode(given).decode()):
            raise _gone(self.pid)
        self._given += len(given)

    def close(self, stopper: _native.Stopper | None) -> None:
        """Ends its input."""
        if not operate(self.session, stopper, "close", pid=self.pid):
            raise _gone(self.pid)

    def resize(self, rows: int, cols: int, stopper: _native.Stopper | None) -> None:
        """Sets the size of its terminal."""
        if not operate(self.session, stopper, "resize", pid=self.pid, size=[rows, cols]):
            raise _gone(self.pid)


def proceed(session: _native.Session, seconds: float, stopper: _native.Stopper | None) -> None:
    """Lets a sandbox run until all of it waits for the host, for so many seconds at most."""
    _native.begin_wait(session)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        with waiting():
            goes_on = _native.drive(session, min(_WAIT, left), stopper)
        if not goes_on:
            return


def _gone(pid: int) -> SessionError:
    return SessionError(
        f"the command {pid} does not run in this sandbox: it has ended, or the sandbox went to a state without it"
    )


def run(
    process: Process, stdin: bytes | str | None, timeout: float | None, stopper: _native.Stopper | None
) -> CommandResult:
    """Gives a command its input, and waits for it. One that is cut short is killed, and the sandbox can be used
    further.
    """
    until = None if timeout is None else time.monotonic() + timeout
    try:
        if stdin is not None:
            process.feed(stdin, until, timeout, stopper)
        return process.wait_until(until, timeout, stopper)
    except BaseException:
        process.kill()
        raise


def default_timeout(session: _native.Session, timeout: float | None) -> float | None:
    """The time limit of a command: its own, or that of the sandbox."""
    return session.timeout if timeout is None else _arguments.seconds(timeout)
