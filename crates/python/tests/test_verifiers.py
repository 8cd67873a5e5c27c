"""Rollouts of ``verifiers`` in sandboxes, with its published package; a local server gives the answers of a model.

`cargo xtask adapters rollouts` runs these.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import afresh
import pytest

vf = pytest.importorskip(
    "verifiers.v1", reason="SKIPPED: verifiers is not installed; `cargo xtask adapters rollouts` has it"
)

from afresh.verifiers import SandboxRuntime  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

# Calls of tools, one for each answer, and a last answer.
_SCRIPT = [
    ("run_code", {"code": "numbers = [3, 1, 2]"}),
    ("run_code", {"code": "1 / 0"}),
    ("run_command", {"command": "echo note > note.txt; exit 3"}),
    ("run_code", {"wrong": "x"}),
    ("run_code", {"code": "numbers.sort(); numbers"}),
]


class _Model(BaseHTTPRequestHandler):
    """The chat completions of a scripted model."""

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        turn = sum(message["role"] == "assistant" for message in given["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "sorted"}
        if turn < len(_SCRIPT):
            name, arguments = _SCRIPT[turn]
            function = {"name": name, "arguments": json.dumps(arguments)}
            message |= {"content": None, "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}]}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        answer = {
            "id": f"a{turn}",
            "object": "chat.completion",
            "created": 0,
            "model": given["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def model() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that exports the harness."""
    (tmp_path / "afresh_rollouts.py").write_text(
        "from afresh.verifiers import SandboxHarness\n__all__ = ['SandboxHarness']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("afresh_rollouts", None)
    return "afresh_rollouts"


class _Sorted(vf.Task[vf.TaskData]):  # type: ignore[misc, name-defined]
    async def setup(self, trace: Any, runtime: Any) -> None:  # noqa: ARG002
        await runtime.write("given.txt", b"given")

    @vf.reward  # type: ignore[untyped-decorator]
    async def is_sorted(self, runtime: SandboxRuntime) -> float:
        return float(await runtime.run_code("numbers == sorted(numbers)") == "True")

    @vf.metric  # type: ignore[untyped-decorator]
    async def notes(self, runtime: SandboxRuntime) -> float:
        return float(await runtime.read("note.txt") == b"note\n") + float(await runtime.read("given.txt") == b"given")


async def test_a_rollout_calls_tools_and_its_state_is_scored(python: afresh.Warm, model: str, harness: str) -> None:
    config = vf.AgentConfig(
        model="scripted",
        harness=vf.HarnessConfig(id=harness),
        runtime=vf.SubprocessConfig(),
        client=vf.EvalClientConfig(base_url=model, api_key_var="AFRESH_TEST_KEY"),
    )
    agent = vf.Agent(config)
    async with SandboxRuntime(python) as runtime:
        for _ in range(2):
            trace = await agent.run(_Sorted(vf.TaskData(prompt="Sort the numbers.")), runtime=runtime)
            assert not trace.errors, trace.errors
            assert trace.rewards["is_sorted"].value == 1.0, trace.rewards
            assert trace.metrics["notes"] == 2.0
            messages = [message for message in trace.branches[-1].messages if message.role == "tool"]
            texts = [str(message.content) for message in messages]
            assert "ZeroDivisionError" in texts[1]
            assert texts[2].endswith("exit code 3")
            assert texts[3].startswith("error:")
            assert texts[4] == "[1, 2, 3]"
            # The next rollout starts anew.
            await runtime.reset()
            assert "NameError" in await runtime.run_code("numbers")
            assert await runtime.run(["ls"], {}) == vf.ProgramResult(0, "", "")


async def test_a_runtime_forks_and_keeps_its_contract(python: afresh.Warm) -> None:
    async with SandboxRuntime(python) as runtime:
        runtime.env = {"A": "b"}
        done = await runtime.run(["sh", "-c", "echo $A$C; pwd; echo err >&2; kill -9 $$"], {"C": "d"})
        assert done == vf.ProgramResult(137, "bd\n/home/user\n", "err\n")
        assert (await runtime.run(["no-such-program"], {})).exit_code == 127
        assert await runtime.alive()
        await runtime.write("data/a.bin", b"\xff" * 10)
        assert await runtime.read("data/a.bin", max_bytes=10) == b"\xff" * 10
        with pytest.raises(vf.SandboxError, match="over the 9 byte limit"):
            await runtime.read("data/a.bin", max_bytes=9)
        with pytest.raises(vf.SandboxError, match="none"):
            await runtime.read("none")
        kept = await runtime.checkpoint("kept")
        one, two = await runtime.fork(2)
        await one.run_code("x = 1")
        assert "NameError" in await two.run_code("x")
        assert await one.read("data/a.bin") == b"\xff" * 10
        await one.reset()
        assert (await one.run(["ls"], {})).stdout == ""
        await one.stop()
        await two.stop()
        await runtime.run(["rm", "-r", "data"], {})
        await runtime.rollback(kept)
        assert await runtime.run(["ls"], {}) == vf.ProgramResult(0, "data\n", "")
    with pytest.raises(vf.SandboxError, match="not started, or stopped"):
        await runtime.run(["true"], {})


def test_a_wasm_guest_is_no_runtime(js: afresh.Warm) -> None:
    with pytest.raises(ValueError, match=r"afresh\.linux"):
        SandboxRuntime(js)
