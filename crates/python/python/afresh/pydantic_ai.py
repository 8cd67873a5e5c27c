"""A toolset for Pydantic AI whose tools run in a sandbox: ``Agent(model, toolsets=[SandboxToolset(warm)])``.

Each run of the agent has a new sandbox, which starts from the warm state and ends with the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_ai.toolsets import FunctionToolset

from ._agent import CALL_TIMEOUT, INSTRUCTIONS, SandboxTools
from ._warm import Warm

if TYPE_CHECKING:
    from pydantic_ai import RunContext

__all__ = ["SandboxToolset"]


class SandboxToolset(FunctionToolset[Any]):  # type: ignore[misc]
    """Tools that run code and commands, use files, take checkpoints and roll back.

    Args:
        warm: The guest whose state each run starts from.
        timeout: Time limit in seconds of one call.
        memory_limit: Maximum memory of one sandbox.
        id: The identifier of the toolset.
    """

    def __init__(
        self,
        warm: Warm,
        *,
        timeout: float | None = CALL_TIMEOUT,
        memory_limit: int | str | None = None,
        id: str = "afresh",
    ) -> None:
        # Tools of one sandbox run one after the other.
        super().__init__(id=id, sequential=True, instructions=INSTRUCTIONS)
        self._warm = warm
        self._options: dict[str, Any] = {"timeout": timeout, "memory_limit": memory_limit}
        self._sandbox = SandboxTools.of(warm, **self._options)
        for function in self._sandbox.functions():
            self.add_function(function)

    async def for_run(self, ctx: RunContext[Any]) -> SandboxToolset:  # noqa: ARG002
        """A toolset with a sandbox for one run."""
        return SandboxToolset(self._warm, id=self.id or "afresh", **self._options)

    async def __aexit__(self, *_: object) -> None:
        """Ends the sandbox."""
        self._sandbox.close()
