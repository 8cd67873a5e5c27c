"""The code interpreter for LangChain agents over warm guests.

The packages are unmodified; the model gives scripted answers. `cargo xtask cpython` runs these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip(
    "langchain_quickjs", reason="SKIPPED: langchain-quickjs is not installed; `cargo xtask cpython` has it"
)
pytestmark = pytest.mark.filterwarnings("default")

import afresh.quickjs  # noqa: E402
from afresh.langchain import CodeInterpreterMiddleware  # noqa: E402
from langchain.agents import create_agent  # noqa: E402
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel  # noqa: E402
from langchain_core.messages import AIMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langgraph.checkpoint.memory import InMemorySaver  # noqa: E402


class Told(GenericFakeChatModel):  # type: ignore[misc]
    """A model that answers what it was given."""

    def bind_tools(self, tools: Sequence[Any], **others: Any) -> Told:  # noqa: ARG002
        return self


@tool  # type: ignore[untyped-decorator]
def price(item: str) -> int:
    """The price of an item."""
    return {"tea": 3, "cake": 4}[item]


def agent(saver: InMemorySaver, turns: Sequence[Sequence[str]], **options: Any) -> Any:
    """An agent whose model evaluates these pieces of code, turn by turn."""

    def said() -> Iterator[AIMessage]:
        for turn, codes in enumerate(turns):
            for at, code in enumerate(codes):
                call = {"name": "eval", "args": {"code": code}, "id": f"{turn}-{at}"}
                yield AIMessage("", tool_calls=[call])
            yield AIMessage("done")

    middleware = [CodeInterpreterMiddleware(**options)]
    return create_agent(Told(messages=said()), tools=[price], middleware=middleware, checkpointer=saver)


def answers(agent: Any, turns: int) -> list[list[str]]:
    """The interpreter's answers, turn by turn."""
    seen = 0
    said = []
    for _ in range(turns):
        state = agent.invoke({"messages": [("user", "go on")]}, {"configurable": {"thread_id": "one"}})
        told = [message.content for message in state["messages"] if isinstance(message, ToolMessage)]
        said.append(told[seen:])
        seen = len(told)
    return said


TURNS = [
    [
        "const rows = [1, 2, 3]; let sum = 0; for (const row of rows) sum += row; console.log('summed'); sum",
        "const rows = [sum]; rows",
    ],
    ["typeof rows + typeof sum"],
]


def test_it_uses_this_package_and_no_other_copy() -> None:
    import langchain_quickjs
    import quickjs_rs

    assert langchain_quickjs.CodeInterpreterMiddleware is not CodeInterpreterMiddleware
    assert quickjs_rs.Runtime is not afresh.quickjs.Runtime


@pytest.mark.parametrize(("mode", "kept"), [("thread", "objectnumber"), ("turn", "undefinedundefined")])
def test_declarations_stay_as_long_as_the_mode_says(mode: str, kept: str) -> None:
    first, second = answers(agent(InMemorySaver(), TURNS, mode=mode), 2)
    assert "summed" in first[0]
    assert "6" in first[0]
    assert "[6]" in first[1]
    assert kept in second[0]


def test_in_the_mode_of_calls_nothing_stays() -> None:
    (said,) = answers(agent(InMemorySaver(), [["var rows = 1; rows", "typeof rows"]], mode="call"), 1)
    assert "undefined" in said[1]


def test_a_thread_continues_in_another_agent() -> None:
    saver = InMemorySaver()
    answers(agent(saver, [["const counter = (() => { let n = 0; return () => ++n })(); counter()"]], mode="thread"), 1)
    (said,) = answers(agent(saver, [["counter()"]], mode="thread"), 1)
    assert "2" in said[-1]


def test_programs_call_the_agents_tools() -> None:
    code = (
        "const [tea, cake] = await Promise.all([tools.price({item: 'tea'}), tools.price({item: 'cake'})]); tea + cake"
    )
    fails = "let why = ''; try { await tools.price({item: 'x'}) } catch (error) { why = `${error}` } why"
    (said,) = answers(agent(InMemorySaver(), [[code, fails]], ptc=["price"]), 1)
    assert "7" in said[0]
    assert "HostError: Host function failed" in said[1]


def test_an_endless_program_is_ended_and_leaves_nothing() -> None:
    (said,) = answers(agent(InMemorySaver(), [["globalThis.left = 1; for (;;) {}", "typeof left"]], timeout=5), 1)
    assert "imeout" in said[0]
    assert "undefined" in said[1]
