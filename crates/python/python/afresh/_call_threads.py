"""Threads for calls from event loops, apart from the default executor of a loop.

A call keeps its thread while its guest waits for a tool. An asynchronous tool may need a thread of the default executor
itself, for ``asyncio.to_thread`` or to look up a name.

Promises: a limited number of calls runs at a time, and others wait in order. A call that waits for Python code or for
the background work of its sandbox is not counted, so that the code which it waits for may call other sandboxes.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from . import _native

# Maximum calls that run at the same time.
_MAX_ACTIVE = 64
# Maximum threads that wait for work.
_MAX_IDLE = 32


class _Job:
    """One call of a function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._function = function

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Worker(threading.Thread):
    def __init__(self, threads: CallThreads) -> None:
        # The process may end while it waits. The native half ends calls that run then.
        super().__init__(name="afresh-call", daemon=True)
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self._threads = threads

    def run(self) -> None:
        _here.threads = self._threads
        while True:
            job = self.jobs.get()
            job.run()
            del job
            if not self._threads.end(self):
                return


# The `CallThreads` that the calling thread belongs to.
_here = threading.local()


class CallThreads(Executor):
    """An executor for calls."""

    def __init__(self, max_active: int = _MAX_ACTIVE) -> None:
        self._max_active = max_active
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A child of a fork has none of the threads."""
        self._lock = threading.Lock()
        self._queue: deque[_Job] = deque()
        self._idle: list[_Worker] = []
        # Calls that run, without those that wait.
        self._active = 0

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Runs a function as soon as there is room for it."""
        job = _Job(functools.partial(function, *arguments, **keywords))
        with self._lock:
            self._queue.append(job)
        self._dispatch()
        return job.future

    def _dispatch(self) -> None:
        """Begins queued work while there is room for it."""
        while True:
            with self._lock:
                if not self._queue or self._active >= self._max_active:
                    return
                job = self._queue.popleft()
                self._active += 1
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = _Worker(self)
                try:
                    worker.start()
                except RuntimeError as error:
                    # The system has no more threads.
                    with self._lock:
                        self._active -= 1
                    job.future.set_exception(error)
                    continue
            worker.jobs.put(job)

    def end(self, worker: _Worker) -> bool:
        """Ends the work of a thread; whether the thread is used again."""
        with self._lock:
            self._active -= 1
            kept = len(self._idle) < _MAX_IDLE
            if kept:
                self._idle.append(worker)
        self._dispatch()
        return kept

    def leave(self) -> None:
        """Begins a wait within work, which is not counted."""
        with self._lock:
            self._active -= 1
        self._dispatch()

    def enter(self) -> None:
        """Ends a wait. The work was admitted already, so that there may be more than the maximum for a while."""
        with self._lock:
            self._active += 1


# Of sandboxes.
CALLS = CallThreads()
# Of programs that run from their start to their end, so that those delay no sandbox.
PROGRAMS = CallThreads()
# Of sandboxes that are closed, so that running calls do not delay the end of others.
CLOSES = CallThreads()


class _UncountedFuture:
    """A future of which the native half takes the result, or which it abandons, once it has added its callback."""

    def __init__(self, threads: CallThreads, future: Future[Any], abandon: Callable[[], object]) -> None:
        self._threads = threads
        self._future = future
        self._abandon = abandon

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        self._threads.leave()
        self._future.add_done_callback(callback)

    def result(self) -> Any:
        self._threads.enter()
        return self._future.result()

    def abandon(self) -> None:
        self._threads.enter()
        self._abandon()


def pending(future: Future[Any], abandon: Callable[[], object]) -> _native.Pending:
    """A future for which the calling thread will wait. The wait is not counted."""
    threads: CallThreads | None = getattr(_here, "threads", None)
    if threads is None:
        return _native.Pending(future, abandon)
    uncounted = _UncountedFuture(threads, future, abandon)
    return _native.Pending(uncounted, uncounted.abandon)


@contextmanager
def waiting() -> Iterator[None]:
    """A wait within work, which is not counted."""
    threads: CallThreads | None = getattr(_here, "threads", None)
    if threads is None:
        yield
        return
    threads.leave()
    try:
        yield
    finally:
        threads.enter()
