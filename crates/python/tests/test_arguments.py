"""Arguments that cannot be meant are refused, and the error names them."""

from __future__ import annotations

from typing import Any

import afresh
import pytest


def test_arguments_of_another_type_are_named(python: afresh.Warm) -> None:
    wrong: Any = 5
    with python.sandbox(timeout=5) as sb:
        with pytest.raises(TypeError, match="code is text"):
            sb.run_code(wrong)
        with pytest.raises(TypeError, match="a function is text"):
            sb.apply(wrong)
        # `bytes(5)` is five zeros.
        with pytest.raises(TypeError, match="content of a file is bytes or text, not int"):
            sb.files.write("/a", wrong)
        assert not sb.files.exists("/a")
        view: Any = bytearray(b"x")
        sb.files.write("/a", view)
        with pytest.raises(TypeError, match="a command is text for the shell"):
            sb.commands.run(wrong)
        command: Any = b"true"
        with pytest.raises(TypeError, match="not bytes"):
            sb.commands.run(command)
        with pytest.raises(TypeError, match="variable A is text"):
            sb.commands.run("true", env={"A": wrong})
        with pytest.raises(ValueError, match="-1 forks"):
            sb.fork(-1)
        with pytest.raises(TypeError, match="a state is a checkpoint or its name"):
            sb.rollback(wrong)
        with pytest.raises(afresh.SessionError, match="/proc/self/comm"):
            sb.files.write("/proc/self/comm", b"name")
        with pytest.raises(ValueError, match="from 1 to 65535"):
            sb.port(65536)
        assert sb.eval("1 + 1") == 2
    text: Any = "5"
    with pytest.raises(TypeError, match="number of seconds, not '5'"):
        python.sandbox(timeout=text)
    for timeout in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="seconds above 0"):
            python.sandbox(timeout=timeout)
    with pytest.raises(ValueError, match="setup_timeout of 0"):
        afresh.linux(setup_timeout=0)
    with pytest.raises(ValueError, match="seconds above 0"):
        afresh.exec(["true"], timeout=0)
    size: Any = 1.5
    with pytest.raises(TypeError, match="a size is"):
        python.sandbox(memory_limit=size)
    with pytest.raises(TypeError, match="code is text"):
        python.run_code(wrong)


async def test_arguments_of_asynchronous_sandboxes_are_named(python: afresh.Warm) -> None:
    wrong: Any = 5
    async with python.async_sandbox(timeout=5) as sb:
        with pytest.raises(TypeError, match="code is text"):
            await sb.run_code(wrong)
        with pytest.raises(ValueError, match="-1 forks"):
            await sb.fork(-1)
        with pytest.raises(ValueError, match="from 1 to 65535"):
            sb.port(0)


def test_a_language_that_is_none_is_named() -> None:
    with pytest.raises(afresh.OpenError, match="'ruby' is neither a language, which are 'js' and 'python', nor a file"):
        afresh.warm("ruby")
