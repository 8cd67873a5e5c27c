"""Packages that CPython in Wasm imports: which files they are, and what is refused. No guest runs here."""

from __future__ import annotations

import re
import tracemalloc
import zipfile
from pathlib import Path

import afresh
import pytest
from afresh._packages import SITE_PACKAGES, package_files

LIMIT = 1 << 20


def names(packages: list[str | Path], limit: int = LIMIT) -> dict[str, bytes]:
    """The files by their paths below the guest's directory of packages."""
    return {path.removeprefix(f"{SITE_PACKAGES}/"): content for path, content in package_files(packages, limit)}


def wheel(at: Path, files: dict[str, str]) -> Path:
    path = at / "mine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_a_wheel_gives_its_modules_and_metadata(tmp_path: Path) -> None:
    path = wheel(
        tmp_path,
        {
            "mine/__init__.py": "v = 1",
            "mine-1.0.dist-info/METADATA": "Name: mine",
            "mine-1.0.data/purelib/also.py": "y = 2",
            "mine-1.0.data/scripts/mine": "#!python",
        },
    )
    expected = {"mine/__init__.py": b"v = 1", "mine-1.0.dist-info/METADATA": b"Name: mine", "also.py": b"y = 2"}
    assert names([path]) == expected


def test_a_package_directory_keeps_its_name_and_a_directory_of_packages_does_not(tmp_path: Path) -> None:
    package = tmp_path / "one"
    package.mkdir()
    (package / "__init__.py").write_bytes(b"")
    (package / "data.txt").write_bytes(b"data")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_bytes(b"old")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"secret")
    assert names([package]) == {"one/__init__.py": b"", "one/data.txt": b"data"}
    assert names([tmp_path]) == names([package])
    assert names([package / "__init__.py"]) == {"__init__.py": b""}


def test_an_installed_distribution_gives_its_files() -> None:
    files = names(["iniconfig"])
    assert "iniconfig/__init__.py" in files
    assert any(name.endswith(".dist-info/METADATA") for name in files)
    assert not any("__pycache__" in name for name in files)


def test_refusals_name_the_package_and_the_way_out(tmp_path: Path) -> None:
    compiled = tmp_path / "fast"
    compiled.mkdir()
    (compiled / "fast.cpython-312-x86_64-linux-gnu.so").write_bytes(b"\x7fELF")
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(b"no archive")
    refusals = {
        str(compiled): "compiled module fast.cpython-312-x86_64-linux-gnu.so, which cannot run in Wasm",
        str(damaged): "cannot be read: File is not a zip file",
        str(wheel(tmp_path, {"../../etc/passwd": "x"})): "it has a file with the path '../../etc/passwd'",
        str(tmp_path / "missing"): "give a wheel, a directory, a .py file, or an installed name",
        "no-such-distribution": "no file and not installed",
    }
    for package, reason in refusals.items():
        with pytest.raises(afresh.OpenError, match=re.escape(reason)):
            package_files([package], LIMIT)
    with pytest.raises(TypeError, match="`packages` is a list"):
        package_files("attrs", LIMIT)


def test_files_beyond_the_limit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = wheel(tmp_path, {"large.py": "#" * (LIMIT + 1)})
    assert path.stat().st_size < LIMIT // 100
    with pytest.raises(afresh.OpenError, match="more than 1048576 bytes of files: leave some out"):
        package_files([path], LIMIT)


def test_a_wheel_that_declares_another_length_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path, {"large.py": "#" * (LIMIT * 8)})
    whole = path.read_bytes()
    entry = whole.rindex(b"PK\x01\x02")
    path.write_bytes(whole[: entry + 24] + (100).to_bytes(4, "little") + whole[entry + 28 :])
    tracemalloc.start()
    try:
        with pytest.raises(afresh.OpenError, match="cannot be read"):
            package_files([path], LIMIT)
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()


def test_links_out_of_a_package_and_empty_names_are_refused(tmp_path: Path) -> None:
    package = tmp_path / "linked"
    package.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (package / "secret.py").symlink_to(tmp_path / "secret")
    with pytest.raises(afresh.OpenError, match="has a link to a file outside of it"):
        package_files([package], LIMIT)
    with pytest.raises(afresh.OpenError, match="has an empty name"):
        package_files([""], LIMIT)


def test_only_the_language_python_imports_packages(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_bytes(b"")
    with pytest.raises(ValueError, match="'js' imports no packages"):
        afresh.warm("js", packages=[tmp_path])


def test_files_of_a_sandbox_may_have_another_limit() -> None:
    with afresh.warm("js", storage_limit="1MiB").sandbox() as sandbox:
        with pytest.raises(afresh.SessionError, match="the file tree is full"):
            sandbox.files.write("/large", b"x" * (1 << 20))
        sandbox.files.write("/small", b"x" * (1 << 19))
    with afresh.warm("js", storage_limit="80MiB").sandbox() as sandbox:
        sandbox.files.write("/large", b"x" * (70 << 20))
