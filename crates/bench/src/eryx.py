"""Pieces of Python in sandboxes of eryx, timed here.

It answers each line `CASE COUNT` with nanoseconds. `afresh-bench eryx` runs it with a Python that
has `pyeryx`. The argument is a factory that was saved, because a new one takes many seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import eryx

CODE = "x = sum(range(10))\nprint(x)"
TEN = ["x = 1", *["x += 1"] * 8, "print(x)"]

factory = eryx.SandboxFactory.load(sys.argv[1])
pool = factory.create_pool(max_size=1, min_idle=1)


def expect(stdout: bytes | str, wanted: str) -> None:
    """Refuses another answer."""
    text = stdout.decode() if isinstance(stdout, bytes) else stdout
    if text.strip() != wanted:
        raise SystemExit(f"{text!r} in place of {wanted!r}")


def sandbox() -> None:
    """Code in a new sandbox."""
    expect(factory.create_sandbox().execute(CODE).stdout, "45")


def pooled() -> None:
    """Code in a sandbox that the pool has reset."""
    with pool.acquire() as lease:
        expect(lease.execute(CODE).stdout, "45")


def session() -> None:
    """A new session, and ten pieces of code in it."""
    state = factory.create_session()
    stdout: bytes | str = ""
    for code in TEN:
        stdout = state.execute(code).stdout
    expect(stdout, "9")


CASES: dict[str, Callable[[], None]] = {"sandbox": sandbox, "pooled": pooled, "session": session}

for line in sys.stdin:
    name, count = line.split()
    work = CASES[name]
    started = time.perf_counter_ns()
    for _ in range(int(count)):
        work()
    print(time.perf_counter_ns() - started, flush=True)
