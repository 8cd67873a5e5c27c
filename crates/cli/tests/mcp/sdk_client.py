"""Uses `afresh mcp` through the Python SDK of the Model Context Protocol.

Arguments: the command `afresh`, the guest, the protocol version or "auto". Each check that fails is an exception.
"""

import asyncio
import sys

from mcp import Client, StdioServerParameters

afresh, guest, mode = sys.argv[1:]

FIGURE = """
import base64

class Figure:
    def _repr_png_(self):
        return base64.b64decode("iVBORw0KGgo=")

display(Figure())
print("said")
6 * 7
"""


async def main() -> None:
    server = StdioServerParameters(command=afresh, args=["mcp", guest, "--linux", "--setup", "import json"])
    heard: list[str] = []

    async def progress(count: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    async with Client(server, mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"run_code", "run_command", "checkpoint", "rollback", "fork"} <= tools.keys(), tools
        assert tools["run_code"].output_schema

        # The SDK checks structured results against the tools' schemas.
        ran = await client.call_tool("run_code", {"code": FIGURE}, progress_callback=progress)
        assert not ran.is_error, ran
        assert ran.structured_content["stdout"] == "said\n", ran
        assert ran.structured_content["text"] == "42", ran
        kinds = [block.type for block in ran.content]
        assert kinds == ["text", "image"], kinds
        assert "".join(heard) == "said\n", heard

        await client.call_tool("checkpoint", {"name": "clean"})
        made = await client.call_tool("run_command", {"command": "echo made | tee /tmp/made; exit 3"})
        assert made.structured_content["exit_code"] == 3, made
        read = await client.read_resource("afresh://main/tmp/made")
        assert read.contents[0].text == "made\n", read
        forks = (await client.call_tool("fork", {"count": 3})).structured_content["sandboxes"]
        await client.call_tool("rollback", {"to": "clean"})
        gone = await client.call_tool("read_file", {"path": "/tmp/made"})
        assert gone.is_error, gone
        codes = [{"code": f"open('/tmp/made').read() + str({n})", "sandbox": fork} for n, fork in enumerate(forks)]
        answers = await asyncio.gather(*(client.call_tool("run_code", code) for code in codes))
        texts = [answer.structured_content["text"] for answer in answers]
        assert all(text.endswith(str(n)) for n, text in enumerate(texts)), texts
        # More calls than may be in flight: those beyond the limit fail at once, and the others are
        # answered.
        first = asyncio.create_task(client.call_tool("run_code", {"code": "import time; time.sleep(600)", "timeout": 20}))
        await asyncio.sleep(0.1)
        many = await asyncio.gather(*(client.call_tool("run_code", {"code": "1"}) for _ in range(300)))
        refused = [answer.content[0].text for answer in many if answer.is_error]
        assert len(refused) == 300 - 255, len(refused)
        assert all("256 calls are in flight" in text for text in refused), refused[0]
        assert (await first).is_error

        for call in (("tree", {}), ("diff", {"from": "clean"}), ("list_files", {"path": "/tmp"}), ("list_sandboxes", {})):
            assert not (await client.call_tool(*call)).is_error, call


asyncio.run(main())
