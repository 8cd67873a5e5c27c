"""The magics of the kernel itself, which move it between states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._guest import GuestKernel
from ._states import States

# Types and contents of outputs.
Outputs = list[tuple[str, dict[str, Any]]]

DESCRIPTIONS = {
    "undo": "%undo [N]: return to the state before the last cell, or before the last N cells.",
    "checkpoint": "%checkpoint NAME: name the present state.",
    "back": "%back NAME: go to a named state; `%undo` reverts that.",
    "fork": "%fork: start a second kernel from the present state.",
    "tree": "%tree: show all states.",
    "costs": "%costs: show time and changed memory pages of each cell.",
}

# Makes the names known to completion and help in the sandbox, where they are never called at the
# start of a cell.
REGISTRATION = f"""
def _afresh_register(descriptions):
    from IPython import get_ipython
    from IPython.core.error import UsageError
    def registered(name, text):
        def magic(line):
            raise UsageError(f"%{{name}} must be at the start of a cell, before any code")
        magic.__doc__ = text
        get_ipython().register_magic_function(magic, "line", name)
    for name, text in descriptions.items():
        registered(name, text)
_afresh_register({DESCRIPTIONS!r})
del _afresh_register
"""


class Magics:
    """Serves the magics of one kernel."""

    def __init__(self, guest: GuestKernel, states: States, fork: Callable[[], str]) -> None:
        self._guest = guest
        self._states = states
        self._start_fork = fork

    @staticmethod
    def split(code: str) -> tuple[list[str], str]:
        """The magics of this kernel at the head of a cell, and the rest.

        >>> Magics.split("# first\\n%undo 2\\n\\nx = 1\\n")
        (['%undo 2'], 'x = 1\\n')
        >>> Magics.split("x = 1\\n%undo")
        ([], 'x = 1\\n%undo')
        """
        lines = code.splitlines(keepends=True)
        magics = []
        end = 0
        for at, line in enumerate(lines):
            text = line.strip()
            words = text.split()
            if words and words[0][0] == "%" and words[0][1:] in DESCRIPTIONS:
                magics.append(text)
                end = at + 1
            elif text and not text.startswith("#"):
                break
            elif not text and end == at:
                end = at + 1
        return (magics, "".join(lines[end:])) if magics else ([], code)

    def serve(self, line: str) -> Outputs:
        """Serves one magic; raises a `ValueError` for wrong arguments."""
        name, *arguments = line.removeprefix("%").split()
        least, most = {"undo": (0, 1), "checkpoint": (1, 1), "back": (1, 1)}.get(name, (0, 0))
        if not least <= len(arguments) <= most:
            raise ValueError(f"usage: {DESCRIPTIONS[name]}")
        served: Outputs = getattr(self, f"_{name}")(*arguments)
        return served

    def _undo(self, count: str = "1") -> Outputs:
        if not count.isdecimal():
            raise ValueError(f"usage: {DESCRIPTIONS['undo']}")
        return _text(self._states.undo(self._guest, int(count)))

    def _checkpoint(self, name: str) -> Outputs:
        self._states.keep(self._guest, name)
        return []

    def _back(self, name: str) -> Outputs:
        self._states.back(self._guest, name)
        return []

    def _fork(self) -> Outputs:
        return _text(self._start_fork())

    def _tree(self) -> Outputs:
        text, html = self._states.drawn(self._guest)
        return [("display_data", {"data": {"text/plain": text, "text/html": html}, "metadata": {}, "transient": {}})]

    def _costs(self) -> Outputs:
        cells = self._states.costs()
        return _text("\n".join(map(str, cells)) or "no cell has run")


def _text(text: str) -> Outputs:
    return [("stream", {"name": "stdout", "text": f"{text}\n"})]
