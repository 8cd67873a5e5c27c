"""Python packages for CPython in Wasm: files that its sandboxes import.

Packages are copied into the guest's files, so snapshots contain them. A package with compiled modules is refused,
because they are code for the host's processor. Nothing of a package runs on the host.
"""

from __future__ import annotations

import importlib.metadata
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from .errors import OpenError

# The directory that the guest imports packages from.
SITE_PACKAGES = "/usr/local/lib/python3.15/site-packages"

# A file of a package: its path below `SITE_PACKAGES`, its length, and a function that reads it.
_File: TypeAlias = tuple[PurePosixPath, int, Callable[[], bytes]]

_COMPILED = (".so", ".pyd", ".dylib")
# The importable parts of the data directory in a wheel.
_IMPORTABLE = ("purelib", "platlib")


def package_files(packages: Iterable[str | os.PathLike[str]], limit: int) -> list[tuple[str, bytes]]:
    """The files of packages, each with its path in the guest and its contents.

    A package is a wheel, a directory, the file of a module, or the name of a distribution that is installed here. If
    they have more than ``limit`` bytes together, the file that exceeds it is not read.
    """
    if isinstance(packages, str | os.PathLike):
        raise TypeError("`packages` is a list: packages=['attrs', './mine-1.0-py3-none-any.whl']")
    files: dict[str, bytes] = {}
    room = limit
    for package in packages:
        given = os.fspath(package)
        if not given:
            raise OpenError("a package has an empty name: give a wheel, a directory, a .py file, or an installed name")
        try:
            for path, length, read in _files(given):
                if any(suffix in _COMPILED for suffix in path.suffixes):
                    raise OpenError(
                        f"the package {given!r} has the compiled module {path}, which cannot run in Wasm. numpy, "
                        "pandas and scipy are part of the language 'python'; `afresh.linux('python3')` runs all "
                        "packages of the host"
                    )
                room -= length
                if room < 0:
                    raise OpenError(
                        f"the packages have more than {limit} bytes of files: leave some out, or raise `storage_limit`"
                    )
                files[f"{SITE_PACKAGES}/{path}"] = read()
        # The last three: damaged data, an end before it, and an encrypted file.
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise OpenError(f"the package {given!r} cannot be read: {error}") from error
    return list(files.items())


def _files(package: str) -> Iterator[_File]:
    path = Path(package)
    if path.is_dir():
        return _of_directory(path)
    if path.is_file() and path.suffix == ".whl":
        return _of_wheel(path)
    if path.is_file() and path.suffix == ".py":
        return iter([(PurePosixPath(path.name), path.stat().st_size, path.read_bytes)])
    if path.exists() or os.sep in package or path.suffix == ".whl":
        raise OpenError(f"{package!r} is no package: give a wheel, a directory, a .py file, or an installed name")
    return _of_distribution(package)


def _of_directory(directory: Path) -> Iterator[_File]:
    """The files of one package, or of a directory of packages. Hidden files are left out."""
    whole = Path(os.path.abspath(directory))
    above = whole.parent if (whole / "__init__.py").is_file() else whole
    for at, directories, names in os.walk(whole):
        directories[:] = sorted(name for name in directories if name != "__pycache__" and not name.startswith("."))
        for name in sorted(names):
            file = Path(at, name)
            if not name.startswith(".") and file.is_file():
                if not file.resolve().is_relative_to(whole.resolve()):
                    raise OpenError(f"the package {str(directory)!r} has a link to a file outside of it: {file}")
                yield PurePosixPath(file.relative_to(above)), file.stat().st_size, file.read_bytes


def _of_wheel(path: Path) -> Iterator[_File]:
    with zipfile.ZipFile(path) as wheel:
        for entry in wheel.infolist():
            parts = PurePosixPath(entry.filename).parts
            if entry.is_dir() or not parts:
                continue
            if ".." in parts or parts[0].startswith("/"):
                raise OpenError(f"the wheel {str(path)!r} is damaged: it has a file with the path {entry.filename!r}")
            if parts[0].endswith(".data"):
                if len(parts) < 3 or parts[1] not in _IMPORTABLE:
                    continue
                parts = parts[2:]
            yield PurePosixPath(*parts), entry.file_size, partial(_read_entry, wheel, entry)


def _read_entry(wheel: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The contents of a file, of which no more than its declared length is decompressed."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"{entry.filename} is compressed in a way that wheels are not")
    with wheel.open(entry) as file:
        content = file.read(entry.file_size)
        if len(content) != entry.file_size or file.read(1):
            raise zipfile.BadZipFile(f"{entry.filename} has another length than its directory says")
        return content


def _of_distribution(name: str) -> Iterator[_File]:
    """The files of an installed distribution, without its commands, and without distributions that it needs."""
    try:
        installed = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise OpenError(f"the package {name!r} is no file and not installed: pip install it, or give a wheel") from None
    found = False
    for listed in installed.files or ():
        path, file = PurePosixPath(listed), Path(str(listed.locate()))
        if (
            ".." in path.parts
            or path.is_absolute()
            or "__pycache__" in path.parts
            or path.suffix == ".pth"
            or not file.is_file()
        ):
            continue
        found = found or not path.parts[0].endswith((".dist-info", ".egg-info"))
        yield path, file.stat().st_size, file.read_bytes
    if not found:
        raise OpenError(
            f"the package {name!r} has no files of its own here, as after `pip install --editable`: give its directory"
        )
