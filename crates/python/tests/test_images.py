"""Interpreters of containers' images."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import afresh
import pytest

pytestmark = pytest.mark.usefixtures("python")

# Packages of the standard library that the image has in addition to its modules.
_PACKAGES = ("collections", "encodings", "importlib", "json", "re", "lib-dynload")


def _parts() -> Iterator[Path]:
    """The host's interpreter, the libraries that it is linked with, and a part of its standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    yield from (path for path in library.iterdir() if path.suffix == ".py")
    for package in _PACKAGES:
        yield from (path for path in (library / package).rglob("*") if path.suffix in (".py", ".so"))
    executable = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
    yield executable
    linking = [executable, *library.glob("lib-dynload/binascii.*"), *library.glob("lib-dynload/_json.*")]
    linked = subprocess.run(["ldd", *linking], capture_output=True, text=True, check=True).stdout
    for line in linked.splitlines():
        words = [word for word in line.split() if word.startswith("/") and not word.endswith(":")]
        yield from (Path(word) for word in words[:1])


def _layer() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path in sorted(set(_parts())):
            content = path.read_bytes()
            entry = tarfile.TarInfo(str(path).lstrip("/"))
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("opt/tools/python3")
        link.type, link.linkname = tarfile.SYMTYPE, f"{sys.base_prefix}/bin/python{sysconfig.get_python_version()}"
        tar.addfile(link)
    return out.getvalue()


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image in the OCI layout, with the host's interpreter and no shell."""
    folder = tmp_path_factory.mktemp("image") / "layout"
    (folder / "blobs/sha256").mkdir(parents=True)

    def blob(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (folder / "blobs/sha256" / digest).write_bytes(content)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    layer = _layer()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/opt/tools", "FROM_IMAGE=yes"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [blob(layer, "layer.v1.tar")],
    }
    index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def test_an_image_brings_its_own_files_and_environment(layout: Path) -> None:
    warm = afresh.image(layout, setup="import os, json\nx = 20", env={"GIVEN": "1"})
    with warm.sandbox(timeout=60) as sb:
        assert sb.eval("json.dumps({'x': x + 1})") == '{"x": 21}'
        assert sb.eval("os.environ['FROM_IMAGE'], os.environ['GIVEN'], os.environ['PATH']") == (
            "yes",
            "1",
            "/opt/tools",
        )
        assert sb.eval("os.path.exists('/usr/share')") is False
        done = sb.commands.run(["python3", "-c", "print(6 * 7)"])
        assert (done.exit_code, done.stdout) == (0, "42\n")
        with pytest.raises(afresh.SessionError, match="no /bin/sh"):
            sb.commands.run("echo")


def test_a_tar_of_a_layout_is_an_image_and_others_say_what_they_lack(layout: Path, tmp_path: Path) -> None:
    packed = tmp_path / "image.tar"
    with tarfile.open(packed, "w") as tar:
        tar.add(layout, arcname=".")
    assert afresh.image(packed, setup="x = 1").eval("x") == 1
    with pytest.raises(afresh.ProgramError, match="ModuleNotFoundError"):
        afresh.image(layout, setup="import nothing_like_it")
    with pytest.raises(afresh.OpenError):
        afresh.image(tmp_path)
