"""The environment of the guide for agents: it resets, steps, scores and forks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import afresh
import pytest
from afresh._agent import MAX_CHECKPOINTS, SandboxTools
from afresh.environment import Environment

GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/agents.md"


@pytest.mark.usefixtures("python")
def test_the_example_of_the_guide_prints_its_comments(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    space: dict[str, Any] = {}
    exec(code, space)
    printed = [line.split("#")[1].strip() for line in code.splitlines() if line.startswith("print(")]
    assert capsys.readouterr().out.splitlines() == printed


def test_an_action_that_exceeds_its_time_is_undone_and_counted(python: afresh.Warm) -> None:
    def score(sandbox: afresh.Sandbox) -> float:
        return float(sandbox.eval("globals().__setitem__('scored', 1) or len(globals().get('kept', []))"))

    with Environment(python.sandbox(timeout=3), score, max_steps=3, max_text=100) as environment:
        assert environment.step("kept = [1]\nprint('x' * 1000)").observation.startswith("xxx")
        step = environment.step("kept.append(2)\nwhile True: pass")
        assert (step.undone, step.done, type(step.error)) == (True, False, afresh.TimeLimitError)
        assert environment.score() == 1.0
        step = environment.command("echo out; exit 3")
        assert (step.observation, step.undone, step.done, step.error) == ("out\nexit code 3", False, True, None)
        with pytest.raises(afresh.SessionError, match="3 steps"):
            environment.step("1")
        environment.reset()
        assert environment.step("'kept' in globals() or 'scored' in globals()").observation == "False"
        step = environment.command("sleep 100")
        assert (step.undone, type(step.error)) == (True, afresh.TimeLimitError)


def test_an_error_of_the_score_is_raised_or_a_reward(js: afresh.Warm) -> None:
    def score(sandbox: afresh.Sandbox) -> float:
        return float(sandbox.eval("missing"))

    with Environment(js.sandbox(), score) as environment:
        with pytest.raises(afresh.ProgramError, match="missing"):
            environment.score()
        environment.step("globalThis.missing = 2")
        assert environment.score() == 2.0


def test_a_model_keeps_a_bounded_number_of_states(js: afresh.Warm) -> None:
    tools = SandboxTools.of(js)
    for _ in range(3):
        tools.run_code("globalThis.x = (globalThis.x ?? 0) + 1")
        assert tools.checkpoint("same") == "saved same"
    kept = len(tools._sandbox.tree().states)
    assert [state.name for state in tools._sandbox.tree().states].count("same") == 1
    for number in range(MAX_CHECKPOINTS + 10):
        said = tools.checkpoint(f"state {number}")
    assert said.startswith("error: there are 100 checkpoints")
    assert tools.checkpoint("x" * 1000).startswith("error: the name")
    assert len(tools._sandbox.tree().states) == kept + MAX_CHECKPOINTS - 1
    assert tools.checkpoint("state 1") == "saved state 1"
    assert tools.rollback("same") == "the sandbox is in the state same"
    assert tools.run_code("x") == "3"
    tools.close()
