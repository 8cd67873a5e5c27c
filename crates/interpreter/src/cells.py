# Code in the contexts of a Linux guest: contexts of Python are modules of this process, contexts of
# other languages are kernels. It follows `kernels.py` in the same module, and `agent.py` follows
# it.
#
# Promises: the names, the working directory and the given environment of a context are seen by its
# code alone. The value of the last expression is shown as a result. Figures that code leaves open
# are shown.

import contextlib
import json
import os
import re
import sys
import textwrap
import types

# A request: code in a context, as an object in JSON.
CELL = 8
_HOME = "/home/user"
# Maximum contexts.
_MAX_CONTEXTS = 100
# The flag of code that awaits.
_COROUTINE = 0x80
_MAGIC = re.compile(r"^(\s*)(?:!(.*)|%(pip|cd|config|matplotlib|env)\b(.*))$")

# Types whose values are returned, and not shown.
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)

_loop = None


class Context:
    """Where code runs: its names, or its kernel, and its directory."""

    def __init__(self, language, cwd, module=None):
        """An empty one."""
        self.language, self.cwd = language, cwd
        self.begin = self.kernel = None
        self.module = module or types.ModuleType("__main__")
        self.module.__dict__.setdefault("__builtins__", builtins)

    def close(self):
        """Ends its kernel."""
        kernel, self.kernel = self.kernel, None
        if kernel is not None:
            kernel.close()


_contexts = {}
# The names and the directory of the template.
_template = {}
_current = None


def begin_contexts():
    """Makes the first context, with the names that the template's setup defined."""
    global _current
    main = sys.modules["__main__"]
    _template.clear()
    _template.update(main.__dict__)
    _current = Context("python", os.getcwd(), main)
    _contexts["default"] = _current


def _context(wanted, language):
    """The context of a request."""
    name = wanted.get("context")
    if name is None:
        name = "default" if language == "python" else language
    if name not in _contexts:
        if name != language and name not in _languages():
            raise LookupError(f"the context {name} was not found")
        _contexts[name] = Context(_language_of(name), _HOME)
    return _contexts[name]


def _list_contexts(_):
    """All contexts, and those of further languages that the first code for them makes."""
    listed = [{"id": name, "language": one.language, "cwd": one.cwd} for name, one in _contexts.items()]
    # Not every Node.js runs TypeScript, so its context is listed once there is one.
    missing = [name for name in _languages()[1:] if name not in _contexts and name != "typescript"]
    listed[1:1] = [{"id": name, "language": name, "cwd": _HOME} for name in missing]
    return listed


def _create_context(wanted):
    language, cwd = _language_of(wanted.get("language")), wanted.get("cwd") or _HOME
    if not os.path.isdir(cwd):
        raise NotADirectoryError(f"{cwd} is not a directory of the sandbox")
    if len(_contexts) >= _MAX_CONTEXTS:
        raise ValueError(f"a sandbox has at most {_MAX_CONTEXTS} contexts; remove one")
    _contexts[wanted["id"]] = Context(language, cwd)
    return {"id": wanted["id"], "language": language, "cwd": cwd}


def _restart_context(wanted):
    """Empties a context. The names of the template come back to the first one, and modules stay imported."""
    if wanted["id"] not in _contexts:
        return wanted["id"] in _languages()
    context = _contexts[wanted["id"]]
    context.close()
    space = context.module.__dict__
    space.clear()
    if wanted["id"] == "default":
        space.update(_template)
        context.cwd = _HOME
    else:
        space.update(types.ModuleType("__main__").__dict__, __builtins__=builtins)
    if context is _current:
        os.chdir(context.cwd)
    return True


def _remove_context(wanted):
    context = _contexts.get(wanted["id"])
    if context is None:
        return False
    if wanted["id"] == "default":
        raise ValueError("the first context stays; restart it to empty it")
    if context is _current:
        _enter(_contexts["default"])
    del _contexts[wanted["id"]]
    context.close()
    return True


CONTEXT_OPERATIONS = {
    "list_contexts": _list_contexts,
    "create_context": _create_context,
    "restart_context": _restart_context,
    "remove_context": _remove_context,
}


def _enter(context):
    """Makes a context the one whose code runs."""
    global _current
    if context is _current:
        return
    with contextlib.suppress(OSError):
        # Code may have removed its directory.
        _current.cwd = os.getcwd()
    os.chdir(context.cwd)
    sys.modules["__main__"] = context.module
    _current = context


@contextlib.contextmanager
def _environment(given):
    """Sets variables for the block."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _magic(found):
    """The Python for a line that a notebook has beside Python."""
    indent, command, name, rest = found.groups()
    return f"{indent}__import__('_afresh').run_magic({name or '!'!r}, {command if name is None else rest.strip()!r})"


def run_magic(name, rest):
    """Runs a line for the shell, or one of the few commands of notebooks that are known."""
    global _figure_formats
    if name in ("!", "pip"):
        import subprocess  # noqa: PLC0415

        _flush()
        command = rest if name == "!" else f"{sys.executable} -m pip {rest}"
        subprocess.run(command, shell=True, check=False)
    elif name == "cd":
        os.chdir(os.path.expanduser(rest or _HOME))
    elif name == "env":
        key, _, value = rest.partition("=")
        os.environ[key.strip()] = value.strip()
    elif name == "config":
        what, _, value = rest.partition("=")
        if what.strip() not in ("InlineBackend.figure_format", "InlineBackend.figure_formats"):
            raise ValueError(f"%config knows InlineBackend.figure_formats, and not {what.strip()}")
        value = eval(value)  # noqa: S307
        _figure_formats = [value] if isinstance(value, str) else list(value)


def _parsed(code, name):
    """The tree of code, as notebooks write it: indented as a whole, and with lines for the shell."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        return compile(code, name, "exec", flags, dont_inherit=True)
    except SyntaxError:
        other = textwrap.dedent(code) if code[:1].isspace() else code
        tree = _parsed_with_commands(other, name, flags)
        if tree is None:
            # An error of the other form would name text that the code does not have.
            raise
        return tree


def _parsed_with_commands(code, name, flags):
    """The tree of code with lines for the shell; None if it has a syntax error in another line.

    Only a line that the compiler refuses is rewritten, so that equal lines in strings stay as they are.
    """
    lines = code.split("\n")
    while True:
        try:
            return compile("\n".join(lines), name, "exec", flags, dont_inherit=True)
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            line = lines[at] if 0 <= at < len(lines) else ""
            command = _MAGIC.sub(_magic, line)
            if command == line:
                return None
            lines[at] = command


def _evaluated(tree, name, kind, space):
    """Runs a tree, in an event loop if it awaits."""
    global _loop
    code = compile(tree, name, kind, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(code, space)
    if code.co_flags & _COROUTINE:
        import asyncio  # noqa: PLC0415

        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
        return _loop.run_until_complete(result)
    return result


def _run_python(code, name):
    """Runs code in the present context, and shows the value of its last expression."""
    space = _current.module.__dict__
    tree = _parsed(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    if tree.body:
        _evaluated(tree, name, "exec", space)
    if last is not None:
        value = _evaluated(ast.Expression(last.value), name, "eval", space)
    if value is not None:
        _show_value(value, _formats(value))
    _flush_figures()


def _show_value(value, formats):
    """Shows the value of the last expression."""
    figures, _ = _open_figures()
    _show_formats(formats, main=True)
    if any(value is figure for figure in figures):
        # It is not shown once more with those that are open.
        sys.modules["matplotlib.pyplot"].close(value)


def run_shown(source, name):
    """Runs code as the driver does, and shows its value if that has a format in addition to text."""
    value = _run(source, name, sys.modules["__main__"].__dict__)
    if type(value) not in _PLAIN_TYPES:
        formats = _formats(value)
        if len(formats) > 1:
            _show_value(value, formats)
    _flush_figures()
    return value


def _run_elsewhere(context, code, given):
    """Runs code in the kernel of a context."""
    if context.kernel is None:
        context.kernel = Kernel(context.language, context.cwd)
    try:
        result = context.kernel.run(code, given)
    except RuntimeError:
        context.kernel = None
        raise
    failed = result.get("error")
    if failed:
        error = type(failed["name"] or "Error", (Exception,), {})(failed["value"])
        error._afresh_trace = failed["traceback"]
        raise error
    if "text" in result:
        formats = {"text/plain": result["text"]}
        if "json" in result:
            formats["application/json"] = result["json"]
        _show_formats(formats, main=True)


def run_cell(source, name):
    """Runs code as a request asks for it."""
    wanted = json.loads(source)
    language = _language_of(wanted.get("language"))
    context = _context(wanted, language)
    if wanted.get("language") and context.language != language:
        raise ValueError(f"the context runs {context.language}, and not {language}")
    given = wanted.get("envs") or {}
    for key in given:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise ValueError(f"{key!r} is not the name of a variable")
    if context.language != "python":
        return _run_elsewhere(context, wanted["code"], given)
    _enter(context)
    _texts[name] = wanted["code"]
    with _environment(given):
        return _run_python(wanted["code"], name)


def warm_cells():
    """Warms the code of cells up to full speed."""
    for _ in range(_OFTEN):
        run_cell('{"code": "pass"}', "<settle>")
        for value in (1, "text", [1.5]):
            _plain(_formats(value))
