"""Limits, closing and exit: every wait of a guest ends, and strangers' values cost no more than their budget."""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import afresh
import pytest
from afresh._delivery import LoopDelivery

Alone = Callable[[str], str]

# Longer than any test may take, so that a wait that does not end fails.
LONG = 200


def test_a_time_limit_ends_a_tool_that_does_not_return(js: afresh.Warm) -> None:
    released = threading.Event()
    ended: list[str] = []

    async def never() -> None:
        try:
            await asyncio.sleep(LONG)
        finally:
            ended.append("async")

    def blocked() -> None:
        released.wait(LONG)

    def busy() -> None:
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.append("sync")

    with js.sandbox(timeout=2, tools=[never, blocked, busy]) as sb:
        clean = sb.checkpoint("clean")
        for code in ["await never()", "blocked()", "busy(); for (;;);"]:
            error = sb.run_code(code).error
            assert isinstance(error, afresh.TimeLimitError), (code, error)
            sb.rollback(clean)
            assert sb.eval("1 + 1") == 2
    released.set()
    deadline = time.monotonic() + LONG
    while "sync" not in ended and time.monotonic() < deadline:
        time.sleep(0.001)
    assert "sync" in ended


def test_each_call_takes_a_time_limit(js: afresh.Warm) -> None:
    released = threading.Event()

    def blocked() -> None:
        released.wait(LONG)

    with js.sandbox(tools=[blocked]) as sb:
        clean = sb.checkpoint("clean")
        calls: list[Callable[[], object]] = [
            lambda: sb.run_code("for (;;);", timeout=0.2).unwrap(),
            # A tool that does not return is abandoned, though the sandbox has no limit.
            lambda: sb.run_code("blocked()", timeout=0.2).unwrap(),
            lambda: sb.eval("for (;;);", timeout=0.2),
            lambda: sb.apply("() => { for (;;); }", timeout=0.2),
            lambda: sb.apply_result("() => { for (;;); }", timeout=0.2).unwrap(),
        ]
        for call in calls:
            with pytest.raises(afresh.TimeLimitError):
                call()
            sb.rollback(clean)
            assert sb.eval("1 + 1") == 2
    released.set()
    # It replaces a lower limit as well as a higher one.
    slow = "const end = Date.now() + 400; while (Date.now() < end); 7"
    with js.sandbox(timeout=0.1) as sb:
        assert sb.eval(slow, timeout=LONG) == 7
        (copy,) = sb.fork()
        assert isinstance(copy.run_code(slow).error, afresh.TimeLimitError)
    assert isinstance(js.run_code("for (;;);", timeout=0.2).error, afresh.TimeLimitError)
    with pytest.raises(afresh.TimeLimitError):
        js.eval("for (;;);", timeout=0.2)
    endless = afresh._native.encode([0, [], "for (;;);", "x", []])
    with pytest.raises(afresh.TimeLimitError):
        js.call("evaluate", endless, timeout=0.2)
    with js.sandbox() as sb:
        clean = sb.checkpoint("clean")
        with pytest.raises(afresh.TimeLimitError):
            sb.call("evaluate", endless, timeout=0.2)
        sb.rollback(clean)
    with js.sandbox(timeout=0.2) as sb:
        assert isinstance(sb.run_code("for (;;);", timeout=None).error, afresh.TimeLimitError)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            js.run_code("1", timeout=wrong)
    for wrong in (float("inf"), 1e300, 1e19, 10**400):
        with pytest.raises(ValueError, match="at most 1000000000 s"):
            js.run_code("1", timeout=wrong)
        with pytest.raises(ValueError, match="at most 1000000000 s"):
            js.sandbox(timeout=wrong)
    assert js.eval("1", timeout=1e9) == 1
    with pytest.raises(TypeError, match="timeout"):
        js.run_code("1", timeout="5")  # type: ignore[arg-type]


async def test_each_asynchronous_call_takes_a_time_limit(js: afresh.Warm) -> None:
    async with js.async_sandbox() as sb:
        clean = await sb.checkpoint("clean")
        assert isinstance((await sb.run_code("for (;;);", timeout=0.2)).error, afresh.TimeLimitError)
        await sb.rollback(clean)
        with pytest.raises(afresh.TimeLimitError):
            await sb.eval("for (;;);", timeout=0.2)
        await sb.rollback(clean)
        with pytest.raises(afresh.TimeLimitError):
            await sb.apply("() => { for (;;); }", timeout=0.2)
        await sb.rollback(clean)
        applied = await sb.apply_result("() => { for (;;); }", timeout=0.2)
        assert isinstance(applied.error, afresh.TimeLimitError)
        await sb.rollback(clean)
        with pytest.raises(afresh.TimeLimitError):
            await sb.call("evaluate", afresh._native.encode([0, [], "for (;;);", "x", []]), timeout=0.2)
        await sb.rollback(clean)
        assert await sb.eval("1 + 1", timeout=LONG) == 2


def test_stop_ends_a_tool_of_a_sandbox_with_a_limit(js: afresh.Warm) -> None:
    waits, released = threading.Event(), threading.Event()

    def blocked() -> None:
        waits.set()
        released.wait(LONG)

    def stop() -> None:
        waits.wait(LONG)
        sb.stop()

    with js.sandbox(timeout=LONG, tools=[blocked]) as sb:
        threading.Thread(target=stop).start()
        assert isinstance(sb.run_code("blocked()").error, afresh.StoppedError)
    released.set()


async def test_cancelling_ends_a_call_in_a_tool(js: afresh.Warm) -> None:
    waits, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def blocked() -> None:
        loop.call_soon_threadsafe(waits.set)
        released.wait(LONG)

    async with js.async_sandbox(tools=[blocked]) as sb:
        task = asyncio.create_task(sb.run_code("blocked()"))
        await asyncio.wait_for(waits.wait(), LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sb.failed
    released.set()


def test_a_tool_may_close_its_own_sandbox(js: afresh.Warm) -> None:
    open_sandboxes: list[afresh.Sandbox] = []

    def close() -> None:
        open_sandboxes[-1].close()

    for timeout in [None, 60]:
        sandbox = js.sandbox(timeout=timeout, tools=[close])
        open_sandboxes.append(sandbox)
        result = sandbox.run_code("close(); for (;;);")
        assert isinstance(result.error, afresh.StoppedError)
        with pytest.raises(afresh.SessionError, match="closed"):
            sandbox.eval("1")


async def test_an_asynchronous_tool_may_close_its_own_sandbox(js: afresh.Warm) -> None:
    async def close() -> None:
        await sandbox.close()

    sandbox = js.async_sandbox(tools=[close])
    result = await sandbox.run_code("close(); for (;;);")
    assert isinstance(result.error, afresh.StoppedError)
    with pytest.raises(afresh.SessionError, match="closed"):
        await sandbox.eval("1")


def test_closing_waits_for_the_call_and_ends_it(js: afresh.Warm) -> None:
    begun = threading.Event()
    sandbox = js.sandbox()
    errors: list[BaseException | None] = []

    def run() -> None:
        errors.append(sandbox.run_code("console.log(1); for (;;);", on_output=lambda *_: begun.set()).error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(LONG)
    sandbox.close()
    thread.join(LONG)
    assert len(errors) == 1
    assert isinstance(errors[0], afresh.StoppedError)


def test_tools_that_refer_to_their_sandbox_are_collected(js: afresh.Warm) -> None:
    class Agent:
        def __init__(self) -> None:
            self.sandbox = js.sandbox(tools=[self.look])
            self.fork = self.sandbox.fork()[0]

        def look(self) -> int:
            return 1

    agent = Agent()
    assert (agent.sandbox.eval("look()"), agent.fork.eval("look()")) == (1, 1)
    gone = weakref.ref(agent)
    del agent
    gc.collect()
    assert gone() is None


def test_failures_of_tools_do_not_accumulate(js: afresh.Warm) -> None:
    class ToolError(Exception):
        pass

    alive: list[weakref.ref[ToolError]] = []

    def fail() -> None:
        error = ToolError("no")
        alive.append(weakref.ref(error))
        raise error

    def count() -> int:
        gc.collect()
        return sum(1 for one in alive if one() is not None)

    with js.sandbox(tools=[fail, count]) as sb:
        many = "for (let i = 0; i < 100; i++) { try { fail() } catch {} }"
        assert sb.eval(f"{many} count()") <= 20
        last = sb.run_code(f"{many} fail()").error
        assert last is not None
        assert isinstance(last.__cause__, ToolError)


@pytest.mark.parametrize(("size", "most"), [(65536, 1 << 20), (0, 1 << 12)])
async def test_output_waits_for_the_loop(
    js: afresh.Warm, monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    sent, got, ahead = 0, 0, 0

    class WatchedDelivery(LoopDelivery):
        def send(self, call: Callable[[], object], size: int) -> Future[None] | None:
            nonlocal sent, ahead
            ahead = max(ahead, sent - got)
            sent += size
            return super().send(call, size)

    def slow(_stream: str, text: str) -> None:
        nonlocal got
        if got == 0:
            # The guest could print all of it in this time.
            time.sleep(0.2)
        got += len(text)

    monkeypatch.setattr("afresh._sandbox.LoopDelivery", WatchedDelivery)
    async with js.async_sandbox() as sb:
        count = 200 if size else 10_000
        code = f"const line = 'x'.repeat({size}); for (let i = 0; i < {count}; i++) console.log(line); 7"
        assert (await sb.run_code(code, on_output=slow)).value == 7
    assert sent == count * (size + 1)
    assert ahead <= most


async def test_a_full_executor_delays_no_cancellation(js: afresh.Warm) -> None:
    released = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(released.wait, LONG)
        sb = js.async_sandbox(executor=executor)
        clean = sb.at
        task = asyncio.create_task(sb.run_code("globalThis.ran = 1"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        queued = asyncio.create_task(sb.eval("globalThis.ran = 2"))
        await asyncio.sleep(0.01)
        await sb.close()
        with pytest.raises(afresh.SessionError, match="closed"):
            await queued
        released.set()
    assert clean is not None


async def test_tools_see_the_callers_context(js: afresh.Warm) -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="none")

    def plain() -> str:
        return user.get()

    async def waits() -> str:
        await asyncio.sleep(0)
        return user.get()

    user.set("caller")
    async with js.async_sandbox(tools=[plain, waits]) as sb:
        assert await sb.eval("[plain(), await waits()]") == ["caller", "caller"]
    with js.sandbox(timeout=60, tools=[plain]) as plain_sb:
        assert plain_sb.eval("plain()") == "caller"


def test_a_daemon_thread_in_a_tool_does_not_end_the_process_badly(alone: Alone) -> None:
    said = alone("""
        import afresh, threading, time
        js = afresh.warm("js")
        begun = [threading.Event() for _ in range(3)]
        def quick(): begun[0].set(); return 1
        def slow(): begun[1].set(); time.sleep(100)
        def run(code, tools, **more):
            js.sandbox(tools=tools, **more).run_code(code)
        for code, tools, more in [
            ("for (;;) quick()", [quick], {}),
            ("slow()", [slow], {}),
            ("console.log(1); for (;;) console.log(2)", [], {}),
        ]:
            def go(code=code, tools=tools):
                js.sandbox(tools=tools).run_code(code, on_output=lambda *_: begun[2].set())
            threading.Thread(target=go, daemon=True).start()
        for event in begun: assert event.wait(100)
        print("ends", flush=True)
    """)
    assert said == "ends\n"


@pytest.mark.usefixtures("python")
def test_a_daemon_thread_that_runs_or_opens_a_program_does_not_end_the_process_badly(alone: Alone) -> None:
    said = alone("""
        import afresh, sys, threading, time
        # The end of the interpreter takes a while.
        class Slow:
            def __del__(self, sleep=time.sleep): sleep(1.5)
        sys.slow = Slow()
        begun = threading.Event()
        def take(text):
            begun.set()
            time.sleep(0.8)
        def runs():
            afresh.exec(["sh", "-c", "echo x; sleep 100"], on_stdout=take)
        def opens():
            afresh.warm("js", setup="for (;;);")
        def opens_program():
            afresh.linux("python3", setup="while True: pass")
        for work in [runs, opens, opens_program]:
            threading.Thread(target=work, daemon=True).start()
        assert begun.wait(100)
        time.sleep(0.3)
        print("ends", flush=True)
    """)
    assert said == "ends\n"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS"])
def test_a_replaced_handler_is_refused(alone: Alone, name: str) -> None:
    alone(f"""
        import afresh, signal
        js = afresh.warm("js")
        assert js.eval("1") == 1
        before = signal.getsignal(signal.{name})
        signal.signal(signal.{name}, lambda *_: None)
        try:
            js.eval("1")
        except afresh.SessionError as error:
            assert "{name}" in str(error), error
        else:
            raise SystemExit("it ran")
    """)
    assert signal.getsignal(signal.SIGSEGV) is not None


UTC = datetime.timezone.utc
EAST = datetime.timezone(datetime.timedelta(hours=5))


def test_dates_keep_their_instant_and_their_day(sb: afresh.Sandbox) -> None:
    show = "(x) => x.toISOString()"
    for given, instant in [
        (datetime.datetime(2020, 1, 1, 12, tzinfo=EAST), "2020-01-01T07:00:00.000Z"),
        (datetime.datetime(2020, 1, 1, 12, 0, 0, 250000, tzinfo=UTC), "2020-01-01T12:00:00.250Z"),
        # A time without a zone is the guest's local time, which is UTC; the host's zone does not
        # matter.
        (datetime.datetime(2020, 1, 1, 12), "2020-01-01T12:00:00.000Z"),
        (datetime.date(2020, 1, 31), "2020-01-31T00:00:00.000Z"),
        (datetime.datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC), "9999-12-31T23:59:59.999Z"),
    ]:
        assert sb.apply(show, given) == instant


def test_a_value_that_is_refused_is_an_error_of_the_result(sb: afresh.Sandbox) -> None:
    # All keys have one hash in Python.
    keys = "Array.from({ length: 100 }, (_, n) => [7n + (2n ** 61n - 1n) * BigInt(n), n])"
    result = sb.run_code(f"console.log('printed'); new Map({keys})")
    assert isinstance(result.error, afresh.MarshalError), result
    assert result.stdout == "printed\n"
    assert sb.eval("1 + 1") == 2


def test_members_that_are_lists_or_sets_become_hashable(sb: afresh.Sandbox) -> None:
    assert sb.eval("new Set([[1, [2]], new Set([3])])") == {(1, (2,)), frozenset([3])}


def test_a_result_keeps_to_its_limit(js: afresh.Warm) -> None:
    with js.sandbox(result_limit="1MiB") as sb:
        assert sb.eval("new Array(1000).fill(null)") == [None] * 1000
        result = sb.run_code("console.log('printed'); new Array(100000).fill({})")
        assert isinstance(result.error, afresh.MarshalError)
        assert "result_limit" in str(result.error)
        assert result.stdout == "printed\n"
        assert isinstance(sb.run_code("'x'.repeat(2000000)").error, afresh.MarshalError)
        assert sb.eval("1") == 1


def test_a_character_split_over_writes_is_streamed_whole(sb: afresh.Sandbox) -> None:
    pieces: list[str] = []
    sb.run_code("console.log('a\\u20ac\\u{1F600}')", on_output=lambda _, text: pieces.append(text))
    assert "".join(pieces) == "a\u20ac\U0001f600\n"
