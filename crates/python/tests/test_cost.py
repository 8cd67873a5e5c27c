"""The cost of calls, and limits of CPU time."""

from __future__ import annotations

import afresh
import pytest
from afresh._cost import NO_COST


def test_a_result_has_the_cost_of_its_call(js: afresh.Warm) -> None:
    with js.sandbox(output_limit=10) as sb:
        r = sb.run_code("console.log('x'.repeat(99)); let s = 0; for (let i = 0; i < 1e5; i++) s += i; s")
    cost = r.cost
    assert cost.wall > 0
    assert cost.cpu > 0
    assert cost.peak_memory is not None
    assert cost.peak_memory >= 65536
    assert r.dirty_pages
    assert cost.dirty_pages == r.dirty_pages
    assert r.us == cost.wall * 1e6
    assert cost.input_bytes > 50
    assert cost.output_bytes >= 100
    assert (cost.dropped_bytes, r.truncated) == (90, True)
    assert js.run_code("1").cost.dirty_pages is None


def test_a_call_that_did_not_begin_has_no_cost(js: afresh.Warm) -> None:
    assert NO_COST.peak_memory is None
    [failed] = js.map("(n) => n", [object()])
    assert failed.error is not None
    assert failed.cost == NO_COST


def test_a_cpu_limit_ends_a_busy_call_of_a_module(js: afresh.Warm) -> None:
    with js.sandbox(cpu_limit=0.1, tools={"wait": lambda: __import__("time").sleep(0.5)}) as sb:
        clean = sb.checkpoint()
        assert sb.run_code("wait(); 1").value == 1
        busy = sb.run_code("for (;;) {}")
        assert isinstance(busy.error, afresh.TimeLimitError)
        assert "CPU time limit of 100ms" in str(busy.error)
        assert busy.cost.cpu >= 0.1
        sb.rollback(clean)
        assert sb.eval("2") == 2


def test_a_cpu_limit_is_a_number_of_seconds(js: afresh.Warm) -> None:
    with pytest.raises(ValueError, match="seconds above 0"):
        js.sandbox(cpu_limit=0)


def test_a_cpu_limit_ends_a_busy_process_and_no_sleeper(python: afresh.Warm) -> None:
    with python.sandbox(timeout=60, cpu_limit=1.0) as box:
        clean = box.checkpoint()
        slept = box.run_code("time.sleep(1.5); 1")
        assert (slept.value, slept.error) == (1, None)
        assert slept.cost.cpu < slept.cost.wall
        assert slept.cost.dirty_pages is None
        assert slept.cost.peak_memory
        for code in ("while True: pass", "subprocess.run(['sh', '-c', 'while :; do :; done'])"):
            busy = box.run_code(code)
            assert isinstance(busy.error, afresh.TimeLimitError), busy
            assert "CPU time limit of 1s" in str(busy.error)
            box.rollback(clean)
        assert box.eval("warm") == 41


def test_a_command_has_the_cost_of_its_sandbox_while_it_ran(python: afresh.Warm) -> None:
    work = "s = 0\nfor n in range(3_000_000): s += n\nprint(input())"
    with python.sandbox(timeout=60, output_limit=4) as box:
        box.run_code("s = 0\nfor n in range(5_000_000): s += n")
        busy = box.commands.run(["python3", "-c", work], stdin="typed\n")
        idle = box.commands.run(["sleep", "0.5"])
    assert (busy.exit_code, busy.stdout, busy.truncated) == (0, "type", True)
    assert busy.cost.cpu > 0
    assert idle.cost.cpu < busy.cost.cpu
    assert idle.cost.wall >= 0.5
    assert idle.cost.cpu < idle.cost.wall
    assert busy.cost.peak_memory is not None
    assert idle.cost.peak_memory is not None
    assert busy.cost.peak_memory >= idle.cost.peak_memory > 0
    assert busy.cost.dirty_pages is None
    assert (busy.cost.input_bytes, busy.cost.output_bytes, busy.cost.dropped_bytes) == (6, 6, 2)
    assert (idle.cost.input_bytes, idle.cost.output_bytes, idle.cost.dropped_bytes) == (0, 0, 0)


def test_a_command_that_is_started_has_its_cost_at_its_end(python: afresh.Warm) -> None:
    with python.sandbox(timeout=60) as box:
        command = box.commands.start(["sh", "-c", "read line; echo $line"], stdin=True)
        command.send_stdin("typed\n")
        done = command.wait()
        assert done.cost.cpu > 0
        assert (done.cost.input_bytes, done.cost.output_bytes) == (6, 6)
        # Its cost ends with it.
        box.run_code("s = 0\nfor n in range(3_000_000): s += n")
        assert command.wait().cost == done.cost


def test_a_run_of_a_program_has_a_cost() -> None:
    done = afresh.exec(["sh", "-c", "cat; echo 1234567"], stdin="in", output_limit=3)
    assert (done.stdout, done.truncated) == ("in1", True)
    assert done.cost.cpu > 0
    assert done.cost.wall > 0
    assert done.cost.peak_memory
    assert (done.cost.input_bytes, done.cost.output_bytes, done.cost.dropped_bytes) == (2, 10, 7)
    assert done == afresh.exec(["sh", "-c", "cat; echo 1234567"], stdin="in", output_limit=3)
