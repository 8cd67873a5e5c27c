"""Threads for tools that a guest's call may abandon.

A thread is used again once its tool has returned. A tool that is abandoned keeps its thread, which gets an exception at
its next bytecode and ends with the tool.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from . import _native
from ._call_threads import pending

# Maximum threads that wait for work.
_MAX_IDLE = 32


class AbandonedCall(BaseException):
    """Raised in a tool whose call has ended: nothing takes its result."""


class _Job:
    """One run of a tool."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._function = function
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._thread: int | None = None
        self.abandoned = False

    def run(self) -> None:
        with self._lock:
            if self.abandoned:
                return
            self._thread = threading.get_ident()
        try:
            result = self._context.run(self._function)
        except BaseException as error:
            if self._end():
                self.future.set_exception(error)
        else:
            if self._end():
                self.future.set_result(result)

    def _end(self) -> bool:
        """Ends the run; whether its result is still wanted."""
        with self._lock:
            self._thread = None
            return not self.abandoned

    def abandon(self) -> None:
        with self._lock:
            self.abandoned = True
            if self._thread is not None:
                thread, error = ctypes.c_ulong(self._thread), ctypes.py_object(AbandonedCall)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)


class _Worker(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="afresh-tool", daemon=True)
        self.jobs: SimpleQueue[_Job] = SimpleQueue()

    def run(self) -> None:
        try:
            while True:
                job = self.jobs.get()
                job.run()
                # A thread with an exception on its way is of no further use.
                if job.abandoned or not _keep(self):
                    return
                del job
        except AbandonedCall:
            return


_idle: list[_Worker] = []
_lock = threading.Lock()


def _keep(worker: _Worker) -> bool:
    with _lock:
        if len(_idle) >= _MAX_IDLE:
            return False
        _idle.append(worker)
        return True


def _forget() -> None:
    """A child of a fork has none of the threads."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


def start(function: Callable[[], Any]) -> _native.Pending:
    """Runs a function on a thread, in the caller's context."""
    job = _Job(function)
    with _lock:
        worker = _idle.pop() if _idle else None
    if worker is None:
        worker = _Worker()
        worker.start()
    worker.jobs.put(job)
    return pending(job.future, job.abandon)
