"""Forks of a warm Linux program that have all answered: time and memory, a JSON object a row.

Usage: ``python bench_forks.py [COUNT] [--python PATH] [--threads N]``. With an interpreter of numpy, the warm state
has numpy and an array, otherwise a list. On a busy host, the processor time is the better measure. Memory is the
proportional set size (PSS) of this process and the sandboxes, without that from before the forks, beside the pages that
the sandboxes have written (private and dirty). Where `sandlock` is installed, a row has the time of its forks, which do
the same work and end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import afresh

NUMPY = "import numpy\nx = numpy.arange(1000)"
LIST = "x = list(range(1000))"


def processes(process: int) -> Iterator[int]:
    """A process and its descendants."""
    yield process
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as children:
                for child in children.read().split():
                    yield from processes(int(child))
    except OSError:
        # It has ended.
        return


def processor() -> float:
    """Seconds of processor time of this process and its descendants."""
    ticks = 0
    for process in processes(os.getpid()):
        try:
            with open(f"/proc/{process}/stat") as stat:
                ticks += sum(map(int, stat.read().rpartition(")")[2].split()[11:13]))
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def memory() -> tuple[int, int]:
    """KiB of PSS, and of private dirty pages, of this process and its descendants."""
    pss = dirty = 0
    for process in processes(os.getpid()):
        try:
            with open(f"/proc/{process}/smaps_rollup") as rollup:
                for line in rollup:
                    name, _, value = line.partition(":")
                    pss += int(value.split()[0]) if name == "Pss" else 0
                    dirty += int(value.split()[0]) if name == "Private_Dirty" else 0
        except OSError:
            continue
    return pss, dirty


def sandlock(count: int, *, has_numpy: bool) -> dict[str, object] | None:
    """The same work in forks of Sandlock."""
    try:
        from sandlock import Sandbox  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
    except ImportError:
        return None
    space: dict[str, object] = {}

    def work(number: int) -> None:
        exec(f"x[0] = {number}; print(int(sum(x)), flush=True)", space)

    readable = ["/usr", "/lib", "/lib64", "/etc", "/proc", "/dev", sys.prefix, sys.base_prefix]
    template = Sandbox(fs_readable=readable, init_fn=lambda: exec(NUMPY if has_numpy else LIST, space), work_fn=work)
    with template, Sandbox(fs_readable=readable) as reducer:
        started = time.perf_counter()
        done = reducer.reduce(["wc", "-l"], template.fork(count))
        answered = time.perf_counter()
    if not done.success:
        raise SystemExit(f"sandlock failed: {done.error}")
    return {"who": "sandlock", "forks": count, "numpy": has_numpy, "answered_s": round(answered - started, 3)}


def main() -> None:
    """Forks, asks, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    has_numpy = subprocess.run([given.python, "-c", "import numpy"], capture_output=True, check=False).returncode == 0
    with afresh.linux(given.python, setup=NUMPY if has_numpy else LIST).sandbox() as sandbox:
        sandbox.eval("int(sum(x))")
        before, busy = memory(), processor()
        started = time.perf_counter()
        forks = sandbox.fork(given.count)
        forked = time.perf_counter()

        def ask(number: int) -> int:
            answer: int = forks[number].eval(f"x[0] = {number}; int(sum(x))")
            return answer

        with ThreadPoolExecutor(given.threads) as pool:
            answers = list(pool.map(ask, range(given.count)))
        answered = time.perf_counter()
        if answers != [499500 + number for number in range(given.count)]:
            raise SystemExit("a fork gave a wrong answer")
        after, busy = memory(), processor() - busy
        for fork in forks:
            fork.close()
        closed = time.perf_counter()
    pss, written = after[0] - before[0], after[1] - before[1]
    row = {
        "who": "afresh",
        "forks": given.count,
        "numpy": has_numpy,
        "fork_s": round(forked - started, 3),
        "answered_s": round(answered - started, 3),
        "processor_s": round(busy, 3),
        "close_s": round(closed - answered, 3),
        "pss_mib": round(pss / 1024, 1),
        "written_mib": round(written / 1024, 1),
        "pss_by_written": round(pss / written, 3),
    }
    print(json.dumps(row), flush=True)
    rival = sandlock(given.count, has_numpy=has_numpy)
    if rival is not None:
        print(json.dumps(rival))


if __name__ == "__main__":
    main()
