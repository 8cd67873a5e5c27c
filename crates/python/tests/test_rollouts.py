"""The environment of the guide for agents: it resets, steps, scores and forks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/agents.md"

pytestmark = pytest.mark.usefixtures("python")


def test_the_example_of_the_guide_prints_its_comments(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    space: dict[str, Any] = {}
    exec(code, space)
    space["environment"].sandbox.close()
    printed = [line.split("#")[1].strip() for line in code.splitlines() if line.startswith("print(")]
    assert capsys.readouterr().out.splitlines() == printed
