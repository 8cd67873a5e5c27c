"""The guest's half of the language ``python``: evaluates requests inside CPython.

`Language.warm_up` runs the source of `_marshal.py` and of this file in the guest once, in one module; `install` then
replaces the function behind the guest's ``turn`` export, so that a turn is a request and no source. Nothing of it runs
on the host but `request`, which the host uses to make one, and the tests.

Promises: a request is answered once, by one frame to the host, for any program; the program's names are
those of ``__main__`` and nothing of the driver is among them. May break it: a program that changes this module, which
harms only itself.

A request is a header (`HEADER`), then the names of tools and the source, its name and the arguments; names of tools and
arguments are CBOR, as are answers. Frames to the host begin with their kind: `ANSWER`, `STDOUT`, `STDERR`, `TOOL`.
"""

from __future__ import annotations

import ast
import builtins
import gc
import io
import keyword
import linecache
import struct
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

if __name__ != "_afresh":
    # In the guest both files are one module.
    from ._marshal import MarshalError, _write_dict, _write_list, _write_str, read, shown, write

# The kind of a request: run source, a module, a function with arguments, or a setup, which has to
# succeed.
RUN, MODULE, APPLY, SETUP = 0, 1, 2, 4
ANSWER, STDOUT, STDERR, TOOL = 0, 1, 2, 3

# The kind of request, the clone's number, its entropy, and the lengths of tools, source and name.
HEADER = struct.Struct("<BQ16sIII")

# Calls after which the interpreter has made a function over.
_OFTEN = 40
NONE_GIVEN = b"\x80"

_FILE = "<afresh>"
# Words that no expression begins with.
_STATEMENTS = frozenset(keyword.kwlist) - {"None", "True", "False", "not", "lambda", "await", "yield"}

_tools: dict[str, Tool] = {}
_tools_told = NONE_GIVEN
_generation = 0
_on_clone: list[Callable[[], object]] = []
# Requests of further kinds, by their kind: what runs their source under its name.
_further: dict[int, Callable[[str, str], Any]] = {}
# The program's text in such a request, by the name of the source, for tracebacks.
_texts: dict[str, str] = {}


def request(
    what: int,
    source: str,
    name: str = "<sandbox>",
    *,
    tools: bytes = NONE_GIVEN,
    arguments: bytes = NONE_GIVEN,
    generation: int = 0,
    entropy: bytes = bytes(16),
) -> bytes:
    """A request as `turn` reads it."""
    code, said = source.encode(), name.encode()
    head = HEADER.pack(what, generation, entropy, len(tools), len(code), len(said))
    return b"".join([head, tools, code, said, arguments])


def _call(frame: bytes) -> bytes:
    """Hands a frame to the host; `install` puts the guest's own function here."""
    raise ConnectionRefusedError(f"no reader accepts a frame of {len(frame)} bytes")


class ToolError(Exception):
    """A host tool failed with an error that Python has no type for."""


# Tools


class Tool:
    """A host function."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls it, and gives what it returns or raises what it raises."""
        frame = bytearray((TOOL, 0x83))
        _write_str(frame, self.__name__)
        _write_list(frame, arguments, 1)
        _write_dict(frame, keywords, 1)
        answer, _ = read(_call(bytes(frame)), 0)
        if answer[0] == 0:
            return answer[1]
        raise _raised(*answer[1:])

    def __repr__(self) -> str:
        return f"<tool {self.__name__}>"


def _raised(name: str, message: str, number: int) -> Exception:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = type(name, (ToolError,), {"__module__": "afresh"})
    try:
        error: Exception = kind(message)
    except Exception:
        error = ToolError(f"{name}: {message}")
    error._afresh_number = number  # type: ignore[attr-defined]
    return error


def _offer(told: bytes) -> None:
    """Makes the host's functions known, unless they are those that are known already."""
    global _tools_told  # noqa: PLW0603
    names = read(told, 0)[0]
    # Names of the program, not builtins, which libraries use, nor this file.
    space = sys.modules["__main__"].__dict__
    for gone in [name for name in _tools if name not in names]:
        tool = _tools.pop(gone)
        if space.get(gone) is tool:
            del space[gone]
    for name in names:
        if name not in _tools:
            space[name] = _tools[name] = Tool(name)
    _tools_told = told


# Clones


def on_clone(function: Callable[[], object]) -> Callable[[], object]:
    """Registers a function to be called first in every clone: to seed the program's generators."""
    _on_clone.append(function)
    return function


def _scattered(number: int) -> int:
    """Another number of 32 bits for each."""
    number = ((number ^ (number >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    number = ((number ^ (number >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return number ^ (number >> 16)


def _begin(generation: int, entropy: bytes) -> None:
    """The first step of a clone: separate random draws."""
    global _generation  # noqa: PLW0603
    _generation = generation
    modules: dict[str, Any] = sys.modules
    random = modules.get("random")
    if random is not None:
        random.seed(int.from_bytes(entropy, "little"))
    numpy = modules.get("numpy.random")
    if numpy is not None:
        # Takes 32 bits at once, or more of them in ten times the time. No two clones of a process
        # have the same.
        numpy.seed(_scattered(generation & 0xFFFFFFFF))
    tempfile = modules.get("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None
    uuid = modules.get("uuid")
    if uuid is not None:
        uuid._node = uuid._last_timestamp = None
    for function in _on_clone:
        function()


# Evaluations


class _Out(io.RawIOBase):
    """A host stream."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Hands data to the host at once."""
        _call(bytes((self._stream,)) + bytes(data))
        return len(data)


def _stream(number: int) -> io.TextIOWrapper:
    raw: Any = _Out(number)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            # The program may have replaced the stream by any object.
            continue


def _run(source: str, name: str, space: dict[str, Any]) -> Any:
    """Runs source; the value is that of its last statement, if that is an expression."""
    word = source.split(None, 1)[:1]
    one = not ("\n" in source or ";" in source)
    if one and word and word[0] in _STATEMENTS:
        exec(compile(source, name, "exec", dont_inherit=True), space)
        return None
    if one and " = " not in source:
        try:
            return eval(compile(source, name, "eval", dont_inherit=True), space)
        except SyntaxError as error:
            # A SyntaxError of the program itself has more frames than this.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec", dont_inherit=True), space)
        return None
    tree.body.pop()
    if tree.body:
        exec(compile(tree, name, "exec", dont_inherit=True), space)
    return eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), space)


def _do(what: int, source: str, name: str, arguments: bytes) -> Any:
    if what in _further:
        return _further[what](source, name)
    space = sys.modules["__main__"].__dict__
    if what == APPLY:
        function = eval(compile(source, name, "eval", dont_inherit=True), space)
        return function(*read(arguments, 0)[0])
    if what == MODULE:
        module = types.ModuleType(name)
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
        return None
    return _run(source, name, space)


def _failed(out: bytearray, error: BaseException, source: str, name: str) -> None:
    """An exception: its type, message and traceback, and the number of the host error if it was one."""
    if isinstance(error, MarshalError):
        kind, message, told = "MarshalError", str(error), None
    else:
        begin = error.__traceback__
        while begin is not None and begin.tb_frame.f_code.co_filename == _FILE:
            begin = begin.tb_next
        text = _texts.pop(name, source)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        kind = type(error).__name__
        try:
            message = str(error)
        except Exception:
            message = "<no text>"
        try:
            told = getattr(error, "_afresh_trace", None)
            told = told or "".join(traceback.format_exception(type(error), error, begin))
        except Exception:
            told = None
    out += b"\x85\x01"
    _write_str(out, kind)
    _write_str(out, message)
    write(out, told)
    write(out, getattr(error, "_afresh_number", None))


def evaluate(data: bytes) -> tuple[bytes, bool]:
    """Does what a request says: the frame of its answer, and whether it succeeded."""
    what, generation, entropy, tools_len, source_len, name_len = HEADER.unpack_from(data)
    at = HEADER.size + tools_len
    told, name_at = data[HEADER.size : at], at + source_len
    source, name = data[at:name_at].decode(), data[name_at : name_at + name_len].decode()
    out = bytearray((ANSWER,))
    try:
        if generation != _generation:
            _begin(generation, entropy)
        if told != _tools_told:
            _offer(told)
        value = _do(what, source, name, data[name_at + name_len :])
        out += b"\x83\x00"
        write(out, value)
        _write_str(out, "" if value is None else shown(value))
        succeeded = True
    except BaseException as error:
        del out[1:]
        _failed(out, error, source, name)
        succeeded = False
    _flush()
    return bytes(out), succeeded


def _turn(source: bytes | None, _environ: object) -> tuple[int, bool]:
    """The function behind the guest's `turn`: the status of the turn, and whether it was the last."""
    if source is None:
        # There was no room for the request.
        return 1, False
    answer, succeeded = evaluate(source)
    _call(answer)
    if source[0] != SETUP:
        return 0, False
    settle()
    return int(not succeeded), False


def settle() -> None:
    """Warms the driver's code up to full speed, and hides all present objects from the collector.

    The interpreter specialises frequent code, and a collection writes to all objects that it sees: in every clone anew,
    if not now.
    """
    values = [None, True, 7, 1.5, "text", b"bytes", (1, 2), [1, "two"], {"key": [1]}, {1}]
    for _ in range(_OFTEN):
        for source in ("0", "pass", "{'a': [1]}", "if 0:\n  pass\n0"):
            code, name = source.encode(), b"<settle>"
            head = HEADER.pack(RUN, _generation, bytes(16), len(_tools_told), len(code), len(name))
            evaluate(b"".join([head, _tools_told, code, name, NONE_GIVEN]))
        out = bytearray()
        write(out, values)
        read(bytes(out), 0)
    gc.collect()
    gc.freeze()


def _furnish() -> None:
    """Makes the functions of the sandbox available to programs."""
    guest = types.ModuleType("afresh_guest", "Operations of a program on its sandbox.")
    guest.__dict__.update(on_clone=on_clone, ToolError=ToolError)
    sys.modules["afresh_guest"] = guest


def install() -> None:
    """Replaces the function behind the guest's `turn`, and its streams."""
    global _call  # noqa: PLW0603
    _call = __import__("_host").call
    sys.stdout, sys.stderr = _stream(STDOUT), _stream(STDERR)
    _furnish()

    def turn(source: bytes | None, environ: object) -> tuple[int, bool]:
        return _afresh_turn(source, environ)  # type: ignore[name-defined, no-any-return]  # noqa: F821

    reactor = sys.modules["_reactor"]
    # The guest holds the function itself, which stays; its body is ours.
    reactor.__dict__["_afresh_turn"] = _turn
    reactor.__dict__["turn"].__code__ = turn.__code__
    settle()
