"""The asynchronous twin: the loop is never blocked, and cancelled calls end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import afresh
import pytest
import pytest_asyncio
from afresh._call_threads import _MAX_ACTIVE, CallThreads


@pytest_asyncio.fixture
async def sb(js: afresh.Warm) -> AsyncIterator[afresh.AsyncSandbox]:
    async with js.async_sandbox(timeout=60) as sandbox:
        yield sandbox


async def test_everything_has_its_twin(sb: afresh.AsyncSandbox, tmp_path: object) -> None:
    assert (await sb.run_code("let x = 1; x")).value == 1
    clean = await sb.checkpoint("clean")
    assert await sb.eval("x = 2") == 2
    fork, other = await sb.fork(2)
    assert list(await asyncio.gather(fork.eval("x"), other.eval("x + 1"))) == [2, 3]
    await sb.rollback(clean)
    assert await sb.apply("(n) => x + n", 10) == 11
    await sb.save(f"{tmp_path}/store@kept")
    request = afresh._native.encode([0, [], "x", "x", []])
    assert afresh._native.decode(await sb.call("evaluate", request)) == [0, 1, None]


async def test_the_loop_goes_on_while_a_guest_runs(sb: afresh.AsyncSandbox) -> None:
    clean = await sb.checkpoint("clean")
    task = asyncio.create_task(sb.run_code("for (;;);"))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not task.done()
    sb.stop()
    assert isinstance((await task).error, afresh.StoppedError)
    await sb.rollback(clean)
    assert await sb.eval("1") == 1


async def test_cancelling_stops_the_guest(sb: afresh.AsyncSandbox) -> None:
    clean = await sb.checkpoint("clean")
    begun = asyncio.Event()
    task = asyncio.create_task(sb.run_code("console.log('x'); for (;;);", on_output=lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # It is over, not only forgotten.
    assert sb.failed
    await sb.rollback(clean)
    assert await sb.eval("1") == 1


async def test_a_call_that_was_cancelled_before_it_began_never_runs_on(sb: afresh.AsyncSandbox) -> None:
    clean = await sb.checkpoint("clean")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(sb.run_code("for (;;);"), 0.05)
    await sb.rollback(clean)
    assert await sb.eval("1") == 1


async def test_tools_run_on_the_loop_that_calls_and_are_cancelled_with_it(js: afresh.Warm) -> None:
    loop = asyncio.get_running_loop()
    waits = asyncio.Event()
    ended: list[str] = []

    async def where() -> bool:
        return asyncio.get_running_loop() is loop

    async def forever() -> None:
        waits.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with js.async_sandbox(tools=[where, forever]) as sb:
        clean = await sb.checkpoint("clean")
        assert await sb.eval("await where()") is True
        task = asyncio.create_task(sb.run_code("for (;;) { try { forever() } catch {} }"))
        await asyncio.wait_for(waits.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended
        await sb.rollback(clean)
        assert await sb.eval("1") == 1


async def test_many_sandboxes_run_at_once(js: afresh.Warm) -> None:
    async def one(number: int) -> int:
        async with js.async_sandbox() as sandbox:
            value: int = await sandbox.eval(f"{number} * 2")
            return value

    assert await asyncio.gather(*(one(number) for number in range(40))) == [number * 2 for number in range(40)]


async def test_a_tool_may_use_the_default_executor_of_the_loop(js: afresh.Warm) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    async def look() -> int:
        return await asyncio.to_thread(lambda: 42)

    async with js.async_sandbox(tools=[look]) as sb:
        assert await asyncio.wait_for(sb.eval("await look()"), 60) == 42


async def test_programs_run_apart_from_the_default_executor(python: afresh.Warm) -> None:
    assert python
    released = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        executor.submit(released.wait, 60)
        try:
            done = await asyncio.wait_for(afresh.async_exec(["sh", "-c", "exit 3"]), 60)
        finally:
            released.set()
    assert done.exit_code == 3


async def test_calls_that_wait_for_tools_delay_no_others(js: afresh.Warm) -> None:
    count = _MAX_ACTIVE + 1
    arrived, complete = 0, asyncio.Event()

    async def meet() -> int:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            complete.set()
        await complete.wait()
        return 1

    sandboxes = [js.async_sandbox(tools=[meet]) for _ in range(count)]
    calls = asyncio.gather(*(sandbox.eval("await meet()") for sandbox in sandboxes))
    assert await asyncio.wait_for(calls, 120) == [1] * count
    for sandbox in sandboxes:
        await sandbox.close()


def test_threads_of_calls_keep_to_their_maximum_and_to_the_order() -> None:
    threads = CallThreads(2)
    begun, released = threading.Semaphore(0), threading.Event()
    order: list[int] = []

    def work(number: int) -> int:
        order.append(number)
        begun.release()
        released.wait(60)
        return number

    futures = [threads.submit(work, number) for number in range(5)]
    assert begun.acquire(timeout=60)
    assert begun.acquire(timeout=60)
    assert [future.running() for future in futures] == [True, True, False, False, False]
    released.set()
    assert [future.result(60) for future in futures] == list(range(5))
    assert sorted(order[:2]) == [0, 1]
    assert threads.submit(lambda: threading.current_thread().daemon).result(60)
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(60)


class _WatchedSession:
    """A session that records the threads of its operations."""

    def __init__(self, session: Any, threads: dict[str, int]) -> None:
        self._session = session
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        self._threads[name] = threading.get_ident()
        return getattr(self._session, name)


async def test_states_are_made_and_left_on_other_threads_than_the_loop(js: afresh.Warm, tmp_path: object) -> None:
    threads: dict[str, int] = {}
    sb = js.async_sandbox()
    sb._session = cast(Any, _WatchedSession(sb._session, threads))
    clean = await sb.checkpoint("clean")
    await sb.rollback(clean)
    for fork in await sb.fork(2):
        await fork.close()
    await sb.save(f"{tmp_path}/store@kept")
    await sb.close()
    operations = {"checkpoint", "rollback", "fork", "save", "close"}
    assert operations <= threads.keys()
    assert not {name for name in operations if threads[name] == threading.get_ident()}
    with pytest.raises(afresh.SessionError, match="closed"):
        await sb.checkpoint("late")


async def test_a_cancelled_close_closes(js: afresh.Warm) -> None:
    sb = js.async_sandbox()
    closing = asyncio.create_task(sb.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(afresh.SessionError, match="closed"):
        await sb.eval("1")
