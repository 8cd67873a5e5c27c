'use strict'
// Options as users give them. One that is not known is an error.

const { homedir } = require('node:os')
const path = require('node:path')

const OUTPUT = 16 * 2 ** 20
const RESULT = 128 * 2 ** 20
const MEMORY = 4 * 2 ** 30
const STORAGE = 2 ** 30
const UNITS = { '': 1, B: 1, KIB: 2 ** 10, MIB: 2 ** 20, GIB: 2 ** 30, KB: 1e3, MB: 1e6, GB: 1e9 }

/** The options; a TypeError for one whose name is not among `names`. */
function options(given, names) {
  if (given === undefined) return {}
  if (given === null || typeof given !== 'object') throw new TypeError('options are an object')
  for (const name of Object.keys(given)) {
    if (!names.includes(name)) {
      throw new TypeError(`there is no option ${JSON.stringify(name)}; there are ${names.join(', ')}`)
    }
  }
  return given
}

/** Bytes, from a number or from text like "64MiB". */
function size(given, name, otherwise) {
  if (given === undefined || given === null) return otherwise
  const parts = typeof given === 'string' && /^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$/.exec(given)
  const bytes = parts ? Math.floor(Number(parts[1]) * UNITS[parts[2].toUpperCase()]) : given
  if (!Number.isSafeInteger(bytes) || bytes <= 0) {
    throw new TypeError(`${name} is no size: give bytes above 0 as a number, or text like "64MiB"`)
  }
  return bytes
}

/** Milliseconds, or null for no limit. */
function timeout(given, name = 'timeoutMs') {
  if (given === undefined || given === null || given === Infinity) return null
  if (typeof given !== 'number' || !(given > 0)) throw new TypeError(`${name} is a number of milliseconds above 0`)
  return given
}

/** Text; a TypeError for another value. */
function text(given, name) {
  if (typeof given !== 'string') throw new TypeError(`${name} is a string, not ${kind(given)}`)
  return given
}

function kind(value) {
  return value === null ? 'null' : Array.isArray(value) ? 'an array' : `a value of type ${typeof value}`
}

/** Bytes of a string, a Uint8Array or an ArrayBuffer. */
function bytes(given, name) {
  if (typeof given === 'string') return Buffer.from(given)
  if (given instanceof Uint8Array) return given
  if (given instanceof ArrayBuffer) return new Uint8Array(given)
  throw new TypeError(`${name} is a string or a Uint8Array, not ${kind(given)}`)
}

/** A function, if one is given. */
function callback(given, name) {
  if (given !== undefined && typeof given !== 'function') throw new TypeError(`${name} is a function`)
  return given
}

/** The path of a file URL or text. */
function reference(given, name) {
  return given instanceof URL && given.protocol === 'file:' ? require('node:url').fileURLToPath(given) : text(given, name)
}

/** The limits of calls, as the native half reads them. */
function limits({ timeoutMs, cpuLimitMs, memoryLimit, outputLimit }) {
  return {
    timeout: timeout(timeoutMs),
    cpu: timeout(cpuLimitMs, 'cpuLimitMs'),
    memory: size(memoryLimit, 'memoryLimit', null),
    output: size(outputLimit, 'outputLimit', OUTPUT),
  }
}

/**
 * Where compiled guests are kept between runs: `$AFRESH_CACHE`, or `afresh` in the user's cache
 * directory.
 */
function cacheDir() {
  return process.env.AFRESH_CACHE || path.join(process.env.XDG_CACHE_HOME || path.join(homedir(), '.cache'), 'afresh')
}

module.exports = { options, size, timeout, text, bytes, callback, reference, limits, cacheDir, OUTPUT, RESULT, MEMORY, STORAGE }
