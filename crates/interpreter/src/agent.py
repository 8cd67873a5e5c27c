# The guest's half of Python as a Linux program: it follows `driver.py` in the same module, reads requests from standard
# input, each after its length, and writes frames to standard output, each after its length. Besides code it runs commands.
#
# What it promises: a request is answered once, by one frame; what code or a command has left running has ended by then, for a
# program with children cannot be frozen.

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time

# What a request wants besides what the driver knows: a command, its source being what `_command` reads.
COMMAND = 6

_PIECE = 32 << 10
# Seconds between two looks at whether a command has ended, while it says nothing.
_LOOK = 0.05


def _exactly(length):
    """So many bytes of the input; None at its end."""
    data = b""
    while len(data) < length:
        piece = os.read(0, length - len(data))
        if not piece:
            return None
        data += piece
    return data


def _send(frame):
    """Hands a frame to the host, which says nothing to it."""
    data = memoryview(len(frame).to_bytes(4, "little") + bytes(frame))
    while data:
        data = data[os.write(1, data) :]
    return b""


def _end_children():
    """Ends whatever else runs."""
    while True:
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _tell(ready):
    """Tells what there is to read; the streams that have ended."""
    ended = []
    for key, _ in ready:
        piece = os.read(key.fd, _PIECE)
        if piece:
            _call(bytes((key.data,)) + piece)
        else:
            ended.append(key.fileobj)
    return ended


def _command(wanted):
    """Runs a command to its end: its status, negative for a signal, or None where its time was over."""
    until = time.monotonic() + wanted["timeout"] if wanted.get("timeout") else None
    process = subprocess.Popen(
        [wanted["cmd"], *wanted.get("args", ())],
        cwd=wanted.get("cwd"),
        env={**os.environ, **wanted.get("envs", {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, STDOUT)
        selector.register(process.stderr, selectors.EVENT_READ, STDERR)
        # It has ended when it has, whatever it leaves behind that could still write.
        while process.poll() is None:
            if until is not None and time.monotonic() >= until:
                return None
            if not selector.get_map():
                time.sleep(_LOOK)
            for ended in _tell(selector.select(_LOOK)):
                selector.unregister(ended)
        while ready := selector.select(0):
            for ended in _tell(ready):
                selector.unregister(ended)
    return process.returncode


def _run_command(data):
    """The answer to a request for a command."""
    tools, source, _ = HEADER.unpack_from(data)[3:]
    at = HEADER.size + tools
    out = bytearray((ANSWER,))
    try:
        status = _command(json.loads(data[at : at + source]))
        out += b"\x83\x00"
        write(out, status)
        _write_str(out, "")
    except Exception as error:
        del out[1:]
        _failed(out, error, "", "<command>")
    return bytes(out)


def serve():
    """Answers requests until the input ends."""
    global _call
    _call = _send
    for directory in ("/tmp", "/home/user"):
        os.makedirs(directory, exist_ok=True)
    os.chdir("/home/user")
    _furnish()
    settle()
    while True:
        head = _exactly(4)
        if head is None:
            return
        request = _exactly(int.from_bytes(head, "little"))
        if request is None:
            return
        if request[0] == COMMAND:
            answer, succeeded = _run_command(request), True
        else:
            answer, succeeded = evaluate(request)
        _end_children()
        _send(answer)
        if request[0] == SETUP:
            if not succeeded:
                os._exit(1)
            settle()
        del request, answer


serve()
