# The guest's half of Python as a Linux program: it follows `cells.py` in the same module, reads
# requests from its first standard input, each after its length, and writes frames to `/dev/host`,
# each after its length. The reply of a tool comes through that input as well. It also runs
# commands. Output of either goes to its standard streams: the host reads both, and can attribute
# the output, because each command leads a session.
#
# Promises: each request gets one answer, in one frame; the end of each command is reported once, in
# a frame during a request or between two. Processes that code or a command leaves running continue.
# Output of terminals is reported in frames, between two requests. May break it: a process made by
# `os.fork` that reads the requests' descriptor.

import _thread
import base64
import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import struct
import subprocess
import termios

# A request kind in addition to those of the driver: an operation on commands, whose source is the
# input of `_command`.
COMMAND = 6
# A frame: a command has ended. Its number and its status follow.
ENDED = 5
# A frame: a command's terminal shows something. Its number and the bytes follow.
TERMINAL_OUTPUT = 7

_HOST = os.open("/dev/host", os.O_WRONLY | os.O_CLOEXEC)
# Requests come through here. Descriptor 0 is empty, for code that reads standard input and for its
# child processes.
_REQUESTS = os.dup(0)
_null = os.open("/dev/null", os.O_RDONLY)
os.dup2(_null, 0)
os.close(_null)
# Held by the thread that reads requests: the first one between two evaluations, and any that waits
# for a tool.
_reading = _thread.allocate_lock()
_PROCESS = os.getpid()
# Bytes of the first read of a request, which is all of most, and maximum bytes of another one.
_FIRST = 4096
_PART = 1 << 18
# Bytes of requests that were read and not used.
_unused = b""


def _exactly(length):
    """So many bytes of the requests; None at their end."""
    global _unused
    data = bytearray(_unused)
    _unused = b""
    while len(data) < length:
        piece = os.read(_REQUESTS, min(max(length - len(data), _FIRST), _PART))
        if not piece:
            return None
        data += piece
    _unused = bytes(data[length:])
    return bytes(data[:length])


def _message():
    """A message from the host; None at their end."""
    head = _exactly(4)
    return None if head is None else _exactly(int.from_bytes(head, "little"))


# Maximum bytes of a frame, as in `frame.rs`.
_MAX_FRAME = 64 << 20
# Seconds that a command has to read its input, before it gets more.
_PATIENCE = 5
# Running commands by number, with their requests.
_commands = {}
# The hosts' ends of terminals, by the numbers of the commands that have them.
_terminals = {}
# Maximum bytes of one read from a terminal, and reads of its last output when its command has
# ended.
_PIECE = 32768
_LAST = 64
# The number of reasons to delay reports of ended children: a frame is being sent, or a command has
# no number yet.
_held = 0
# Whether a command may have ended since the last report.
_due = False
# A pipe that is readable after each signal, if no code has taken its place.
_woken = os.pipe()
_set_wakeup_fd = signal.set_wakeup_fd
_is_wakeup_taken = True


@functools.wraps(_set_wakeup_fd)
def _take_wakeup_fd(*arguments, **options):
    global _is_wakeup_taken
    _is_wakeup_taken = True
    return _set_wakeup_fd(*arguments, **options)


signal.set_wakeup_fd = _take_wakeup_fd


@contextlib.contextmanager
def _alone():
    """Delays reports of ended commands until the end of the block."""
    global _held
    _held += 1
    try:
        yield
    finally:
        _held -= 1
    _tell_ended()


def _send(frame):
    """Hands a frame to the host, which does not reply."""
    if len(frame) > _MAX_FRAME:
        raise MarshalError(
            f"the value takes {len(frame)} bytes with its text, and the host accepts {_MAX_FRAME}: write it to a file"
        )
    data = memoryview(len(frame).to_bytes(4, "little") + bytes(frame))
    with _alone():
        while data:
            data = data[os.write(_HOST, data) :]
    return b""


def _ask(frame):
    """Hands a frame to the host; the reply, if it is a call of a tool."""
    if frame[0] != TOOL:
        return _send(frame)
    if os.getpid() != _PROCESS:
        raise RuntimeError("tools can be called in the first process of a sandbox, not in one made by fork")
    with _reading:
        _send(frame)
        reply = _message()
    if reply is None:
        raise ConnectionAbortedError("the host has ended the requests")
    return reply


def _show(number):
    """Hands on what a command's terminal shows: whether there was something."""
    # The end of the command may be noticed at the same time, and is reported after this.
    with _alone():
        try:
            data = os.read(_terminals[number], _PIECE)
        except BlockingIOError:
            return False
        except OSError:
            # The terminal is closed on the other side.
            data = b""
        if data:
            _send(bytes((TERMINAL_OUTPUT,)) + number.to_bytes(4, "little") + data)
        else:
            os.close(_terminals.pop(number))
        return bool(data)


def _wait():
    """Passes on what terminals show and the ends of commands until there is a request."""
    global _is_wakeup_taken
    if _is_wakeup_taken:
        # It is a system call.
        _set_wakeup_fd(_woken[1], warn_on_full_buffer=False)
        _is_wakeup_taken = False
    _tell_ended()
    # Without commands there is nothing to pass on, and the read of the request waits for it.
    while (_commands or _terminals) and not _unused:
        ready = select.select((_REQUESTS, _woken[0], *_terminals.values()), (), ())[0]
        if _woken[0] in ready:
            # A signal may have come just before the wait, where its handler is not called during
            # it.
            with contextlib.suppress(BlockingIOError):
                os.read(_woken[0], _PIECE)
            _tell_ended()
        for number, terminal in list(_terminals.items()):
            if terminal in ready:
                _show(number)
        if _REQUESTS in ready:
            return


def _hang_up(number):
    """Passes on the last output of an ended command's terminal, and closes it for all processes."""
    for _ in range(_LAST):
        if number not in _terminals or not _show(number):
            break
    if number in _terminals:
        os.close(_terminals.pop(number))


def _tell_ended(*_):
    """Reports ended commands to the host."""
    global _held, _due
    _due = True
    # A command that ends during a report calls this within it. The outer call sees `_due` then, and
    # looks again.
    while _due and not _held:
        _held += 1
        try:
            _due = False
            _report_ended()
        finally:
            _held -= 1


def _report_ended():
    for number, (process, _) in list(_commands.items()):
        status = process.poll()
        if status is not None and _commands.pop(number, None):
            _hang_up(number)
            _send(
                bytes((ENDED,))
                + number.to_bytes(4, "little")
                + status.to_bytes(4, "little", signed=True)
            )


def _resize(terminal, size):
    """Says how many rows and columns a terminal has."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def _take_terminal():
    """Makes standard input the terminal of a session, as its first process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


# `CLONE_NEWUSER`, where Python has no name for it.
_NEW_USER = 0x10000000
_ROOT_HOME = "/root"


def _unshare():
    """The function `unshare`, also for a Python older than 3.12."""
    if hasattr(os, "unshare"):
        return os.unshare
    try:
        import ctypes
    except ImportError as error:
        raise RuntimeError("commands of `root` need Python 3.12 or newer, or one with `ctypes`") from error
    function = ctypes.CDLL(None, use_errno=True).unshare

    def unshare(flags):
        if function(flags):
            raise OSError(ctypes.get_errno(), "unshare")

    return unshare


def _become_root(unshare, user, group):
    """Gives a new process the number 0, in a user namespace of its own."""
    unshare(_NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _start(wanted, as_root=False):
    """Starts a command: its number."""
    config = {name: wanted[name] for name in ("cmd", "args", "envs", "cwd") if wanted.get(name)}
    steps, envs = [], wanted.get("envs") or {}
    if as_root:
        os.makedirs(_ROOT_HOME, exist_ok=True)
        steps.append(functools.partial(_become_root, _unshare(), os.getuid(), os.getgid()))
        envs = {"HOME": _ROOT_HOME, "USER": "root", "LOGNAME": "root", **envs}
    with contextlib.ExitStack() as kept:
        streams = {"stdin": subprocess.PIPE if wanted.get("stdin") else subprocess.DEVNULL}
        if wanted.get("size"):
            ours, theirs = os.openpty()
            kept.callback(os.close, theirs)
            failed = kept.enter_context(contextlib.ExitStack())
            failed.callback(os.close, ours)
            _resize(ours, wanted["size"])
            os.set_blocking(ours, False)
            streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
            steps.append(_take_terminal)
        process = subprocess.Popen(
            [wanted["cmd"], *wanted.get("args", ())],
            cwd=wanted.get("cwd"),
            env={**os.environ, **envs},
            bufsize=0,
            start_new_session=True,
            preexec_fn=(lambda: [step() for step in steps]) if steps else None,
            **streams,
        )
        if wanted.get("size"):
            failed.pop_all()
            _terminals[process.pid] = ours
    if process.stdin:
        os.set_blocking(process.stdin.fileno(), False)
    _commands[process.pid] = (process, {"config": config, "tag": wanted.get("tag")})
    return process.pid


def _input_of(process):
    """The input descriptor or terminal of a command."""
    to = _terminals.get(process.pid)
    if to is None and process.stdin is not None and not process.stdin.closed:
        to = process.stdin.fileno()
    if to is None:
        raise ValueError("the command has no input")
    return to


def _feed(process, data):
    """Writes as much to a command's input as fits: how many bytes; None if it reads no more."""
    to, fed = _input_of(process), 0
    try:
        while fed < len(data):
            fed += os.write(to, data[fed:])
    except BlockingIOError:
        pass
    except BrokenPipeError:
        return None
    return fed


def _input(process, data):
    """Writes to a command's input, or types at its terminal."""
    to = _input_of(process)
    while data:
        with contextlib.suppress(BlockingIOError):
            data = data[os.write(to, data) :]
        if data and not select.select((), (to,), (), _PATIENCE)[1]:
            raise BlockingIOError("the command does not read its input, and no more of it fits")


def _command(wanted):
    """Does what is wanted with commands."""
    if wanted["op"] == "start":
        return _start(wanted)
    if wanted["op"] == "start as root":
        return _start(wanted, as_root=True)
    if wanted["op"] == "list":
        return [{"pid": number, **what} for number, (_, what) in _commands.items()]
    if wanted["op"] in CONTEXT_OPERATIONS:
        return CONTEXT_OPERATIONS[wanted["op"]](wanted)
    process, _ = _commands.get(wanted["pid"], (None, None))
    if process is None:
        return False
    match wanted["op"]:
        case "signal":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, wanted["signal"])
        case "input":
            _input(process, base64.b64decode(wanted["data"]))
        case "feed":
            return _feed(process, base64.b64decode(wanted["data"]))
        case "close":
            if process.stdin is not None:
                process.stdin.close()
            elif process.pid in _terminals:
                _input(process, b"\x04")
        case "resize":
            if process.pid not in _terminals:
                raise ValueError("the command has no terminal")
            _resize(_terminals[process.pid], wanted["size"])
        case other:
            raise ValueError(f"{other!r} is nothing that is done with commands")
    return True


def _run_command(data):
    """The answer to a request that is about commands."""
    tools, source, _ = HEADER.unpack_from(data)[3:]
    at = HEADER.size + tools
    out = bytearray((ANSWER,))
    try:
        result = _command(json.loads(data[at : at + source]))
        out += b"\x83\x00"
        write(out, result)
        _write_str(out, "")
    except Exception as error:
        del out[1:]
        _failed(out, error, "", "<command>")
    return bytes(out)


def serve():
    """Answers requests until the input ends."""
    global _call
    _call = _ask
    for directory in ("/tmp", "/home/user"):
        os.makedirs(directory, exist_ok=True)
    os.chdir("/home/user")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    for end in _woken:
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, _tell_ended)
    _furnish()
    _prepare_displays()
    _further[CELL] = run_cell
    _further[RUN] = run_shown
    begin_contexts()
    warm_cells()
    settle()
    _reading.acquire()
    while True:
        _wait()
        request = _message()
        if request is None:
            return
        if request[0] == COMMAND:
            with _alone():
                answer, succeeded = _run_command(request), True
                _send(answer)
        else:
            _reading.release()
            try:
                answer, succeeded = evaluate(request)
            finally:
                # A thread that waits for a tool has its reply first.
                _reading.acquire()
            try:
                _send(answer)
            except MarshalError as error:
                answer, succeeded = bytearray((ANSWER,)), False
                _failed(answer, error, "", "<code>")
                _send(answer)
        if request[0] == SETUP:
            if not succeeded:
                os._exit(1)
            warm_figures()
            begin_contexts()
            settle()
        del request, answer


serve()
