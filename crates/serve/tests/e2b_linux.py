"""An unmodified E2B client with sandboxes that are Linux programs: code, commands and files together."""

import pathlib
import tempfile
import threading
import time
import urllib.error
import urllib.request

from e2b import CommandExitException, CommandHandle, PtySize
from e2b.exceptions import (
    AuthenticationException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)
from e2b_code_interpreter import Execution, Sandbox

from e2b_network import LONG, ask, from_outside, narrowed, reached
from e2b_templates import built


def ticks(sandbox: Sandbox) -> int:
    """How often a command has ticked that counts in a file."""
    until = time.monotonic() + LONG
    while not sandbox.files.exists("/tmp/ticks"):
        assert time.monotonic() < until, "it has not begun"
        time.sleep(0.05)
    return int(sandbox.files.read("/tmp/ticks"))


def goes_on(sandbox: Sandbox) -> bool:
    """Whether it ticks between calls. Where the machine is busy that takes more than one look."""
    for pause in (1, 2, 4, 8, 16, 32):
        before = ticks(sandbox)
        time.sleep(pause)
        if ticks(sandbox) >= before + 5:
            return True
    return False


def as_root(sandbox: Sandbox) -> None:
    """Commands and terminals of `root` have the number 0, its home, and the same files."""
    script = "whoami; id -u; id -g; pwd; echo $HOME $USER $KIND; touch own; chown root:root own; stat -c %U:%G own"
    shown = sandbox.commands.run(script, user="root", envs={"KIND": "given"}).stdout.split()
    assert shown == ["root", "0", "0", "/root", "/root", "root", "given", "root:root"], shown
    assert sandbox.commands.run("stat -c %U /root/own; id -u", user="user").stdout.split() == ["user", "1000"]
    assert sandbox.commands.run("pwd", user="root", cwd="/tmp").stdout == "/tmp\n"
    waiting = sandbox.commands.run("echo up; sleep 1000", user="root", background=True, timeout=0)
    fork = sandbox.fork(count=1, timeout=600)[0]
    assert sandbox.commands.kill(waiting.pid)
    assert fork.commands.kill(waiting.pid) and fork.commands.run("id -u", user="root").stdout == "0\n"
    assert fork.kill()
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), user="root")
    seen = bytearray()
    sandbox.pty.send_stdin(terminal.pid, b"echo $(id -u)-$(tty | cut -c1-9); exit\n")
    terminal.wait(on_pty=seen.extend)
    assert b"0-/dev/pts/" in seen, seen
    sandbox.files.write("of-root", "content", user="root")
    assert sandbox.files.read("/root/of-root") == "content" == sandbox.files.read("~/of-root", user="root")
    assert {"of-root", "own"} <= {entry.name for entry in sandbox.files.list(".", user="root")}
    with urllib.request.urlopen(sandbox.download_url("of-root", user="root")) as response:
        assert response.read() == b"content"


def none_left(sandbox: Sandbox) -> bool:
    """Whether no command runs, or soon none does."""
    until = time.monotonic() + LONG
    while sandbox.commands.list() and time.monotonic() < until:
        time.sleep(0.05)
    return not sandbox.commands.list()


def background(sandbox: Sandbox) -> None:
    """Programs that are left running continue, in parallel with code and other commands."""
    assert none_left(sandbox)
    assert not sandbox.commands.kill(77)
    counting = "n=0; while :; do n=$((n+1)); echo $n > /tmp/next; mv /tmp/next /tmp/ticks; sleep 0.1; done"
    counter = sandbox.commands.run(counting, background=True, timeout=0)
    until = f"import time\nwhile int(open('/tmp/ticks').read()) < {ticks(sandbox) + 5}: time.sleep(0.05)\n'ticked'"
    assert sandbox.run_code(until).text == "ticked"
    assert goes_on(sandbox)
    # A server that one command starts answers another, and code.
    server = sandbox.commands.run("python3 -m http.server 8000 --bind 127.0.0.1", background=True, timeout=0)
    sandbox.files.write("/home/user/page", "served well")
    asking = (
        "import time, urllib.request\nfor _ in range(300):\n"
        "    try: told = urllib.request.urlopen('http://127.0.0.1:8000/page').read(); break\n"
        "    except OSError: time.sleep(0.05)\ntold"
    )
    assert sandbox.run_code(asking).text == "b'served well'"
    from_outside(sandbox)
    listed = {found.pid: found for found in sandbox.commands.list()}
    assert set(listed) == {counter.pid, server.pid}, listed
    assert listed[counter.pid].cmd == "/bin/bash" and counting in listed[counter.pid].args, listed
    assert server.kill()
    try:
        server.wait()
        raise AssertionError("a killed command was reported as a successful one")
    except CommandExitException as error:
        assert error.exit_code == 137, error.exit_code
    assert sandbox.commands.kill(counter.pid) and none_left(sandbox)
    # Its input, and the output for each subscriber.
    reader = sandbox.commands.run("while read line; do echo got $line; done; echo over", background=True, stdin=True)
    reader.send_stdin("one\n")
    again = sandbox.commands.connect(reader.pid)
    sandbox.commands.send_stdin(reader.pid, "two\n" * 20_000)
    reader.close_stdin()
    # A client that does not read output would receive no more.
    whole: list[str] = []
    hearing = threading.Thread(target=lambda: whole.append(reader.wait().stdout))
    hearing.start()
    told = "got two\n" * 20_000 + "over\n"
    assert again.wait().stdout.endswith(told)
    hearing.join()
    assert whole == ["got one\n" + told]
    for gone in (lambda: sandbox.commands.connect(reader.pid), lambda: reader.send_stdin("late\n")):
        try:
            gone()
            raise AssertionError("a command that has ended is still there")
        except NotFoundException:
            pass
    reader = sandbox.commands.run("sort -r", background=True, stdin=True)
    sandbox.commands.stream_input(reader.pid, ["one\n", b"two\n", "three\n"])
    sandbox.commands.close_stdin(reader.pid)
    assert reader.wait().stdout == "two\nthree\none\n"
    # A client that disconnects ends nothing; the limit of the command does.
    left = sandbox.commands.run("sleep 1; echo first; sleep 1; echo second", background=True)
    left.disconnect()
    assert sandbox.commands.connect(left.pid).wait().stdout == "first\nsecond\n"
    left = sandbox.commands.run("sleep 6000", background=True, timeout=3)
    left.disconnect()
    assert none_left(sandbox)
    # Beside one that never waits.
    spinner = sandbox.commands.run("while :; do :; done", background=True, timeout=0)
    assert sandbox.run_code("6 * 7").text == "42" and sandbox.commands.run("echo beside").stdout == "beside\n"
    assert spinner.kill() and none_left(sandbox)


class Screen:
    """The output of a terminal, read by a thread."""

    def __init__(self, sandbox: Sandbox, shell: CommandHandle) -> None:
        self.sandbox, self.shell, self.shown, self.ended = sandbox, shell, b"", None
        self.thread = threading.Thread(target=self.hear)
        self.thread.start()

    def hear(self) -> None:
        try:
            for _, _, data in self.shell:
                self.shown += data or b""
            self.shell.wait()
        except (CommandExitException, SandboxException) as error:
            self.ended = error

    def type(self, keys: bytes, *shows: bytes) -> None:
        """Types, and waits until all of that is shown."""
        self.shown = b""
        self.sandbox.pty.send_stdin(self.shell.pid, keys)
        until = time.monotonic() + LONG
        while not all(show in self.shown for show in shows):
            assert time.monotonic() < until and self.ended is None, (keys, self.shown, self.ended)
            time.sleep(0.01)


def terminals(sandbox: Sandbox) -> None:
    """A shell at a terminal: its size, its keys, its forks and its end."""
    shell = sandbox.pty.create(PtySize(rows=24, cols=81), cwd="/tmp", timeout=0)
    screen = Screen(sandbox, shell)
    screen.type(b"stty size; tty; pwd; echo $((6 * 7))$TERM\n", b"24 81", b"/dev/pts/", b"/tmp", b"42xterm-256color")
    sandbox.pty.resize(shell.pid, PtySize(rows=40, cols=100))
    screen.type(b"stty size\n", b"40 100")
    screen.type(b"sleep 1000\n", b"sleep 1000")
    screen.type(b"\x03", b"^C")
    screen.type(b"echo left $?\n", b"left 130")
    screen.type(b"python3 -c 'print(input(), __import__(\"sys\").stdin.isatty())'\n", b"isatty")
    screen.type(b"tpo\x7f\x7fyped\n", b"typed True")
    screen.type(b"seq 1 20000 | tail -n +19998; seq 1 30000 > /tmp/many; cat /tmp/many; echo all\n", b"20000\r\n", b"\r\n30000\r\nall")
    assert sandbox.run_code("1 + 1").text == "2"
    fork = sandbox.fork(count=1, timeout=600)[0]
    forked = Screen(fork, fork.pty.connect(shell.pid, timeout=0))
    forked.type(b"echo here $((1 + 1))\n", b"here 2")
    screen.type(b"echo there $((1 + 2))\n", b"there 3")
    assert b"here 2" not in screen.shown
    assert fork.kill()
    forked.thread.join()
    sandbox.pty.send_stdin(shell.pid, b"exit 3\n")
    screen.thread.join()
    assert isinstance(screen.ended, CommandExitException) and screen.ended.exit_code == 3, screen.ended
    assert none_left(sandbox)


def kept(sandbox: Sandbox) -> None:
    """Saved states include programs: forks and resumed sandboxes continue with them."""
    counting = "n=0; while :; do n=$((n+1)); echo $n > /tmp/next; mv /tmp/next /tmp/ticks; sleep 0.1; done"
    counter = sandbox.commands.run(counting, background=True, timeout=0)
    assert goes_on(sandbox)
    fork = sandbox.fork(count=1, timeout=600)[0]
    assert goes_on(fork)
    assert [found.pid for found in fork.commands.list()] == [counter.pid], fork.commands.list()
    assert fork.commands.kill(counter.pid)
    assert fork.kill()
    snapshot = sandbox.create_snapshot(name="counting")
    other = Sandbox.create(snapshot.snapshot_id, timeout=600)
    hearing = other.commands.connect(counter.pid)
    assert other.pause()
    try:
        hearing.wait()
        raise AssertionError("a command of a paused sandbox has ended")
    except SandboxException:
        pass
    resumed = Sandbox.connect(other.sandbox_id, timeout=600)
    assert goes_on(resumed)
    assert resumed.commands.kill(counter.pid) and resumed.kill()
    assert sandbox.commands.kill(counter.pid)
    # Code that ends the program itself is undone, to the end of the last call; so is the output of
    # other commands.
    sandbox.files.write("/home/user/before", "before")
    last = sandbox.commands.run("sleep 1; kill -9 1 $PPID", background=True)
    try:
        last.wait()
        raise AssertionError("a program that was undone has ended")
    except SandboxException:
        pass
    assert sandbox.files.read("/home/user/before") == "before"
    assert sandbox.commands.kill(last.pid)


RICH = """
class Rich:
    def _repr_html_(self): return '<b>x</b>'
    def _repr_png_(self): return b'\\x89PNG'
    def _repr_latex_(self): raise ValueError
display(1, {'a': float('nan')})
display({'text/markdown': '*x*'}, raw=True)
Rich()
"""


def said(execution: Execution) -> str:
    """The output of code."""
    return "".join(execution.logs.stdout)


def results(sandbox: Sandbox) -> None:
    """Values are shown in all their formats, in the order of the code, and half characters arrive whole."""
    execution = sandbox.run_code(RICH)
    assert execution.error is None, execution.error
    one, two, three, rich = execution.results
    assert (one.text, two.json, three.markdown, three.text) == ("1", {"a": None}, "*x*", None), execution
    assert rich.is_main_result and rich.html == "<b>x</b>" and rich.png == "iVBORw==" and rich.latex is None, rich
    assert sandbox.run_code("'text'").text == "text"
    assert sandbox.run_code("  y = 1\n  y").text == "1"
    assert said(sandbox.run_code("!echo from a shell")) == "from a shell\n"
    assert sandbox.run_code("import asyncio\nawait asyncio.sleep(0.01, 'awaited')").text == "awaited"
    halves = "import os, time\nfor byte in 'ä€😀'.encode(): os.write(1, bytes([byte])); time.sleep(0.01)"
    assert "".join(sandbox.run_code(halves).logs.stdout) == "ä€😀"
    assert sandbox.commands.run(f'python3 -c "{halves}"').stdout == "ä€😀"
    failed = sandbox.run_code("a = 1\nunknown\n")
    assert failed.error is not None and "unknown" in failed.error.traceback and "json" not in failed.error.traceback


def contexts(sandbox: Sandbox) -> None:
    """Code of a context has its own names, directory and environment."""
    sandbox.run_code("own = 'first'")
    other = sandbox.create_code_context(cwd="/tmp")
    assert sandbox.run_code("import os\nown = 'second'\nos.getcwd()", context=other).text == "/tmp"
    assert sandbox.run_code("import os\nown, os.getcwd()").text == "('first', '/home/user')"
    listed = [context.id for context in sandbox.list_code_contexts()]
    assert listed[0] == "default" and listed[-1] == other.id, listed
    sandbox.restart_code_context(other.id)
    assert sandbox.run_code("own", context=other).error.name == "NameError"
    sandbox.remove_code_context(other.id)
    assert other.id not in [context.id for context in sandbox.list_code_contexts()]
    for gone in (lambda: sandbox.remove_code_context(other.id), lambda: sandbox.create_code_context(language="cobol")):
        try:
            gone()
            raise AssertionError("a context that is not there was changed")
        except (NotFoundException, SandboxException):
            pass
    assert sandbox.run_code("os.environ.get('GIVEN')", envs={"GIVEN": "yes"}).text == "yes"
    assert sandbox.run_code("os.environ.get('GIVEN', 'no')").text == "no"
    if "bash" in {context.language for context in sandbox.list_code_contexts()}:
        shell = sandbox.run_code("cd /; kept=1; echo $GIVEN", language="bash", envs={"GIVEN": "yes"})
        assert shell.error is None and said(shell) == "yes\n", shell
        assert said(sandbox.run_code("echo $kept [$GIVEN]; pwd", language="bash")) == "1 []\n/\n"
        assert sandbox.run_code("exit 3", language="bash").error is not None
        assert said(sandbox.run_code("echo new", language="bash")) == "new\n"
    if "javascript" in {context.language for context in sandbox.list_code_contexts()}:
        node = sandbox.run_code("const kept = await Promise.resolve(41); console.log('said')", language="js")
        assert node.error is None and said(node) == "said\n", node
        assert sandbox.run_code("kept + 1", language="js").text == "42"
        typed = sandbox.run_code("enum Side { Left = 41 }; const side: Side = Side.Left; side + 1", language="ts")
        if typed.error is not None:
            # An older Node.js has no TypeScript, and says so.
            assert "TypeScript needs Node.js" in typed.error.value, typed
        else:
            assert typed.text == "42" and sandbox.run_code("side", language="ts").text == "41", typed
        assert sandbox.run_code("let typed: number = 1", language="js").error is not None


# A server that answers with the host that it is asked for.
HOST = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.headers["Host"].encode())
http.server.HTTPServer(("", 8000), Handler).serve_forever()
"""


def restarted(sandbox: Sandbox) -> None:
    """A pause without memory keeps the files, and starts the template's program."""
    boot = "/proc/sys/kernel/random/boot_id"
    sandbox.files.write("/home/user/kept", "kept")
    before = sandbox.files.read(boot)
    assert sandbox.run_code("base").text == "40"
    sleeper = sandbox.commands.run("sleep 600", background=True, timeout=0)
    assert sandbox.pause(keep_memory=False)
    again = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert again.files.read("/home/user/kept") == "kept"
    assert again.files.read(boot) not in ("", before)
    assert again.run_code("json.dumps([name in globals() for name in ('json', 'base')])").text == "[true, false]"
    assert sleeper.pid not in {found.pid for found in again.commands.list()}


def chosen() -> None:
    """Settings of a sandbox are honoured or refused."""
    network = {"allow_public_traffic": True, "mask_request_host": "masked.test:${PORT}"}
    sandbox = Sandbox.create(timeout=600, envs={"GIVEN": "yes"}, network=network)
    assert sandbox.commands.run("echo $GIVEN").stdout == "yes\n"
    assert sandbox.commands.run("echo $GIVEN", envs={"GIVEN": "other"}).stdout == "other\n"
    assert sandbox.run_code("import os; os.environ['GIVEN']").text == "yes"
    fork = sandbox.fork(count=1, timeout=600)[0]
    assert fork.commands.run("echo $GIVEN").stdout == "yes\n" and fork.kill()
    sandbox.files.write("/home/user/host.py", HOST)
    server = sandbox.commands.run("python3 host.py", background=True, timeout=0)
    until = time.monotonic() + LONG
    while (answer := ask(sandbox, 8000, "/", shown=False)).status != 200:
        assert time.monotonic() < until, "a port of a public sandbox asks for a token"
        time.sleep(0.05)
    assert answer.read() == b"masked.test:8000"
    assert server.kill()
    shown = sandbox.commands.run("whoami; id -u; touch own; stat -c %U:%G own", user="user").stdout
    assert shown == "user\n1000\nuser:user\n", shown
    assert sandbox.files.get_info("own", user="user").owner == "user"
    as_root(sandbox)
    for refused in (
        lambda: sandbox.commands.run("id", user="nobody"),
        lambda: sandbox.pty.create(PtySize(rows=24, cols=80), user="nobody"),
        lambda: sandbox.files.read("/etc/passwd", user="nobody"),
        lambda: sandbox.files.write("/tmp/of-nobody", "x", user="nobody"),
        lambda: sandbox.files.list("/", user="nobody"),
        lambda: Sandbox.create("no-such-template"),
        lambda: Sandbox.create(network={"allow_out": ["example.org"]}),
        lambda: Sandbox.create(network={"dns_servers": ["8.8.8.8"]}),
        lambda: Sandbox.create(network={"rules": {"server.test": [{"transform": {"headers": {"X-Told": "a"}}}]}}),
        lambda: sandbox.update_network({"deny_out": ["server.test"]}),
        lambda: sandbox.update_network({"egress_proxy": {"address": "proxy.test:1080"}}),
    ):
        try:
            refused()
            raise AssertionError("an option that is not there was ignored")
        except (AuthenticationException, SandboxException):
            pass
    # Code that its client leaves ends, and so does code of a sandbox that is killed.
    try:
        sandbox.run_code("left = 1\nimport time; time.sleep(6000)", timeout=2)
        raise AssertionError("the client did not leave")
    except TimeoutException:
        pass
    assert sandbox.run_code("left").error.name == "NameError"
    ended: list[object] = []

    def run() -> None:
        try:
            code = "open('/tmp/running', 'w').write('now')\nimport time; time.sleep(6000)"
            ended.append(sandbox.run_code(code, timeout=0))
        except (SandboxException, TimeoutException) as error:
            ended.append(error)

    running = threading.Thread(target=run)
    running.start()
    # Its files are read while it runs.
    until = time.monotonic() + 15
    while not sandbox.files.exists("/tmp/running"):
        assert time.monotonic() < until, "a read waits for running code"
        time.sleep(0.05)
    assert sandbox.files.read("/tmp/running") == "now"
    assert sandbox.kill()
    running.join(15)
    assert ended and isinstance(ended[0], Exception), ended


def watched(sandbox: Sandbox) -> None:
    """Changes of a directory are events; files have metadata, signed links and compression."""
    sandbox.files.make_dir("/home/user/watched/deep")
    watch = sandbox.files.watch_dir("/home/user/watched", recursive=True, include_entry=True)
    sandbox.files.write("/home/user/watched/one", "1")
    sandbox.run_code("import os; os.rename('/home/user/watched/one', '/home/user/watched/deep/two')")
    sandbox.commands.run("rm /home/user/watched/deep/two")
    told = [(event.type.value, event.name) for event in watch.get_new_events()]
    assert told == [
        ("create", "one"),
        ("chmod", "one"),
        ("write", "one"),
        ("rename", "one"),
        ("create", "deep/two"),
        ("remove", "deep/two"),
    ], told
    watch.stop()
    info = sandbox.files.write("/home/user/labelled", "text", metadata={"author": "me"})
    assert info.metadata == {"author": "me"}
    assert sandbox.files.rename("/home/user/labelled", "/home/user/moved").metadata == {"author": "me"}
    setting = "import os; os.setxattr('moved', 'user.e2b.by', b'code'); print(os.getxattr('moved', 'user.e2b.author'))"
    assert sandbox.commands.run(f'python3 -c "{setting}"').stdout == "b'me'\n"
    assert sandbox.files.get_info("moved").metadata == {"author": "me", "by": "code"}
    assert sandbox.files.write("/home/user/moved", "other").metadata is None
    assert sandbox.files.get_info("/home/user/moved").metadata is None
    sandbox.files.write("/home/user/zipped", "z" * 100_000, gzip=True)
    assert sandbox.files.read("/home/user/zipped", gzip=True) == "z" * 100_000
    with urllib.request.urlopen(sandbox.download_url("/home/user/zipped")) as answer:
        assert answer.read() == b"z" * 100_000
    expired = sandbox.download_url("/home/user/zipped", use_signature_expiration=-10)
    for url in (expired, sandbox.upload_url("/home/user/zipped")):
        try:
            urllib.request.urlopen(url)
            raise AssertionError("a link that is not for this was taken")
        except urllib.error.HTTPError as error:
            assert error.code == 401, error
    assert sandbox.get_metrics()[0].mem_total > 0
    boot = sandbox.files.read("/proc/sys/kernel/random/boot_id")
    assert len(boot) == 37, boot


def pasted(sandbox: Sandbox) -> None:
    """Lines that are typed faster than they are read arrive whole."""
    shell = sandbox.pty.create(PtySize(rows=24, cols=80), cwd="/tmp", timeout=0)
    screen = Screen(sandbox, shell)
    screen.type(b"stty -echo; echo rea''dy; sleep 1; cat > pasted; stty echo; echo do''ne\n", b"ready")
    text = "".join(f"line {n:05d} abcdefghijklmnopqrstuvwxyz0123456789\n" for n in range(163))
    screen.type(text.encode() + b"\x04", b"done")
    assert sandbox.files.read("/tmp/pasted") == text
    shell.kill()
    screen.thread.join()


def ends(sandbox: Sandbox) -> None:
    """The end of each command is reported, also where two end at once."""
    for _ in range(30):
        both = [sandbox.commands.run("true", background=True) for _ in range(2)]
        assert all(one.wait().exit_code == 0 for one in both)


def main() -> None:
    sandbox = Sandbox.create(timeout=600)
    heard: list[tuple[str, float]] = []

    def hear(line: object) -> None:
        heard.append((str(getattr(line, "line", line)), time.monotonic()))

    execution = sandbox.run_code(
        "import time\nfor n in range(3):\n    print(n, flush=True)\n    time.sleep(2)\nbase = 40\nbase + 2",
        on_stdout=hear,
    )
    assert execution.error is None and execution.text == "42", execution
    assert "".join(line for line, _ in heard) == "0\n1\n2\n", heard
    assert heard[-1][1] - heard[0][1] > 0.5, heard
    assert sandbox.run_code("1 / 0").error.name == "ZeroDivisionError"

    # Output of programs that the code starts, and its own output outside Python's streams.
    heard.clear()
    mixed = "import os, subprocess\nprint('one')\nsubprocess.run(['echo', 'two'])\nos.system('echo three >&2')\nos.write(1, b'four\\n')"
    execution = sandbox.run_code(mixed, on_stdout=hear)
    assert "".join(line for line, _ in heard) == "one\ntwo\nfour\n", heard
    assert "".join(execution.logs.stderr) == "three\n" and execution.text == "5", execution

    # Commands, in the same files as the code.
    result = sandbox.commands.run("echo hello; echo to-stderr >&2; pwd; echo $GIVEN", envs={"GIVEN": "yes"})
    assert result.stdout == "hello\n/home/user\nyes\n" and result.stderr == "to-stderr\n", result
    try:
        sandbox.commands.run("exit 3")
        raise AssertionError("a failed command was reported as a successful one")
    except CommandExitException as error:
        assert error.exit_code == 3, error
    heard.clear()
    sandbox.commands.run("for n in 1 2 3; do echo $n; sleep 2; done", on_stdout=hear)
    assert "".join(line for line, _ in heard) == "1\n2\n3\n", heard
    assert heard[-1][1] - heard[0][1] > 0.5, heard
    # It is known before it ends.
    handle = sandbox.commands.run("while [ ! -e /tmp/end ]; do sleep 0.1; done; echo late", background=True)
    assert handle.pid > 0
    sandbox.commands.run("touch /tmp/end")
    assert handle.wait().stdout == "late\n"
    sandbox.commands.run("seq 1 5 | sort -r > numbers; cd /tmp && echo here > there", cwd="/home/user")
    assert sandbox.files.read("/home/user/numbers") == "5\n4\n3\n2\n1\n"
    assert sandbox.run_code("open('/tmp/there').read()").text == "here\\n"
    sandbox.files.write("/home/user/tool.py", "import sys\nprint('tool', sys.argv[1:])\nsys.exit(len(sys.argv) - 2)\n")
    assert sandbox.commands.run("python3 tool.py one").stdout == "tool ['one']\n"
    assert {"numbers", "tool.py"} <= {found.name for found in sandbox.files.list("/home/user")}
    try:
        sandbox.commands.run("sleep 6000", timeout=2)
        raise AssertionError("a command ran longer than it may")
    except TimeoutException:
        pass
    background(sandbox)

    # A program that ends itself is as it was before.
    ended = sandbox.run_code("base = 0; import os; os._exit(0)")
    assert ended.error is not None and ended.error.name == "GuestError", ended
    large = sandbox.run_code("'x' * (20 << 20)")
    assert large.error is not None and large.error.name == "AnswerTooLarge", large.error
    flood = sandbox.run_code("import os\nfor _ in range(100): os.write(1, b'y' * (1 << 20))\n'flooded'")
    assert flood.text == "flooded" and sum(map(len, flood.logs.stdout)) == 100 << 20, flood.error
    assert sandbox.run_code("base").text == "40"

    # All of it is one state.
    forks = sandbox.fork(count=3, timeout=600)
    draws = set()
    for number, fork in enumerate(forks):
        assert fork.run_code(f"base += {number}; base").text == str(40 + number)
        fork.commands.run(f"echo {number} > fork")
        assert fork.files.read("/home/user/fork") == f"{number}\n"
        draws.add(fork.run_code("import random; random.random()").text)
    assert len(draws) == 3, draws
    try:
        sandbox.files.read("/home/user/fork")
        raise AssertionError("a fork's file is its parent's")
    except NotFoundException:
        pass
    snapshot = sandbox.create_snapshot(name="linux")
    sandbox.commands.run("rm numbers")
    again = Sandbox.create(snapshot.snapshot_id, timeout=600)
    assert again.commands.run("wc -l < numbers").stdout.strip() == "5"
    assert again.run_code("base").text == "40"
    assert again.pause()
    resumed = Sandbox.connect(again.sandbox_id, timeout=600)
    assert resumed.run_code("base + 1").text == "41"
    assert resumed.commands.run("cat /tmp/there").stdout == "here\n"
    cut = resumed.run_code("base = 0\nopen('/tmp/there', 'w').write('cut')\nwhile True: pass")
    assert cut.error is not None and cut.error.name == "TimeoutError", cut
    assert resumed.run_code("base, open('/tmp/there').read()").text == "(40, 'here\\n')"
    reached(sandbox, resumed)
    results(sandbox)
    contexts(sandbox)
    watched(sandbox)
    chosen()
    narrowed()
    pasted(sandbox)
    ends(sandbox)
    terminals(sandbox)
    kept(sandbox)
    with tempfile.TemporaryDirectory() as files:
        built(pathlib.Path(files))
    restarted(resumed)
    for live in (sandbox, resumed, *forks):
        assert live.kill()
    print("all done")


main()
