"""The states of a sandbox, for display: the tree, and the difference of two states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from . import _native

_PAGE = 4096


def _bytes(count: int) -> str:
    """
    >>> _bytes(100), _bytes(4096), _bytes(3 << 20)
    ('100 B', '4.0 KiB', '3.0 MiB')
    """
    if count < 1 << 10:
        return f"{count} B"
    if count < 1 << 20:
        return f"{count / (1 << 10):.1f} KiB"
    return f"{count / (1 << 20):.1f} MiB"


@dataclass(frozen=True, slots=True)
class State:
    """One state of a tree.

    Attributes:
        checkpoint: Its identifier.
        parent: The state that it was made from; ``None`` for the first.
        name: Its name, if it was given one.
        stored_pages: Pages that it stores or shares.
        own_pages: Pages that it does not share with its parent.
        own_bytes: Bytes that those take.
        is_here: Whether the sandbox stands on it.
    """

    checkpoint: _native.Checkpoint
    parent: _native.Checkpoint | None
    name: str | None
    stored_pages: int
    own_pages: int
    own_bytes: int
    is_here: bool

    def __str__(self) -> str:
        here = " ← here" if self.is_here else ""
        return f"{self.name or self.checkpoint} ({_bytes(self.own_bytes)}){here}"


@dataclass(frozen=True)
class Tree:
    """Every state that a sandbox and its relatives can go to.

    >>> import afresh
    >>> with afresh.warm("js").sandbox() as sb:
    ...     first = sb.checkpoint("first")
    ...     len(sb.tree()), sb.tree()["first"].is_here
    (2, True)
    """

    states: tuple[State, ...]

    def __iter__(self) -> Iterator[State]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, name: str) -> State:
        for state in reversed(self.states):
            if state.name == name:
                return state
        raise KeyError(name)

    def children(self, of: State | None) -> list[State]:
        """The states that were made from one; of ``None``, the first ones."""
        known = {state.checkpoint for state in self.states}
        if of is None:
            return [state for state in self.states if state.parent not in known]
        return [state for state in self.states if state.parent == of.checkpoint]

    def _walk(self, of: State | None, depth: int) -> Iterator[tuple[int, State]]:
        for state in self.children(of):
            yield depth, state
            yield from self._walk(state, depth + 1)

    def __str__(self) -> str:
        return "\n".join("  " * depth + str(state) for depth, state in self._walk(None, 0))

    def _repr_html_(self) -> str:
        def item(state: State) -> str:
            name = escape(state.name or str(state.checkpoint))
            shown = f"<b>{name}</b>" if state.is_here else name
            below = "".join(item(child) for child in self.children(state))
            size = f"<small>{state.own_pages} pages, {_bytes(state.own_bytes)}</small>"
            return f"<li>{shown} {size}{f'<ul>{below}</ul>' if below else ''}</li>"

        return f"<ul>{''.join(item(state) for state in self.children(None))}</ul>"


@dataclass(frozen=True)
class Difference:
    """The difference of two states.

    Attributes:
        pages: How many pages (4 KiB) of memory do.
        bytes: How many bytes of them do.
        runs: Which pages, as ``(memory, first page, number of pages)``.
        state: Whether other state differs: globals, tables, sizes.
    """

    pages: int
    bytes: int
    runs: tuple[tuple[int, int, int], ...] = field(repr=False)
    state: bool

    def __bool__(self) -> bool:
        return self.pages > 0 or self.state

    def _repr_html_(self) -> str:
        rest = " and more than memory" if self.state else ""
        head = f"<p>{self.pages} pages, {_bytes(self.bytes)}{rest}</p>"
        return head + "".join(self._map(memory) for memory in sorted({run[0] for run in self.runs}))

    def _map(self, memory: int, across: int = 128) -> str:
        """A picture of one memory's pages, those that differ dark; a square is as many pages as it takes to fit."""
        runs = [(first, count) for of, first, count in self.runs if of == memory]
        pages = max(first + count for first, count in runs)
        each = max(1, -(-pages // (across * 64)))
        squares = -(-pages // each)
        dark: dict[int, int] = {}
        for first, count in runs:
            for page in range(first, first + count):
                dark[page // each] = dark.get(page // each, 0) + 1
        drawn = "".join(
            f'<rect x="{at % across * 5}" y="{at // across * 5}" width="4" height="4" '
            f'fill-opacity="{0.35 + 0.65 * count / each:.2f}"/>'
            for at, count in sorted(dark.items())
        )
        height = (-(-squares // across)) * 5
        return (
            f'<svg width="{across * 5}" height="{height}" style="background:#eee" fill="#b00">'
            f"<title>memory {memory}: a square is {_bytes(each * _PAGE)}</title>{drawn}</svg>"
        )


def tree(session: _native.Session) -> Tree:
    """The tree of a session."""
    here = session.at()
    return Tree(
        tuple(
            State(checkpoint, parent, name, stored, own, own_bytes, checkpoint == here)
            for checkpoint, parent, name, stored, own, own_bytes in session.tree()
        )
    )
