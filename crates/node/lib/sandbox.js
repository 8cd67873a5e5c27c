'use strict'
// Sandboxes: live guests whose calls continue from one another.

const { Commands, proceed } = require('./commands.js')
const { interrupt, operate, own, release } = require('./native.js')
const { SandboxError } = require('./errors.js')
const { bytes: asBytes, callback, options, reference, text } = require('./options.js')
const { Port } = require('./ports.js')
const { result } = require('./result.js')
const { named, ToolCalls } = require('./tools.js')
const { encode } = require('./values.js')

/** The kinds of requests, as guests number them. */
const [RUN, APPLY] = [0, 2]
const STREAMS = [undefined, 'stdout', 'stderr']
const MAX_FORKS = 1_000_000

/** A state in the tree of a sandbox. */
class Checkpoint {
  constructor(id) {
    this.id = id
    Object.freeze(this)
  }

  toString() {
    return this.id
  }
}

function stateRef(given, name) {
  if (given instanceof Checkpoint) return { id: given.id }
  if (typeof given === 'string') return { name: given }
  throw new TypeError(`${name} is a Checkpoint or its name`)
}

/** Decodes streamed output, whose pieces end anywhere. */
function outputSink(onOutput) {
  if (callback(onOutput, 'onOutput') === undefined) return undefined
  const decoders = STREAMS.map(() => new TextDecoder())
  return (stream, piece) => {
    const said = decoders[stream].decode(piece, { stream: true })
    if (said) onOutput(STREAMS[stream], said)
  }
}

/** Files of a sandbox, between its calls. */
class Files {
  #sandbox

  constructor(sandbox) {
    this.#sandbox = sandbox
  }

  /** All bytes of a file. */
  async read(path) {
    const { bytes } = await this.#sandbox.operate('readFile', { path: text(path, 'the path') })
    return new Uint8Array(bytes)
  }

  /** A file as text in UTF-8. */
  async readText(path) {
    return Buffer.from(await this.read(path)).toString()
  }

  /** Writes a whole file. */
  async write(path, data) {
    await this.#sandbox.operate('writeFile', { path: text(path, 'the path') }, { bytes: asBytes(data, 'the data') })
  }

  /** The names in a directory, in order. */
  async list(path) {
    return (await this.#sandbox.operate('listFiles', { path: text(path, 'the path') })).json
  }

  /** Makes a directory, with those above it that are missing. */
  async makeDirectory(path) {
    await this.#sandbox.operate('makeDirectory', { path: text(path, 'the path') })
  }

  /** The kind, size and mode of a file; `undefined` where no file exists. */
  async stat(path) {
    return (await this.#sandbox.operate('statFile', { path: text(path, 'the path') })).json ?? undefined
  }

  /** Removes a file, or a directory with everything in it. */
  async remove(path) {
    await this.#sandbox.operate('removeFile', { path: text(path, 'the path') })
  }
}

class Sandbox {
  #handle
  #tools
  #limits
  /** Operations that are under way. */
  #running = new Set()
  #closed = false

  /** Made by `Warm.sandbox`. */
  constructor(handle, tools, limits) {
    this.#handle = handle
    this.#tools = tools
    this.#limits = limits
    this.files = new Files(this)
    this.commands = new Commands(this)
    own(this, handle)
  }

  /** The limits of its calls. */
  get limits() {
    return this.#limits
  }

  /** An operation of the native half on this sandbox. */
  operate(op, request, how) {
    if (this.#closed) return Promise.reject(new SandboxError('this sandbox is closed'))
    const running = operate({ op, session: this.#handle, ...request }, { ...how, owner: this })
    const done = running.catch(() => {}).then(() => this.#running.delete(done))
    this.#running.add(done)
    return running
  }

  async #evaluate(what, code, given, bytes) {
    const { name, onOutput, signal } = options(given, ['name', 'onOutput', 'signal'])
    const sink = outputSink(onOutput)
    const calls = new ToolCalls(this.#tools, this.#limits.result)
    const request = {
      what,
      code: text(code, 'the code'),
      name: text(name ?? '<sandbox>', 'the name'),
      streams: sink !== undefined,
    }
    const onTool = (tool, ended) => calls.answer(tool, ended)
    const outcome = await this.operate('run', request, { bytes, signal, onOutput: sink, onTool })
    return result(outcome, this.#limits.result, calls.failures)
  }

  /** Runs code; what the program throws is in the result. */
  runCode(code, given) {
    return this.#evaluate(RUN, code, given)
  }

  /** The value that code gives; throws what the program throws. */
  async eval(code, given) {
    return (await this.runCode(code, given)).unwrap()
  }

  /** Calls a function, given as an expression in the language of the guest. */
  async apply(code, args = [], given = undefined) {
    return (await this.applyResult(code, args, given)).unwrap()
  }

  /** As `apply`, but gives the whole result. */
  async applyResult(code, args = [], given = undefined) {
    if (!Array.isArray(args)) throw new TypeError('the arguments are an array: apply("(a) => a", [1])')
    return this.#evaluate(APPLY, code, given, encode(args))
  }

  /** Calls an export that takes and gives bytes: for guests that are no interpreters. */
  async call(name, input = '', given = undefined) {
    const { signal } = options(given, ['signal'])
    const request = { export: text(name, 'the export') }
    const { bytes } = await this.operate('callExport', request, { bytes: asBytes(input, 'the input'), signal })
    return new Uint8Array(bytes)
  }

  /** Keeps the present state. */
  async checkpoint(name = '') {
    return new Checkpoint((await this.operate('checkpoint', { name: text(name, 'the name') })).json)
  }

  /** Goes to any state of the tree, also after a call was cut short. */
  async rollback(to) {
    return new Checkpoint((await this.operate('rollback', { to: stateRef(to, 'the state') })).json)
  }

  /** Sandboxes that start from the present state. */
  async fork(count = 1) {
    if (!Number.isInteger(count) || count < 0 || count > MAX_FORKS) {
      throw new TypeError(`the number of forks is a whole number up to ${MAX_FORKS}`)
    }
    const { json } = await this.operate('fork', { count })
    return json.map((handle) => new Sandbox(handle, this.#tools, this.#limits))
  }

  /** Every state of its tree. */
  async tree() {
    const { json } = await this.operate('tree')
    return json.states.map(({ id, parent, name, ...sizes }) => ({
      checkpoint: new Checkpoint(id),
      parent: parent === null ? undefined : new Checkpoint(parent),
      name: name ?? undefined,
      ...sizes,
    }))
  }

  /** The state that it stands on. */
  async at() {
    return new Checkpoint((await this.operate('tree')).json.at)
  }

  /** The differences of two states. */
  async diff(one, two) {
    return (await this.operate('diff', { one: stateRef(one, 'the state'), two: stateRef(two, 'the other state') })).json
  }

  /** Forgets a state. */
  async drop(which) {
    await this.operate('dropState', { which: stateRef(which, 'the state') })
  }

  /** Saves what it became since it was last saved there; gives the id of the saved state. */
  async save(to) {
    return (await this.operate('save', { to: reference(to, 'the place') })).json
  }

  /** The changes since a state, as bytes for `applyDelta`. */
  async delta(since) {
    const { bytes } = await this.operate('delta', { since: stateRef(since, 'the state') })
    return new Uint8Array(bytes)
  }

  /** Goes to the state that a delta makes of the present one. */
  async applyDelta(delta) {
    return new Checkpoint((await this.operate('applyDelta', {}, { bytes: asBytes(delta, 'the delta') })).json)
  }

  /** Offers other tools from the next call on. */
  async offer(tools) {
    const offered = named(tools)
    await this.operate('offer', { tools: [...offered.keys()] })
    this.#tools = offered
  }

  /** A port within a sandbox of a Linux program, for requests to a server in it. */
  port(number) {
    return new Port(this, number)
  }

  /**
   * Lets background work of a Linux program run for so many milliseconds, or until all of it waits
   * for the host.
   */
  async proceed(milliseconds, given = undefined) {
    await proceed(this, milliseconds, given)
  }

  /** Why it refuses calls; `undefined` if it does not. */
  async failed() {
    return (await this.operate('failed')).json ?? undefined
  }

  /** Stops the call that is under way. */
  stop() {
    interrupt(this.#handle, false)
  }

  /** Closes it, stops a call that is under way, and waits for its end. Forks stay open. */
  async close() {
    this.#closed = true
    interrupt(this.#handle, true)
    await Promise.all(this.#running)
    release(this, this.#handle)
  }
}

/** Adds the methods of `using` and `await using`, where the runtime knows their symbols. */
function disposable(type, dispose) {
  if (Symbol.dispose) Object.defineProperty(type.prototype, Symbol.dispose, { value: dispose })
  if (Symbol.asyncDispose) {
    Object.defineProperty(type.prototype, Symbol.asyncDispose, {
      value() {
        return this.close()
      },
    })
  }
}

disposable(Sandbox, function dispose() {
  // Begins to close it, and does not wait.
  this.close().catch(() => {})
})

module.exports = { Sandbox, Checkpoint, disposable, outputSink }
