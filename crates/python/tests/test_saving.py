"""Sandboxes that are saved turn by turn, deltas, and files."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import afresh
import pytest


def test_every_turn_is_saved_and_opens_in_another_process(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with afresh.warm("js").sandbox() as sb:
        sb.run_code("globalThis.log = []")
        sb.save(f"{store}@agent")
        for turn in range(5):
            sb.run_code(f"log.push({{turn: {turn}}})")
            sb.save(f"{store}@agent")
            code = f"import afresh; sb = afresh.load({f'{store}@agent'!r}).sandbox(); print(sb.eval('log.length'))"
            said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert said.stdout.strip() == str(turn + 1)
    journals = list((store / "journals").iterdir())
    assert len(journals) == 1
    assert journals[0].stat().st_size < 6 * 8192


def test_what_a_first_evaluation_touches_is_read_first(tmp_path: Path) -> None:
    # userfaultfd, for user mode only: it records the touched pages.
    number = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine)
    found = -1 if number is None else ctypes.CDLL(None).syscall(number, 1 | os.O_CLOEXEC)
    if found < 0:
        pytest.skip("SKIPPED: no userfaultfd here")
    os.close(found)
    heap = "globalThis.heap = Array.from({length: 20000}, (_, i) => ({i}))"
    there = tmp_path / "warm.afresh"
    afresh.warm("js", setup=heap).save(there)
    with tarfile.open(there) as archive:

        def told(name: str) -> Any:
            content = archive.extractfile(name)
            assert content is not None
            return json.load(content)

        digest = told("index.json")["manifests"][0]["digest"]
        manifest = told(f"blobs/{digest.replace(':', '/')}")
    sizes = {layer["mediaType"].split(".")[3]: layer["size"] for layer in manifest["layers"]}
    assert 10 * 4096 < sizes["working-set"] < sizes["pages"] / 4
    assert afresh.load(there).eval("heap.length") == 20000


def test_a_delta_is_small_and_applies_where_it_was_made_since() -> None:
    warm = afresh.warm("js", setup="globalThis.heap = Array.from({length: 20000}, (_, i) => ({i}))")
    with warm.sandbox() as sb:
        start = sb.at
        sb.eval("heap.length")
        warmed = sb.checkpoint("warmed")
        sb.run_code("heap.push({turn: 1})")
        delta = sb.delta(warmed)
        assert len(delta) < 8192
        whole = sb.delta(start)
        with warm.apply(whole) as other:
            assert other.eval("heap.length") == 20001
            with pytest.raises(afresh.AfreshError, match="delta"):
                other.apply_delta(delta)
        with sb.fork(1)[0] as fork:
            fork.rollback(warmed)
            fork.apply_delta(delta)
            assert fork.eval("heap.at(-1)") == {"turn": 1}
        with pytest.raises(afresh.AfreshError):
            sb.apply_delta(delta[:-1])


def test_files_are_part_of_every_state(tmp_path: Path) -> None:
    with afresh.warm("js").sandbox() as sb:
        sb.files.write("/data/a.csv", b"1,2")
        clean = sb.checkpoint("clean")
        sb.files.write("/data/b.csv", "3")
        assert sb.files.list("/data") == ["a.csv", "b.csv"]
        sb.rollback(clean)
        assert sb.files.list("/data") == ["a.csv"]
        sb.save(tmp_path / "store")
        with afresh.load(tmp_path / "store").sandbox() as again:
            assert again.files.read("/data/a.csv") == b"1,2"
            again.files.remove("/data")
            assert again.files.list() == []
        with pytest.raises(afresh.AfreshError, match="nowhere"):
            sb.files.read("/nowhere")
