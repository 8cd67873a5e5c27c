"""The Jupyter kernel, through the published client and `nbclient`. `cargo xtask adapters` runs these."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for _package in ("ipykernel", "nbclient", "matplotlib", "pandas"):
    pytest.importorskip(_package, reason=f"SKIPPED: {_package} is not installed; `cargo xtask adapters` has it")
pytestmark = [pytest.mark.usefixtures("python"), pytest.mark.filterwarnings("default")]

_TIMEOUT = 120
_KERNEL = "afresh-test"
_NOTEBOOK = [
    "import numpy as np, pandas as pd\nx = np.arange(6).reshape(2, 3)\nx",
    "print('out'); import sys; print('err', file=sys.stderr); x.sum()",
    "frame = pd.DataFrame({'a': [1, 2], 'b': ['x', None]}); frame",
    "import matplotlib.pyplot as plt\nplt.plot(x[0]); plt.title('line'); plt.show()",
    "from IPython.display import HTML, Markdown, display\ndisplay(HTML('<b>b</b>'), Markdown('*m*')); None",
    "%%bash\necho from a shell",
    "!echo $((6 * 7))",
    "open('/tmp/note', 'w').write('kept')",
    "get_ipython().ast_node_interactivity, open('/tmp/note').read()",
    "1 / 0",
]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernel, where Jupyter finds it."""
    prefix = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(prefix / "share/jupyter"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(prefix / "runtime"))
        patch.chdir(prefix)
        command = [sys.executable, "-m", "afresh.kernel", "install", "--name", _KERNEL, "--prefix", str(prefix)]
        subprocess.run(command, check=True, timeout=_TIMEOUT)
        yield


class Client:
    """A client that runs cells and keeps their messages."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def wait(self, sent: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The reply to a request, and its messages up to idle."""
        messages = []
        while True:
            message = self.client.get_iopub_msg(timeout=_TIMEOUT)
            if message["parent_header"].get("msg_id") != sent:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
            messages.append(message)
        return self.reply(sent), messages

    def reply(self, sent: str) -> dict[str, Any]:
        """The reply to a request."""
        while True:
            reply: dict[str, Any] = self.client.get_shell_msg(timeout=_TIMEOUT)
            if reply["parent_header"].get("msg_id") == sent:
                return reply

    def run(self, code: str) -> tuple[dict[str, Any], str]:
        """The reply to a cell, and its text."""
        reply, messages = self.wait(self.client.execute(code))
        contents = [message["content"] for message in messages]
        texts = [content.get("text") or content.get("data", {}).get("text/plain", "") for content in contents]
        return reply, "".join(texts).strip()

    def show(self, code: str) -> str:
        """The text of a cell that succeeds."""
        reply, text = self.run(code)
        assert reply["content"]["status"] == "ok", reply["content"]
        return text


@pytest.fixture
def kernel() -> Iterator[tuple[Any, Client]]:
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name=_KERNEL)
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=_TIMEOUT)
        yield manager, Client(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _executed(kernel: str) -> list[list[dict[str, Any]]]:
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(code) for code in _NOTEBOOK]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name=kernel, timeout=_TIMEOUT, allow_errors=True).execute()
    outputs = [[_plain(output) for output in cell.outputs] for cell in notebook.cells]
    assert [cell.execution_count for cell in notebook.cells] == list(range(1, len(_NOTEBOOK) + 1))
    return outputs


def _plain(output: Any) -> dict[str, Any]:
    plain = dict(output)
    if "traceback" in plain:
        # Names of temporary files contain process numbers.
        plain["traceback"] = re.sub(r"ipykernel_\d+/\d+", "cell", "\n".join(plain["traceback"]))
    return plain


def test_a_notebook_has_the_same_outputs_as_natively() -> None:
    here, native = _executed(_KERNEL), _executed("python3")
    for code, ours, theirs in zip(_NOTEBOOK, here, native, strict=True):
        assert ours == theirs, code
    assert "image/png" in str(here[3])


def test_cells_are_undone_with_variables_files_and_count(kernel: tuple[Any, Client]) -> None:
    _, client = kernel
    client.show("x = 1; open('/tmp/f', 'w').write('one')")
    reply, _ = client.run("x = 2; open('/tmp/f', 'w').write('two'); big = b'1' * (8 << 20)")
    assert reply["metadata"]["afresh"]["pages"] > 1000
    assert reply["metadata"]["afresh"]["seconds"] > 0
    assert client.show("%undo").startswith("undone: x = 2; open(")
    reply, text = client.run("x, open('/tmp/f').read(), 'big' in globals()")
    assert (text, reply["content"]["execution_count"]) == ("(1, 'one', False)", 2)
    assert client.show("%undo 2").count("undone") == 2
    reply, _ = client.run("x")
    assert reply["content"]["ename"] == "NameError"
    reply, _ = client.run("%undo 9")
    assert "1 steps can be undone, not 9" in reply["content"]["evalue"]
    assert client.show("%undo\n'clean'").endswith("'clean'")


def test_named_states_and_the_tree(kernel: tuple[Any, Client]) -> None:
    _, client = kernel
    client.show("x = 1")
    client.show("%checkpoint one")
    client.show("x = 2")
    assert client.show("%checkpoint two\nx") == "2"
    client.show("%back one")
    assert client.show("x") == "1"
    client.show("%back two")
    assert client.show("x") == "2"
    client.show("%undo 2")
    assert client.show("x") == "1"
    tree = client.show("%tree")
    assert "one · [1] x = 1" in tree
    assert "two" in tree
    assert "← here" in tree
    assert "x = 2" in client.show("%costs")
    for wrong, why in (("%back three", "one, two"), ("%checkpoint", "usage: %checkpoint NAME"), ("%undo x", "usage")):
        reply, _ = client.run(wrong)
        assert why in reply["content"]["evalue"]
    _, messages = client.wait(client.client.execute("x\n%undo"))
    assert "%undo must be at the start of a cell" in str(messages)


def test_a_fork_is_a_second_kernel(kernel: tuple[Any, Client]) -> None:
    from jupyter_client.blocking import BlockingKernelClient
    from jupyter_core.paths import jupyter_runtime_dir

    _, client = kernel
    client.show("x = [1]")
    name = client.show("%fork").split()[-1]
    second = BlockingKernelClient(connection_file=str(Path(jupyter_runtime_dir()) / name))
    second.load_connection_file()
    second.start_channels()
    second.wait_for_ready(timeout=_TIMEOUT)
    other = Client(second)
    other.show("x.append(2)")
    client.show("x.append(3)")
    assert (other.show("x"), client.show("x")) == ("[1, 2]", "[1, 3]")
    other.show("%undo 2")
    assert other.show("x") == "[1]"
    second.shutdown()
    second.stop_channels()
    assert client.show("x") == "[1, 3]"


def test_completion_inspection_input_and_comms(kernel: tuple[Any, Client]) -> None:
    _, client = kernel
    # Its first completion reads the sources of all imported modules.
    client.show("%config IPCompleter.use_jedi = False\nvalue_of_mine = {'key': 1}")
    completed = client.reply(client.client.complete("value_of"))["content"]
    assert "value_of_mine" in completed["matches"]
    assert "%undo" in client.reply(client.client.complete("%und"))["content"]["matches"]
    inspected = client.reply(client.client.inspect("value_of_mine"))["content"]
    assert "dict" in inspected["data"]["text/plain"]
    sent = client.client.execute("typed = input('name? ')", allow_stdin=True)
    asked = client.client.get_stdin_msg(timeout=_TIMEOUT)
    assert asked["content"]["prompt"] == "name? "
    client.client.input("afresh")
    client.wait(sent)
    assert client.show("typed") == "'afresh'"
    code = "from comm import create_comm\ncomm = create_comm(target_name='t', data={'a': 1})"
    _, messages = client.wait(client.client.execute(code))
    assert [message["content"]["data"] for message in messages if message["msg_type"] == "comm_open"] == [{"a": 1}]


def test_a_widget_follows_its_client(kernel: tuple[Any, Client]) -> None:
    pytest.importorskip("ipywidgets", reason="SKIPPED: ipywidgets is not installed; `cargo xtask adapters` has it")
    _, client = kernel
    code = "import ipywidgets\nmoved = []\nslider = ipywidgets.IntSlider(3)\n"
    code += "slider.observe(lambda change: moved.append(change['new']), 'value')\nslider"
    _, messages = client.wait(client.client.execute(code))
    (shown,) = [message["content"]["data"] for message in messages if message["msg_type"] == "execute_result"]
    model = shown["application/vnd.jupyter.widget-view+json"]["model_id"]
    state = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    session = client.client.session
    client.client.shell_channel.send(session.msg("comm_msg", {"comm_id": model, "data": state}))
    assert client.show("slider.value, moved") == "(7, [7])"


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_cell_is_interrupted(kernel: tuple[Any, Client], code: str) -> None:
    manager, client = kernel
    sent = client.client.execute(f"x = 1\nprint('begun', flush=True)\n{code}")
    waiting = client.client.execute("never = 1")
    while client.client.get_iopub_msg(timeout=_TIMEOUT)["msg_type"] != "stream":
        pass
    time.sleep(0.1)
    manager.interrupt_kernel()
    reply, _ = client.wait(sent)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert client.reply(waiting)["content"]["status"] == "aborted"
    assert client.show("x, 'never' in globals()") == "(1, False)"


def test_a_cell_that_ends_the_kernel_is_undone(kernel: tuple[Any, Client]) -> None:
    manager, client = kernel
    client.show("x = 1")
    reply, _ = client.run("x = 2; import os; os._exit(3)")
    assert "status 3; the state before the cell is restored" in reply["content"]["evalue"]
    assert client.show("x") == "1"
    client.run("exit()")
    until = time.monotonic() + _TIMEOUT
    while manager.is_alive() and time.monotonic() < until:
        time.sleep(0.05)
    assert not manager.is_alive()
