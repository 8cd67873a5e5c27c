"""Adapters to agent frameworks, over the published packages; models give scripted answers.

`cargo xtask adapters` runs these. Each is skipped where its package is missing.
"""

from __future__ import annotations

import datetime
import gc
import json
import sys
from collections.abc import Iterator
from typing import Any

import afresh
import pytest

pytestmark = pytest.mark.filterwarnings("default")


def _needs(module: str) -> Any:
    return pytest.importorskip(module, reason=f"SKIPPED: {module} is not installed; `cargo xtask adapters` has it")


class TestPydanticAi:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        _needs("pydantic_ai")

    async def test_each_run_has_a_sandbox_whose_state_stays_between_calls(self, python: afresh.Warm) -> None:
        from afresh.pydantic_ai import SandboxToolset
        from pydantic_ai import Agent
        from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
        from pydantic_ai.models.function import AgentInfo, FunctionModel

        script = [
            ("run_code", {"code": "x = 1; x"}),
            ("checkpoint", {"name": "clean"}),
            ("write_file", {"path": "data/a.txt", "content": "one"}),
            ("run_command", {"command": "cat data/a.txt; exit 3"}),
            ("run_code", {"code": "x += 1; 1 / 0"}),
            ("rollback", {"name": "clean"}),
            ("run_code", {"code": "x"}),
            ("read_file", {"path": "data/a.txt"}),
            ("rollback", {"name": "other"}),
        ]
        offered: set[str] = set()

        def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            offered.update(tool.name for tool in info.function_tools)
            turn = sum(isinstance(message, ModelResponse) for message in messages)
            if turn == len(script):
                return ModelResponse(parts=[TextPart("done")])
            return ModelResponse(parts=[ToolCallPart(*script[turn])])

        agent = Agent(FunctionModel(answer), toolsets=[SandboxToolset(python, timeout=60)])
        for _ in range(2):
            run = await agent.run("go")
            parts = [part for message in run.all_messages() for part in message.parts]
            texts = [str(part.content) for part in parts if isinstance(part, ToolReturnPart)]
            assert texts[:4] == ["1", "saved clean", "wrote 3 bytes", "one\nexit code 3"]
            assert "ZeroDivisionError" in texts[4]
            assert texts[6] == "1"
            assert texts[7].startswith("error:")
            assert "there are: clean" in texts[8]
        assert offered == {
            "run_code", "run_command", "read_file", "write_file", "list_files", "checkpoint", "rollback",
        }  # fmt: skip

    async def test_a_wasm_guest_has_no_commands(self, js: afresh.Warm) -> None:
        from afresh.pydantic_ai import SandboxToolset

        toolset = SandboxToolset(js)
        assert "run_command" not in toolset.tools
        assert "run_code" in toolset.tools


class TestSmolagents:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        _needs("smolagents")

    @pytest.fixture
    def executor(self, python: afresh.Warm) -> Iterator[Any]:
        from afresh.smolagents import SandboxExecutor

        executor = SandboxExecutor(python, timeout=3)
        yield executor
        executor.cleanup()

    def test_an_agent_calls_tools_from_code_and_answers(self, executor: Any) -> None:
        import smolagents
        from smolagents.models import ChatMessage, MessageRole

        class Double(smolagents.Tool):  # type: ignore[misc]
            name = "double"
            description = "Doubles a number."
            inputs = {"number": {"type": "integer", "description": "The number."}}  # noqa: RUF012
            output_type = "integer"

            def forward(self, number: int) -> int:
                return number * 2

        script = iter(
            [
                "import subprocess\nx = double(number=start)\nprint(subprocess.check_output(['echo', 'hi']).decode())"
                "\nx",
                "1 / 0",
                "try:\n    final_answer({'x': double(x)})\nexcept Exception:\n    pass\nprint('not reached')",
            ]
        )

        class Scripted(smolagents.Model):  # type: ignore[misc]
            def generate(self, messages: Any, **_: Any) -> ChatMessage:  # noqa: ARG002
                return ChatMessage(role=MessageRole.ASSISTANT, content=f"Thought\n<code>\n{next(script)}\n</code>")

        agent = smolagents.CodeAgent([Double()], Scripted(), executor=executor, verbosity_level=0)
        assert agent.run("go", additional_args={"start": 21}) == {"x": 84}
        steps = [step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)]
        assert "hi" in steps[0].observations
        assert "42" in steps[0].observations
        assert "ZeroDivisionError" in str(steps[1].error)
        assert "not reached" not in steps[2].observations

    def test_code_that_is_cut_short_is_undone(self, executor: Any) -> None:
        from smolagents.local_python_executor import InterpreterError

        executor.send_tools({})
        executor("x = 1")
        kept = executor.checkpoint("one")
        with pytest.raises(InterpreterError, match="undone"):
            executor("x = 2\nprint('begun')\nwhile True: pass")
        assert "begun" in executor.state["_print_outputs"]
        assert executor("x").output == 1
        executor("x = 3")
        executor.rollback(kept)
        assert executor("x").output == 1
        assert "object" in executor("object()").output
        assert len(executor.sandbox.tree()) < 5


class TestDeepAgents:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        _needs("deepagents")

    def test_files_and_commands(self, python: afresh.Warm) -> None:
        from afresh.deepagents import SandboxBackend

        backend = SandboxBackend(python)
        try:
            done = backend.execute("echo out; echo err >&2; exit 3")
            assert (sorted(done.output.split()), done.exit_code) == (["err", "out"], 3)
            assert backend.execute("sleep 100", timeout=1).exit_code == 124
            assert backend.write("/project/a.py", "x = 1\ny = 2\n").error is None
            assert backend.edit("/project/a.py", "x = 1", "x = 3").occurrences == 1
            assert "x = 3" in str(backend.read("/project/a.py").file_data)
            assert [entry["path"] for entry in backend.ls("/project").entries] == ["/project/a.py"]
            assert [match["line"] for match in backend.grep("y = ", "/project").matches] == [2]
            assert [match["path"] for match in backend.glob("*.py", "/project").matches]
            found = backend.download_files(["/project/a.py", "/none", "/project"])
            assert [one.error for one in found] == [None, "file_not_found", "is_directory"]
            assert found[0].content == b"x = 3\ny = 2\n"
            assert [one.error for one in backend.upload_files([("/project", b""), ("b", b"")])] == [
                "is_directory",
                "invalid_path",
            ]
        finally:
            backend.close()


class TestOpenaiAgents:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        _needs("agents")

    async def test_tools_have_schemas_and_share_a_sandbox(self, python: afresh.Warm) -> None:
        from afresh.openai_agents import sandbox_tools
        from agents.tool_context import ToolContext

        tools = {tool.name: tool for tool in sandbox_tools(python)}
        assert tools["write_file"].params_json_schema["required"] == ["path", "content"]
        assert tools["write_file"].params_json_schema["properties"]["path"]["description"]
        assert "checkpoint" in tools["rollback"].params_json_schema["properties"]["name"]["description"]

        async def call(name: str, **given: str) -> str:
            arguments = json.dumps(given)
            context = ToolContext(None, tool_name=name, tool_call_id="1", tool_arguments=arguments)
            return str(await tools[name].on_invoke_tool(context, arguments))

        assert await call("run_code", code="x = 20") == ""
        assert await call("run_code", code="x + 1") == "21"
        assert await call("run_command", command="echo $((1 + 1))") == "2"


class TestClaudeAgent:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        _needs("claude_agent_sdk")

    async def test_tools_are_served_in_process(self, python: afresh.Warm) -> None:
        from afresh.claude_agent import sandbox_server

        server = sandbox_server(python)
        assert server["type"] == "sdk"
        listed, called = await _served(server["instance"], "run_code", {"code": "6 * 7"})
        assert {"run_code", "checkpoint", "rollback"} <= set(listed)
        assert called == "42"


async def _served(server: Any, name: str, arguments: dict[str, str]) -> tuple[list[str], str]:
    """The tools of an MCP server, and the text of a call."""
    from mcp import Client

    async with Client(server) as client:
        listed = await client.list_tools()
        called = await client.call_tool(name, arguments)
        return [tool.name for tool in listed.tools], called.content[0].text


class TestInspect:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        _needs("inspect_ai")

    def test_an_evaluation_has_a_sandbox_for_each_sample(self, python: afresh.Warm, tmp_path: Any) -> None:  # noqa: ARG002
        from afresh.inspect_ai import AfreshConfig
        from inspect_ai import Task
        from inspect_ai import eval as evaluate
        from inspect_ai.dataset import Sample
        from inspect_ai.scorer import Score, Target, accuracy, scorer
        from inspect_ai.solver import Generate, TaskState, solver
        from inspect_ai.util import SandboxEnvironmentSpec, SandboxUserUnsupportedError, sandbox

        @solver  # type: ignore[untyped-decorator]
        def work() -> Any:
            async def solve(state: TaskState, generate: Generate) -> TaskState:  # noqa: ARG001
                box = sandbox()
                done = await box.exec(
                    ["sh", "-c", "cat given.txt; cat; pwd; echo $A; ls made 2>&1; exit 3"], "in\n", env={"A": "b"}
                )
                assert (done.success, done.returncode) == (False, 3)
                assert done.stdout.startswith("given\nin\n/home/user\nb\n")
                assert "No such file" in done.stdout
                await box.write_file("made/a.bin", b"\xff")
                assert await box.read_file("made/a.bin", text=False) == b"\xff"
                assert (await box.exec(["no-such-program"])).returncode == 127
                for wrong, error in (("none", FileNotFoundError), ("made", IsADirectoryError)):
                    with pytest.raises(error):
                        await box.read_file(wrong)
                with pytest.raises(UnicodeDecodeError):
                    await box.read_file("made/a.bin")
                with pytest.raises(TimeoutError):
                    await box.exec(["sleep", "100"], timeout=1)
                assert (await box.exec(["id", "-u"], user="root")).stdout == "0\n"
                with pytest.raises(SandboxUserUnsupportedError):
                    await box.exec(["true"], user="nobody")
                return state

            return solve

        @scorer(metrics=[accuracy()])  # type: ignore[untyped-decorator]
        def warm() -> Any:
            async def score(state: TaskState, target: Target) -> Score:  # noqa: ARG001
                done = await sandbox().exec(["python3", "-c", "print(6 * 7)"])
                return Score(value=1 if done.stdout == "42\n" else 0)

            return score

        samples = [Sample(input=str(number), files={"given.txt": "given\n"}) for number in range(2)]
        task = Task(
            dataset=samples, solver=work(), scorer=warm(), sandbox=SandboxEnvironmentSpec("afresh", AfreshConfig())
        )
        (log,) = evaluate(task, model="mockllm/model", log_dir=str(tmp_path), display="none")
        assert log.status == "success", log.error
        assert log.results is not None
        assert log.results.scores[0].metrics["accuracy"].value == 1
        # Its streams that are never closed warn here, and not at the end of all tests.
        gc.collect()


class TestValues:
    def test_values_of_numpy_and_pandas(self) -> None:
        _needs("pandas")
        warm = afresh.linux(sys.executable, setup="import numpy, pandas")
        assert warm.eval("pandas.NaT") == afresh.Opaque("NaTType", "NaT")
        assert warm.eval("numpy.array(['NaT'], dtype='M8[s]'), numpy.timedelta64('NaT')") == ([None], None)
        dates = warm.eval("pandas.Series(['2026-01-02', None], dtype='datetime64[ns]').to_dict()")
        assert dates == {0: datetime.datetime(2026, 1, 2), 1: afresh.Opaque("NaTType", "NaT")}
        assert warm.eval("numpy.array(['2026-01-02'], dtype='M8[D]')") == [datetime.date(2026, 1, 2)]
