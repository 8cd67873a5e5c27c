"""Transformations of sources before they are evaluated.

At a prompt, people and models write ``const rows = …`` again and again. A script may declare a constant only once, so
its outermost constants become variables. Only the necessary part of the language is parsed here: comments, strings,
templates, regular expressions, brackets and words. A source in which they do not end is left as it is: evaluating it
says what is wrong with it.
"""

from __future__ import annotations

import re

# Words after which a slash begins a regular expression; after other words it divides.
_BEFORE_EXPRESSIONS = re.compile("await|case|delete|do|else|in|instanceof|new|of|return|throw|typeof|void|yield")
_SKIPPED = re.compile(r"\s+|//[^\n\u2028\u2029]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""", re.DOTALL)
_TEMPLATE = re.compile(r"[`}](?:[^`\\$]|\\.|\$(?!\{))*(?:`|\$\{)", re.DOTALL)
_PATTERN = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/\w*")
_WORD = re.compile(r"[\w$\u0080-\U0010ffff]+")
_DECLARED = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*[\w$\[{\u0080-\U0010ffff]", re.DOTALL)


class _EndlessError(Exception):
    """Something in the source does not end."""


def constants_as_variables(code: str) -> str:
    """The script with ``var`` for each ``const`` at its outermost level.

    >>> constants_as_variables("const a = 1; { const b = a }")
    'var a = 1; { const b = a }'
    """
    if "const" not in code:
        return code
    try:
        found = _outermost(code)
    except _EndlessError:
        return code
    for at in reversed(found):
        code = code[:at] + "var" + code[at + len("const") :]
    return code


def _outermost(code: str) -> list[int]:
    """Where ``const`` stands at the outermost level."""
    found: list[int] = []
    # Open brackets; a backtick stands for a template that continues after the bracket.
    opened: list[str] = []
    # The last word or sign.
    last = ""
    at = 0
    while at < len(code):
        sign = code[at]
        if skipped := _SKIPPED.match(code, at):
            at = skipped.end()
        elif text := _text(code, at, opened, last):
            if sign == "}":
                opened.pop()
            at, last = text.end(), "'"
            if text[0].endswith("${"):
                opened.append("`")
                last = "{"
        elif word := _WORD.match(code, at):
            if word[0] == "const" and not opened and last != "." and _DECLARED.match(code, word.end()):
                found.append(at)
            at, last = word.end(), word[0]
        else:
            if sign in "([{":
                opened.append(sign)
            elif sign in ")]}" and (not opened or opened.pop() == "`"):
                raise _EndlessError
            at, last = at + 1, sign
    if opened:
        raise _EndlessError
    return found


def _text(code: str, at: int, opened: list[str], last: str) -> re.Match[str] | None:
    """A string, a part of a template or a regular expression, if one begins here."""
    sign = code[at]
    if sign == "/":
        return _PATTERN.match(code, at) if _begins_expression(last) else None
    of_template = sign == "`" or (sign == "}" and opened[-1:] == ["`"])
    if not of_template and sign not in "'\"":
        return None
    text = (_TEMPLATE if of_template else _STRING).match(code, at)
    if text is None:
        raise _EndlessError
    return text


def _begins_expression(last: str) -> bool:
    """Whether an expression, not an operator, follows this word or sign."""
    if _WORD.fullmatch(last):
        return _BEFORE_EXPRESSIONS.fullmatch(last) is not None
    return last not in (")", "]", "'")
