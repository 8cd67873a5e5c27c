# Other languages of a Linux guest: a shell, Node.js and R, each in a separate process that keeps
# its state. It follows `display.py` in the same module, and `agent.py` follows it.
#
# Promises: a process is started by the first code for it. Output of code goes to the standard
# streams. Code that ends its process is answered, and the next code has a new process.

import contextlib
import fcntl
import json
import os
import select
import shlex
import shutil
import signal

# Programs of the languages, by their names.
_PROGRAMS = {"javascript": "node", "typescript": "node", "bash": "bash", "r": "R"}
_NAMES = {"js": "javascript", "ts": "typescript", "sh": "bash", "py": "python", "R": "r", "": "python"}

# Reads lines of JSON from descriptor 3 and answers on 4. Code runs as in the interactive console of
# Node.js.
_NODE = r"""
const fs = require('fs'), util = require('util'), stream = require('stream');
const none = new stream.PassThrough();
const repl = require('repl').start({ prompt: '', input: none, output: new stream.PassThrough(), useGlobal: true });
const names = (list) => list.trim().replace(/\s+as\s+/g, ': ');
const imported = (_, indent, what, quote, from) => {
  const load = `await import(${JSON.stringify(from)})`;
  if (what === undefined) return `${indent}${load}`;
  const parts = /^\s*(?:([\w$]+)\s*,?)?\s*(?:\*\s*as\s+([\w$]+)|(\{[^}]*\}))?\s*$/.exec(what);
  if (!parts) throw new SyntaxError(`cannot import ${what}`);
  const [, own, all, some] = parts;
  return indent + [own && `var { default: ${own} } = ${load}`, all && `var ${all} = ${load}`,
    some && `var ${names(some)} = ${load}`].filter(Boolean).join('; ');
};
const IMPORT = /^([ \t]*)import(?:\s+([^'"]+?)\s+from)?\s*(['"])([^'"]+)\3[ \t]*;?[ \t]*$/gm;
// The console gives errors to its domain, and to the callback only those of promises.
let failed = () => {};
repl._domain.removeAllListeners('error');
repl._domain.on('error', (error) => failed(error));
const run = (code) => new Promise((done, refuse) => {
  failed = refuse;
  repl.eval(code, repl.context, '<code>', (error, value) => (error ? refuse(error) : done(value)));
});
// Code without its types. Node.js warns of the function, once in a process.
const untyped = (code) => {
  const strip = require('module').stripTypeScriptTypes;
  if (!strip) throw new Error(`TypeScript needs Node.js 22.13 or newer, and this is ${process.version}`);
  const warn = process.emitWarning;
  process.emitWarning = () => {};
  try { return strip(code, { mode: 'transform' }); } finally { process.emitWarning = warn; }
};
// A socket: the reader of a file would wait in a thread, and code that ends the process would wait
// for that thread.
const requests = new (require('net').Socket)({ fd: 3, readable: true, writable: false });
const lines = require('readline').createInterface({ input: requests });
(async () => {
  for await (const line of lines) {
    const { code, envs, cwd, typed } = JSON.parse(line);
    const before = { ...process.env };
    const said = {};
    try {
      if (cwd) process.chdir(cwd);
      Object.assign(process.env, envs);
      const value = await run((typed ? untyped(code) : code).replace(IMPORT, imported) + '\n');
      if (value !== undefined) {
        said.text = util.inspect(value);
        if (value && typeof value === 'object') {
          try { said.json = JSON.parse(JSON.stringify(value)); } catch {}
        }
      }
    } catch (error) {
      const named = error instanceof Error;
      said.error = { name: named ? error.name : 'Error', value: named ? error.message : util.inspect(error),
        traceback: named ? error.stack : util.inspect(error) };
    }
    for (const name of Object.keys(envs)) {
      if (name in before) process.env[name] = before[name]; else delete process.env[name];
    }
    fs.writeSync(4, JSON.stringify(said) + '\n');
  }
})();
"""

# Reads lines from descriptor 3: the directory or `-`, the code, and variables with their values, in
# hexadecimal digits. Answers on 4 alike. A visible value before the last one is printed, as in the
# console of R. The loop finds functions of `base` before those of the user, and prints values from
# the user's environment, which has the user's methods.
_R = r"""
local({
  unhex <- function(hex) {
    if (hex == "-") return("")
    at <- seq(1, nchar(hex), 2)
    text <- rawToChar(as.raw(strtoi(substring(hex, at, at + 1), 16L)))
    Encoding(text) <- "UTF-8"
    text
  }
  hex <- function(text) {
    bytes <- charToRaw(enc2utf8(paste(text, collapse = "\n")))
    if (length(bytes)) paste(as.character(bytes), collapse = "") else "-"
  }
  printed <- function(value) {
    from <- list2env(list(print = print, show = methods::show, value = value), parent = globalenv())
    show <- if (isS4(value)) quote(show(value)) else quote(print(value))
    utils::capture.output(invisible(eval(show, from)))
  }
  options(warn = 1)
  requests <- file("/dev/fd/3", "r", raw = TRUE)
  answers <- file("/dev/fd/4", "w", raw = TRUE)
  while (length(line <- readLines(requests, 1))) {
    parts <- strsplit(line, " ", fixed = TRUE)[[1]]
    given <- strsplit(parts[-(1:2)], "=", fixed = TRUE)
    names <- vapply(given, `[[`, "", 1)
    values <- vapply(given, function(one) unhex(one[[2]]), "")
    before <- Sys.getenv(names, unset = NA, names = TRUE)
    shown <- NULL
    said <- tryCatch({
      if (parts[[1]] != "-") setwd(unhex(parts[[1]]))
      if (length(names)) do.call(Sys.setenv, structure(as.list(values), names = names))
      for (one in parse(text = unhex(parts[[2]]), keep.source = FALSE)) {
        if (!is.null(shown)) writeLines(shown)
        value <- withVisible(eval(one, globalenv()))
        shown <- if (value$visible) printed(value$value)
      }
      if (is.null(shown)) "none" else paste("value", hex(shown))
    }, error = function(error) {
      call <- if (is.null(conditionCall(error))) "" else deparse(conditionCall(error))[[1]]
      # Not the calls of this loop.
      where <- if (grepl("^(eval\\(one,|parse\\(text = unhex|$)", call)) "" else paste(" in", call)
      message <- conditionMessage(error)
      paste("error", hex(class(error)[[1]]), hex(message), hex(paste0("Error", where, ": ", message)))
    })
    for (name in names) {
      old <- before[[name]]
      if (is.na(old)) Sys.unsetenv(name) else do.call(Sys.setenv, structure(list(old), names = name))
    }
    flush(stdout())
    writeLines(said, answers)
    flush(answers)
  }
}, new.env(parent = .BaseNamespaceEnv))
"""


def _language_of(name):
    """The canonical name of a language that this guest has."""
    name = _NAMES.get(name or "", name)
    if name == "python":
        return name
    program = _PROGRAMS.get(name)
    if program is None:
        raise ValueError(f"this sandbox does not run {name}: it runs {', '.join(_languages())}")
    lack = _lack_of(program)
    if lack:
        raise ValueError(f"this sandbox does not run {name}: {lack}")
    return name


def _lack_of(program):
    """Why this guest does not run a program; None if it does."""
    found = shutil.which(program)
    if found is None:
        return f"it has no {program}"
    if program != "R":
        return None
    # Debian has the settings of R elsewhere. Without them it has none of its packages but `base`.
    with contextlib.suppress(OSError, IndexError), open(found, encoding="utf-8", errors="replace") as script:
        home = [line.strip().partition("=")[2] for line in script if line.startswith("R_HOME_DIR=")][0]
        for entry in os.scandir(os.path.join(home.strip("\"'"), "etc")):
            if entry.is_symlink() and not os.path.exists(entry.path):
                folder = os.path.dirname(os.path.realpath(entry.path))
                return f'R needs {folder}, which `dirs = ["{folder}"]` grants'
    return None


def _languages():
    """The languages that this guest has."""
    return ["python", *(name for name, program in _PROGRAMS.items() if not _lack_of(program))]


# The commands of the kernels.
_COMMANDS = {
    "bash": ["bash", "--noprofile", "--norc"],
    "javascript": ["node", "-e", _NODE],
    "r": ["R", "--no-echo", "--no-restore", "--no-save", "-e", _R],
}


def _hex(text):
    return text.encode().hex() or "-"


def _unhex(digits):
    return "" if digits == "-" else bytes.fromhex(digits).decode(errors="replace")


class Kernel:
    """A process that runs code of another language."""

    def __init__(self, language, cwd):
        """Starts it."""
        inside, ours = os.pipe()
        theirs, outside = os.pipe()
        shell = language == "bash"
        command = _COMMANDS.get(language, _COMMANDS["javascript"])
        null = os.open(os.devnull, os.O_RDONLY)
        # Far from 3 and 4, which the process has for them. Other descriptors are closed in it.
        far = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (inside, outside)]
        places = ((far[0], 0),) if shell else ((null, 0), (far[0], 3))
        actions = [(os.POSIX_SPAWN_DUP2, old, new) for old, new in (*places, (far[1], 4))]
        try:
            self.process = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
        except BaseException:
            os.close(ours)
            os.close(theirs)
            raise
        finally:
            for end in (inside, outside, null, *far):
                os.close(end)
        self.language, self.cwd = language, cwd
        self.requests = os.fdopen(ours, "wb", buffering=0)
        self.answers = os.fdopen(theirs, "rb", buffering=0)
        # Some builds of Python lack the function.
        self.end = os.pidfd_open(self.process) if hasattr(os, "pidfd_open") else None

    def _await(self, pipe, event):
        """Waits for a pipe; False if the process has ended before. Its children may hold the pipe open."""
        poll = select.poll()
        poll.register(pipe, event)
        if self.end is not None:
            poll.register(self.end, select.POLLIN)
        return any(ready == pipe.fileno() for ready, _ in poll.poll())

    def ask(self, line):
        """The answer to a line; None if the process has ended."""
        data = memoryview(line.encode())
        try:
            while data:
                if not self._await(self.requests, select.POLLOUT):
                    return None
                # There is room for so many bytes.
                data = data[self.requests.write(data[: select.PIPE_BUF]) :]
        except BrokenPipeError:
            return None
        answer = bytearray()
        while not answer.endswith(b"\n"):
            piece = self.answers.read(1 << 16) if self._await(self.answers, select.POLLIN) else b""
            if not piece:
                return None
            answer += piece
        return bytes(answer)

    def run(self, code, envs):
        """Runs code: its result, which may be empty."""
        if self.language == "bash":
            return self._run_shell(code, envs)
        if self.language == "r":
            return self._run_r(code, envs)
        cwd, self.cwd = self.cwd, None
        wanted = {"code": code, "envs": envs, "cwd": cwd, "typed": self.language == "typescript"}
        answer = self.ask(json.dumps(wanted) + "\n")
        if answer is None:
            raise self._ended()
        return json.loads(answer)

    def _run_shell(self, code, envs):
        cwd, self.cwd = self.cwd, None
        change = f"cd {shlex.quote(cwd)}\n" if cwd else ""
        # Values for this code alone: those of before come back after it.
        given = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in envs.items())
        saved = "".join(f'__afresh_{name}="${{{name}-}}" __had_{name}="${{{name}+x}}"\n' for name in envs)
        back = "".join(
            f'if [ -n "$__had_{name}" ]; then export {name}="$__afresh_{name}"; else unset {name}; fi; '
            f"unset __afresh_{name} __had_{name}\n"
            for name in envs
        )
        line = f"{change}{saved}{given}{{ eval {shlex.quote(code)}; }} </dev/null 4>&-; __status=$?\n{back}"
        answer = self.ask(f"{line}printf '%s\\n' $__status >&4\n")
        if answer is None:
            raise self._ended()
        status = int(answer)
        if status:
            message = f"exit status {status}"
            return {"error": {"name": "CommandError", "value": message, "traceback": message}}
        return {}

    def _run_r(self, code, envs):
        cwd, self.cwd = self.cwd, None
        given = (f"{name}={_hex(value)}" for name, value in envs.items())
        answer = self.ask(" ".join([_hex(cwd or ""), _hex(code), *given]) + "\n")
        if answer is None:
            raise self._ended()
        kind, *parts = (_unhex(part) if at else part for at, part in enumerate(answer.decode().split()))
        if kind == "error":
            return {"error": dict(zip(("name", "value", "traceback"), parts))}
        return {"text": parts[0]} if parts else {}

    def _ended(self):
        with contextlib.suppress(OSError):
            self.requests.close()
        self.answers.close()
        if self.end is not None:
            os.close(self.end)
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        message = f"the code ended its process, with status {status}; the next code has a new one"
        return RuntimeError(message)

    def close(self):
        """Ends the process."""
        os.kill(self.process, signal.SIGKILL)
        self._ended()
