"""With other users of signals, processes and threads: each in a new Python process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

Alone = Callable[[str], str]


TRAPS = """
        with js.sandbox() as sb:
            clean = sb.checkpoint("clean")
            for _ in range(3):
                error = sb.run_code("globalThis.f = () => f() + 1; f()").error
                assert isinstance(error, afresh.GuestError), error
                sb.rollback(clean)
            sb.run_code("globalThis.big = new Array(200000).fill(0).map((_, i) => ({i}))")
            print(sb.eval("big.length"))
"""


def test_faulthandler_that_was_there_before(alone: Alone) -> None:
    said = alone(f"""
        import faulthandler; faulthandler.enable()
        import afresh
        js = afresh.warm("js")
{TRAPS}
    """)
    assert said == "200000\n"


def test_faulthandler_that_comes_after_is_an_error_instead_of_the_end(alone: Alone) -> None:
    said = alone(f"""
        import afresh, faulthandler
        js = afresh.warm("js")
        js.eval("1")
        sb = js.sandbox()
        faulthandler.enable()
        for call in (lambda: sb.run_code("1"), lambda: js.run_code("1"), lambda: js.call("evaluate")):
            try:
                call()
            except afresh.SessionError as error:
                assert "faulthandler" in str(error), error
            else:
                raise AssertionError("it ran")
        faulthandler.disable()
{TRAPS}
    """)
    assert said == "200000\n"


@pytest.mark.skipif(importlib.util.find_spec("wasmtime") is None, reason="SKIPPED: wasmtime-py is not installed")
@pytest.mark.parametrize("first", ["afresh", "wasmtime"])
def test_wasmtime_of_python(alone: Alone, first: str) -> None:
    other = """
        import wasmtime
        engine = wasmtime.Engine()
        store = wasmtime.Store(engine)
        module = wasmtime.Module(engine, '(module (memory 1) (func (export "trap") (drop (i32.load (i32.const -1)))))')
        trap = wasmtime.Instance(store, module, []).exports(store)["trap"]
        def theirs():
            try:
                trap(store)
            except wasmtime.Trap:
                return "trap"
    """
    own = """
        import afresh
        js = afresh.warm("js")
        def ours():
            return js.eval("[1, 2].length")
    """
    one, two = (own, other) if first == "afresh" else (other, own)
    said = alone(f"{one}\n{two}\n        print(ours(), theirs(), ours(), theirs())")
    assert said == "2 trap 2 trap\n"


def test_a_child_of_a_fork_goes_on_with_new_sandboxes_and_is_told_of_old_ones(alone: Alone) -> None:
    said = alone("""
        import os, warnings
        warnings.simplefilter("ignore")
        import afresh
        js = afresh.warm("js")
        old = js.sandbox()
        old.run_code("globalThis.x = Math.random()")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with js.sandbox(timeout=60) as sb:
                    assert sb.eval("6 * 7") == 42
                    assert js.eval("typeof x") == "undefined"
                # It keeps its state, but writes here are not recorded.
                assert old.eval("typeof x") == "number"
                try:
                    old.checkpoint("here")
                except afresh.SessionError as error:
                    assert "fork" in str(error), error
                else:
                    raise AssertionError("it was kept")
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), old.eval("typeof x"))
    """)
    assert said == "0 number\n"


def test_a_child_of_a_fork_closes_and_drops_what_threads_of_its_parent_use(alone: Alone) -> None:
    said = alone("""
        import gc, os, signal, sys, threading, warnings
        warnings.simplefilter("ignore")
        import afresh
        js = afresh.warm("js")
        boxes = [js.sandbox() for _ in range(3)]
        def run(box):
            begun = threading.Event()
            call = lambda: box.run_code("console.log(1); for (;;);", on_output=lambda *_: begun.set())
            threading.Thread(target=call, daemon=True).start()
            assert begun.wait(60)
        for box in boxes:
            run(box)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            boxes[0].close()
            for box, why in zip(boxes, ("closed", "fork")):
                try:
                    box.eval("1")
                except afresh.SessionError as error:
                    assert why in str(error), error
                else:
                    raise AssertionError("it ran")
            with js.sandbox(timeout=60) as sb:
                assert sb.eval("6 * 7") == 42
            del box, boxes, js
            gc.collect()
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
        for box in boxes:
            box.close()
    """)
    assert said == "7\n"


def test_a_child_of_a_fork_waits_for_no_loop_or_executor_of_its_parent(alone: Alone) -> None:
    said = alone("""
        import asyncio, os, signal, threading, warnings
        warnings.simplefilter("ignore")
        import afresh
        from afresh._worker import ThreadWorker

        async def answer():
            return 42

        worker = ThreadWorker()
        assert worker.run_sync(answer()) == 42

        async def main():
            box = afresh.warm("js").async_sandbox()
            begun = asyncio.Event()
            task = asyncio.create_task(box.run_code("console.log(1); for (;;);", on_output=lambda *_: begun.set()))
            await begun.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                await box.close()
                os._exit(7)
            status = os.waitpid(child, 0)[1]
            await box.close()
            await asyncio.gather(task, return_exceptions=True)
            return os.waitstatus_to_exitcode(status)

        print(asyncio.run(main()))
        held, end = threading.Event(), threading.Event()
        def hold():
            with worker._lock:
                held.set()
                end.wait(60)
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            good = worker.run_sync(answer()) == 42
            worker.close()
            os._exit(7 if good else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        end.set()
        holder.join()
        assert worker.run_sync(answer()) == 42
        worker.close()
    """)
    assert said == "7\n7\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(alone: Alone, tmp_path: object, method: str) -> None:
    program = f"{tmp_path}/program.py"
    with open(program, "w", encoding="utf-8") as file:
        file.write(
            f"""
import multiprocessing, warnings
warnings.simplefilter("ignore")
import afresh

def work(number):
    with afresh.warm("js").sandbox(timeout=60) as sb:
        return sb.eval(f"{{number}} * 2")

if __name__ == "__main__":
    assert afresh.warm("js").eval("1") == 1
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        print(pool.map(work, range(4)))
"""
        )
    said = alone(f"import runpy; runpy.run_path({program!r}, run_name='__main__')")
    assert said == "[0, 2, 4, 6]\n"


def test_the_end_of_the_interpreter_with_sandboxes_and_a_call_under_way(alone: Alone) -> None:
    said = alone("""
        import threading
        import afresh
        js = afresh.warm("js")
        kept = js.sandbox()
        kept.run_code("1")
        begun = threading.Event()
        busy = js.sandbox()
        thread = threading.Thread(
            target=lambda: busy.run_code("console.log(1); for (;;);", on_output=lambda *_: begun.set()), daemon=True
        )
        thread.start()
        assert begun.wait(60)
        print("end")
    """)
    assert said == "end\n"


def test_dropped_sandboxes_release_the_lock_of_python(alone: Alone) -> None:
    said = alone("""
        import sys, threading, time
        import afresh
        js = afresh.warm("js")
        is_dropping = ended = ran = False
        def watch():
            global ran
            while not ended:
                ran = ran or is_dropping
                time.sleep(0)
        watcher = threading.Thread(target=watch)
        watcher.start()
        # No thread takes the lock from another that keeps it.
        sys.setswitchinterval(1000)
        for _ in range(10):
            sandboxes = [js.sandbox() for _ in range(20)]
            for sandbox in sandboxes:
                sandbox.eval("1")
            is_dropping = True
            del sandbox
            sandboxes.clear()
            is_dropping = False
            if ran:
                break
        ended = True
        watcher.join()
        print(ran)
    """)
    assert said == "True\n"
