"""Environments for reinforcement learning: each resets to a state, steps, scores and forks.

>>> import afresh
>>> from afresh.environment import Environment
>>> warm = afresh.warm("js", setup="globalThis.numbers = [3, 1, 2]")
>>> def first(sandbox):
...     return 1.0 if sandbox.eval("numbers[0]") == 1 else 0.0
>>> with Environment(warm.sandbox(timeout=5), first) as environment:
...     [attempt] = environment.fork(1)
...     with attempt:
...         _ = attempt.step("numbers.sort()")
...         print(attempt.score(), environment.score())
...         attempt.reset()
...         print(attempt.score())
1.0 0.0
0.0
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from ._agent import MAX_TEXT, described, shortened, undone
from ._native import Checkpoint
from ._sandbox import Sandbox
from .errors import AfreshError, SessionError

__all__ = ["Environment", "Scorer", "Step"]


class Scorer(Protocol):
    """Scores the state of a sandbox."""

    def __call__(self, sandbox: Sandbox, /) -> float:
        """The reward. An exception is raised by `Environment.score`, if the environment has no reward for errors."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of an action.

    Attributes:
        observation: Output, value and error as text for a model.
        error: The error that ended the action; ``None`` on success. A command with another exit code than 0 has none.
        undone: Whether the action exceeded a limit and its changes were undone.
        done: Whether the episode ended: it has had ``max_steps`` actions.
    """

    observation: str
    error: BaseException | None
    undone: bool
    done: bool


class Environment:
    """An episode in a sandbox. The sandbox belongs to it, in the state that each episode starts from.

    Args:
        sandbox: The sandbox.
        score: The reward of a state. It may change the sandbox: its changes are undone.
        error_reward: The reward of a state in which ``score`` raises an `AfreshError`; without it, the error is raised.
        max_steps: Actions of an episode, if they are limited.
        max_text: Maximum characters of an observation; the middle of a longer one is left out.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        score: Scorer,
        *,
        error_reward: float | None = None,
        max_steps: int | None = None,
        max_text: int = MAX_TEXT,
    ) -> None:
        self.sandbox = sandbox
        self.steps = 0
        self._score = score
        self._error_reward = error_reward
        self._max_steps = max_steps
        self._max_text = max_text
        self._start: Checkpoint = sandbox.checkpoint("start")

    def __enter__(self) -> Environment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def reset(self) -> None:
        """Returns to the start of the episode."""
        self.sandbox.rollback(self._start)
        self.steps = 0

    def step(self, code: str) -> Step:
        """Runs code as an action. Code that exceeds a limit is undone."""
        self._begin()
        result, was_undone = undone(self.sandbox, lambda: self.sandbox.run_code(code))
        parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
        if result.error is not None:
            parts.append(described(result.error, was_undone=was_undone))
        elif result.value is not None:
            parts.append(result.text)
        return self._stepped(parts, result.error, was_undone)

    def command(self, command: str | Sequence[str]) -> Step:
        """Runs a command of a Linux program as an action. One that exceeds its time limit is undone."""
        self._begin()
        before = self.sandbox.checkpoint()
        try:
            done = self.sandbox.commands.run(command)
        except AfreshError as error:
            self.sandbox.rollback(before)
            return self._stepped([described(error, was_undone=True)], error, True)
        finally:
            with contextlib.suppress(AfreshError):
                self.sandbox.drop(before)
        parts = [done.stdout.rstrip("\n"), done.stderr.rstrip("\n")]
        parts.append("" if done.exit_code == 0 else f"exit code {done.exit_code}")
        return self._stepped(parts, None, False)

    def score(self) -> float:
        """The reward of the present state, which does not change."""
        before = self.sandbox.checkpoint()
        try:
            return float(self._score(self.sandbox))
        except AfreshError:
            if self._error_reward is None:
                raise
            return self._error_reward
        finally:
            with contextlib.suppress(AfreshError):
                self.sandbox.rollback(before)
                self.sandbox.drop(before)

    def fork(self, count: int = 1) -> list[Environment]:
        """Environments that continue from the present state, and reset to the start of the same episode."""
        forks = []
        for sandbox in self.sandbox.fork(count):
            fork = object.__new__(Environment)
            fork.__dict__.update(self.__dict__)
            fork.sandbox = sandbox
            forks.append(fork)
        return forks

    def close(self) -> None:
        """Ends it. Forks stay open."""
        self.sandbox.close()

    def _begin(self) -> None:
        if self._max_steps is not None and self.steps >= self._max_steps:
            raise SessionError(f"the episode has had its {self._max_steps} steps: reset the environment")
        self.steps += 1

    def _stepped(self, parts: list[str], error: BaseException | None, was_undone: bool) -> Step:
        text = shortened("\n".join(part for part in parts if part), self._max_text)
        return Step(text, error, was_undone, self._max_steps is not None and self.steps >= self._max_steps)
