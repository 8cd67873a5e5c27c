"""The result of an evaluation."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from typing import Any

from . import _native
from ._cost import NO_COST, CallCost
from ._rich import RichResult, rich_result
from .errors import ProgramError


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an evaluation: a value or an error, and the output.

    Attributes:
        value: The value of the last expression, as a Python value; ``None`` without one.
        text: The value as the guest's language shows it.
        stdout: Output of the program.
        stderr: Error output of the program.
        error: The error that ended it: a `ProgramError`, a `TimeLimitError`, a `GuestError`, a `StoppedError`; ``None``
            on success.
        truncated: Whether more was printed or displayed than is kept.
        cost: The cost of the call: its times, memory and bytes.
        results: What the code displayed in a sandbox of Python as a Linux program: by ``display``, as an open figure of
            matplotlib, and as the value of the last expression if that has a format in addition to text.
    """

    value: Any
    text: str
    stdout: str
    stderr: str
    error: BaseException | None
    truncated: bool
    cost: CallCost
    results: tuple[RichResult, ...] = ()

    @property
    def dirty_pages(self) -> int | None:
        """Pages of memory (4 KiB) that differ from the sandbox's last state, as `CallCost.dirty_pages`."""
        return self.cost.dirty_pages

    @property
    def us(self) -> float:
        """Microseconds that the guest ran."""
        return self.cost.wall * 1e6

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
        parts.extend(shown._repr_html_() for shown in self.results)
        if self.error is not None:
            parts.append(f'<pre style="color:#b00">{escape(str(self.error))}</pre>')
        elif self.value is not None and not any(shown.is_main_result for shown in self.results):
            parts.append(f"<pre>{escape(self.text)}</pre>")
        pages = "" if self.dirty_pages is None else f", {self.dirty_pages} pages dirty"
        parts.append(f"<small>{self.us:.0f} µs{pages}</small>")
        return "".join(parts)

    def _repr_mimebundle_(self, **_options: object) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/html": self._repr_html_(), "text/plain": repr(self)}
        for shown in self.results:
            formats = shown._repr_mimebundle_()
            bundle.update((mime, formats[mime]) for mime in formats if mime.startswith("image/"))
        return bundle


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
    try:
        return repr(value)
    except ValueError:
        # Python limits the digits of a number that it shows, and not those of a number.
        return hex(value) if isinstance(value, int) else f"<{type(value).__name__} with a number of too many digits>"


def failed(error: BaseException) -> Result:
    """The result of an evaluation that did not begin."""
    return Result(None, "", "", "", error, False, NO_COST)


def result(outcome: _native.Outcome) -> Result:
    """Converts the result of the native half."""
    value, text, ended_by, stdout, stderr, truncated, cost, displayed = outcome
    error: BaseException | None
    if isinstance(ended_by, tuple):
        name, message, stack, cause = ended_by
        error = ProgramError(name, message, stack)
        error.__cause__ = cause
    else:
        error = ended_by
    shown = _plain(value) if text is None else text
    return Result(value, shown, stdout, stderr, error, truncated, CallCost(*cost), tuple(map(rich_result, displayed)))
