"""A thread with an event loop, for coroutines from any thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class ThreadWorker:
    """Runs coroutines on a separate thread, which starts with the first.

    >>> async def answer():
    ...     return 42
    >>> worker = ThreadWorker()
    >>> worker.run_sync(answer())
    42
    >>> worker.close()
    """

    def __init__(self, name: str = "afresh-worker") -> None:
        self._name = name
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def _here(self) -> threading.Lock:
        """The lock. A child of a fork has no thread of its parent, which may have held it, and shares its loop."""
        if self._process != os.getpid():
            self._begin()
        return self._lock

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._here():
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def run_sync(self, coro: Coroutine[Any, Any, _T]) -> _T:
        """Waits for the coroutine and returns its result."""
        return asyncio.run_coroutine_threadsafe(coro, self._started()).result()

    def run_async(self, coro: Coroutine[Any, Any, _T]) -> asyncio.Future[_T]:
        """The result of the coroutine, as a future of the calling loop."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, self._started()))

    def close(self) -> None:
        """Cancels what still runs, and ends the thread."""
        with self._here():
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join()
