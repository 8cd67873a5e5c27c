"""The sockets that Jupyter clients connect to, and the messages on them."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

import zmq
from jupyter_client.session import DELIM, Session

_ROUTERS = ("shell", "control", "stdin")
# Frames of a message behind its signature: header, parent header, metadata and content.
PARTS = 4


@dataclass
class Request:
    """A message of a client."""

    channel: str
    # The frames that name the client.
    client: list[bytes]
    # Header, parent header, metadata and content as JSON, and buffers.
    parts: list[bytes]
    header: dict[str, Any]

    @property
    def id(self) -> str:
        """Its identifier."""
        return str(self.header["msg_id"])

    @property
    def kind(self) -> str:
        """Its type."""
        return str(self.header["msg_type"])

    def content(self) -> dict[str, Any]:
        """Its content."""
        found: dict[str, Any] = json.loads(self.parts[3])
        return found


def split(frames: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The frames before the delimiter, and the parts and buffers behind the signature."""
    at = frames.index(DELIM)
    return frames[:at], frames[at + 2 :]


class Channels:
    """The five sockets of a kernel, as a connection file describes them."""

    def __init__(self, connection: dict[str, Any]) -> None:
        self._session = Session(
            key=connection["key"].encode(), signature_scheme=connection.get("signature_scheme", "hmac-sha256")
        )
        context = zmq.Context.instance()
        self._poller = zmq.Poller()
        self._sockets: dict[str, Any] = {}
        for name in (*_ROUTERS, "iopub"):
            sock = context.socket(zmq.PUB if name == "iopub" else zmq.ROUTER)
            sock.linger = 1000
            sock.bind(_address(connection, f"{name}_port"))
            if name != "iopub":
                sock.router_handover = 1
                self._poller.register(sock, zmq.POLLIN)
            self._sockets[name] = sock
        beat = context.socket(zmq.REP)
        beat.linger = 0
        beat.bind(_address(connection, "hb_port"))
        threading.Thread(target=_echo, args=(beat,), daemon=True).start()

    def receive(self, timeout: float | None) -> list[Request]:
        """Requests that have come; waits so many seconds for one, or without end."""
        try:
            ready = dict(self._poller.poll(None if timeout is None else timeout * 1000))
        except InterruptedError:
            return []
        requests = []
        for name in _ROUTERS:
            sock = self._sockets[name]
            while sock in ready and sock.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                request = self._request(name, sock.recv_multipart())
                if request is not None:
                    requests.append(request)
        return requests

    def _request(self, channel: str, frames: list[bytes]) -> Request | None:
        """A message; none if it is malformed, or not signed with the key."""
        try:
            client, signed = self._session.feed_identities(frames)
            message = self._session.deserialize(signed)
            request = Request(channel, client, signed[1:], message["header"])
            return request if request.id and request.kind and isinstance(message["content"], dict) else None
        except (ValueError, TypeError, KeyError, IndexError):
            return None

    def carry(self, channel: str, before: list[bytes], parts: list[bytes]) -> None:
        """Sends a message of the kernel, signed anew; ``before`` names the client or the topic."""
        signature = self._session.sign(parts[:PARTS])
        self._sockets[channel].send_multipart([*before, DELIM, signature, *parts])

    def send(
        self, channel: str, kind: str, content: dict[str, Any], request: Request, metadata: dict[str, Any] | None = None
    ) -> None:
        """Sends a message of this process, in answer to a request."""
        before = [f"kernel.afresh.{kind}".encode()] if channel == "iopub" else request.client
        self._session.send(
            self._sockets[channel], kind, content, parent=request.header, ident=before, metadata=metadata
        )

    def close(self) -> None:
        """Closes the sockets of clients."""
        for sock in self._sockets.values():
            sock.close()


def _address(connection: dict[str, Any], port: str) -> str:
    transport = connection.get("transport", "tcp")
    between = "-" if transport == "ipc" else ":"
    return f"{transport}://{connection['ip']}{between}{connection[port]}"


def _echo(beat: Any) -> None:
    while True:
        try:
            beat.send_multipart(beat.recv_multipart())
        except zmq.ContextTerminated:
            return


def sign(key: bytes, parts: list[bytes]) -> list[bytes]:
    """The frames of a message for the kernel in the sandbox."""
    return [DELIM, Session(key=key).sign(parts[:PARTS]), *parts]
