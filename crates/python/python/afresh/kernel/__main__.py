"""The command ``python -m afresh.kernel``: adds the kernel to Jupyter, and runs it."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .._linux import linux
from .._sizes import size
from .._warm import Warm
from ..errors import AfreshError
from ._guest import GuestKernel
from ._magics import REGISTRATION
from ._states import States

# Bytes of states that are kept for undoing.
_UNDO = 1 << 30
# Seconds between two looks at the parent process.
_PARENT_INTERVAL = 1.0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m afresh.kernel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="add the kernel to Jupyter")
    install.add_argument("--name", default="afresh", help="name of the kernel (afresh)")
    install.add_argument("--display-name", help="name in menus")
    install.add_argument("--user", action="store_true", help="for this user, not for this environment")
    install.add_argument("--prefix", help="for the environment in this directory")
    run = commands.add_parser("run", help="run the kernel, as Jupyter does")
    run.add_argument("-f", dest="connection", required=True, metavar="FILE", help="connection file")
    for command in (install, run):
        command.add_argument("--python", default=sys.executable, help="interpreter, with ipykernel (this one)")
        command.add_argument(
            "--dir", action="append", default=[], help="host directory to read, in addition to that of the notebook"
        )
        command.add_argument("--no-cwd", action="store_true", help="do not grant the directory of the notebook")
        command.add_argument("--net", action="append", default=[], metavar="NAME:PORT", help="server to connect to")
        command.add_argument("--undo-memory", type=size, default=_UNDO, help="maximum memory of undo states (1 GiB)")
        command.add_argument("--memory", default=None, help="maximum memory, such as 2GiB (4 GiB)")
    return parser


def _install(given: argparse.Namespace) -> None:
    from jupyter_client.kernelspec import KernelSpecManager  # noqa: PLC0415

    argv = [sys.executable, "-m", "afresh.kernel", "run", "-f", "{connection_file}", "--python", given.python]
    for option in ("dir", "net"):
        for value in getattr(given, option):
            argv += [f"--{option}", os.path.abspath(value) if option == "dir" else value]
    argv += ["--undo-memory", str(given.undo_memory)]
    if given.memory:
        argv += ["--memory", given.memory]
    if given.no_cwd:
        argv.append("--no-cwd")
    spec = {
        "argv": argv,
        "display_name": given.display_name or "Python (afresh)",
        "language": "python",
        "interrupt_mode": "message",
        "metadata": {"debugger": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/kernel.json", "w") as file:
            json.dump(spec, file, indent=1)
        prefix = None if given.user else given.prefix or sys.prefix
        manager = KernelSpecManager()
        print(manager.install_kernel_spec(folder, given.name, user=given.user, prefix=prefix))


def _open(given: argparse.Namespace) -> Warm:
    # Without its configuration, fontconfig prints errors into cells.
    dirs = [*given.dir, *filter(os.path.isdir, ("/etc/fonts",))]
    if not given.no_cwd:
        dirs.append(os.getcwd())
    # Variables that front ends set for libraries in a kernel.
    env = {name: os.environ[name] for name in ("MPLBACKEND", "TZ", "LANG", "LC_ALL") if name in os.environ}
    env.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    return linux(given.python, dirs=dirs, net=given.net, env=env, memory_limit=given.memory)


def _fork(guest: GuestKernel, states: States) -> str:
    """Serves a fork in a thread; how to connect to it."""
    from jupyter_client.connect import write_connection_file  # noqa: PLC0415
    from jupyter_core.paths import jupyter_runtime_dir  # noqa: PLC0415

    folder = jupyter_runtime_dir()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, f"kernel-afresh-{secrets.token_hex(6)}.json")
    write_connection_file(path, key=secrets.token_hex(32).encode(), kernel_name="afresh")
    # Also where this process ends before the fork.
    atexit.register(lambda: Path(path).unlink(missing_ok=True))
    started = threading.Event()

    def serve() -> None:
        kernel = _kernel(_read(path), guest, states)
        started.set()
        try:
            kernel.run()
        finally:
            Path(path).unlink(missing_ok=True)

    threading.Thread(target=serve, daemon=True).start()
    started.wait()
    return f"a second kernel has this state: jupyter console --existing {os.path.basename(path)}"


def _read(path: str) -> dict[str, Any]:
    with open(path) as file:
        connection: dict[str, Any] = json.load(file)
    return connection


def _kernel(connection: dict[str, Any], guest: GuestKernel, states: States) -> Any:
    from ._channels import Channels  # noqa: PLC0415
    from ._kernel import Kernel  # noqa: PLC0415

    return Kernel(Channels(connection), guest, states, _fork)


def _run(given: argparse.Namespace) -> None:
    guest = GuestKernel.start(_open(given), [])
    kernel = _kernel(_read(given.connection), guest, States(given.undo_memory))

    def interrupt(*_: object) -> None:
        kernel.interrupted = True

    signal.signal(signal.SIGINT, interrupt)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    kernel.register(REGISTRATION)
    kernel.run()


def _end_with_parent() -> None:
    """Ends this process after the one that started it, if Jupyter asks for that."""
    if "JPY_PARENT_PID" not in os.environ:
        return
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_PARENT_INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Runs the command."""
    given = _arguments().parse_args()
    try:
        if given.command == "install":
            _install(given)
        else:
            _run(given)
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed: `pip install afresh[kernel]` adds it")
    except AfreshError as error:
        sys.exit(f"the kernel cannot run: {error}")


if __name__ == "__main__":
    main()
