"""Output on its way to functions on an event loop.

Promises: a guest that is ahead of the loop waits, so that output that nothing has taken yet is bounded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from . import _call_threads, _native

# Memory of output on its way to an event loop, beyond which the guest waits.
_MAX_PENDING = 1 << 20
# Memory of one call in the loop, apart from its text.
_CALL_COST = 512


def pending(future: Future[None] | None) -> _native.Pending | None:
    """A future as the native half waits for it."""
    return None if future is None else _call_threads.pending(future, future.cancel)


class LoopDelivery:
    """Makes calls on an event loop, in order, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending = 0
        self._caught_up: Future[None] | None = None

    def send(self, call: Callable[[], object], size: int) -> Future[None] | None:
        """Makes a call that takes so many characters; a future that the sender has to wait for, if it is ahead."""
        cost = _CALL_COST + size
        with self._lock:
            self._pending += cost
            caught_up = None
            if self._pending > _MAX_PENDING:
                if self._caught_up is None or self._caught_up.cancelled():
                    self._caught_up = Future()
                caught_up = self._caught_up
        self._loop.call_soon_threadsafe(self._deliver, call, cost)
        return caught_up

    def _deliver(self, call: Callable[[], object], cost: int) -> None:
        try:
            call()
        finally:
            with self._lock:
                self._pending -= cost
                caught_up = None
                if self._pending <= _MAX_PENDING // 2:
                    caught_up, self._caught_up = self._caught_up, None
            if caught_up is not None and caught_up.set_running_or_notify_cancel():
                caught_up.set_result(None)
