"""Work of a task of an event loop in a thread.

Promises: a task that is cancelled stops its work, and ends after it.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from . import _native


class RunningCall:
    """Work that waits for a thread of an executor, or runs in one."""

    def __init__(self, work: Callable[[_native.Stopper], Any]) -> None:
        self.stopper = _native.Stopper()
        self._work = work
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._begun = self._refused = False
        self._process = os.getpid()

    async def run(self, executor: Executor) -> Any:
        """Does the work in a thread, with the task's context, and stops it when the task is cancelled."""
        try:
            return await self._start(executor)
        except asyncio.CancelledError:
            if not self.refuse(None):
                self.stopper.stop()
                await self.ended()
            raise

    async def complete(self, executor: Executor) -> Any:
        """Does the work in a thread, also to its end when the task is cancelled."""
        return await self._start(executor)

    async def _start(self, executor: Executor) -> Any:
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Any] = loop.create_future()
        self._future = loop.run_in_executor(executor, self._run)
        self._future.add_done_callback(self._settle)
        return await asyncio.shield(self._outcome)

    def _run(self) -> Any:
        with self._lock:
            if self._refused:
                return None
            self._begun = True
        return self._context.run(self._work, self.stopper)

    def _settle(self, future: asyncio.Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if self._outcome.done():
            return
        if future.cancelled():
            self._outcome.cancel()
        elif error is not None:
            self._outcome.set_exception(error)
            # Nothing may await it any more.
            self._outcome.exception()
        else:
            self._outcome.set_result(future.result())

    def refuse(self, error: Exception | None) -> bool:
        """Keeps the work from being run, and lets a task that awaits it fail; ``False`` once it has begun."""
        if self._process != os.getpid():
            # A child of a fork has neither the thread nor the loop, and may find the lock held.
            return True
        with self._lock:
            if self._begun:
                return False
            self._refused = True
        if error is not None and not self._outcome.done():
            self._outcome.set_exception(error)
        return True

    async def ended(self) -> None:
        """Waits for the end of work that was stopped."""
        await asyncio.wait([self._outcome])
