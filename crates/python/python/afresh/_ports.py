"""Connections to programs that listen within a sandbox of a Linux program, and HTTP over them."""

from __future__ import annotations

import io
import json as _json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _arguments, _native
from ._call_threads import waiting
from ._process import Away, default_timeout
from .errors import SessionError, TimeLimitError

# Maximum bytes of one exchange.
_PIECE = 64 << 10
# Seconds of one wait for background work.
_WAIT = 0.05
# Seconds for a connection and its requests, where nothing else is set.
_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response from within a sandbox.

    Attributes:
        status: Its status code.
        headers: Its headers; of those with the same name, the last one.
        content: Its body.
    """

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """Its body as text."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Its body, read as JSON."""
        return _json.loads(self.content)


class PortConnection:
    """A connection to a program that listens within a sandbox. A rollback or a fork ends it."""

    def __init__(
        self,
        session: _native.Session,
        port: int,
        timeout: float,
        stopper: _native.Stopper | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self._session = session
        self._stopper = stopper
        self._port = port
        self._timeout = timeout
        # Whether bytes have passed since the sandbox ran.
        self._moved = False
        until = time.monotonic() + timeout
        # The end of all operations together.
        self._end = time.monotonic() + timeout if whole else math.inf
        _native.begin_wait(session)
        goes_on = True
        while True:
            connection = _native.dial(session, port)
            if connection is not None:
                self._connection = connection
                self._moved = True
                return
            if not goes_on:
                raise SessionError(
                    f"nothing listens on port {port} of the sandbox, and no process in it is about to: start a server, "
                    "on 127.0.0.1 or all addresses"
                )
            # The program may be about to listen.
            goes_on = self._proceed(until)

    def __enter__(self) -> PortConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _proceed(self, until: float) -> bool:
        """Lets the sandbox run for a moment; whether it may do something by itself afterwards."""
        left = min(until, self._end) - time.monotonic()
        if left <= 0:
            raise TimeLimitError(
                f"port {self._port} of the sandbox took no connection or gave no answer within {self._timeout} s"
            )
        moved, self._moved = self._moved, False
        with waiting():
            return _native.drive(self._session, min(_WAIT, left), self._stopper, moved)

    def _exchange(self, data: bytes, room: int) -> tuple[int, bytes, bool]:
        taken, given, ended = _native.exchange(self._session, self._connection, data, room)
        self._moved |= taken > 0 or bool(given)
        return taken, given, ended

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all bytes."""
        given = bytes(data)
        at, until = 0, time.monotonic() + self._timeout
        goes_on = True
        while at < len(given):
            taken, _, _ = self._exchange(given[at : at + _PIECE], 0)
            at += taken
            if taken == 0:
                if not goes_on:
                    raise SessionError(f"the program on port {self._port} of the sandbox does not read the connection")
                goes_on = self._proceed(until)

    def recv(self, size: int = _PIECE) -> bytes:
        """The next bytes, at most ``size``; none at the end."""
        until = time.monotonic() + self._timeout
        goes_on = True
        while True:
            _, given, ended = self._exchange(b"", min(size, _PIECE))
            if given or ended:
                return given
            if not goes_on:
                raise SessionError(f"the program on port {self._port} of the sandbox does not answer: it waits itself")
            goes_on = self._proceed(until)

    def shutdown(self) -> None:
        """Sends no more."""
        _native.hang_up(self._session, self._connection, False)
        self._moved = True

    def close(self) -> None:
        """Closes the connection."""
        try:
            _native.hang_up(self._session, self._connection, True)
        except SessionError:
            # The sandbox is closed, failed, or in another state: the connection has ended.
            return

    def makefile(self, *_: object, **__: object) -> io.BufferedReader:
        """A file that reads from it, as HTTP clients want one."""
        return io.BufferedReader(_Reader(self), _PIECE)


class _Reader(io.RawIOBase):
    def __init__(self, connection: PortConnection) -> None:
        self._connection = connection

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer; how many bytes."""
        data = self._connection.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def request(
    session: _native.Session,
    port: int,
    method: str,
    path: str,
    *,
    body: bytes | str | None,
    json: Any,
    headers: Mapping[str, str] | None,
    timeout: float | None,
    stopper: _native.Stopper | None = None,
) -> Response:
    """Makes one request in a new connection."""
    # Its import takes a tenth of the whole package's.
    import http.client  # noqa: PLC0415

    given = dict(headers or {})
    data = body.encode() if isinstance(body, str) else body
    if json is not None:
        if data is not None:
            raise ValueError("a request has a body or JSON, not both")
        data = _json.dumps(json).encode()
        given.setdefault("Content-Type", "application/json")
    given.setdefault("Connection", "close")
    limit = default_timeout(session, timeout)
    with PortConnection(session, port, _TIMEOUT if limit is None else limit, stopper, whole=True) as connection:
        client = http.client.HTTPConnection("localhost", port)
        sock: Any = connection
        client.sock = sock
        try:
            client.request(method, path, body=data, headers=given)
            answer = client.getresponse()
            content = answer.read(session.output_limit + 1)
            if len(content) > session.output_limit:
                raise SessionError(
                    f"the response of port {port} has more than {session.output_limit} bytes: set a larger "
                    "`output_limit` for the sandbox, or use `connect`"
                )
            return Response(answer.status, dict(answer.getheaders()), content)
        except http.client.HTTPException as error:
            raise SessionError(f"the program on port {port} of the sandbox does not speak HTTP: {error!r}") from error


class Port:
    """A port within a sandbox, made by `Sandbox.port`. The sandbox runs while a request waits for its response.

    >>> import afresh
    >>> with afresh.linux("python3").sandbox(timeout=60) as sb:
    ...     sb.files.write("/srv/index.html", "hello")
    ...     _ = sb.commands.start("python3 -m http.server 8000 --directory /srv")
    ...     answer = sb.port(8000).get("/index.html")
    ...     answer.status, answer.text
    (200, 'hello')
    """

    def __init__(self, session: _native.Session, number: int) -> None:
        self._session = session
        self._number = _arguments.port(number)

    def request(
        self,
        method: str,
        path: str = "/",
        *,
        body: bytes | str | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Response:
        """Makes an HTTP request to the program that listens there, and waits for one that is about to listen.

        Args:
            method: ``"GET"``, for instance.
            path: The path, with a query behind it.
            body: The body.
            json: The body, as a value that is sent as JSON.
            headers: Headers.
            timeout: Most seconds, if not those of a call; 60 if neither is set. A response has at most as many bytes
                as the ``output_limit`` of the sandbox.

        Raises:
            SessionError: Nothing listens there, or it speaks no HTTP.
            TimeLimitError: There was no answer in time. The sandbox can be used further.
        """
        return request(
            self._session, self._number, method, path, body=body, json=json, headers=headers, timeout=timeout
        )

    def get(
        self, path: str = "/", *, headers: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Response:
        """A request with the method GET."""
        return self.request("GET", path, headers=headers, timeout=timeout)

    def post(
        self,
        path: str = "/",
        *,
        body: bytes | str | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Response:
        """A request with the method POST."""
        return self.request("POST", path, body=body, json=json, headers=headers, timeout=timeout)

    def connect(self, timeout: float | None = None) -> PortConnection:
        """A connection for any protocol over TCP. ``timeout`` is for each of its operations."""
        limit = default_timeout(self._session, timeout)
        return PortConnection(self._session, self._number, _TIMEOUT if limit is None else limit)


class AsyncPort:
    """The asynchronous twin of `Port`."""

    def __init__(self, session: _native.Session, number: int, away: Away) -> None:
        self._session = session
        self._number = _arguments.port(number)
        self._away = away

    async def request(
        self,
        method: str,
        path: str = "/",
        *,
        body: bytes | str | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Response:
        """As `Port.request`."""
        response: Response = await self._away(
            lambda stopper: request(
                self._session,
                self._number,
                method,
                path,
                body=body,
                json=json,
                headers=headers,
                timeout=timeout,
                stopper=stopper,
            )
        )
        return response

    async def get(
        self, path: str = "/", *, headers: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Response:
        """As `Port.get`."""
        return await self.request("GET", path, headers=headers, timeout=timeout)

    async def post(
        self,
        path: str = "/",
        *,
        body: bytes | str | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Response:
        """As `Port.post`."""
        return await self.request("POST", path, body=body, json=json, headers=headers, timeout=timeout)
