"""Sandboxes for agents by the Python package, and by rivals: a JSON object a row.

`afresh-bench sandbox` runs it with the Python that has the package. Rivals and libraries are measured where they are
installed: `pydantic-monty`, `sandlock`, `matplotlib`, `numpy`, `pytest`, `toolz` and `mcp`. Standard error names those
that are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import io
import itertools
import json
import os
import shutil
import subprocess
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
PLOT = """
matplotlib.pyplot.figure()
matplotlib.pyplot.plot([1, 2, 3], [1, 4, 9])
"""
FIGURE = f"{PLOT}matplotlib.pyplot.show()\n"
# A package that brings its tests: the project that a coding agent works on.
PROJECT = "toolz"
NODE = shutil.which("node")
# Counted calls by MCP in a turn of one client, and seconds of a pause between two.
MCP_TURN = 5
PAUSE = 0.01


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

    def command(arguments: list[str]) -> Callable[[], None]:
        def run() -> None:
            with python.sandbox() as sandbox:
                expect(sandbox.commands.run(arguments).exit_code, 0)

        return run

    def host(arguments: list[str]) -> Callable[[], None]:
        return lambda: expect(subprocess.run(arguments, stdout=subprocess.DEVNULL, check=False).returncode, 0)

    def code(warm: afresh.Warm) -> Callable[[], None]:
        def run() -> None:
            with warm.sandbox() as sandbox:
                expect(sandbox.eval("1 + 1"), 2)

        return run

    works = {
        "afresh, python3 -c 1": command([sys.executable, "-I", "-c", "1"]),
        "afresh, Python code": code(python),
        "afresh, JavaScript code": code(script),
    }
    if NODE:
        works["afresh, node -v"] = command([NODE, "-v"])
        works["the host, node -v"] = host([NODE, "-v"])
    works["the host, python3 -c 1"] = host([sys.executable, "-I", "-c", "1"])
    bench.contest("create/first", works)
    for name, work in works.items():
        if not bench.wants("create/at-once", name):
            continue
        # A thread may begin late, because the start of a process holds Python's lock. So all times
        # are from here.
        started = time.perf_counter()

        def timed(_: int, work: Callable[[], None] = work, started: float = started) -> float:
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


def processes(process: int) -> Iterator[int]:
    """A process and its descendants."""
    yield process
    with contextlib.suppress(OSError):  # It has ended.
        for thread in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                yield from processes(int(child))


def processor_time() -> float:
    """Seconds of processor time of this process and its descendants. `stat` of a short process shows no tick."""
    taken = time.process_time()
    for process in processes(os.getpid()):
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task") if process != os.getpid() else []:
                taken += int(Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    return taken


def memory() -> tuple[int, int]:
    """KiB of the proportional set size (PSS), and of private dirty pages, of this process and its descendants."""
    pss = dirty = 0
    for process in processes(os.getpid()):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                name, _, value = line.partition(":")
                pss += int(value.split()[0]) if name == "Pss" else 0
                dirty += int(value.split()[0]) if name == "Private_Dirty" else 0
    return pss, dirty


def forks(bench: Bench, count: int) -> None:
    """Forks of one state that have all answered: time, processor time, and memory beside the pages written."""
    numpy = has("numpy")
    setup = "import numpy\nx = numpy.arange(1000)" if numpy else "x = list(range(1000))"
    change = "x[0] = {}; int(sum(x))"
    case = f"forks/{count}{' numpy' if numpy else ''}"
    threads = len(os.sched_getaffinity(0))
    if bench.wants(case, "afresh"):
        with afresh.linux(sys.executable, setup=setup).sandbox() as sandbox:
            sandbox.eval("int(sum(x))")
            before, busy = memory(), processor_time()
            started = time.perf_counter()
            made = sandbox.fork(count)

            def answer(number: int) -> object:
                return made[number].eval(change.format(number))

            with ThreadPoolExecutor(threads) as pool:
                answers = list(pool.map(answer, range(count)))
            taken = (time.perf_counter() - started) * 1e6
            expect(answers, [499500 + number for number in range(count)])
            after, busy = memory(), processor_time() - busy
            for fork in made:
                fork.close()
        pss, written = after[0] - before[0], after[1] - before[1]
        more = {"cpu_us": busy * 1e6, "pss_kib": pss, "written_kib": written, "pss_by_written": pss / max(written, 1)}
        bench.row(case, "afresh", [taken], threads, **more)
    if not bench.wants(case, "sandlock") or not has("sandlock"):
        return
    from sandlock import Sandbox  # noqa: PLC0415

    space: dict[str, object] = {}

    def work(number: int) -> None:
        exec(f"x[0] = {number}; print(int(sum(x)), flush=True)", space)

    readable = ["/usr", "/lib", "/lib64", "/etc", "/proc", "/dev", sys.prefix, sys.base_prefix]
    template = Sandbox(fs_readable=readable, init_fn=lambda: exec(setup, space), work_fn=work)
    with template, Sandbox(fs_readable=readable) as reducer:
        started = time.perf_counter()
        done = reducer.reduce(["wc", "-l"], template.fork(count))
        taken = (time.perf_counter() - started) * 1e6
    if not done.success:
        raise SystemExit(f"sandlock failed: {done.error}")
    bench.row(case, "sandlock", [taken], threads)


def figure(bench: Bench) -> None:
    """A figure of matplotlib after a setup that imports it, and natively in a process that has drawn it."""
    if not has("matplotlib") or not bench.wants("figure", "afresh"):
        return
    warm = afresh.linux(sys.executable, setup="import matplotlib.pyplot")

    def draw(drawer: afresh.Warm | afresh.Sandbox) -> None:
        shown = drawer.run_code(FIGURE).results
        if len(shown) != 1 or not (shown[0].png or b"").startswith(b"\x89PNG"):
            raise SystemExit(f"{shown} in place of a PNG")

    def draw_first() -> None:
        with warm.sandbox() as sandbox:
            draw(sandbox)

    import matplotlib.pyplot  # noqa: ICN001, PLC0415

    matplotlib.pyplot.switch_backend("agg")

    def draw_here() -> None:
        exec(PLOT, {"matplotlib": matplotlib})
        # As in a sandbox.
        matplotlib.pyplot.savefig(io.BytesIO(), format="png", bbox_inches="tight")
        matplotlib.pyplot.close()

    with warm.sandbox() as sandbox:
        works: dict[str, Callable[[], object]] = {
            "afresh, one evaluation": lambda: draw(warm),
            "afresh, a new sandbox": draw_first,
            "afresh, in a sandbox that has drawn it": lambda: draw(sandbox),
            "the host, in a process that has drawn it": draw_here,
        }
        bench.contest("figure", works, max(10, bench.rounds // 4))


def turn(bench: Bench) -> None:
    """A turn of a coding agent: an edit, tests of a project, and back. And the cost of marking and going back alone."""
    if not any(bench.wants("agent", name) for name in ("turn", "undo")) or not has("pytest") or not has(PROJECT):
        return
    project = Path(str(importlib.util.find_spec(PROJECT).origin)).parent  # type: ignore[union-attr]
    with afresh.linux(sys.executable, setup="import pytest").sandbox() as sandbox:
        for path in project.rglob("*.py"):
            sandbox.files.write(f"/home/user/{PROJECT}/{path.relative_to(project)}", path.read_bytes())
        edited, text = f"/home/user/{PROJECT}/itertoolz.py", (project / "itertoolz.py").read_text()
        natively, turns, undos = [], [], []
        for number in range(max(5, bench.rounds // 10)):
            started = time.perf_counter()
            before = sandbox.checkpoint(f"turn {number}")
            marked = time.perf_counter()
            sandbox.files.write(edited, f"{text}\nnumber = {number}\n")
            tests = f"{PROJECT}/tests/test_itertoolz.py"
            test = f"cd /home/user && exec {sys.executable} -m pytest -q -p no:cacheprovider {tests}"
            expect(sandbox.commands.run(test).exit_code, 0)
            tested = time.perf_counter()
            sandbox.rollback(before)
            ended = time.perf_counter()
            sandbox.drop(before)
            turns.append((ended - started) * 1e6)
            undos.append((marked - started + ended - tested) * 1e6)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as copy:
                shutil.copytree(project, Path(copy, PROJECT))
                done = subprocess.run(command, cwd=copy, stdout=subprocess.DEVNULL, check=False)
            natively.append((time.perf_counter() - started) * 1e6)
            expect(done.returncode, 0)
    bench.row("agent/turn", "afresh", turns)
    bench.row("agent/turn", "the host, in a copy", natively)
    bench.row("agent/undo", "afresh", undos)


@contextlib.contextmanager
def ask_lines(command: list[str]) -> Iterator[Callable[[], None]]:
    """A call of `run_code` by a client that writes and reads lines of JSON, and does no more."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        if server.stdin is None or server.stdout is None:
            raise SystemExit("the server has no streams")
        writing, reading = server.stdin, server.stdout
        numbers = itertools.count()

        def ask(method: str, params: dict[str, object]) -> None:
            number = next(numbers)
            message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            writing.write(json.dumps(message).encode() + b"\n")
            writing.flush()
            answer: dict[str, object] = json.loads(reading.readline())
            result = answer.get("result")
            if answer.get("id") != number or not isinstance(result, dict) or result.get("isError"):
                raise SystemExit(f"MCP: {answer}")

        client = {"name": "bench", "version": "1"}
        ask("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client})
        writing.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
        yield lambda: ask("tools/call", {"name": "run_code", "arguments": {"code": "1 + 1"}})


def mcp(bench: Bench, script: afresh.Warm, program: str) -> None:
    """The same code by two clients of MCP and by the package, with pauses between calls and without.

    The client of the official SDK checks each result against the schema of its tool, and passes each message through
    several tasks. The other client does neither. Without pauses, threads of the server are awake.
    """
    if not bench.wants("mcp/run_code", "afresh"):
        return
    guest = Path(afresh.__file__).with_name("guests") / "js.wasm"
    command = [program, "mcp", str(guest), "--language", "javascript"]
    with script.sandbox() as sandbox, ask_lines(command) as ask:
        works: dict[str, Callable[[], object]] = {
            "afresh mcp, lines of JSON": ask,
            "the Python package": lambda: sandbox.eval("1 + 1"),
        }
        for case, pause in (("mcp/run_code", 0), ("mcp/run_code/paused", PAUSE)):
            taken: dict[str, list[float]] = {name: [] for name in works}
            for _ in range(bench.rounds):
                for name, work in works.items():
                    for number in range(MCP_TURN + 1):
                        if pause:
                            time.sleep(pause)
                        started = time.perf_counter()
                        work()
                        # The first call of a turn finds the caches of another contestant.
                        if number:
                            taken[name].append((time.perf_counter() - started) * 1e6)
            for name, samples in taken.items():
                bench.row(case, name, samples)
    if not has("mcp"):
        return
    from mcp import ClientSession, StdioServerParameters  # noqa: PLC0415
    from mcp.client.stdio import stdio_client  # noqa: PLC0415

    async def ask_sdk() -> list[float]:
        server = StdioServerParameters(command=command[0], args=command[1:])
        async with stdio_client(server) as (reading, writing), ClientSession(reading, writing) as session:
            await session.initialize()
            taken = []
            for number in range(bench.rounds * MCP_TURN + 5):
                started = time.perf_counter()
                done = await session.call_tool("run_code", {"code": "1 + 1"})
                if number >= 5:
                    taken.append((time.perf_counter() - started) * 1e6)
                if getattr(done, "isError", False) or getattr(done, "is_error", False):
                    raise SystemExit(f"MCP: {done}")
            return taken

    bench.row("mcp/run_code", "afresh mcp, the official SDK", asyncio.run(ask_sdk()))


def cases(bench: Bench, given: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """All cases."""
    # Node may be outside of /usr.
    dirs = [Path(NODE).resolve().parents[1]] if NODE else []
    python = afresh.linux(sys.executable, setup="import json", dirs=dirs)
    script = afresh.warm("js")
    yield lambda: create(bench, python, script)
    yield lambda: ten(bench, python, script)
    yield lambda: forks(bench, given.forks)
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
