"""The network of sandboxes that are Linux programs: ports that clients reach, and servers outside."""

import http.client
import os
import socket
import time
import urllib.parse

from e2b_code_interpreter import Sandbox

# Far longer than anything takes on a busy machine.
LONG = 120


ECHO = """
import collections, http.server, threading
go_on = collections.defaultdict(lambda: threading.Semaphore(0))
class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_POST(self):
        body = self.rfile.read(int(self.headers['content-length']))
        self.send_response(201); self.send_header('content-length', str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        if self.headers['upgrade'] == 'shout':
            self.send_response(101); self.send_header('upgrade', 'shout'); self.send_header('connection', 'upgrade'); self.end_headers()
            while line := self.rfile.readline(): self.wfile.write(line.upper())
            self.close_connection = True
            return
        self.send_response(200); self.send_header('transfer-encoding', 'chunked'); self.end_headers()
        if self.path.startswith('/go'): go_on[self.path[3:]].release()
        for n in range(3):
            shown = self.headers["x-access-token"] or self.headers["e2b-traffic-access-token"]
            piece = f'{n} {self.path} {shown}\\n'.encode()
            self.wfile.write(b'%x\\r\\n%s\\r\\n' % (len(piece), piece)); self.wfile.flush()
            # The next one is sent once the client asks for that.
            if self.path in ('/0', '/1', '/2'): go_on[self.path].acquire()
        self.wfile.write(b'0\\r\\n\\r\\n')
http.server.ThreadingHTTPServer(('0.0.0.0', 8001), Echo).serve_forever()
"""


def ask(sandbox: Sandbox, port: int, path: str, data: bytes | None = None, shown: bool = True) -> http.client.HTTPResponse:
    """The answer of a program in the sandbox."""
    url = urllib.parse.urlsplit(os.environ["E2B_SANDBOX_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    token = {"E2B-Traffic-Access-Token": sandbox.traffic_access_token} if shown else {}
    method = "GET" if data is None else "POST"
    connection.request(method, path, data, {"Host": sandbox.get_host(port), **token})
    return connection.getresponse()


FETCH = "import urllib.request as r; print(r.urlopen('http://server.test/').read().decode())"

WATCH = """
import time, urllib.request
while True:
    urllib.request.urlopen('http://server.test/').read()
    open('/tmp/watched', 'a').write('.')
    time.sleep(0.05)
"""


def reached(*sandboxes: Sandbox) -> None:
    """Servers outside that the template names are reached: by code, by a command, and by one that runs between
    calls."""
    for sandbox in sandboxes:
        assert "".join(sandbox.run_code(FETCH).logs.stdout) == "from outside, true\n"
        assert sandbox.commands.run(f'python3 -c "{FETCH}"').stdout == "from outside, true\n"
        for place in ("other.test", "127.0.0.1:1"):
            failed = sandbox.run_code(FETCH.replace("server.test", place))
            assert failed.error is not None and failed.error.name == "URLError", failed
    sandbox = sandboxes[0]
    sandbox.files.write("/home/user/watch.py", WATCH)
    watch = sandbox.commands.run("python3 watch.py", background=True, timeout=0)
    until = time.monotonic() + LONG
    while not sandbox.files.exists("/tmp/watched") or len(sandbox.files.read("/tmp/watched")) < 5:
        assert time.monotonic() < until, "work between calls reaches no client"
        time.sleep(0.05)
    watch.kill()


def from_outside(sandbox: Sandbox) -> None:
    """A server on port 8000 is asked from outside, and one that takes its time."""
    assert ask(sandbox, 8000, "/page").read() == b"served well"
    assert ask(sandbox, 8000, "/sandboxes").status == 404 and ask(sandbox, 8002, "/").status == 502
    assert ask(sandbox, 8000, "/page", shown=False).status == 403
    sandbox.files.write("/home/user/large", "x" * 3_000_000)
    assert len(ask(sandbox, 8000, "/large").read()) == 3_000_000
    sandbox.files.write("/home/user/echo.py", ECHO)
    echo = sandbox.commands.run("python3 echo.py", background=True, timeout=0)
    while ask(sandbox, 8001, "/").status != 200:
        time.sleep(0.05)
    body = os.urandom(1_000_000)
    assert (back := ask(sandbox, 8001, "/", body)).status == 201 and back.read() == body
    slow = [ask(sandbox, 8001, f"/{n}") for n in range(3)]
    came = 0
    while line := slow[0].readline():
        assert line == f"{came} /0 None\n".encode(), line
        came += 1
        assert sandbox.run_code("1 + 1").text == "2"
        assert all(len(ask(sandbox, 8001, f"/go/{n}").read()) > 0 for n in range(3))
    assert came == 3
    assert all(one.read().count(b"\n") == 3 for one in slow[1:])
    # A protocol that HTTP is left for.
    url = urllib.parse.urlsplit(os.environ["E2B_SANDBOX_URL"])
    with socket.create_connection((url.hostname, url.port), timeout=60) as line:
        head = f"GET / HTTP/1.1\r\nHost: {sandbox.get_host(8001)}\r\nX-Access-Token: {sandbox._envd_access_token}\r\n"
        line.sendall(f"{head}Connection: Upgrade\r\nUpgrade: shout\r\n\r\n".encode())
        stream = line.makefile("rb")
        assert b"101" in stream.readline()
        while stream.readline() != b"\r\n":
            pass
        for said in (b"hello\n", b"x" * 200_000 + b"\n"):
            line.sendall(said)
            assert stream.readline() == said.upper()
    # A client that stops reading does not block others; connections are closed when the sandbox
    # moves to another host.
    stalled = ask(sandbox, 8000, "/large")
    assert sandbox.run_code("2 + 2").text == "4"
    fork = sandbox.fork(count=1, timeout=600)[0]
    assert ask(fork, 8000, "/page").read() == b"served well" and fork.kill()
    assert len(stalled.read()) == 3_000_000
    assert echo.kill()


def narrowed() -> None:
    """Rules of a sandbox narrow those of its template, after a pause and in forks too."""
    listed = {"allow_out": ["server.test"], "deny_out": lambda ctx: [ctx.all_traffic]}
    sandbox = Sandbox.create(timeout=600, network=listed)
    sandbox.run_code(
        "import socket, urllib.request\n"
        "def get(host):\n"
        "    try:\n"
        "        return urllib.request.urlopen(f'http://{host}/', timeout=60).read().decode()\n"
        "    except OSError:\n"
        "        return 'denied'\n"
    )

    def get(sandbox: Sandbox, host: str) -> str | None:
        return sandbox.run_code(f"get('{host}')").text

    fork = sandbox.fork(count=1, timeout=600)[0]
    for one in (sandbox, fork):
        assert get(one, "server.test") == "from outside, true", get(one, "server.test")
        assert get(one, "rule.test") == "denied"
    assert fork.kill() and sandbox.pause()
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert get(sandbox, "server.test") != "denied" and get(sandbox, "rule.test") == "denied"
    info = sandbox.get_info()
    assert info.network is not None and info.network["allow_out"] == ["server.test"], info.network
    assert info.network["deny_out"] == ["0.0.0.0/0"] and info.allow_internet_access is False, info.network

    # New rules replace all those before, and cut connections.
    held = sandbox.run_code("held = socket.create_connection(('server.test', 80)); held.settimeout(60)")
    assert held.error is None, held.error
    sandbox.update_network({"deny_out": ["127.0.0.0/8"]})
    cut = sandbox.run_code("held.recv(1)")
    assert cut.text == "b''" or cut.error is not None and cut.error.name == "ConnectionResetError", cut
    assert get(sandbox, "server.test") == "denied" and "502" in sandbox.run_code(
        "try:\n    urllib.request.urlopen('http://rule.test/')\nexcept OSError as error:\n    print(error)"
    ).logs.stdout[0]
    told = {"rules": {"rule.test": [{"transform": {"headers": {"X-Told": "secret"}}}]}}
    sandbox.update_network(told)
    assert get(sandbox, "server.test") == "from outside, true"
    assert get(sandbox, "rule.test") == "from outside, truesecret"
    sandbox.update_network({"allow_internet_access": False})
    assert get(sandbox, "server.test") == get(sandbox, "rule.test") == "denied"
    sandbox.update_network({})
    assert get(sandbox, "rule.test") == "from outside, true" and sandbox.kill()
