"""The asynchronous twin: the loop is never blocked, and cancelled calls end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import afresh
import pytest
import pytest_asyncio


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
