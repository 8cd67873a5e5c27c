"""The kernel: carries messages between clients and the sandbox, keeps a state around each cell, and serves its magics.

Only one cell is in the sandbox at a time. Others wait here, so that each has a state before it and one after it.
"""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import AfreshError
from ._channels import PARTS, Channels, Request, sign, split
from ._guest import ENDED_CHANNEL, GuestKernel, Message
from ._magics import Magics
from ._states import States

# Seconds of one wait for the sandbox, while a cell runs and otherwise.
_WAIT = 0.005
_IDLE_WAIT = 0.02
# Begins the identifiers of requests of this process.
_OWN = "afresh-"
# Messages of widgets, which have no reply.
_WIDGETS = ("comm_open", "comm_msg", "comm_close")
# Requests that may change the program.
_CHANGES = ("execute_request", *_WIDGETS)


@dataclass
class _Cell:
    """The cell that runs."""

    request: Request
    source: str
    begun: float
    reply: list[bytes] | None = None
    # The topic of the message that it has ended, and the message. A client may send the next cell
    # after either.
    idle: tuple[list[bytes], list[bytes]] | None = None


class Kernel:
    """A kernel with its clients."""

    def __init__(
        self, channels: Channels, guest: GuestKernel, states: States, fork: Callable[[GuestKernel, States], str]
    ) -> None:
        self._channels = channels
        self._guest = guest
        self._states = states
        self._magics = Magics(guest, states, lambda: fork(guest.fork(), states.copy()))
        self._queue: deque[Request] = deque()
        # Requests in the sandbox, by identifier, and those of them that a checkpoint waits for.
        self._clients: dict[str, Request] = {}
        self._unanswered: set[str] = set()
        self._cell: _Cell | None = None
        self._goes_on = True
        self._closing = False
        self.interrupted = False

    def run(self) -> None:
        """Serves clients until one shuts the kernel down, or the kernel exits."""
        try:
            while not self._closing:
                timeout = 0.0 if self._goes_on or self.interrupted else None
                for request in self._channels.receive(timeout):
                    self._take(request)
                self._interrupt()
                self._next()
                if not self._closing:
                    self._guarded(self._turn)
        finally:
            self._channels.close()
            self._guest.close()

    # Clients

    def _take(self, request: Request) -> None:
        if request.kind == "shutdown_request":
            restart = bool(request.content().get("restart"))
            self._channels.send(request.channel, "shutdown_reply", {"status": "ok", "restart": restart}, request)
            self._closing = True
        elif request.channel == "shell" and not request.header.get("subshell_id"):
            self._queue.append(request)
        else:
            self._forward(request)

    def _interrupt(self) -> None:
        """Passes on a signal that this process got."""
        if self.interrupted:
            self.interrupted = False
            self._request("control", "interrupt_request", {})

    def register(self, code: str) -> None:
        """Runs code of this process in the sandbox, before the first cell."""
        content = {"code": code, "silent": True, "store_history": False, "allow_stdin": False}
        self._unanswered.add(self._request("shell", "execute_request", content))

    def _request(self, channel: str, kind: str, content: dict[str, Any]) -> str:
        """Sends a request of this process to the sandbox; its identifier."""
        header = {"msg_id": f"{_OWN}{secrets.token_hex(8)}", "msg_type": kind, "session": _OWN, "username": ""}
        header |= {"date": "1970-01-01T00:00:00Z", "version": "5.3"}
        parts = [json.dumps(header).encode(), b"{}", b"{}", json.dumps(content).encode()]
        self._guest.send(channel, sign(self._guest.key, parts))
        self._goes_on = True
        return header["msg_id"]

    def _forward(self, request: Request, parts: list[bytes] | None = None) -> None:
        """Passes a message to the sandbox."""
        if request.channel != "stdin":
            self._clients[request.id] = request
        if request.channel == "shell":
            self._unanswered.add(request.id)
        self._guest.send(request.channel, sign(self._guest.key, parts or request.parts))
        self._goes_on = True
        # Completion and inspection are not worth a state.
        self._states.dirty |= request.kind in _CHANGES

    def _next(self) -> None:
        """Passes on requests that wait, up to the next cell."""
        while self._queue and self._cell is None and not self._closing:
            kept = _is_kept(self._queue[0])
            if kept and self._unanswered:
                return
            request = self._queue.popleft()
            if kept:
                self._guarded(functools.partial(self._begin, request), request)
            else:
                self._forward(request)

    def _begin(self, request: Request) -> None:
        """Serves the magics at the head of a cell, and runs the rest."""
        self._settle()
        if self._closing:
            return
        content = request.content()
        magics, rest = self._magics.split(str(content.get("code", "")))
        if magics and not self._served(request, magics, final=not rest.strip()):
            return
        if magics and not rest.strip():
            return
        content["code"] = rest
        parts = list(request.parts)
        if magics:
            parts[3] = json.dumps(content).encode()
        self._states.begin(self._guest, rest)
        self._cell = _Cell(request, rest, time.monotonic())
        self._forward(request, parts)

    def _served(self, request: Request, magics: list[str], *, final: bool) -> bool:
        """Serves magics; ``final`` if no code follows. Whether they succeeded."""
        self._channels.send("iopub", "status", {"execution_state": "busy"}, request)
        number = self._states.count + 1
        self._channels.send("iopub", "execute_input", {"code": "\n".join(magics), "execution_count": number}, request)
        try:
            for line in magics:
                for kind, output in self._magics.serve(line):
                    self._channels.send("iopub", kind, output, request)
        except (ValueError, AfreshError) as error:
            self._failed(request, type(error).__name__, str(error))
            return False
        if final:
            reply = {"status": "ok", "execution_count": number, "user_expressions": {}, "payload": []}
            self._channels.send("shell", "execute_reply", reply, request)
            self._channels.send("iopub", "status", {"execution_state": "idle"}, request)
        return True

    def _failed(self, request: Request, name: str, text: str) -> None:
        """Answers a cell with an error."""
        waiting = self._waiting(request.content())
        error = {"ename": name, "evalue": text, "traceback": [f"{name}: {text}"]}
        self._channels.send("iopub", "error", error, request)
        reply = {"status": "error", "execution_count": self._states.count + 1, **error}
        self._channels.send("shell", "execute_reply", reply, request)
        self._channels.send("iopub", "status", {"execution_state": "idle"}, request)
        self._abort(waiting)

    def _waiting(self, failed: dict[str, Any]) -> list[Request]:
        """Takes the cells that wait behind a failed one, which stops them if its content says so.

        They have to be taken before its reply: a client that knows of the error sends cells that run.
        """
        if not failed.get("stop_on_error", True):
            return []
        for request in self._channels.receive(0):
            self._take(request)
        waiting = [request for request in self._queue if request.kind == "execute_request"]
        self._queue = deque(request for request in self._queue if request.kind != "execute_request")
        return waiting

    def _abort(self, waiting: list[Request]) -> None:
        """Aborts cells, as ipykernel does."""
        for request in waiting:
            self._channels.send("iopub", "status", {"execution_state": "busy"}, request)
            reply = {"status": "aborted", "execution_count": self._states.count}
            self._channels.send("shell", "execute_reply", reply, request, {"status": "aborted"})
            self._channels.send("iopub", "status", {"execution_state": "idle"}, request)

    # The sandbox

    def _guarded(self, work: Callable[[], object], begun: Request | None = None) -> None:
        """Does work with the sandbox, and restores a state if the sandbox or the kernel in it ends.

        That fails the present cell, or the request that the work begins.
        """
        try:
            work()
        except AfreshError as error:
            self._restore(str(self._guest.sandbox.failed or error), begun)

    def _turn(self) -> None:
        messages, self._goes_on = self._guest.turn(_IDLE_WAIT if self._cell is None else _WAIT)
        for message in messages:
            self._carry(message)
        if self._cell is not None and self._cell.reply is not None and self._cell.idle is not None:
            self._end(self._cell)

    def _settle(self) -> None:
        for message in self._guest.settle():
            self._carry(message)

    def _carry(self, message: Message) -> None:
        """Passes a message of the sandbox to its client."""
        channel, frames = message
        if channel == ENDED_CHANNEL:
            self._ended(int(frames[0]))
            return
        before, parts = split(frames)
        parent = json.loads(parts[1])
        answered = str(parent.get("msg_id", ""))
        if answered.startswith(_OWN):
            if channel != "iopub":
                self._unanswered.discard(answered)
            return
        request = self._clients.get(answered)
        if self._states.moves:
            # The kernel counts its messages, and a rollback turns the counter back.
            header = json.loads(parts[0])
            header["msg_id"] = f"{header['msg_id']}_{self._states.moves}"
            parts[0] = json.dumps(header).encode()
        if channel == "iopub":
            if self._cell is not None and request is self._cell.request and _state(parts) == "idle":
                self._cell.idle = before, parts
            else:
                self._channels.carry(channel, before, parts)
                if request is not None and request.kind in _WIDGETS and _state(parts) == "idle":
                    # The next cell may begin.
                    self._clients.pop(request.id, None)
                    self._unanswered.discard(request.id)
        elif request is None:
            return
        elif channel == "stdin":
            self._channels.carry(channel, request.client, parts)
        elif self._cell is not None and request is self._cell.request:
            # Held back until the state after the cell is kept.
            self._cell.reply = parts
        else:
            self._answer(request, parts)

    def _answer(self, request: Request, parts: list[bytes]) -> None:
        self._channels.carry(request.channel, request.client, parts)
        self._clients.pop(request.id, None)
        self._unanswered.discard(request.id)

    def _end(self, cell: _Cell) -> None:
        """Keeps the state after a cell, and answers it with its cost."""
        assert cell.reply is not None
        assert cell.idle is not None
        seconds = time.monotonic() - cell.begun
        parts, self._cell = cell.reply, None
        content = json.loads(parts[3])
        self._states.count = int(content.get("execution_count", self._states.count))
        self._settle()
        if not self._closing:
            cost = self._states.end(self._guest, cell.source, seconds)
            metadata = json.loads(parts[2])
            metadata["afresh"] = {"seconds": round(cost.seconds, 6), "pages": cost.pages}
            parts[2] = json.dumps(metadata).encode()
        failed = content.get("status") == "error"
        waiting = self._waiting(cell.request.content()) if failed else []
        self._answer(cell.request, parts)
        self._channels.carry("iopub", *cell.idle)
        self._abort(waiting)

    def _ended(self, status: int) -> None:
        if status == 0 and self._cell is None:
            # `exit` in a cell.
            self._closing = True
        else:
            raise AfreshError(f"the kernel process ended with the status {status}")

    def _restore(self, why: str, begun: Request | None) -> None:
        cell, self._cell = self._cell, None
        self._clients.clear()
        self._unanswered.clear()
        restored = self._states.restore(self._guest)
        self._goes_on = True
        if cell is not None:
            begun = cell.request
        if begun is not None:
            self._failed(begun, "KernelEnded", f"{why}; {restored}")


def _is_kept(request: Request) -> bool:
    """Whether a request is a cell with states around it: no silent execution of a front end."""
    if request.kind != "execute_request":
        return False
    content = request.content()
    return bool(content.get("store_history", True)) and not content.get("silent", False)


def _state(parts: list[bytes]) -> str | None:
    """The execution state that a message reports."""
    assert len(parts) >= PARTS
    if json.loads(parts[0]).get("msg_type") != "status":
        return None
    state: str = json.loads(parts[3]).get("execution_state", "")
    return state
