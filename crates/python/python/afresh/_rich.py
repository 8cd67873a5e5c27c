"""Results that code displays, in all their formats.

Promises: nothing that code in a sandbox sends runs in a notebook of the host: HTML is shown in a frame without scripts,
and drawings are shown as images.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from . import _native

_TEXTS = ("text", "html", "markdown", "latex", "svg", "javascript")
_BINARY = ("png", "jpeg", "pdf")
_OTHERS = ("json", "data", "chart")
_IMAGES = {"png": "image/png", "jpeg": "image/jpeg", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class RichResult:
    """A result that code displays: a value, a figure or an image. A format that it does not have is ``None``.

    Attributes:
        text: As the guest's language shows it.
        html: HTML. It comes from the sandbox, so show it in a frame without scripts.
        markdown: Markdown.
        latex: LaTeX.
        svg: A drawing.
        png: An image.
        jpeg: An image.
        pdf: A document.
        javascript: JavaScript, which is never run.
        json: A value of JSON.
        data: The columns of a data frame.
        chart: The data of a chart, where the guest has the package ``e2b_charts``.
        extra: Further formats by their MIME types.
        is_main_result: Whether it is the value of the last expression.
    """

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    latex: str | None = None
    svg: str | None = None
    png: bytes | None = None
    jpeg: bytes | None = None
    pdf: bytes | None = None
    javascript: str | None = None
    json: Any = None
    data: Any = None
    chart: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_main_result: bool = False

    def formats(self) -> list[str]:
        """The names of its formats."""
        names = [*_TEXTS, *_BINARY, *_OTHERS]
        return [name for name in names if getattr(self, name) is not None] + list(self.extra)

    def _repr_html_(self) -> str:
        for name, mime in _IMAGES.items():
            image = getattr(self, name)
            if image is not None:
                data = base64.b64encode(image.encode() if isinstance(image, str) else image).decode()
                return f'<img src="data:{mime};base64,{data}">'
        if self.html is not None:
            frame = "width:100%;height:20em;border:0;background:white"
            return f'<iframe sandbox srcdoc="{escape(self.html)}" style="{frame}"></iframe>'
        shown = next((text for text in (self.text, self.markdown, self.latex) if text is not None), "")
        return f"<pre>{escape(shown)}</pre>"

    def _repr_mimebundle_(self, **_options: object) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/html": self._repr_html_()}
        for mime, value in (("text/plain", self.text), ("text/latex", self.latex)):
            if value is not None:
                bundle[mime] = value
        for name in ("png", "jpeg"):
            image = getattr(self, name)
            if image is not None:
                bundle[_IMAGES[name]] = base64.b64encode(image).decode()
        bundle.setdefault("text/plain", f"<{', '.join(self.formats())}>")
        return bundle


def rich_result(displayed: _native.Displayed) -> RichResult:
    """Converts a result of the native half. A format that cannot be read is left out."""
    is_main, texts, whole = displayed
    formats: dict[str, Any] = {"is_main_result": is_main}
    for name, text in texts:
        if name not in _BINARY:
            formats[name] = text
            continue
        try:
            formats[name] = base64.b64decode(text)
        except (binascii.Error, ValueError):
            continue
    try:
        others = {} if whole is None else json.loads(whole)
    except (ValueError, RecursionError):
        others = {}
    if not isinstance(others, dict):
        # The guest may send any bytes.
        others = {}
    formats.update((name, others[name]) for name in _OTHERS if name in others)
    if isinstance(others.get("extra"), dict):
        formats["extra"] = others["extra"]
    return RichResult(**formats)
