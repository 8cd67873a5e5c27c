"""Files of a sandbox, from outside."""

from __future__ import annotations

from dataclasses import dataclass

from . import _native
from .errors import SessionError


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a sandbox.

    Attributes:
        kind: ``"file"``, ``"directory"``, ``"link"`` or ``"other"``.
        size: Its bytes.
        mode: Its permission bits.
    """

    kind: str
    size: int
    mode: int


def _content(data: bytes | str) -> bytes:
    if isinstance(data, str):
        return data.encode()
    try:
        return bytes(memoryview(data))
    except TypeError:
        raise TypeError(f"the content of a file is bytes or text, not {type(data).__name__}") from None


class Files:
    """The files of a sandbox: files before and after its program. They are part of every checkpoint.

    Paths begin at the root of the sandbox tree; the host's files are never changed.

    >>> import afresh
    >>> with afresh.warm("js").sandbox() as sb:
    ...     sb.files.write("/data/a.csv", "1,2")
    ...     clean = sb.checkpoint("clean")
    ...     sb.files.remove("/data/a.csv")
    ...     _ = sb.rollback(clean)
    ...     sb.files.list("/data"), sb.files.read("/data/a.csv")
    (['a.csv'], b'1,2')
    """

    def __init__(self, session: _native.Session) -> None:
        self._session = session

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        return self._session.read_file(path)

    def write(self, path: str, data: bytes | str) -> None:
        """Writes a whole file, with the directories above it; text as UTF-8."""
        self._session.write_file(path, _content(data))

    def list(self, path: str = "/") -> list[str]:
        """The names in a directory, in order."""
        return self._session.list_files(path)

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with everything in it."""
        self._session.remove_file(path)

    def exists(self, path: str) -> bool:
        """Whether there is a file or a directory at the path."""
        return self._session.stat_file(path) is not None

    def stat(self, path: str) -> FileInfo:
        """The kind, size and mode of a file."""
        about = self._session.stat_file(path)
        if about is None:
            raise SessionError(f"the sandbox has no file {path!r}")
        return FileInfo(*about)

    def make_directory(self, path: str) -> None:
        """Makes a directory, with those above it that are missing."""
        self._session.make_directory(path)
