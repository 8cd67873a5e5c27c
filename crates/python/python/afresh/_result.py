"""What an evaluation gave."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from typing import Any

from . import _native
from .errors import ProgramError


@dataclass(frozen=True, slots=True)
class Result:
    """What an evaluation gave: a value or an error, and what was printed meanwhile.

    Attributes:
        value: The value of the last expression, as a Python value; ``None`` when there is none.
        text: The value as the guest's language shows it.
        stdout: What the program printed.
        stderr: What it printed as errors.
        error: What ended it: a `ProgramError`, a `TimeLimitError`, a `GuestError`, a `StoppedError`; ``None`` when it
            came to its end.
        truncated: Whether more was printed than is kept.
        dirty_pages: Pages of memory (4 KiB) that differ from the state that the sandbox stands on; ``None`` where
            nobody counts them, as after a run from the warm state, which is forgotten: to count takes a tenth of it.
        us: Microseconds that the guest ran.
    """

    value: Any
    text: str
    stdout: str
    stderr: str
    error: BaseException | None
    truncated: bool
    dirty_pages: int | None
    us: float

    def unwrap(self) -> Any:
        """The value; raises the error if there is one.

        >>> import afresh
        >>> with afresh.warm("js").sandbox() as sb:
        ...     sb.run_code("6 * 7").unwrap()
        42
        """
        if self.error is not None:
            raise self.error
        return self.value

    def _repr_html_(self) -> str:
        parts = []
        if self.stdout:
            parts.append(f"<pre>{escape(self.stdout)}</pre>")
        if self.stderr:
            parts.append(f'<pre style="color:#b00">{escape(self.stderr)}</pre>')
        if self.error is not None:
            parts.append(f'<pre style="color:#b00">{escape(str(self.error))}</pre>')
        elif self.value is not None:
            parts.append(f"<pre>{escape(self.text)}</pre>")
        pages = "" if self.dirty_pages is None else f", {self.dirty_pages} pages dirty"
        parts.append(f"<small>{self.us:.0f} µs{pages}</small>")
        return "".join(parts)


def _plain(value: Any) -> str:
    """How a value shows that the guest did not show itself."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
    return repr(value)


def result(outcome: _native.Outcome) -> Result:
    """What the native half found."""
    value, text, failed, stdout, stderr, truncated, dirty_pages, us = outcome
    error: BaseException | None
    if isinstance(failed, tuple):
        name, message, stack, cause = failed
        error = ProgramError(name, message, stack)
        error.__cause__ = cause
    else:
        error = failed
    shown = _plain(value) if text is None else text
    return Result(value, shown, stdout, stderr, error, truncated, dirty_pages, us)
