"""Commands, terminals and ports of Linux sandboxes, and single runs."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future

import afresh
import pytest
from afresh._delivery import LoopDelivery

pytestmark = pytest.mark.usefixtures("python")


def test_a_command_has_a_status_and_two_streams(box: afresh.Sandbox) -> None:
    out: list[str] = []
    done = box.commands.run("echo ä; echo bad >&2; exit 3", on_stdout=out.append)
    assert (done.exit_code, done.stdout, done.stderr, done.truncated) == (3, "ä\n", "bad\n", False)
    assert "".join(out) == "ä\n"
    with pytest.raises(afresh.CommandError, match="exited with 3: bad"):
        done.check()
    assert box.commands.run(["printf", "%s", "a b"]).check().stdout == "a b"
    assert box.commands.run("kill -9 $$").exit_code == -9
    assert box.commands.run("cat; pwd; echo $X", stdin="typed ", cwd="/tmp", env={"X": "y"}).stdout == "typed /tmp\ny\n"
    assert box.commands.run("sleep 0.1; wc -c", stdin="x" * 400_000).stdout.strip() == "400000"
    assert box.commands.run("true", stdin="x" * 400_000).exit_code == 0
    with pytest.raises(afresh.TimeLimitError):
        box.commands.run("sleep 60", stdin="x" * 400_000, timeout=0.3)
    assert "exit code 3" in done._repr_html_()
    assert box.eval("1 + 1") == 2


def test_output_of_a_command_is_bounded_and_reaches_callbacks_whole(python: afresh.Warm) -> None:
    seen: list[str] = []
    with python.sandbox(timeout=60, output_limit=1000) as sb:
        done = sb.commands.run("yes | head -c 300000", on_stdout=seen.append)
        assert (len(done.stdout), done.truncated, len("".join(seen))) == (1000, True, 300000)
        sb.files.write("/srv/big", "x" * 2000)
        sb.commands.start("python3 -m http.server 8000 --directory /srv")
        with pytest.raises(afresh.SessionError, match="more than 1000 bytes"):
            sb.port(8000).get("/big")


def test_code_that_changes_the_half_of_commands_gets_an_error(box: afresh.Sandbox) -> None:
    clean = box.checkpoint()
    box.run_code("import _afresh; _afresh._command = lambda wanted: 'x' if wanted['op'] == 'start' else [7]")
    with pytest.raises(afresh.GuestError, match="damaged"):
        box.commands.run("true")
    with pytest.raises(afresh.GuestError, match="damaged"):
        box.commands.list()
    box.rollback(clean)
    assert box.commands.run("true").exit_code == 0


def test_commands_that_wait_for_time_continue_after_a_rollback_and_in_forks(box: afresh.Sandbox) -> None:
    command = box.commands.start("sleep 0.5; echo x >/tmp/done; echo done")
    box.proceed(0.2)
    asleep = box.checkpoint()
    (fork,) = box.fork()
    with fork:
        fork.proceed(1)
        assert fork.files.read("/tmp/done") == b"x\n"
    for _ in range(2):
        box.rollback(asleep)
        assert command.wait(timeout=30).stdout == "done\n"


def test_code_and_commands_share_files(box: afresh.Sandbox) -> None:
    box.files.write("/data/a.py", "import sys; print(sys.argv[1:])")
    assert box.commands.run("python3 /data/a.py x && touch /data/b").stdout == "['x']\n"
    assert sorted(box.eval("__import__('os').listdir('/data')")) == ["a.py", "b"]
    box.files.make_directory("/data/c/d")
    assert box.files.list("/data") == ["a.py", "b", "c"]
    assert box.files.stat("/data/c").kind == "directory"
    with pytest.raises(afresh.SessionError, match="missing"):
        box.files.stat("/missing")


def test_a_command_that_runs_too_long_is_killed_and_the_sandbox_stays(box: afresh.Sandbox) -> None:
    with pytest.raises(afresh.TimeLimitError):
        box.commands.run("while true; do :; done", timeout=0.3)
    with pytest.raises(afresh.TimeLimitError):
        box.commands.run("sleep 60", timeout=0.2)
    assert box.failed is None
    assert box.commands.list() == []
    with pytest.raises(afresh.StoppedError):
        box.commands.run("echo; sleep 60", on_stdout=lambda _: box.stop())

    def fail(_: str) -> None:
        raise LookupError("of the callback")

    with pytest.raises(LookupError):
        box.commands.run("echo; sleep 60", on_stdout=fail)
    assert box.commands.list() == []
    assert box.eval("1 + 1") == 2


def test_commands_run_as_root_with_the_same_files(box: afresh.Sandbox) -> None:
    shown = box.commands.run("id -u; id -g; whoami; echo $HOME; touch own; chown root:root own", user="root")
    assert (shown.stdout, shown.stderr) == ("0\n0\nroot\n/root\n", "")
    assert box.commands.run("stat -c %u own; id -u", user="user").stdout.split() == ["1000", "1000"]
    sleeper = box.commands.start(["sleep", "1000"], user="root")
    (copy,) = box.fork(1)
    assert copy.commands.connect(sleeper.pid).kill()
    assert sleeper.kill()
    with pytest.raises(ValueError, match="'user' or 'root', not as 'nobody'"):
        box.commands.run("true", user="nobody")
    with pytest.raises(afresh.CommandError, match="nowhere"):
        box.commands.run(["nowhere"], user="root")


def test_a_sandbox_of_an_earlier_version_refuses_root_by_name(box: afresh.Sandbox) -> None:
    # Its guest side does not know the operation.
    box.eval("""
import sys
frame = sys._getframe()
while "_run_command" not in frame.f_globals:
    frame = frame.f_back
names, now = frame.f_globals, frame.f_globals["_command"]
names["_command"] = lambda wanted: now({**wanted, "op": wanted["op"].replace("start as root", "unknown")})
None
""")
    with pytest.raises(afresh.SessionError, match="earlier version"):
        box.commands.run("true", user="root")
    assert box.commands.run("id -u").stdout == "1000\n"


def test_commands_that_cannot_start_say_why(box: afresh.Sandbox) -> None:
    with pytest.raises(afresh.CommandError, match="nowhere") as failed:
        box.commands.run(["nowhere"])
    assert (failed.value.exit_code, "Traceback" in str(failed.value)) == (127, False)
    assert failed.value.__suppress_context__
    box.files.write("/home/user/plain", b"no program")
    with pytest.raises(afresh.CommandError, match="plain") as failed:
        box.commands.run(["/home/user/plain"])
    assert failed.value.exit_code == 126
    with pytest.raises(afresh.CommandError, match="absent"):
        box.commands.run("true", cwd="/absent")
    with pytest.raises(ValueError, match="empty"):
        box.commands.run([])
    box.commands.run("rm -f /bin/sh /usr/bin/sh")
    with pytest.raises(afresh.SessionError, match="no /bin/sh"):
        box.commands.run("true")


def test_background_commands_are_waited_for_written_to_and_killed(box: afresh.Sandbox) -> None:
    cat = box.commands.start("cat; echo end", stdin=True, tag="mine")
    cat.send_stdin("hello ")
    assert cat.read() == "hello "
    (listed,) = box.commands.list()
    assert (listed.pid, listed.tag, listed.command[0]) == (cat.pid, "mine", "/bin/sh")
    with pytest.raises(afresh.SessionError, match="only the host can give"):
        cat.wait()
    cat.close_stdin()
    assert cat.wait().stdout == "hello end\n"
    assert cat.wait().exit_code == 0
    with pytest.raises(afresh.SessionError, match="does not run"):
        cat.send_stdin("late")
    sleeper = box.commands.start("sleep 60")
    assert sleeper.poll() is None
    with pytest.raises(afresh.TimeLimitError):
        sleeper.wait(timeout=0.1)
    assert sleeper.kill()
    assert sleeper.wait().exit_code == -signal.SIGKILL
    assert not sleeper.kill()
    with pytest.raises(afresh.SessionError, match="stdin=True"):
        box.commands.start("true").send_stdin("x")


def test_commands_are_part_of_every_state(box: afresh.Sandbox) -> None:
    cat = box.commands.start(["cat"], stdin=True)
    running = box.checkpoint()
    (fork,) = box.fork()
    cat.send_stdin("a")
    cat.close_stdin()
    assert cat.wait().stdout == "a"
    with fork:
        same = fork.commands.connect(cat.pid)
        same.send_stdin("b")
        same.close_stdin()
        assert same.wait().stdout == "b"
    box.rollback(running)
    cat.send_stdin("c")
    cat.close_stdin()
    assert cat.wait().stdout == "c"
    box.rollback(running)
    later = box.commands.start("sleep 60")
    box.rollback(running)
    with pytest.raises(afresh.SessionError, match="does not run"):
        later.wait()
    with pytest.raises(afresh.SessionError, match="does not run"):
        box.commands.connect(99999)


def test_a_terminal_shows_what_is_typed(box: afresh.Sandbox) -> None:
    with box.terminal(rows=30, cols=100) as term:
        term.write("stty size\n")
        assert "30 100" in term.read_until("30 100")
        term.resize(40, 120)
        term.write("stty size; echo $TERM\n")
        assert "40 120" in term.read_until("xterm")
        term.write("exit 5\n")
        assert term.wait(timeout=30).exit_code == 5
    with pytest.raises(ValueError, match="invalid"):
        box.terminal(rows=0)


def test_servers_in_a_sandbox_answer(box: afresh.Sandbox) -> None:
    box.files.write("/srv/a.txt", "hello")
    server = box.commands.start("python3 -m http.server 8000 --directory /srv")
    answer = box.port(8000).get("/a.txt")
    assert (answer.status, answer.text, answer.headers["Content-type"]) == (200, "hello", "text/plain")
    assert box.port(8000).get("/missing").status == 404
    (fork,) = box.fork()
    with fork:
        fork.files.write("/srv/a.txt", "fork")
        assert fork.port(8000).get("/a.txt").text == "fork"
    assert box.port(8000).post("/a.txt", json={"a": 1}).status == 501
    with pytest.raises(afresh.TimeLimitError, match="port 9"):
        box.port(9).get(timeout=0.2)
    server.kill()
    assert server.wait().exit_code == -9
    with pytest.raises(afresh.SessionError, match="nothing listens on port 9"):
        box.port(9).get()
    echo = "import socket; s = socket.create_server(('127.0.0.1', 7)); c, _ = s.accept()\n"
    echo += "while d := c.recv(9): c.sendall(d.upper())"
    box.commands.start(["python3", "-c", echo])
    with box.port(7).connect() as connection:
        connection.sendall(b"hello")
        assert connection.recv() == b"HELLO"
        with pytest.raises(afresh.SessionError, match="does not answer"):
            connection.recv()


def test_exec_runs_one_pristine_command() -> None:
    done = afresh.exec(["sh", "-c", "cat; echo $X; echo bad >&2; exit 3"], stdin="in ", env={"X": "y"})
    assert (done.exit_code, done.stdout, done.stderr) == (3, "in y\n", "bad\n")
    out: list[str] = []
    assert afresh.exec(["sh", "-c", "kill -9 $$"]).exit_code == -9
    big = afresh.exec(["sh", "-c", "yes | head -c 100000"], output_limit=1000, on_stdout=out.append)
    assert (len(big.stdout), big.truncated, len("".join(out))) == (1000, True, 100000)
    with pytest.raises(afresh.TimeLimitError):
        afresh.exec(["sleep", "60"], timeout=0.2)
    with pytest.raises(afresh.OpenError, match="was not found"):
        afresh.exec(["nowhere"])
    with pytest.raises(TypeError, match="list"):
        afresh.exec("ls")

    def fail(_: str) -> None:
        raise LookupError("of the callback")

    with pytest.raises(LookupError):
        afresh.exec(["yes"], on_stdout=fail)


async def test_the_asynchronous_twin_runs_commands(python: afresh.Warm) -> None:
    async with python.async_sandbox(timeout=60) as sb:
        out: list[str] = []
        done = await sb.commands.run("echo hello; exit 2", on_stdout=out.append)
        await asyncio.sleep(0)
        assert (done.exit_code, "".join(out)) == (2, "hello\n")
        task = asyncio.create_task(sb.commands.run("sleep 60"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await sb.commands.list() == []
        cat = await sb.commands.start(["cat"], stdin=True)
        await cat.send_stdin("a")
        assert await cat.read() == "a"
        await cat.close_stdin()
        assert (await cat.wait()).stdout == "a"
        sb.files.write("/srv/a.txt", "hello")
        server = await sb.commands.start("python3 -m http.server 8000 --directory /srv")
        assert (await sb.port(8000).get("/a.txt")).text == "hello"
        assert await server.kill()
        async with await sb.terminal(rows=20, cols=70) as term:
            await term.write("stty size\n")
            assert "20 70" in await term.read_until("20 70")
        assert (await sb.run_code("6 * 7")).value == 42


async def test_the_asynchronous_twins_of_map_and_exec(python: afresh.Warm) -> None:
    async def half(number: int) -> float:
        await asyncio.sleep(0)
        return number / 2

    results = await python.async_map("lambda n: half(n) if n else 1 / n", [4, 0, 2], concurrency=2, tools=[half])
    assert [r.value for r in results] == [2, None, 1]
    out: list[str] = []
    done = await afresh.async_exec(["sh", "-c", "echo hello"], on_stdout=out.append)
    await asyncio.sleep(0)
    assert (done.exit_code, "".join(out)) == (0, "hello\n")
    task = asyncio.create_task(afresh.async_exec(["sleep", "60"]))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("way", ["exec", "run", "wait"])
async def test_an_event_loop_that_is_behind_makes_a_command_wait(
    python: afresh.Warm, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    sent, got, ahead = 0, 0, 0

    class WatchedDelivery(LoopDelivery):
        def send(self, call: Callable[[], object], size: int) -> Future[None] | None:
            nonlocal sent, ahead
            ahead = max(ahead, sent - got)
            sent += size
            return super().send(call, size)

    def take(text: str) -> None:
        nonlocal got
        if got == 0:
            # The command could print all of it in this time.
            time.sleep(0.2)
        got += len(text)

    monkeypatch.setattr("afresh._process.LoopDelivery", WatchedDelivery)
    command = ["sh", "-c", "yes | head -c 6000000"]
    if way == "exec":
        done = await afresh.async_exec(command, on_stdout=take)
    else:
        async with python.async_sandbox(timeout=60) as box:
            if way == "run":
                done = await box.commands.run(command, on_stdout=take)
            else:
                done = await (await box.commands.start(command, on_stdout=take)).wait()
    while got < sent:
        await asyncio.sleep(0.01)
    assert (done.exit_code, got, sent) == (0, 6_000_000, 6_000_000)
    assert ahead <= 1 << 20
