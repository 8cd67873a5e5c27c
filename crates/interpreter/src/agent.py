# The guest's half of Python as a Linux program: it follows `driver.py` in the same module, reads requests from standard
# input, each after its length, and writes frames to `/dev/host`, each after its length. Besides code it runs commands. What either
# prints, it prints: the host hears both streams.
#
# What it promises: a request is answered once, by one frame; what code or a command has left running has ended by then, for a
# program with children cannot be frozen.

import contextlib
import json
import os
import signal
import subprocess

# What a request wants besides what the driver knows: a command, its source being what `_command` reads.
COMMAND = 6

_HOST = os.open("/dev/host", os.O_WRONLY | os.O_CLOEXEC)


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
        data = data[os.write(_HOST, data) :]
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


def _command(wanted):
    """Runs a command to its end: its status, negative for a signal, or None where its time was over."""
    process = subprocess.Popen(
        [wanted["cmd"], *wanted.get("args", ())],
        cwd=wanted.get("cwd"),
        env={**os.environ, **wanted.get("envs", {})},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(wanted.get("timeout"))
    except subprocess.TimeoutExpired:
        return None


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
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
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
