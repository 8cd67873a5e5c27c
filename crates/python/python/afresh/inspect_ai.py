"""A sandbox provider for Inspect, under the name ``afresh``.

``Task(…, sandbox=SandboxEnvironmentSpec("afresh", AfreshConfig(setup="import numpy")))`` after
``import afresh.inspect_ai``: the guest is warmed up once for a task, and each sample has a sandbox that starts from it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from ._agent import absolute
from ._linux import image, linux
from ._sandbox import AsyncSandbox
from ._warm import Warm
from .errors import CommandError

__all__ = ["AfreshConfig", "AfreshSandbox"]

_USERS = ("user", "root")
# The exit code of shells for a program that cannot be executed.
_NOT_EXECUTABLE = 126


class AfreshConfig(BaseModel):  # type: ignore[misc]
    """The warm state from which sandboxes of a task start.

    Attributes:
        program: The Python interpreter, as in `afresh.linux`.
        image: An image instead, as in `afresh.image`.
        setup: Code that the interpreter runs once.
        dirs: Host directories that it may read.
        net: Servers that it may connect to, and rules for requests as JSON.
        memory_limit: Maximum memory of one sandbox.
    """

    # Hashable, since a warm guest belongs to it.
    model_config = ConfigDict(frozen=True)

    program: str = "python3"
    image: str | None = None
    setup: str | None = None
    dirs: tuple[str, ...] = ()
    net: tuple[str, ...] = ()
    memory_limit: str | None = None

    def open(self) -> Warm:
        """The warm guest."""
        options: dict[str, Any] = {"setup": self.setup, "dirs": self.dirs, "net": self.net}
        options["memory_limit"] = self.memory_limit
        return linux(self.program, **options) if self.image is None else image(self.image, **options)


def _config(given: BaseModel | str | None) -> AfreshConfig:
    if given is None:
        return AfreshConfig()
    if isinstance(given, str):
        return AfreshConfig(program=given)
    if isinstance(given, AfreshConfig):
        return given
    raise ValueError(f"the sandbox `afresh` is configured by an AfreshConfig, not by a {type(given).__name__}")


@sandboxenv(name="afresh")
class AfreshSandbox(SandboxEnvironment):  # type: ignore[misc]
    """A sandbox of a Linux program."""

    _warm: dict[AfreshConfig, Warm] = {}  # noqa: RUF012
    _opening = asyncio.Lock()

    def __init__(self, sandbox: AsyncSandbox) -> None:
        super().__init__()
        self.sandbox = sandbox
        self._turn = asyncio.Lock()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """A configuration that a log holds."""
        return AfreshConfig(**config)

    @classmethod
    async def sample_init(
        cls,
        task_name: str,  # noqa: ARG003
        config: BaseModel | str | None,
        metadata: dict[str, str],  # noqa: ARG003
    ) -> dict[str, SandboxEnvironment]:
        """A sandbox for a sample."""
        wanted = _config(config)
        async with cls._opening:
            if wanted not in cls._warm:
                cls._warm[wanted] = await asyncio.to_thread(wanted.open)
        return {"default": cls(cls._warm[wanted].async_sandbox())}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,  # noqa: ARG003
        config: BaseModel | str | None,  # noqa: ARG003
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,  # noqa: ARG003
    ) -> None:
        """Ends the sandboxes of a sample."""
        for environment in environments.values():
            await environment.as_type(cls).sandbox.close()

    async def exec(  # noqa: PLR0917
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,  # noqa: ARG002
        concurrency: bool = True,  # noqa: ARG002
    ) -> ExecResult[str]:
        """Runs a command to its end."""
        if user not in (None, *_USERS):
            raise SandboxUserUnsupportedError(f"commands run as {' or '.join(map(repr, _USERS))}, not as {user!r}")
        async with self._turn:
            try:
                done = await self.sandbox.commands.run(
                    cmd, stdin=input, cwd=absolute(cwd or "."), env=env, user=user, timeout=timeout
                )
            except CommandError as error:
                if error.exit_code == _NOT_EXECUTABLE:
                    raise PermissionError(error.stderr) from error
                return ExecResult(False, error.exit_code, "", error.stderr)
        for stream in (done.stdout, done.stderr):
            if done.truncated or len(stream) > SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE:
                limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, stream[:limit])
        return ExecResult(done.exit_code == 0, done.exit_code, done.stdout, done.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes a file, and makes missing directories."""
        async with self._turn:
            files, path = self.sandbox.files, absolute(file)
            if files.exists(path) and files.stat(path).kind == "directory":
                raise IsADirectoryError(f"{file} is a directory")
            files.write(path, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Reads a file."""
        async with self._turn:
            files, path = self.sandbox.files, absolute(file)
            if not files.exists(path):
                raise FileNotFoundError(f"{file} does not exist in the sandbox")
            about = files.stat(path)
            if about.kind == "directory":
                raise IsADirectoryError(f"{file} is a directory")
            if about.size > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
            data = files.read(path)
        return data.decode() if text else data
