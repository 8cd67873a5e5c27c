"""A runtime and a harness for rollouts of ``verifiers`` (the interface ``verifiers.v1``).

``async with SandboxRuntime(warm) as runtime: trace = await agent.run(task, runtime=runtime)``: task hooks and rewards
get the runtime. `SandboxRuntime.reset` returns to the state at the start, and `SandboxRuntime.fork` makes runtimes that
continue from the present state.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any

import httpx
from verifiers.v1 import Harness, HarnessConfig, ProgramResult, Runtime, SandboxError, SubprocessConfig
from verifiers.v1.runtimes import SubprocessRuntimeInfo

from ._agent import CALL_TIMEOUT, SandboxTools, absolute, described, schema, shortened
from ._native import Checkpoint
from ._sandbox import AsyncSandbox
from ._warm import Warm
from .errors import AfreshError, CommandError

__all__ = ["SandboxHarness", "SandboxRuntime"]

# The sum of this and the number of a signal is the exit code of shells.
_SIGNALLED = 128
# Seconds of a command: a stage of a rollout that exceeds its limit cancels it.
_COMMAND_TIMEOUT = 24 * 60 * 60.0

_INSTRUCTIONS = "You have a sandbox. Variables, files and processes stay between calls of your tools."


class SandboxRuntime(Runtime):  # type: ignore[misc]
    """A sandbox of a Linux program as the runtime of rollouts.

    Promises: calls run one after the other. A command of a cancelled rollout is killed.

    Args:
        warm: The warm guest, from `afresh.linux` or `afresh.image`.
        name: A name for logs.
        memory_limit: Maximum memory of the sandbox.
    """

    def __init__(self, warm: Warm, name: str | None = None, *, memory_limit: int | str | None = None) -> None:
        super().__init__(name)
        if warm._native.kind != "program":
            raise ValueError("a runtime takes a Linux program, from `afresh.linux` or `afresh.image`")
        # The types of configurations are a closed list, and a sandbox on the same host is next to
        # this one.
        self.config = SubprocessConfig()
        self.info = SubprocessRuntimeInfo(id=self.name)
        self._warm = warm
        self._memory_limit = memory_limit
        self._sandbox: AsyncSandbox | None = None
        self._start: Checkpoint | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> SandboxRuntime:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox."""
        if self._sandbox is None:
            raise SandboxError(f"the runtime {self.name} is not started, or stopped")
        return self._sandbox

    async def start(self) -> None:
        """Makes the sandbox."""
        self._sandbox = self._warm.async_sandbox(timeout=CALL_TIMEOUT, memory_limit=self._memory_limit)
        self._start = await self._sandbox.checkpoint("start")

    async def teardown(self) -> None:
        """Ends the sandbox. Forks stay."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    def cleanup(self) -> None:
        """Ends the sandbox without an event loop."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox._session.close()

    async def reset(self) -> None:
        """Returns to the state at the start."""
        async with self._turn:
            assert self._start is not None
            await self.sandbox.rollback(self._start)

    async def checkpoint(self, name: str = "") -> Checkpoint:
        """Keeps the present state."""
        async with self._turn:
            return await self.sandbox.checkpoint(name)

    async def rollback(self, to: Checkpoint | str) -> None:
        """Returns to a kept state."""
        async with self._turn:
            await self.sandbox.rollback(to)

    async def fork(self, count: int = 1) -> list[SandboxRuntime]:
        """Runtimes that continue from the present state, and reset to the same start. Stop each of them."""
        async with self._turn:
            sandboxes = await self.sandbox.fork(count)
        forks = []
        for number, sandbox in enumerate(sandboxes):
            fork = SandboxRuntime(self._warm, f"{self.name}-{number}", memory_limit=self._memory_limit)
            fork.env = dict(self.env)
            fork._sandbox, fork._start = sandbox, self._start
            forks.append(fork)
        return forks

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Runs a command to its end."""
        async with self._turn:
            try:
                done = await self.sandbox.commands.run(
                    argv, cwd=absolute("."), env=self.process_env(env), timeout=_COMMAND_TIMEOUT
                )
            except CommandError as error:
                return ProgramResult(error.exit_code, "", error.stderr)
            except AfreshError as error:
                raise SandboxError(str(error)) from error
        if done.truncated:
            raise SandboxError(f"the output of {argv[0]!r} exceeds the limit of the sandbox")
        code = done.exit_code if done.exit_code >= 0 else _SIGNALLED - done.exit_code
        return ProgramResult(code, done.stdout, done.stderr)

    async def run_code(self, code: str) -> str:
        """Runs code in the interpreter: output, value and error as text. Code that exceeds a limit is undone."""
        async with self._turn:
            before = await self.sandbox.checkpoint()
            try:
                result = await self.sandbox.run_code(code)
                was_undone = self.sandbox.failed is not None
            finally:
                if self.sandbox.failed is not None:
                    await self.sandbox.rollback(before)
                self.sandbox.drop(before)
        parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
        if result.error is not None:
            parts.append(described(result.error, was_undone=was_undone))
        elif result.value is not None:
            parts.append(result.text)
        return shortened("\n".join(part for part in parts if part))

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        async with self._turn:
            files, place = self.sandbox.files, absolute(path)
            try:
                if max_bytes is None or files.stat(place).size <= max_bytes:
                    return files.read(place)
            except AfreshError as error:
                raise SandboxError(f"read {path!r}: {error}") from error
        # The command stops at the limit.
        read: bytes = await super()._read(place, max_bytes)
        return read

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file, with the directories above it."""
        async with self._turn:
            try:
                self.sandbox.files.write(absolute(path), data)
            except AfreshError as error:
                raise SandboxError(f"write {path!r}: {error}") from error


def _tool(name: str) -> dict[str, Any]:
    function = getattr(SandboxTools, name)
    about = {"name": name, "description": (function.__doc__ or "").split("\n")[0], "parameters": schema(function)}
    return {"type": "function", "function": about}


class SandboxHarness(Harness[HarnessConfig]):  # type: ignore[misc]
    """A chat loop whose tools `run_code` and `run_command` work in a `SandboxRuntime`.

    The loop runs in your process, so the sandbox needs no network. Export it in ``__all__`` of your environment package
    and name that package as the harness.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0917
        self,
        ctx: Any,
        trace: Any,  # noqa: ARG002
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,  # noqa: ARG002
    ) -> ProgramResult:
        """Runs the model until an answer has no calls of tools."""
        if not isinstance(runtime, SandboxRuntime):
            raise SandboxError(f"this harness runs in a SandboxRuntime, not in a {type(runtime).__name__}")
        if mcp_urls:
            raise SandboxError(f"this harness has no tool servers, and the task has: {', '.join(mcp_urls)}")
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"{_INSTRUCTIONS}\n\n{system or ''}".strip()}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages.extend(message.model_dump(exclude_none=True) for message in prompt or [])
        tools = [_tool("run_code"), _tool("run_command")]
        headers = {"Authorization": f"Bearer {secret}"}
        # The rollout limits the time of an answer.
        async with httpx.AsyncClient(base_url=endpoint.rstrip("/") + "/", headers=headers, timeout=None) as client:
            while True:
                body = {"model": ctx.model, "messages": messages, "tools": tools}
                answered = await client.post("chat/completions", json=body)
                if answered.status_code >= httpx.codes.BAD_REQUEST:
                    return ProgramResult(1, "", answered.text)
                message = answered.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                for call in calls:
                    content = await _call(runtime, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                if not calls:
                    return ProgramResult(0, message.get("content") or "", "")


async def _call(runtime: SandboxRuntime, function: dict[str, Any]) -> str:
    """The result of a tool as text; also of a call that a model wrote wrongly."""
    try:
        arguments = json.loads(function["arguments"])
        match function["name"]:
            case "run_code":
                return await runtime.run_code(str(arguments["code"]))
            case "run_command":
                done = await runtime.run(["sh", "-c", str(arguments["command"])], {})
                ended = "" if done.exit_code == 0 else f"exit code {done.exit_code}"
                parts = [done.stdout.rstrip("\n"), done.stderr.rstrip("\n"), ended]
                return shortened("\n".join(part for part in parts if part))
            case other:
                return f"error: there is no tool {other!r}"
    except (ValueError, KeyError, TypeError) as error:
        return f"error: the arguments are not as the schema of the tool: {error!r}"
    except (AfreshError, SandboxError) as error:
        return f"error: {error}"
