"""The sandbox of a kernel: starts it, exchanges messages with it, and moves it between states."""

from __future__ import annotations

import time
from pathlib import Path

from .. import _native
from .._ports import PortConnection
from .._sandbox import Sandbox
from .._tree import Tree
from .._warm import Warm
from ..errors import AfreshError, GuestError, OpenError
from ._relay import CHANNELS, ENDED, packed, unpacked

_PORT = 57575
_RELAY = "/tmp/.afresh-kernel.py"
_KEY = "sandbox"
_PIECE = 64 << 10
# Maximum bytes of a message from the sandbox, whose size comes from the guest.
_MAX_MESSAGE = 1 << 30
# Seconds for the start of the kernel in the sandbox.
_START_TIMEOUT = 120.0
# Seconds that the sandbox has for its remaining work before a checkpoint.
_SETTLE_TIMEOUT = 0.01

Message = tuple[str, list[bytes]]


# The channel of a message without a socket: the kernel process has ended, with the status in the
# only frame.
ENDED_CHANNEL = "ended"


class GuestKernel:
    """A kernel within a sandbox."""

    key = _KEY.encode()

    def __init__(self, sandbox: Sandbox) -> None:
        """Of a sandbox in which a kernel runs already."""
        self.sandbox = sandbox
        self.connect()

    @classmethod
    def start(cls, warm: Warm, arguments: list[str]) -> GuestKernel:
        """Starts a kernel in a new sandbox."""
        sandbox = warm.sandbox()
        sandbox.files.write(_RELAY, Path(__file__).with_name("_relay.py").read_bytes())
        executable = sandbox.eval("__import__('sys').executable")
        missing = sandbox.eval(
            "[name for name in ('ipykernel', 'zmq') if __import__('importlib.util').util.find_spec(name) is None]"
        )
        if missing:
            raise OpenError(
                f"the interpreter {executable} of the kernel has no {' and no '.join(missing)}: "
                f"run `{executable} -m pip install ipykernel`, or name another one with --python"
            )
        command = sandbox.commands.start([executable, _RELAY, str(_PORT), _KEY, *arguments])
        try:
            return cls(sandbox)
        except AfreshError as error:
            said = command.read(0)
            raise OpenError(f"the kernel does not start in its sandbox: {error}\n{said}") from error

    def connect(self) -> None:
        """Connects to the relay, at the start and after each change of state."""
        self._connection = PortConnection(self.sandbox._session, _PORT, _START_TIMEOUT)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        # Whether bytes have passed since the sandbox ran.
        self._moved = True

    def send(self, channel: str, frames: list[bytes]) -> None:
        """Sends a message to a socket of the kernel, with the next `turn`."""
        self._outgoing += packed(CHANNELS.index(channel), frames)

    def turn(self, wait: float) -> tuple[list[Message], bool]:
        """Lets the sandbox run for a slice, which begins within ``wait`` seconds.

        Returns the messages that it sent, and whether something may still happen by itself.
        """
        self._exchange()
        moved, self._moved = self._moved, False
        goes_on = _native.drive(self.sandbox._session, wait, None, moved)
        self._exchange()
        return self._messages(), goes_on or self._moved or bool(self._outgoing)

    def _exchange(self) -> None:
        while True:
            piece = bytes(self._outgoing[:_PIECE])
            taken, given, ended = _native.exchange(self.sandbox._session, self._connection._connection, piece, _PIECE)
            del self._outgoing[:taken]
            self._incoming += given
            if not taken and not given:
                if ended and not self._incoming:
                    raise GuestError("the relay of the kernel in the sandbox has ended")
                return
            self._moved = True

    def _messages(self) -> list[Message]:
        messages = []
        while (message := unpacked(self._incoming)) is not None:
            channel, frames = message
            messages.append((ENDED_CHANNEL if channel == ENDED else CHANNELS[channel], frames))
        if len(self._incoming) > _MAX_MESSAGE:
            raise AfreshError(f"the kernel in the sandbox sent a message of more than {_MAX_MESSAGE} bytes")
        return messages

    def settle(self) -> list[Message]:
        """Lets remaining work of the sandbox end, so that a checkpoint has no message under way."""
        until = time.monotonic() + _SETTLE_TIMEOUT
        messages: list[Message] = []
        while True:
            more, goes_on = self.turn(0)
            messages += more
            if not goes_on or (time.monotonic() >= until and not self._outgoing):
                return messages

    def checkpoint(self, name: str = "") -> _native.Checkpoint:
        """Keeps the present state."""
        return self.sandbox.checkpoint(name)

    def rollback(self, to: _native.Checkpoint | str) -> _native.Checkpoint:
        """Goes to a state."""
        reached = self.sandbox.rollback(to)
        self.connect()
        return reached

    def fork(self) -> GuestKernel:
        """A second kernel in the present state."""
        (sandbox,) = self.sandbox.fork()
        return GuestKernel(sandbox)

    def tree(self) -> Tree:
        """All states."""
        return self.sandbox.tree()

    def pages(self, before: _native.Checkpoint, after: _native.Checkpoint) -> int:
        """How many memory pages differ between two states."""
        return self.sandbox.diff(before, after).pages

    def drop(self, checkpoint: _native.Checkpoint) -> None:
        """Forgets a state."""
        self.sandbox.drop(checkpoint)

    def close(self) -> None:
        """Ends the sandbox."""
        self.sandbox.close()
