"""The states of a kernel: those that cells made, and the steps that can be undone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from .._native import Checkpoint
from .._tree import State, Tree
from ..errors import SessionError
from ._guest import GuestKernel

# Maximum undo steps that are kept.
MAX_STEPS = 200
_MAX_SOURCE = 60


@dataclass
class Cell:
    """A cell that has run.

    Attributes:
        number: Its execution count.
        source: Its first line.
        seconds: Its time.
        pages: Memory pages (4 KiB) that it changed.
    """

    number: int
    source: str
    seconds: float = 0.0
    pages: int = 0

    def __str__(self) -> str:
        return f"[{self.number}] {self.source} ({self.seconds * 1000:.0f} ms, {self.pages} pages)"


def first_line(source: str) -> str:
    """A short name for code.

    >>> first_line("\\n x = 1\\ny = 2")
    'x = 1'
    """
    line = next((line.strip() for line in source.splitlines() if line.strip()), "")
    return line if len(line) <= _MAX_SOURCE else f"{line[: _MAX_SOURCE - 1]}…"


@dataclass
class _Step:
    """A change that can be undone."""

    before: Checkpoint
    name: str


@dataclass
class States:
    """Moves a kernel between its states.

    Attributes:
        budget: Maximum bytes of unnamed states kept for undo.
        count: The execution count of the last cell in the present state.
        moves: How often the kernel went to another state.
        dirty: Whether the sandbox may have changed since its last checkpoint.
    """

    budget: int
    count: int = 0
    moves: int = 0
    dirty: bool = True
    _here: Checkpoint | None = None
    _steps: list[_Step] = field(default_factory=list)
    _cells: dict[Checkpoint, Cell] = field(default_factory=dict)
    _counts: dict[Checkpoint, int] = field(default_factory=dict)
    _names: dict[str, Checkpoint] = field(default_factory=dict)
    _log: list[Cell] = field(default_factory=list)

    def keep(self, guest: GuestKernel, name: str = "") -> Checkpoint:
        """The present state."""
        if self.dirty or name or self._here is None:
            last, clean = self._here, not self.dirty
            self._here = guest.checkpoint(name)
            self._counts[self._here] = self.count
            if last is not None and clean and last in self._cells:
                self._cells[self._here] = self._cells[last]
            self.dirty = False
        if name:
            self._names[name] = self._here
        return self._here

    def begin(self, guest: GuestKernel, source: str) -> Checkpoint:
        """Keeps the state before a cell."""
        before = self.keep(guest)
        self._steps.append(_Step(before, first_line(source)))
        self.dirty = True
        return before

    def end(self, guest: GuestKernel, source: str, seconds: float) -> Cell:
        """Keeps the state after a cell, and returns the cost of the cell."""
        before = self._steps[-1].before
        after = self.keep(guest)
        cell = self._cells[after] = Cell(self.count, first_line(source), seconds, guest.pages(before, after))
        self._log = [*self._log[-MAX_STEPS:], cell]
        self._trim(guest)
        return cell

    def restore(self, guest: GuestKernel) -> str:
        """Returns to the state before a cell that ended the kernel, or to the last one."""
        if self.dirty and self._steps:
            step = self._steps.pop()
            self._go(guest, step.before)
            return "the state before the cell is restored"
        if self._here is None:
            raise SessionError("the kernel in the sandbox ended before its first cell")
        self._go(guest, self._here)
        return "the last state is restored"

    def undo(self, guest: GuestKernel, count: int) -> str:
        """Undoes the last steps; describes them."""
        if not 1 <= count <= len(self._steps):
            raise ValueError(
                "there is nothing to undo"
                if not self._steps
                else f"{len(self._steps)} steps can be undone, not {count}"
            )
        undone = self._steps[-count:]
        del self._steps[-count:]
        self._go(guest, undone[0].before)
        return "\n".join(f"undone: {step.name}" for step in reversed(undone))

    def back(self, guest: GuestKernel, name: str) -> None:
        """Goes to a named state, as a step that can be undone."""
        to = self._names.get(name)
        if to is None:
            known = ", ".join(self._names) or "none; `%checkpoint NAME` makes one"
            raise ValueError(f"there is no checkpoint {name!r}; the checkpoints are: {known}")
        before = self.keep(guest)
        self._go(guest, to)
        self._steps.append(_Step(before, f"%back {name}"))

    def copy(self) -> States:
        """The same, for a fork."""
        copied = copy.copy(self)
        for name in ("_steps", "_cells", "_counts", "_names"):
            setattr(copied, name, copy.copy(getattr(self, name)))
        return copied

    def costs(self) -> list[Cell]:
        """Cells that have run, also undone ones, in order of execution."""
        return list(self._log)

    def _go(self, guest: GuestKernel, to: Checkpoint) -> None:
        self.moves += 1
        guest.rollback(to)
        # The relay accepts the new connection, which is no change worth a state.
        guest.settle()
        self._here = to
        self.count = self._counts.get(to, self.count)
        self.dirty = False

    def _trim(self, guest: GuestKernel) -> None:
        """Forgets the oldest undo steps beyond the limits, and states that no step and no name leads to."""
        sizes = {state.checkpoint: state.own_bytes for state in guest.tree()}
        needed = {self._here, *self._names.values(), *(step.before for step in self._steps)}
        held = sum(size for checkpoint, size in sizes.items() if checkpoint in needed)
        while len(self._steps) > 1 and (len(self._steps) > MAX_STEPS or held > self.budget):
            oldest = self._steps.pop(0).before
            if oldest not in self._names.values():
                held -= sizes.get(oldest, 0)
        needed = {self._here, *self._names.values(), *(step.before for step in self._steps)}
        for checkpoint in [checkpoint for checkpoint in self._counts if checkpoint not in needed]:
            guest.drop(checkpoint)
            self._cells.pop(checkpoint, None)
            self._counts.pop(checkpoint)

    def _label(self, state: State) -> str:
        cell = self._cells.get(state.checkpoint)
        parts = [part for part in (state.name or "", str(cell or "")) if part]
        # The sandbox has an earlier state, without a kernel.
        return " · ".join(parts) or ("between cells" if state.parent in self._counts else "start")

    def _walk(self, tree: Tree, of: State | None, depth: int) -> Iterator[tuple[int, State]]:
        """States in depth-first order; those in a line have the same depth."""
        children = tree.children(of)
        for child in children:
            inner = depth + (len(children) > 1)
            if child.checkpoint in self._counts:
                yield inner, child
            yield from self._walk(tree, child, inner)

    def drawn(self, guest: GuestKernel) -> tuple[str, str]:
        """The tree of states, as text and as HTML."""
        self.keep(guest)
        lines, items = [], []
        for depth, state in self._walk(guest.tree(), None, 0):
            here = state.checkpoint == self._here
            label = self._label(state)
            lines.append(f"{'  ' * depth}{label}{' ← here' if here else ''}")
            shown = f"<b>{escape(label)} ← here</b>" if here else escape(label)
            items.append(f'<div style="margin-left:{depth * 2}em">{shown}</div>')
        return "\n".join(lines), "".join(items)
