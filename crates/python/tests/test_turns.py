"""The language `python`, with a small guest in CPython's place that has its interface: what the real one does is tested
by `test_cpython.py`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import afresh
import pytest

LIBRARY = b"library " * 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where CPython would be."""
    guest = os.environ.get("AFRESH_TURNS")
    if guest is None:
        pytest.skip("SKIPPED: the guest with CPython's interface is not built; `cargo xtask test` builds it")
    folder = tmp_path_factory.mktemp("python")
    shutil.copy(guest, folder / "python.wasm")
    (folder / "python-stdlib.zip").write_bytes(LIBRARY)
    return folder


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFRESH_PYTHON", str(folder))


@pytest.fixture(scope="module")
def warm(folder: Path) -> afresh.Warm:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AFRESH_PYTHON", str(folder))
        return afresh.warm("python", setup="add 40\nprint nobody sees this")


def test_every_call_starts_where_the_setup_ended(warm: afresh.Warm) -> None:
    for _ in range(3):
        result = warm.run_code("print one\ncomplain two\nadd 2")
        assert (result.value, result.text, result.stdout, result.stderr) == (42, "shown", "one\n", "two\n")
        assert result.error is None
        assert result.dirty_pages is None, "dropped states are not counted"


def test_a_setup_that_fails_says_why(folder: Path) -> None:
    with pytest.raises(afresh.ProgramError, match="ValueError: broken"):
        afresh.warm("python", setup="fail broken")
    assert folder.is_dir()


def test_sandboxes_go_back_and_fork_files_included(warm: afresh.Warm) -> None:
    with warm.sandbox() as sb:
        assert sb.eval("write /tmp/own one\nadd 1") == 41
        clean = sb.checkpoint("clean")
        sb.eval("write /tmp/own two\nadd 1")
        (fork,) = sb.fork()
        sb.rollback(clean)
        assert (sb.eval("add 0"), sb.eval("read /tmp/own")) == (41, b"one")
        assert (fork.eval("add 0"), fork.eval("read /tmp/own")) == (42, b"two")
        assert sb.diff(clean, sb.checkpoint("later")) is not None


def test_the_library_is_a_lower_layer_and_is_not_written(warm: afresh.Warm, folder: Path) -> None:
    assert warm.eval("read /usr/local/lib/python315.zip") == LIBRARY
    warm.run_code("write /usr/local/lib/python315.zip other")
    assert (folder / "python-stdlib.zip").read_bytes() == LIBRARY


def test_a_snapshot_holds_no_library_and_needs_it_again(
    warm: afresh.Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warm.sandbox() as sb:
        sb.eval("write /tmp/own one\nadd 1")
        sb.save(tmp_path / "there.afresh")
    again = afresh.load(tmp_path / "there.afresh")
    assert (again.eval("add 1"), again.eval("read /tmp/own")) == (42, b"one")
    assert again.eval("read /usr/local/lib/python315.zip") == LIBRARY
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("AFRESH_PYTHON", str(empty))
    with pytest.raises(afresh.OpenError, match=r"known:sha256"):
        afresh.load(tmp_path / "there.afresh")


def test_clones_begin_with_their_own_entropy(warm: afresh.Warm) -> None:
    drawn = {bytes(warm.eval("clone")) for _ in range(500)}
    with warm.sandbox() as sb:
        one = sb.checkpoint("one")
        drawn.add(sb.eval("clone"))
        assert sb.eval("clone") in drawn, "the same clone continues with its state"
        sb.rollback(one)
        drawn.add(sb.eval("clone"))
        drawn |= {fork.eval("clone") for fork in sb.fork(100)}
    assert len(drawn) == 602


def test_tools_answer_and_what_they_raise_is_the_cause(warm: afresh.Warm) -> None:
    def double(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return 2 * number

    async def late(number: int) -> int:
        await asyncio.sleep(0)
        return number + 1

    with warm.sandbox(tools={"double": double, "late": late, "deep": double}) as sb:
        assert sb.eval("tool double 21") == 42
        assert sb.eval("tool late 1") == 2
        error = sb.run_code("tool double -1").error
        assert isinstance(error, afresh.ProgramError)
        assert (error.name, str(error.__cause__)) == ("ValueError", "negative")
        # From far down its stack.
        assert sb.run_code("deep 2000").error is None


async def test_asynchronous_sandboxes_await_tools(warm: afresh.Warm) -> None:
    async def late(number: int) -> int:
        await asyncio.sleep(0.01)
        return number + 1

    seen: list[str] = []
    async with warm.async_sandbox(tools={"late": late}) as sb:
        result = await sb.run_code("print now\ntool late 41", on_output=lambda _, text: seen.append(text))
        assert (result.value, seen) == (42, ["now\n"])


def test_code_that_never_ends_is_ended(warm: afresh.Warm) -> None:
    with warm.sandbox(timeout=2) as sb:
        clean = sb.checkpoint("clean")
        assert isinstance(sb.run_code("print before\nspin").error, afresh.TimeLimitError)
        sb.rollback(clean)
        assert sb.eval("add 2") == 42
        assert isinstance(sb.run_code("trap").error, afresh.GuestError)
        sb.rollback(clean)
    with warm.sandbox() as sb:
        printed = threading.Event()

        def stop_once_printed() -> None:
            printed.wait(60)
            sb.stop()

        stops = threading.Thread(target=stop_once_printed)
        stops.start()
        result = sb.run_code("print before\nspin", on_output=lambda *_: printed.set())
        stops.join()
        assert isinstance(result.error, afresh.StoppedError)
        assert result.stdout == "before\n"
