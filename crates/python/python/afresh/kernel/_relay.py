"""The guest half of the kernel: runs `ipykernel`, and carries its messages over one TCP connection from the host.

This file is executed inside the sandbox, so it imports nothing of this package. The ZMQ sockets have both ends in the
sandbox and are part of each checkpoint; a rollback or a fork only ends the connection from the host, which connects
again. Messages pass unread: the host signs and parses them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from typing import Any

import zmq

CHANNELS = ("shell", "control", "stdin", "iopub")
# A message to the host without frames of ZMQ: the kernel process has ended with a status.
ENDED = len(CHANNELS)
# Bytes of a message, its channel, and the number of its frames.
HEAD = struct.Struct(">IBI")
SIZE = struct.Struct(">I")
_PIECE = 1 << 20


def packed(channel: int, frames: list[bytes]) -> bytes:
    """A message as bytes."""
    body = b"".join(SIZE.pack(len(frame)) + frame for frame in frames)
    return HEAD.pack(len(body), channel, len(frames)) + body


def unpacked(buffer: bytearray) -> tuple[int, list[bytes]] | None:
    """Takes the first message out of a buffer, if all of it is there."""
    if len(buffer) < HEAD.size:
        return None
    length, channel, count = HEAD.unpack_from(buffer)
    end = HEAD.size + length
    if len(buffer) < end:
        return None
    frames, at = [], HEAD.size
    for _ in range(count):
        (size,) = SIZE.unpack_from(buffer, at)
        at += SIZE.size
        frames.append(bytes(buffer[at : at + size]))
        at += size
    if at != end:
        raise ValueError("the frames of a message do not add up to its length")
    del buffer[:end]
    return channel, frames


class Relay:
    """Carries messages between the kernel's sockets and the present connection from the host."""

    def __init__(self, port: int, key: str, arguments: list[str]) -> None:
        folder = tempfile.mkdtemp(prefix="kernel-")
        connection: dict[str, Any] = {
            "transport": "ipc",
            "ip": f"{folder}/socket",
            "key": key,
            "signature_scheme": "hmac-sha256",
            "kernel_name": "afresh",
            "hb_port": ENDED + 1,
        }
        connection |= {f"{name}_port": number + 1 for number, name in enumerate(CHANNELS)}
        path = f"{folder}/connection.json"
        with open(path, "w") as file:
            json.dump(connection, file)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._host: socket.socket | None = None
        self._given = bytearray()
        context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets = []
        identity = os.urandom(8).hex().encode()
        for number, name in enumerate(CHANNELS):
            sock = context.socket(zmq.SUB if name == "iopub" else zmq.DEALER)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVHWM, 0)
            sock.setsockopt(zmq.SNDHWM, 0)
            if name == "iopub":
                sock.setsockopt(zmq.SUBSCRIBE, b"")
            else:
                # `input()` asks at the stdin socket with the identity of the shell socket.
                sock.setsockopt(zmq.IDENTITY, identity)
            sock.connect(f"ipc://{folder}/socket-{number + 1}")
            self._poller.register(sock, zmq.POLLIN)
            self._sockets.append(sock)
        self._poller.register(self._listener, zmq.POLLIN)
        self._kernel = subprocess.Popen([sys.executable, "-m", "ipykernel_launcher", "-f", path, *arguments])
        # Readable once the kernel has ended. No timer: a sandbox without timers is idle between two
        # cells.
        self._poller.register(os.pidfd_open(self._kernel.pid), zmq.POLLIN)

    def run(self) -> None:
        """Carries messages until the kernel has ended."""
        while True:
            status = self._kernel.poll()
            if status is not None:
                self._send(packed(ENDED, [str(status).encode()]))
                return
            ready = dict(self._poller.poll())
            for number, sock in enumerate(self._sockets):
                while sock in ready and sock.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    self._send(packed(number, sock.recv_multipart()))
            if self._host is not None and self._host.fileno() in ready:
                self._receive(self._host)
            if self._listener.fileno() in ready:
                self._accept()

    def _accept(self) -> None:
        host, _ = self._listener.accept()
        self._hang_up()
        host.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = host
        self._poller.register(host, zmq.POLLIN)

    def _hang_up(self) -> None:
        if self._host is not None:
            self._poller.unregister(self._host)
            self._host.close()
        self._host = None
        self._given.clear()

    def _receive(self, host: socket.socket) -> None:
        try:
            data = host.recv(_PIECE)
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        self._given += data
        while (message := unpacked(self._given)) is not None:
            channel, frames = message
            self._sockets[channel].send_multipart(frames)

    def _send(self, data: bytes) -> None:
        if self._host is None:
            return
        try:
            self._host.sendall(data)
        except OSError:
            self._hang_up()


if __name__ == "__main__":
    Relay(int(sys.argv[1]), sys.argv[2], sys.argv[3:]).run()
