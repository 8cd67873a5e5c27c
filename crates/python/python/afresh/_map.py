"""Calls of one function with many inputs, in several sandboxes at once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from ._result import Result, failed
from ._sandbox import AsyncSandbox, Sandbox

# Seconds between two attempts to stop calls.
_STOP_INTERVAL = 0.02


class _Work:
    """Inputs that wait for a sandbox, and results in their order."""

    def __init__(self, inputs: Sequence[Any], concurrency: int | None) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"a concurrency of {concurrency} runs nothing: give 1 or more")
        self.inputs = inputs
        self.workers = min(concurrency or os.cpu_count() or 1, len(inputs))
        self._results: list[Result | None] = [None] * len(inputs)
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """The number of the next input."""
        with self._lock:
            at = self._next
            self._next += 1
        return at if at < len(self.inputs) else None

    def put(self, at: int, result: Result) -> None:
        """The result of an input, unless it has one already."""
        if self._results[at] is None:
            self._results[at] = result

    def end(self) -> None:
        """Hands out no more inputs."""
        with self._lock:
            self._next = len(self.inputs)

    def results(self) -> list[Result]:
        """All results."""
        return [result for result in self._results if result is not None]


def map_inputs(make: Callable[[], Sandbox], code: str, inputs: Sequence[Any], concurrency: int | None) -> list[Result]:
    """A result for each input, in order."""
    work = _Work(inputs, concurrency)
    live: dict[int, Sandbox] = {}

    def run(worker: int) -> None:
        while (at := work.take()) is not None:
            try:
                sandbox = live.get(worker)
                if sandbox is None:
                    sandbox = live[worker] = make()
                    sandbox.checkpoint("start")
                work.put(at, sandbox.apply_result(code, inputs[at]))
                sandbox.rollback("start")
            except Exception as error:
                work.put(at, failed(error))
                # The next input has a new one.
                broken = live.pop(worker, None)
                if broken is not None:
                    broken.close()

    if not work.workers:
        return []
    with ThreadPoolExecutor(work.workers, "afresh-map") as pool:
        futures = [pool.submit(run, worker) for worker in range(work.workers)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            work.end()
            while wait(futures, _STOP_INTERVAL).not_done:
                for sandbox in list(live.values()):
                    sandbox.stop()
            raise
        finally:
            for sandbox in live.values():
                sandbox.close()
    return work.results()


async def async_map_inputs(
    make: Callable[[], AsyncSandbox], code: str, inputs: Sequence[Any], concurrency: int | None
) -> list[Result]:
    """The same on an event loop."""
    work = _Work(inputs, concurrency)

    async def run() -> None:
        sandbox: AsyncSandbox | None = None
        try:
            while (at := work.take()) is not None:
                try:
                    if sandbox is None:
                        sandbox = make()
                        await sandbox.checkpoint("start")
                    work.put(at, await sandbox.apply_result(code, inputs[at]))
                    await sandbox.rollback("start")
                except Exception as error:
                    work.put(at, failed(error))
                    if sandbox is not None:
                        await sandbox.close()
                        sandbox = None
        finally:
            if sandbox is not None:
                await sandbox.close()

    await asyncio.gather(*(run() for _ in range(work.workers)))
    return work.results()
