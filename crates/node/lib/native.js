'use strict'
// The native half: its location, and the operations that it runs on separate threads.

const path = require('node:path')
const { existsSync } = require('node:fs')
const { ofNative, SandboxError, StoppedError } = require('./errors.js')

const SUPPORTED = 'linux-x64 and linux-arm64 with glibc'
const PLATFORMS = ['linux-x64', 'linux-arm64']
/** The kinds of events, as `mailbox.rs` numbers them. */
const [DONE, FAILED, OUTPUT, TOOL] = [0, 1, 2, 3]
const LONGEST_TIMER = 0x7fffffff

function load() {
  const platform = `${process.platform}-${process.arch}`
  const given = process.env.AFRESH_NATIVE
  if (!given && !PLATFORMS.includes(platform)) {
    throw new Error(`afresh has no native half for ${platform}: it runs on ${SUPPORTED}`)
  }
  const file = given ? path.resolve(given) : path.join(__dirname, '..', `afresh.${platform}.node`)
  if (!existsSync(file)) {
    throw new Error(
      `the native half of afresh for ${platform} is not at ${file}: install the package again, or build it in the ` +
        'repository with `cargo xtask node`',
    )
  }
  const module = { exports: {} }
  try {
    process.dlopen(module, file)
  } catch (cause) {
    throw new Error(`the native half of afresh (${file}) does not load here: it needs ${SUPPORTED}`, { cause })
  }
  return module.exports
}

const native = load()
/** Operations that are under way, by their numbers. */
const pending = new Map()
let next = 0
let ended = false
// Keeps the event loop alive while an operation is under way.
let keepAlive

function add(operation) {
  do {
    next = (next + 1) >>> 0
  } while (pending.has(next))
  pending.set(next, operation)
  keepAlive ??= setInterval(() => {}, LONGEST_TIMER)
  return next
}

function remove(number, operation) {
  pending.delete(number)
  operation.signal?.removeEventListener('abort', operation.onAbort)
  operation.tools?.abort(new StoppedError('the call that wanted the tool has ended'))
  if (pending.size === 0) {
    clearInterval(keepAlive)
    keepAlive = undefined
  }
}

/** Takes an event. It must not throw: the native half calls it from the event loop. */
function deliver(number, kind, detail, text, bytes) {
  const operation = pending.get(number)
  if (operation === undefined) return
  if (kind === OUTPUT) {
    try {
      operation.onOutput?.(detail, bytes)
    } catch (error) {
      fail(number, operation, error)
    }
  } else if (kind === TOOL) {
    answer(number, operation, detail, bytes)
  } else {
    remove(number, operation)
    settle(operation, kind, JSON.parse(text), bytes)
  }
}

/** Ends an operation because a callback has thrown. */
function fail(number, operation, error) {
  operation.thrown ??= { error }
  native.stop(number)
}

function settle(operation, kind, json, bytes) {
  const failure = kind === FAILED ? json : json?.error
  if (operation.thrown) {
    operation.reject(operation.thrown.error)
  } else if (operation.signal?.aborted && failure?.class === 'StoppedError') {
    operation.reject(operation.signal.reason)
  } else if (kind === DONE) {
    operation.resolve({ json, bytes })
  } else {
    operation.reject(ofNative(json))
  }
}

async function answer(number, operation, toolCall, request) {
  operation.tools ??= new AbortController()
  try {
    const reply = await operation.onTool(request, operation.tools.signal)
    if (pending.get(number) === operation) native.reply(number, toolCall, reply)
  } catch (error) {
    // Errors of tools are replies; this is one of the package.
    if (pending.get(number) === operation) fail(number, operation, error)
  }
}

/**
 * Runs an operation: `{ json, bytes }` of its result. Until then the garbage collector keeps
 * `owner`. `onTool` gives the bytes of the answer to a tool call; without it such calls fail.
 */
function operate(request, { bytes, signal, owner, onOutput, onTool = refuse } = {}) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted()
    if (ended) throw new SandboxError('the process is exiting')
    const operation = { resolve, reject, signal, owner, onOutput, onTool }
    const number = add(operation)
    if (signal) {
      operation.onAbort = () => native.stop(number)
      signal.addEventListener('abort', operation.onAbort, { once: true })
    }
    try {
      native.start(number, JSON.stringify(request), bytes)
    } catch (error) {
      remove(number, operation)
      throw error
    }
  })
}

function refuse() {
  throw new SandboxError('the host offers no functions here')
}

/**
 * Estimated bytes of a sandbox outside the heap: what a small call writes, which the garbage
 * collector has to know.
 */
const COST = 256 * 1024

function free(handle) {
  native.account(COST, 1)
  native.release(handle)
}

const collected = new FinalizationRegistry(free)

/** Frees a handle when `owner` is collected, or `release` is called for it. */
function own(owner, handle) {
  native.account(COST, 0)
  collected.register(owner, handle, owner)
}

function release(owner, handle) {
  // Once, however often it is closed.
  if (collected.unregister(owner)) free(handle)
}

/** Stops the call of a session at once; with `close` it is the last one. */
function interrupt(handle, close) {
  native.interrupt(handle, close ? 1 : 0)
}

native.listen(deliver)
process.on('exit', () => {
  ended = true
  native.end()
})

module.exports = { interrupt, operate, own, release }
