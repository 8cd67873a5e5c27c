"""A backend for Deep Agents: ``create_deep_agent(model, backend=SandboxBackend(warm))``.

Commands and files of the agent are those of one sandbox of a Linux program.
"""

from __future__ import annotations

import itertools
import threading

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from ._agent import CALL_TIMEOUT, absolute
from ._sandbox import Sandbox
from ._warm import Warm
from .errors import AfreshError, TimeLimitError

__all__ = ["SandboxBackend"]

_numbers = itertools.count(1)
# The exit code of the command `timeout`.
_TIMED_OUT = 124


class SandboxBackend(BaseSandbox):  # type: ignore[misc]
    """A sandbox of a Linux program as the backend of an agent.

    Args:
        warm: The guest that it starts from: `afresh.linux` or `afresh.image`, with ``python3`` in its PATH.
        timeout: Time limit in seconds of a command, if the agent names no other.
        memory_limit: Maximum memory of the sandbox.
    """

    def __init__(
        self, warm: Warm, *, timeout: float | None = CALL_TIMEOUT, memory_limit: int | str | None = None
    ) -> None:
        self._timeout = timeout
        self._sandbox = warm.sandbox(memory_limit=memory_limit)
        self._number = next(_numbers)
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        """Its identifier in this process."""
        return f"afresh-{self._number}"

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox, to take checkpoints of and to fork."""
        return self._sandbox

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a shell command to its end. A timeout of 0 means no limit."""
        limit = self._timeout if timeout is None else timeout or None
        with self._lock:
            try:
                done = self._sandbox.commands.run(command, timeout=limit)
            except TimeLimitError as error:
                return ExecuteResponse(output=f"error: {error}", exit_code=_TIMED_OUT)
        # The agent reads both streams as one.
        return ExecuteResponse(output=done.stdout + done.stderr, exit_code=done.exit_code, truncated=done.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Writes files."""
        with self._lock:
            return [FileUploadResponse(path=path, error=self._write(path, data)) for path, data in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Reads files."""
        with self._lock:
            return [self._read(path) for path in paths]

    def close(self) -> None:
        """Ends the sandbox."""
        self._sandbox.close()

    def _kind(self, path: str) -> str | None:
        files = self._sandbox.files
        return files.stat(path).kind if files.exists(path) else None

    def _write(self, path: str, data: bytes) -> str | None:
        if not path.startswith("/"):
            return "invalid_path"
        if self._kind(path) == "directory":
            return "is_directory"
        try:
            self._sandbox.files.write(path, data)
        except AfreshError as error:
            return str(error)
        return None

    def _read(self, path: str) -> FileDownloadResponse:
        kind = self._kind(absolute(path))
        if kind is None:
            return FileDownloadResponse(path=path, error="file_not_found")
        if kind == "directory":
            return FileDownloadResponse(path=path, error="is_directory")
        try:
            return FileDownloadResponse(path=path, content=self._sandbox.files.read(absolute(path)))
        except AfreshError as error:
            return FileDownloadResponse(path=path, error=str(error))
