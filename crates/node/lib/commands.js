'use strict'
// Commands in a sandbox of a Linux program: processes that run beside its code.
//
// The sandbox runs only while an operation runs it, so commands make progress during calls, waits
// and `proceed`.

const { constants } = require('node:os')
const { CommandError, GuestError, ProgramError, SandboxError, TimeoutError } = require('./errors.js')
const { bytes: asBytes, callback, options, RESULT, text, timeout } = require('./options.js')
const { result, split } = require('./result.js')

const SHELL = '/bin/sh'
/** Milliseconds of one wait for background work. */
const WAIT = 50
/** Maximum bytes of input in one request. */
const PIECE = 64 * 1024

class CommandResult {
  constructor(exitCode, stdout, stderr, truncated) {
    Object.assign(this, { exitCode, stdout, stderr, truncated })
  }

  /** This result; throws a `CommandError` if the command failed. */
  check() {
    if (this.exitCode !== 0) throw new CommandError(this)
    return this
  }
}

function damaged(what) {
  return new GuestError(`the sandbox's half of commands gave a damaged answer to ${what}: its code may have changed it`)
}

function gone(pid) {
  return new SandboxError(
    `the command ${pid} does not run in this sandbox: it has ended, or the sandbox went to a state without it`,
  )
}

/** Runs an operation in the guest's half of commands, and returns its answer. */
async function ask(sandbox, wanted, signal) {
  const request = { wanted: JSON.stringify(wanted), starts: false }
  return result(await sandbox.operate('command', request, { signal }), RESULT).unwrap()
}

async function drive(sandbox, wait, signal, moved = false) {
  return (await sandbox.operate('drive', { wait, moved }, { signal })).json
}

/** Lets a sandbox run until all of it waits for the host, for so many milliseconds at most. */
async function proceed(sandbox, milliseconds, given) {
  const { signal } = options(given, ['signal'])
  await sandbox.operate('beginWait')
  const until = performance.now() + timeout(milliseconds, 'the time')
  for (let left; (left = until - performance.now()) > 0; ) {
    if (!(await drive(sandbox, Math.min(WAIT, left), signal))) return
  }
}

/** The deadline of a command. */
class Deadline {
  constructor(milliseconds) {
    this.milliseconds = milliseconds
    this.until = milliseconds === null ? Infinity : performance.now() + milliseconds
  }

  /** Milliseconds of the next wait; a TimeoutError after the deadline. */
  next(pid) {
    const left = this.until - performance.now()
    if (left <= 0) throw new TimeoutError(`the command ${pid} ran longer than ${this.milliseconds} ms`)
    return Math.min(WAIT, left)
  }
}

/** A command that runs in a sandbox, made by `Commands.start`. */
class Command {
  #sandbox
  #serial
  #sinks
  #hasStdin
  #decoders
  #moves = 0
  #parts
  #room
  #truncated
  #exitCode

  constructor(sandbox, pid, serial, sinks, hasStdin) {
    this.pid = pid
    this.#sandbox = sandbox
    this.#serial = serial
    this.#sinks = sinks
    this.#hasStdin = hasStdin
    this.#forget(0)
  }

  #forget(moves) {
    this.#moves = moves
    this.#decoders = [new TextDecoder(), new TextDecoder()]
    this.#parts = ['', '']
    const most = this.#sandbox.limits.output
    this.#room = [most, most]
    this.#truncated = false
    this.#exitCode = undefined
  }

  /** Takes output since the last time, and delivers it. */
  async #collect() {
    const { json, bytes } = await this.#sandbox.operate('takeOutput', { pid: this.pid, serial: this.#serial })
    if (json === null) throw gone(this.pid)
    if (json.moves !== this.#moves) this.#forget(json.moves)
    this.#truncated ||= json.truncated
    split(bytes, json.lengths).forEach((piece, stream) => {
      const said = this.#decoders[stream].decode(piece, { stream: json.exitCode === null })
      if (said) this.#sinks[stream]?.(said)
      const kept = said.slice(0, this.#room[stream])
      this.#truncated ||= kept.length < said.length
      this.#room[stream] -= kept.length
      this.#parts[stream] += kept
    })
    this.#exitCode = json.exitCode ?? undefined
  }

  #ended() {
    if (this.#exitCode === undefined) return undefined
    return new CommandResult(this.#exitCode, ...this.#parts, this.#truncated)
  }

  /** Throws where a wait would never end: all processes wait for the host. */
  async #checkProgress(signal) {
    await this.#collect()
    if (this.#ended()) return
    const listed = await list(this.#sandbox, signal)
    const runs = listed.some(({ pid }) => pid === this.pid)
    const proceeds = runs && (await drive(this.#sandbox, 0, signal))
    await this.#collect()
    if (this.#ended() || proceeds) return
    if (!runs) throw gone(this.pid)
    throw new SandboxError(
      `the command ${this.pid} waits for something that only the host can give, such as input (\`sendStdin\`, ` +
        '`closeStdin`)',
    )
  }

  /** Lets the sandbox run until the command has ended. */
  async wait(given = undefined) {
    const { timeoutMs, signal } = options(given, ['timeoutMs', 'signal'])
    await this.#sandbox.operate('beginWait')
    return this.finish(new Deadline(timeout(timeoutMs)), signal)
  }

  /** As `wait`, up to a deadline. */
  async finish(deadline, signal) {
    for (;;) {
      await this.#collect()
      const done = this.#ended()
      if (done) return done
      if (!(await drive(this.#sandbox, deadline.next(this.pid), signal))) await this.#checkProgress(signal)
    }
  }

  /** Lets the sandbox run for a slice of time; the exit code, if the command has ended. */
  async poll() {
    await this.#collect()
    if (!this.#ended()) {
      await drive(this.#sandbox, 0)
      await this.#collect()
    }
    return this.#exitCode
  }

  /**
   * Writes all of its input as it reads it, and ends the input. Input that it does not read is
   * dropped.
   */
  async feed(data, deadline, signal) {
    let proceeds = true
    for (let at = 0; at < data.length; ) {
      const piece = Buffer.from(data.subarray(at, at + PIECE)).toString('base64')
      const fed = await ask(this.#sandbox, { op: 'feed', pid: this.pid, data: piece }, signal)
      await this.#collect()
      if (fed === undefined || fed === null || fed === false) break
      if (!Number.isInteger(fed) || fed < 0 || fed > PIECE) throw damaged('its input')
      at += fed
      if (fed === 0 && !proceeds) await this.#checkProgress(signal)
      proceeds = fed > 0 || (await drive(this.#sandbox, deadline.next(this.pid), signal))
    }
    await ask(this.#sandbox, { op: 'close', pid: this.pid }, signal)
  }

  /** Sends the command and its descendants a signal, by number or name; whether it still ran. */
  async sendSignal(signal) {
    const number = typeof signal === 'string' ? constants.signals[signal] : signal
    if (!Number.isInteger(number)) throw new TypeError(`there is no signal ${JSON.stringify(signal)}`)
    await this.#collect()
    if (this.#ended()) return false
    return Boolean(await ask(this.#sandbox, { op: 'signal', pid: this.pid, signal: number }))
  }

  /** Sends SIGKILL. */
  kill() {
    return this.sendSignal('SIGKILL')
  }

  /** Writes to its input, which it has if it was started with `stdin: true`. */
  async sendStdin(data) {
    if (!this.#hasStdin) {
      throw new SandboxError(`the command ${this.pid} has no input: start it with \`stdin: true\``)
    }
    const piece = Buffer.from(asBytes(data, 'the input')).toString('base64')
    if (!(await ask(this.#sandbox, { op: 'input', pid: this.pid, data: piece }))) throw gone(this.pid)
  }

  /** Ends its input. */
  async closeStdin() {
    if (!(await ask(this.#sandbox, { op: 'close', pid: this.pid }))) throw gone(this.pid)
  }
}

/** All running commands. */
async function list(sandbox, signal) {
  const listed = await ask(sandbox, { op: 'list' }, signal)
  try {
    return listed.map(({ pid, config, tag }) => ({
      pid: Number(pid),
      command: [config.cmd, ...(config.args ?? [])],
      cwd: config.cwd ?? undefined,
      env: config.envs ?? {},
      tag: tag ?? undefined,
    }))
  } catch {
    throw damaged('a list')
  }
}

/** The program and arguments of a command. Text is a line of the shell. */
function words(command) {
  if (typeof command === 'string') return [SHELL, '-c', command]
  if (Array.isArray(command) && command.length > 0) return command.map((word) => text(word, 'a word of the command'))
  throw new TypeError('a command is text for the shell, or an array of a program and its arguments')
}

/** Commands of a sandbox. They are part of its state: a fork has its own. */
class Commands {
  #sandbox

  constructor(sandbox) {
    this.#sandbox = sandbox
  }

  async #start(command, { cwd, env = {}, tag, onStdout, onStderr }, hasStdin, signal) {
    const sinks = [callback(onStdout, 'onStdout'), callback(onStderr, 'onStderr')]
    const [cmd, ...args] = words(command)
    const wanted = { op: 'start', cmd, args, cwd: cwd ?? null, envs: env, stdin: hasStdin, size: null, tag: tag ?? null }
    const request = { wanted: JSON.stringify(wanted), starts: true }
    const outcome = await this.#sandbox.operate('command', request, { signal })
    let pid
    try {
      pid = result(outcome, RESULT).unwrap()
    } catch (error) {
      if (!(error instanceof ProgramError) || error.type !== 'FileNotFoundError' || !error.reason.includes(SHELL)) {
        throw error
      }
      const message = `the sandbox has no ${SHELL}, which runs commands that are text: give an array of a program and its arguments`
      throw new SandboxError(message, { cause: error })
    }
    if (!Number.isInteger(pid) || !outcome.json.serial) throw damaged('a start')
    return new Command(this.#sandbox, pid, outcome.json.serial, sinks, hasStdin)
  }

  /** Starts a command in the background. */
  async start(command, given) {
    const names = ['stdin', 'cwd', 'env', 'tag', 'onStdout', 'onStderr']
    const chosen = options(given, names)
    return this.#start(command, chosen, Boolean(chosen.stdin))
  }

  /**
   * Runs a command to its end. One that is cut short is killed, and the sandbox can be used
   * further.
   */
  async run(command, given) {
    const names = ['stdin', 'cwd', 'env', 'timeoutMs', 'onStdout', 'onStderr', 'signal']
    const chosen = options(given, names)
    const { stdin, signal } = chosen
    const data = stdin === undefined ? undefined : asBytes(stdin, 'stdin')
    const most = chosen.timeoutMs === undefined ? this.#sandbox.limits.timeout : timeout(chosen.timeoutMs)
    const deadline = new Deadline(most)
    const running = await this.#start(command, chosen, data !== undefined, signal)
    try {
      if (data !== undefined) await running.feed(data, deadline, signal)
      return await running.finish(deadline, signal)
    } catch (error) {
      // The sandbox may be closed or have failed; its processes have ended then.
      await running.kill().catch(() => {})
      throw error
    }
  }

  /** All running commands. */
  list() {
    return list(this.#sandbox)
  }

  /** A command that runs already, by its process number. */
  async connect(pid, given = undefined) {
    const { onStdout, onStderr } = options(given, ['onStdout', 'onStderr'])
    const sinks = [callback(onStdout, 'onStdout'), callback(onStderr, 'onStderr')]
    if (!(await this.list()).some((info) => info.pid === pid)) throw gone(pid)
    const { json } = await this.#sandbox.operate('adoptCommand', { pid })
    return new Command(this.#sandbox, pid, json, sinks, true)
  }
}

module.exports = { Command, CommandResult, Commands, drive, proceed, WAIT }
