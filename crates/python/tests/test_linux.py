"""Linux programs: code, states, tools and errors of sandboxes whose guest is the host's own interpreter."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import venv
from collections.abc import Callable
from pathlib import Path

import afresh
import pytest

pytestmark = pytest.mark.usefixtures("python")

_EXECUTABLE = "__import__('sys').executable"


def test_code_has_value_text_and_output_and_continues(box: afresh.Sandbox) -> None:
    r = box.run_code("import sys; print('out'); print('err', file=sys.stderr); x = {'a': (1, warm)}; x")
    assert r.value == {"a": (1, 41)}
    assert (r.stdout, r.stderr, r.error) == ("out\n", "err\n", None)
    assert "<pre>" in r._repr_html_()
    assert box.eval("x['a'][1] + 1") == 42
    error = box.run_code("1 / 0", name="cell").error
    assert isinstance(error, afresh.ProgramError)
    assert error.name == "ZeroDivisionError"
    assert error.traceback is not None
    assert "cell" in error.traceback


def test_each_call_takes_a_time_limit(python: afresh.Warm) -> None:
    with python.sandbox() as sb:
        clean = sb.checkpoint("clean")
        for code in ("while True: pass", "time.sleep(200)", "subprocess.run(['sleep', '200'])"):
            assert isinstance(sb.run_code(code, timeout=0.5).error, afresh.TimeLimitError), code
            sb.rollback(clean)
            assert sb.eval("warm", timeout=60) == 41
        with pytest.raises(afresh.TimeLimitError):
            sb.commands.run("sleep 200", timeout=0.5)
        # A command that is cut short is killed, and needs no rollback.
        assert sb.eval("warm") == 41
    with python.sandbox(timeout=0.3) as sb:
        assert sb.eval("time.sleep(0.6) or warm", timeout=60) == 41
    assert isinstance(python.run_code("time.sleep(200)", timeout=0.5).error, afresh.TimeLimitError)


def test_output_arrives_while_code_runs(box: afresh.Sandbox) -> None:
    pieces: list[tuple[str, str]] = []
    box.run_code("print('one'); time.sleep(0.01); print('two')", on_output=lambda *piece: pieces.append(piece))
    assert "".join(text for _, text in pieces) == "one\ntwo\n"
    assert len(pieces) >= 2


def test_checkpoints_rollbacks_and_forks_keep_memory_files_and_processes(box: afresh.Sandbox) -> None:
    box.run_code("x = 1; open('/tmp/f', 'w').write('one')")
    one = box.checkpoint("one")
    box.run_code("x = 2; open('/tmp/f', 'w').write('two'); os.makedirs('/data')")
    box.checkpoint("two")
    a, b = box.fork(2)
    with a, b:
        a.run_code("x += 10")
        assert (a.eval("x"), b.eval("x"), a.files.read("/tmp/f")) == (12, 2, b"two")
        assert a.eval("os.urandom(8)") != b.eval("os.urandom(8)")
    assert box.rollback(one) == one
    assert (box.eval("x"), box.files.read("/tmp/f"), box.files.exists("/data")) == (1, b"one", False)
    box.rollback("two")
    assert (box.eval("x"), box.files.stat("/data").kind) == (2, "directory")
    assert [state.name for state in box.tree().states if state.name] == ["one", "two"]
    assert box.diff("one", "two")


def test_clones_draw_different_numbers_from_the_global_generators(box: afresh.Sandbox) -> None:
    box.run_code("import random; random.seed(42); own = random.Random(42); random.random()")
    start = box.checkpoint("seeded")
    a, b = box.fork(2)
    with a, b:
        draws = [one.eval("(random.random(), own.random())") for one in (a, b)]
    box.rollback(start)
    draws.append(box.eval("(random.random(), own.random())"))
    assert len({drawn for drawn, _ in draws}) == 3
    assert len({drawn for _, drawn in draws}) == 1


def test_the_warm_state_answers_and_forgets(python: afresh.Warm) -> None:
    assert python.run_code("warm += 1; warm").value == 42
    assert python.eval("warm") == 41
    assert "program" in repr(python)


def test_tools_are_called_from_code_and_its_threads(python: afresh.Warm) -> None:
    asked: list[str] = []

    def search(query: str, *, limit: int = 2) -> list[str]:
        asked.append(query)
        if query == "bad":
            raise LookupError("nothing there")
        return [f"{query} {number}" for number in range(limit)]

    with python.sandbox(timeout=60, tools=[search]) as sb:
        assert sb.eval("search('a', limit=3)") == ["a 0", "a 1", "a 2"]
        many = "found = []\n"
        many += "threads = [threading.Thread(target=lambda n=n: found.extend(search(str(n)))) for n in range(4)]\n"
        many += "[t.start() for t in threads]; [t.join() for t in threads]; sorted(found)"
        assert sb.eval(many) == sorted(f"{n} {k}" for n in range(4) for k in range(2))
        error = sb.run_code("search('bad')").error
        assert isinstance(error, afresh.ProgramError)
        assert isinstance(error.__cause__, LookupError)
        assert sb.eval("try:\n  search('bad')\nexcept LookupError as e:\n  said = str(e)\nsaid") == "nothing there"
        assert sb.eval("len(search('big' * 100000)[0])") == 300002
        (fork,) = sb.fork()
        with fork:
            assert fork.eval("search('fork')[0]") == "fork 0"
        child = "if not (pid := os.fork()):\n  try:\n    search('child')\n  except RuntimeError:\n    os._exit(7)\n"
        assert sb.eval(child + "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == 7
    assert asked[:1] == ["a"]
    assert "child" not in asked


def test_a_tool_that_never_returns_is_abandoned_at_the_time_limit(python: afresh.Warm) -> None:
    released = threading.Event()
    with python.sandbox(timeout=2, tools={"hang": lambda: released.wait(60)}) as sb:
        clean = sb.checkpoint()
        assert isinstance(sb.run_code("hang()").error, afresh.TimeLimitError)
        assert sb.failed
        sb.rollback(clean)
        assert sb.eval("warm") == 41
    released.set()


@pytest.mark.parametrize("code", ["while True: pass", "time.sleep(60)", "subprocess.run(['sleep', '60'])"])
def test_code_ends_at_its_time_limit_wherever_it_waits(python: afresh.Warm, code: str) -> None:
    with python.sandbox(timeout=2) as sb:
        clean = sb.checkpoint()
        assert isinstance(sb.run_code(code).error, afresh.TimeLimitError)
        with pytest.raises(afresh.SessionError):
            sb.run_code("1")
        sb.rollback(clean)
        assert sb.eval("warm") == 41


def test_a_result_that_is_too_large_leaves_the_sandbox_usable(box: afresh.Sandbox) -> None:
    result = box.run_code("'a' * 40_000_000")
    assert isinstance(result.error, afresh.ProgramError), result
    assert result.error.name == "MarshalError"
    assert "write it to a file" in str(result.error), result
    assert box.eval("len('a' * 40_000_000)") == 40_000_000


def test_code_is_stopped(box: afresh.Sandbox) -> None:
    clean = box.checkpoint()
    stopped = box.run_code("print('up'); time.sleep(60)", on_output=lambda *_: box.stop())
    assert isinstance(stopped.error, afresh.StoppedError)
    box.rollback(clean)
    assert box.eval("warm") == 41


def test_standard_input_of_code_and_its_children_is_empty(box: afresh.Sandbox) -> None:
    assert box.eval("__import__('sys').stdin.read()") == ""
    assert box.eval("subprocess.run(['cat'], capture_output=True).stdout") == b""
    error = box.run_code("input()").error
    assert isinstance(error, afresh.ProgramError)
    assert error.name == "EOFError"


def test_memory_has_a_limit_in_each_sandbox(python: afresh.Warm) -> None:
    big = "x = bytearray(400 << 20)"
    with python.sandbox(timeout=60, memory_limit="300MiB") as small, python.sandbox(timeout=60) as large:
        error = small.run_code(big).error
        assert isinstance(error, afresh.ProgramError)
        assert error.name == "MemoryError"
        assert small.eval("warm") == 41
        assert large.run_code(big).error is None
        start = small.checkpoint()
        small.rollback(start)
        assert small.run_code(big).error is not None


def test_saved_sandboxes_and_deltas_are_opened_again(python: afresh.Warm, tmp_path: Path) -> None:
    executable = Path(python.eval("__import__('sys').base_prefix"))
    dirs = [executable] if executable.exists() else []
    with python.sandbox(timeout=60) as sb:
        start = sb.at
        sb.run_code("x = [7]; open('/tmp/f', 'w').write('kept')")
        delta = sb.delta(start)
        sb.save(f"{tmp_path}/store@agent")
    with afresh.load(f"{tmp_path}/store@agent", dirs=dirs).sandbox(timeout=60) as again:
        assert again.eval("x + [warm]") == [7, 41]
        assert again.files.read("/tmp/f") == b"kept"
        assert again.commands.run("cat /tmp/f").stdout == "kept"
    with python.apply(delta, timeout=60) as other:
        assert other.eval("x") == [7]


def test_granted_directories_are_seen_and_never_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("answer = 42\n")
    warm = afresh.linux("python3", dirs=[tmp_path], cwd=tmp_path, env={"GREETING": "hello"}, setup="import mine")
    with warm.sandbox(timeout=60) as sb:
        assert sb.eval("mine.answer") == 42
        assert (
            sb.commands.run("command -v python3").stdout.strip() == f"{os.path.dirname(sb.eval(_EXECUTABLE))}/python3"
        )
        assert sb.commands.run("echo $GREETING; pwd; ls *.py").stdout == f"hello\n{tmp_path}\nmine.py\n"
        sb.run_code("open('mine.py', 'w').write('answer = 1')")
        assert sb.files.read(f"{tmp_path}/mine.py") == b"answer = 1"
    assert (tmp_path / "mine.py").read_text() == "answer = 42\n"


def test_an_interpreter_that_needs_a_library_path_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from afresh._linux import _environment

    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib:/elsewhere/lib")
    made = _environment("/opt/python/bin/python3", ["/opt/python"])
    assert made["LD_LIBRARY_PATH"] == "/opt/python/lib"
    assert made["PATH"].startswith("/opt/python/bin:")


def test_an_interpreter_outside_of_path_is_not_run_on_the_host(tmp_path: Path) -> None:
    venv.create(tmp_path / "own", symlinks=True)
    warm = afresh.linux(tmp_path / "own/bin/python3")
    with warm.sandbox() as box:
        assert box.eval("__import__('sys').prefix") == str(tmp_path / "own")
    script = tmp_path / "other/bin/python3"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/mark\n")
    script.chmod(0o755)
    with pytest.raises(afresh.OpenError, match="no standard library"):
        afresh.linux(script)
    (tmp_path / "other/pyvenv.cfg").write_text(f"home = {tmp_path}/bin\n")
    with pytest.raises(afresh.OpenError, match="no standard library"):
        afresh.linux(script)
    assert not (tmp_path / "mark").exists()


def test_errors_name_the_cause_and_the_way_out(python: afresh.Warm, tmp_path: Path) -> None:
    with pytest.raises(afresh.OpenError, match=r"'nowhere' was not found: it must be in PATH"):
        afresh.linux("nowhere")
    with pytest.raises(afresh.OpenError, match=r"afresh\.exec"):
        afresh.linux("sh")
    with pytest.raises(afresh.OpenError, match="does not exist on this host"):
        afresh.linux(dirs=[tmp_path / "missing"])
    with pytest.raises(ValueError, match="names no port"):
        afresh.linux(net=["example.org"])
    with pytest.raises(ValueError, match="missing field `to`"):
        afresh.linux(net=[{"methods": ["GET"]}])
    with pytest.raises(ValueError, match=r"`get` is no method"):
        afresh.linux(net=[{"to": "api.example.org:443", "methods": ["get"]}])
    with pytest.raises(TypeError, match="a dict with 'to'"):
        afresh.linux(net=[443])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="lists"):
        afresh.linux(net="example.org:443")
    with pytest.raises(ValueError, match="setup_timeout"):
        afresh.linux(setup_timeout=-1)
    with pytest.raises(afresh.ProgramError, match="ZeroDivisionError"):
        afresh.linux(setup="1 / 0")
    with pytest.raises(afresh.TimeLimitError, match="setup_timeout"):
        afresh.linux(setup="while True: pass", setup_timeout=1)
    with pytest.raises(afresh.SessionError, match="run_code"):
        python.call("export")
    with pytest.raises(afresh.OpenError, match="no image"):
        afresh.image(tmp_path / "missing.tar")
    with pytest.raises(ValueError, match="cobol"):
        afresh.image(tmp_path, language="cobol")


@pytest.mark.parametrize(("call", "named"), [(323, "userfaultfd"), (317, "seccomp")])
def test_what_the_host_forbids_is_named_with_the_way_out(alone: Callable[[str], str], call: int, named: str) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("SKIPPED: the filter is for x86-64")
    said = alone(f"""
        import ctypes, struct
        import afresh
        # Loads the number of a call, and answers this one with EPERM; allows others.
        code = [(0x20, 0, 0, 0), (0x15, 0, 1, {call}), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        steps = b"".join(struct.pack("HBBI", *step) for step in code)
        kept = ctypes.create_string_buffer(steps)
        filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(kept)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, filter) == 0
        try:
            afresh.linux("python3", setup="x = 1")
        except afresh.OpenError as error:
            print(error)
    """)
    assert "this host cannot run Linux guests" in said
    assert named in said
    assert "seccomp profile" in said


def test_a_wasm_sandbox_says_that_it_has_no_processes(sb: afresh.Sandbox) -> None:
    for work in (
        lambda: sb.commands.run("ls"),
        lambda: sb.port(80).get(),
        sb.terminal,
        lambda: sb.proceed(1),
    ):
        with pytest.raises(afresh.SessionError, match=r"afresh\.linux"):
            work()
    assert sb.eval("1 + 1") == 2


def test_background_threads_of_code_run_while_the_sandbox_does(box: afresh.Sandbox) -> None:
    box.run_code("ticks = []\ndef tick():\n  while True:\n    ticks.append(1); time.sleep(0.01)")
    box.run_code("threading.Thread(target=tick, daemon=True).start()")
    before = box.eval("len(ticks)")
    while box.eval("len(ticks)") < before + 5:
        box.proceed(0.05)


def test_map_gives_results_in_order_and_failures_in_place(python: afresh.Warm) -> None:
    def double(number: int) -> int:
        return number * 2

    code = "lambda n: 60 // (n - 3) if n != 4 else time.sleep(60)"
    results = python.map(code, range(7), concurrency=2, timeout=3)
    assert [r.value for r in results] == [-20, -30, -60, None, None, 30, 20]
    assert isinstance(results[3].error, afresh.ProgramError)
    assert isinstance(results[4].error, afresh.TimeLimitError)
    # Each starts from the warm state.
    counting = python.map(
        "lambda n: (globals().__setitem__('warm', warm + n), double(warm))[1]", [1, 2], tools=[double]
    )
    assert [r.value for r in counting] == [84, 86]
    assert python.map(code, []) == []
    strange = python.map("lambda n: n", [1, object()])
    assert strange[0].value == 1
    assert isinstance(strange[1].error, afresh.MarshalError)
    with pytest.raises(ValueError, match="concurrency"):
        python.map(code, [1], concurrency=0)


def test_a_keyboard_interrupt_ends_a_warm_up() -> None:
    setup = "import socket; s = socket.create_connection(('host', 1))\nwhile True: pass"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def interrupt() -> None:
            connection, _ = server.accept()
            os.kill(os.getpid(), signal.SIGINT)
            connection.close()

        thread = threading.Thread(target=interrupt)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            afresh.linux(setup=setup, net=[f"host:1=127.0.0.1:{server.getsockname()[1]}"], setup_timeout=240)
        # Without the interrupt it would have run into its own limit.
        assert time.monotonic() - begun < 200
        thread.join(60)


# Lists traces of an earlier sandbox, by kind.
_LEFT = """
import resource, threading
def left():
    return [globals().get("secret"), os.environ.get("LEFT"), os.path.exists("/tmp/left"), threading.active_count(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0], signal.getitimer(signal.ITIMER_REAL)[0] > 0,
            len(os.listdir("/proc/self/fd")), len([pid for pid in os.listdir("/proc") if pid.isdigit()]), os.getcwd()]
"""


def test_a_sandbox_sees_nothing_of_the_one_before() -> None:
    python = afresh.linux("python3", setup=f"import os, signal, subprocess{_LEFT}")
    with python.sandbox(timeout=60) as sb:
        new = sb.eval("left()")
    for count in range(3):
        tools = {"ask": lambda: "answer"} if count else {}
        with python.sandbox(timeout=60, memory_limit="2GiB", tools=tools) as sb:
            assert sb.eval("left()") == new
            assert sb.eval("'ask' in globals()") == bool(count)
            sb.run_code(
                "secret = b'x' * (8 << 20); os.environ['LEFT'] = 'yes'; os.chdir('/tmp')\n"
                "kept = open('/tmp/left', 'w'); threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
                "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99)); signal.setitimer(signal.ITIMER_REAL, 3600)"
            ).unwrap()
            sb.commands.start("sleep 600")
            assert sb.eval("left()") != new
            if count == 1:
                sb.checkpoint("left")
                sb.run_code("secret += b'y'").unwrap()
            if count == 2:
                sb.run_code("import ctypes; os._exit(3)")
    with python.sandbox(timeout=60) as sb:
        assert sb.eval("left()") == new
        assert sb.commands.list() == []
        assert [state.name for state in sb.tree()] == [None]
