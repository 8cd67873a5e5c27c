"""The drop-in for `quickjs-rs` keeps its interface."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import afresh.quickjs as quickjs_rs
import pytest


@pytest.fixture
def runtime() -> Iterator[quickjs_rs.Runtime]:
    with quickjs_rs.Runtime() as runtime:
        yield runtime


@pytest.fixture
def ctx(runtime: quickjs_rs.Runtime) -> Iterator[quickjs_rs.Context]:
    with runtime.new_context() as ctx:
        yield ctx


def test_values_errors_and_state(ctx: quickjs_rs.Context) -> None:
    assert ctx.eval("let x = 20; x + 1") == 21
    assert ctx.eval("undefined") is None
    with pytest.raises(quickjs_rs.JSError) as raised:
        ctx.eval("null.x")
    assert raised.value.name == "TypeError"
    assert raised.value.stack
    with pytest.raises(quickjs_rs.MarshalError):
        ctx.eval("() => 1")
    assert ctx.eval("x") == 20


def test_a_function_of_the_host_tells_the_guest_nothing_and_the_caller_all(ctx: quickjs_rs.Context) -> None:
    @ctx.function
    def fail(secret: str) -> None:
        raise LookupError(secret)

    assert ctx.eval("try { fail('x') } catch (e) { [e.name, e.message] }") == ["HostError", "Host function failed"]
    with pytest.raises(LookupError, match="hidden"):
        ctx.eval("fail('hidden')")


def test_a_time_limit_leaves_no_trace(runtime: quickjs_rs.Runtime) -> None:
    with runtime.new_context(timeout=2) as ctx:
        ctx.eval("var x = 1")
        with pytest.raises(quickjs_rs.TimeoutError):
            ctx.eval("x = 2; for (;;);")
        assert ctx.eval("x") == 1


def test_a_snapshot_is_restored_in_another_context_and_a_spoiled_one_is_refused(runtime: quickjs_rs.Runtime) -> None:
    with runtime.new_context() as ctx:
        ctx.eval("const counter = (() => { let n = 0; return () => ++n })(); counter()")
        data = ctx.create_snapshot().to_bytes()
    with runtime.new_context() as ctx:
        ctx.register("double", lambda n: n * 2)
        for at in (0, 4, 10):
            spoiled = bytearray(data)
            spoiled[at] ^= 0xFF
            with pytest.raises(ValueError, match=r"magic|version|build_id"):
                runtime.restore_snapshot(quickjs_rs.Snapshot(bytes(spoiled)), ctx)
        with pytest.raises(ValueError, match="length"):
            runtime.restore_snapshot(quickjs_rs.Snapshot(data[:-1]), ctx)
        assert ctx.eval("typeof counter") == "undefined"
        runtime.restore_snapshot(quickjs_rs.Snapshot.from_bytes(data), ctx)
        assert ctx.eval("double(counter())") == 4


def test_handles_hold_what_stays(ctx: quickjs_rs.Context) -> None:
    with ctx.eval_handle("({ twice: (n) => n * 2, list: [1, 2] })") as handle:
        assert handle.type_of == "object"
        with handle.get("twice") as twice, twice.call(21) as answer:
            assert twice.type_of == "function"
            assert answer.to_python() == 42
        with handle.call_method("twice", 4) as answer:
            assert answer.to_python() == 8
        with handle.get("list") as items:
            handle.set("copy", items)
            assert items.to_python() == [1, 2]
        assert handle.has("copy")
        assert not handle.has("nothing")
    with pytest.raises(quickjs_rs.InvalidHandleError):
        handle.to_python()


async def test_asynchronous_functions(ctx: quickjs_rs.Context) -> None:
    @ctx.function
    async def later(n: int) -> int:
        await asyncio.sleep(0)
        return n * 2

    assert await ctx.eval_async("const a = await later(10); a + await later(1)") == 22
    with pytest.raises(quickjs_rs.ConcurrentEvalError):
        ctx.eval("later(1)")
    with pytest.raises(quickjs_rs.DeadlockError):
        await ctx.eval_async("await new Promise(() => 0)")
    with pytest.raises(quickjs_rs.TimeoutError):
        await ctx.eval_async("for (;;);", timeout=0.05)
    assert await ctx.eval_async("a") == 20


async def test_a_handle_of_an_awaiting_script_holds_what_it_became() -> None:
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    with quickjs_rs.Runtime(transform_flags=quickjs_rs.SourceTransform.TOP_LEVEL_CONST_TO_VAR) as runtime:
        context = runtime.new_context()
        context.register("double", double)
        for n in range(2):
            handle = await context.eval_handle_async(f"const x = await double({n + 20}); let y{n} = x; x")
            assert not handle.is_promise()
            assert handle.to_python() == 2 * (n + 20)
        assert (await context.eval_handle_async("[x, y0, y1]")).to_python() == [42, 40, 42]
        function = await context.eval_handle_async("(a, b) => a + b + x")
        assert (function.type_of, function.call(1, 2).to_python()) == ("function", 45)
        promise = context.eval_handle("(async () => 5)()")
        assert promise.is_promise()
        assert (await promise.await_promise()).to_python() == 5
        with pytest.raises(quickjs_rs.QuickJSError, match="no promise"):
            await function.await_promise()
        with pytest.raises(quickjs_rs.JSError, match="gone"):
            await context.eval_handle_async("await double(1); throw new Error('gone')")
        with pytest.raises(quickjs_rs.DeadlockError):
            await context.eval_handle_async("new Promise(() => {})")
        assert context.eval("Symbol.for('afresh.value') in globalThis") is False


def test_a_worker_is_a_thread_with_a_loop() -> None:
    async def where() -> str:
        return threading.current_thread().name

    worker = quickjs_rs.ThreadWorker(name="of-its-own")
    assert worker.run_sync(where()) == "of-its-own"

    async def elsewhere() -> str:
        return await worker.run_async(where())

    assert asyncio.run(elsewhere()) == "of-its-own"
    worker.close()
    worker.close()
    assert "of-its-own" not in [thread.name for thread in threading.enumerate()]
