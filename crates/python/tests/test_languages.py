"""Where languages' files are found, and how often that is looked up."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from afresh import _languages


def known(folder: Path) -> str:
    ((_, _, path, identity),) = _languages.python_below()
    assert Path(path) == folder / "python-stdlib.zip"
    return identity


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AFRESH_PYTHON", str(tmp_path))
    library = tmp_path / "python-stdlib.zip"
    library.write_bytes(b"library one")
    return library


def test_the_library_is_read_once_and_again_when_another_takes_its_place(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_languages, "_SETTLES", 0.0)
    reads = []
    identity = _languages._identity

    def read(artifacts: Path, file: Path) -> str:
        reads.append(file)
        return identity(artifacts, file)

    monkeypatch.setattr(_languages, "_identity", read)
    for _ in range(3):
        assert known(library.parent) == digest(b"library one")
    assert len(reads) == 1
    before = library.stat()
    time.sleep(0.05)
    # With the same length and times as before.
    library.write_bytes(b"library two")
    os.utime(library, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert known(library.parent) == digest(b"library two")
    library.unlink()
    assert _languages.python_below() == ()


def test_a_library_that_was_changed_just_now_is_read_again(library: Path) -> None:
    for content in (b"library two", b"library six", b"library ten"):
        library.write_bytes(content)
        assert known(library.parent) == digest(content)


def test_another_folder_is_looked_at(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_languages, "_SETTLES", 0.0)
    assert known(library.parent) == digest(b"library one")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("AFRESH_PYTHON", str(empty))
    assert _languages.python_below() == ()
