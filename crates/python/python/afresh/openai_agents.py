"""Tools for the OpenAI Agents SDK that run in a sandbox: ``Agent(name, tools=sandbox_tools(warm))``."""

from __future__ import annotations

from agents import FunctionTool, function_tool

from ._agent import CALL_TIMEOUT, SandboxTools
from ._warm import Warm

__all__ = ["sandbox_tools"]


def sandbox_tools(
    warm: Warm, *, timeout: float | None = CALL_TIMEOUT, memory_limit: int | str | None = None
) -> list[FunctionTool]:
    """Tools over one new sandbox, which all runs with these tools share.

    Args:
        warm: The guest that it starts from.
        timeout: Time limit in seconds of one call.
        memory_limit: Maximum memory of the sandbox.
    """
    tools = SandboxTools.of(warm, timeout=timeout, memory_limit=memory_limit)
    return [function_tool(function) for function in tools.functions()]
