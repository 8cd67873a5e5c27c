"""Sandboxes for agents by the Python package, and by rivals: a JSON object a row.

`afresh-bench sandbox` runs it with the Python that has the package. Rivals and libraries are measured where they are
installed: `pydantic-monty`, `sandlock`, `matplotlib`, `numpy`, `pytest` and `mcp`. Standard error names the missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import afresh

GIVEN = argparse.ArgumentParser()
GIVEN.add_argument("--rounds", type=int, default=100)
GIVEN.add_argument("--forks", type=int, default=1000)
GIVEN.add_argument("--filter", default="")
GIVEN.add_argument("--afresh", default="afresh")

TEN = ["x = 1", *["x += 1"] * 8, "x"]
FIGURE = """
import io
figure = matplotlib.pyplot.figure()
matplotlib.pyplot.plot([1, 2, 3], [1, 4, 9])
_buffer = io.BytesIO()
figure.savefig(_buffer, format="png")
_buffer.getvalue()
"""
PROJECT = {
    "project/rows.py": "def total(rows):\n    return sum(row['n'] for row in rows)\n",
    "project/test_rows.py": "".join(
        f"def test_{n}():\n    from rows import total\n    assert total([{{'n': {n}}}, {{'n': 1}}]) == {n + 1}\n"
        for n in range(20)
    ),
}


def has(module: str) -> bool:
    """Whether a module is there; standard error names one that is not."""
    there = importlib.util.find_spec(module) is not None
    if not there:
        print(f"{module} is not installed: its rows are left out", file=sys.stderr)
    return there


class Bench:
    """Measures and prints."""

    def __init__(self, rounds: int, wanted: str) -> None:
        self.rounds, self.wanted = rounds, wanted

    def wants(self, case: str, strategy: str) -> bool:
        """Whether a row is wanted."""
        return self.wanted in f"{case} {strategy}"

    def row(self, case: str, strategy: str, taken: list[float], threads: int = 1, **more: object) -> None:
        """Prints the row of these microseconds."""
        ordered = sorted(taken)
        row = {
            "case": case,
            "strategy": strategy,
            "threads": threads,
            "median": ordered[len(ordered) // 2],
            "min": ordered[0],
            "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            "samples": taken,
            **more,
        }
        print(json.dumps(row), flush=True)

    def contest(self, case: str, works: dict[str, Callable[[], object]], rounds: int | None = None) -> None:
        """The contestants take turns."""
        works = {name: work for name, work in works.items() if self.wants(case, name)}
        taken: dict[str, list[float]] = {name: [] for name in works}
        for work in works.values():
            work()
        for _ in range(rounds or self.rounds):
            for name, work in works.items():
                started = time.perf_counter()
                work()
                taken[name].append((time.perf_counter() - started) * 1e6)
        for name, samples in taken.items():
            self.row(case, name, samples)


def expect(value: object, wanted: object) -> None:
    """Refuses another answer."""
    if value != wanted:
        raise SystemExit(f"{value!r} in place of {wanted!r}")


def create(bench: Bench, python: afresh.Warm, script: afresh.Warm) -> None:
    """A new sandbox and its first command, one after another and all at once."""

    def command() -> None:
        with python.sandbox() as sandbox:
            expect(sandbox.commands.run([sys.executable, "-I", "-c", "1"]).exit_code, 0)

    def code(warm: afresh.Warm) -> Callable[[], None]:
        def run() -> None:
            with warm.sandbox() as sandbox:
                expect(sandbox.eval("1 + 1"), 2)

        return run

    works = {
        "afresh, python3 -c 1": command,
        "afresh, Python code": code(python),
        "afresh, JavaScript code": code(script),
    }
    bench.contest("create/first", works)
    for name, work in works.items():
        if not bench.wants("create/at-once", name):
            continue

        def timed(_: int, work: Callable[[], None] = work) -> float:
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1e6

        with ThreadPoolExecutor(bench.rounds) as pool:
            bench.row("create/at-once", name, list(pool.map(timed, range(bench.rounds))), bench.rounds)


def ten(bench: Bench, python: afresh.Warm, script: afresh.Warm) -> None:
    """A sandbox and ten pieces of code."""

    def ours(warm: afresh.Warm, codes: list[str]) -> Callable[[], None]:
        def run() -> None:
            with warm.sandbox() as sandbox:
                value: object = None
                for code in codes:
                    value = sandbox.run_code(code).unwrap()
            expect(value, 9)

        return run

    with contextlib.ExitStack() as stack:
        works = {"afresh, Python": ours(python, TEN), "afresh, JavaScript": ours(script, ["var x = 1", *TEN[1:]])}
        if has("pydantic_monty"):
            import pydantic_monty  # noqa: PLC0415

            monty = stack.enter_context(pydantic_monty.Monty())

            def rival() -> None:
                with monty.checkout() as session:
                    value = None
                    for code in TEN:
                        value = session.feed_run(code)
                expect(value, 9)

            works["pydantic-monty"] = rival
        bench.contest("ten-commands", works)


def forks(bench: Bench, python: afresh.Warm, count: int) -> None:
    """Forks of one state that have all answered."""
    case = f"forks/{count}"
    threads = len(os.sched_getaffinity(0))
    if bench.wants(case, "afresh"):
        with python.sandbox() as sandbox:
            sandbox.run_code("x = list(range(1000))").unwrap()
            started = time.perf_counter()
            made = sandbox.fork(count)

            def ask(number: int) -> object:
                return made[number].eval(f"x[0] = {number}; sum(x)")

            with ThreadPoolExecutor(threads) as pool:
                answers = list(pool.map(ask, range(count)))
            taken = (time.perf_counter() - started) * 1e6
            expect(answers, [499500 + number for number in range(count)])
            for fork in made:
                fork.close()
        bench.row(case, "afresh", [taken], threads)
    if not bench.wants(case, "sandlock") or not has("sandlock"):
        return
    from sandlock import Sandbox  # noqa: PLC0415

    space: dict[str, object] = {}

    def work(number: int) -> None:
        exec(f"x[0] = {number}; print(sum(x), flush=True)", space)

    readable = ["/usr", "/lib", "/lib64", "/etc", "/proc", "/dev", sys.prefix, sys.base_prefix]
    template = Sandbox(fs_readable=readable, init_fn=lambda: exec("x = list(range(1000))", space), work_fn=work)
    with template, Sandbox(fs_readable=readable) as reducer:
        started = time.perf_counter()
        done = reducer.reduce(["wc", "-l"], template.fork(count))
        taken = (time.perf_counter() - started) * 1e6
    if not done.success:
        raise SystemExit(f"sandlock failed: {done.error}")
    bench.row(case, "sandlock", [taken], threads)


def figure(bench: Bench) -> None:
    """A figure of matplotlib, warm."""
    if not has("matplotlib") or not bench.wants("figure", "afresh"):
        return
    setup = f"import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot\n{FIGURE}"
    warm = afresh.linux(sys.executable, setup=setup)

    def draw() -> None:
        png = warm.eval(FIGURE)
        if not isinstance(png, bytes) or not png.startswith(b"\x89PNG"):
            raise SystemExit("there is no figure")

    bench.contest("figure", {"afresh": draw}, max(10, bench.rounds // 4))


def turn(bench: Bench) -> None:
    """A turn of a coding agent: an edit, the tests of a project, and back. And the cost of going back alone."""
    if not has("pytest") or not any(bench.wants("agent", name) for name in ("turn", "undo")):
        return
    with afresh.linux(sys.executable, setup="import pytest").sandbox() as sandbox:
        for path, text in PROJECT.items():
            sandbox.files.write(f"/home/user/{path}", text)
        turns, undos = [], []
        for number in range(max(5, bench.rounds // 10)):
            started = time.perf_counter()
            before = sandbox.checkpoint(f"turn {number}")
            marked = time.perf_counter()
            sandbox.files.write("/home/user/project/extra.py", f"number = {number}\n")
            test = "cd /home/user/project && exec " + sys.executable + " -m pytest -q -p no:cacheprovider"
            expect(sandbox.commands.run(test).exit_code, 0)
            tested = time.perf_counter()
            sandbox.rollback(before)
            ended = time.perf_counter()
            sandbox.drop(before)
            turns.append((ended - started) * 1e6)
            undos.append((marked - started + ended - tested) * 1e6)
    bench.row("agent/turn", "afresh", turns)
    bench.row("agent/undo", "afresh", undos)


def mcp(bench: Bench, script: afresh.Warm, program: str) -> None:
    """The same code by a client of MCP and by the package."""
    if not has("mcp") or not bench.wants("mcp/run_code", "afresh"):
        return
    from mcp import ClientSession, StdioServerParameters  # noqa: PLC0415
    from mcp.client.stdio import stdio_client  # noqa: PLC0415

    guest = Path(afresh.__file__).with_name("guests") / "js.wasm"

    async def ask() -> list[float]:
        server = StdioServerParameters(command=program, args=["mcp", str(guest), "--language", "javascript"])
        async with stdio_client(server) as (reading, writing), ClientSession(reading, writing) as session:
            await session.initialize()
            taken = []
            for number in range(bench.rounds + 5):
                started = time.perf_counter()
                done = await session.call_tool("run_code", {"code": "1 + 1"})
                if number >= 5:
                    taken.append((time.perf_counter() - started) * 1e6)
                if getattr(done, "isError", False) or getattr(done, "is_error", False):
                    raise SystemExit(f"MCP: {done}")
            return taken

    with script.sandbox() as sandbox:
        sandbox.eval("1 + 1")
        bench.contest("mcp/run_code", {"the Python package": lambda: sandbox.eval("1 + 1")})
    bench.row("mcp/run_code", "afresh mcp", asyncio.run(ask()))


def cases(bench: Bench, given: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """All cases."""
    python = afresh.linux(sys.executable, setup="import json")
    script = afresh.warm("js")
    yield lambda: create(bench, python, script)
    yield lambda: ten(bench, python, script)
    yield lambda: forks(bench, python, given.forks)
    yield lambda: figure(bench)
    yield lambda: turn(bench)
    yield lambda: mcp(bench, script, given.afresh)


def main() -> None:
    """Runs all cases."""
    given = GIVEN.parse_args()
    bench = Bench(given.rounds, given.filter)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for case in cases(bench, given):
            case()


if __name__ == "__main__":
    main()
