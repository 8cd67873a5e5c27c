"""Tools for the Claude Agent SDK that run in a sandbox, as an MCP server within this process.

``ClaudeAgentOptions(mcp_servers={"sandbox": sandbox_server(warm)}, allowed_tools=["mcp__sandbox__run_code"])``
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any

from claude_agent_sdk import McpSdkServerConfig, SdkMcpTool, create_sdk_mcp_server

from ._agent import CALL_TIMEOUT, SandboxTools, schema
from ._call_threads import CALLS
from ._warm import Warm

__all__ = ["sandbox_server"]


def sandbox_server(
    warm: Warm, *, timeout: float | None = CALL_TIMEOUT, memory_limit: int | str | None = None, name: str = "afresh"
) -> McpSdkServerConfig:
    """A server over one new sandbox, which all queries with it share.

    Args:
        warm: The guest that it starts from.
        timeout: Time limit in seconds of one call.
        memory_limit: Maximum memory of the sandbox.
        name: The name of the server.
    """
    tools = SandboxTools.of(warm, timeout=timeout, memory_limit=memory_limit)
    return create_sdk_mcp_server(name, tools=[_tool(function) for function in tools.functions()])


def _tool(function: Callable[..., str]) -> SdkMcpTool[Any]:
    async def call(arguments: dict[str, Any]) -> dict[str, Any]:
        run = functools.partial(contextvars.copy_context().run, function, **arguments)
        text = await asyncio.get_running_loop().run_in_executor(CALLS, run)
        return {"content": [{"type": "text", "text": text}]}

    return SdkMcpTool(
        name=function.__name__,
        description=inspect.getdoc(function) or "",
        input_schema=schema(function),
        handler=call,
    )
