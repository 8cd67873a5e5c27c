"""Guests that were compiled when the package was made."""

from pathlib import Path

import afresh
import pytest
from afresh import _languages


def test_the_first_warm_and_load_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = tmp_path / "precompiled", tmp_path / "cache"
    _languages.precompile(folder)
    shipped = sorted(path.suffix for path in folder.iterdir())
    assert shipped == [".cwasm", ".prepared"]
    monkeypatch.setattr(_languages, "_PRECOMPILED", folder)
    js = afresh.warm("js", setup="const rate = 3", cache=cache)
    assert js.run_code("rate * 2").value == 6
    js.save(tmp_path / "js.afresh")
    again = afresh.load(tmp_path / "js.afresh", cache=cache)
    assert again.run_code("rate * 3").value == 9
    assert not list(tmp_path.glob("cache/*.cwasm"))
    assert sorted(path.suffix for path in folder.iterdir()) == shipped


def test_without_compiled_guests_they_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_languages, "_PRECOMPILED", tmp_path / "missing")
    assert _languages.precompiled() is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "js.cwasm").write_bytes(b"of another version")
    monkeypatch.setattr(_languages, "_PRECOMPILED", tmp_path / "other")
    assert afresh.warm("js", cache=tmp_path / "cache").run_code("1 + 1").value == 2
    assert list(tmp_path.glob("cache/*.cwasm"))


def test_load_reports_that_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_languages, "_PRECOMPILED", tmp_path / "missing")
    monkeypatch.setattr(_languages, "_PATIENCE", 0)
    afresh.warm("js", cache=tmp_path / "cache").save(tmp_path / "js.afresh")
    assert not capfd.readouterr().err
    assert afresh.load(tmp_path / "js.afresh", cache=tmp_path / "empty").run_code("1 + 1").value == 2
    assert f"compiled once, CPython in some minutes (kept in {tmp_path / 'empty'})" in capfd.readouterr().err
