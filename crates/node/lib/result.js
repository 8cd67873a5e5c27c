'use strict'
// The result of an evaluation.

const { MarshalError, ProgramError, ofNative } = require('./errors.js')
const { richResult } = require('./rich.js')
const { decode } = require('./values.js')

class Result {
  constructor(parts) {
    Object.assign(this, parts)
  }

  /** The value; throws the error if there is one. */
  unwrap() {
    if (this.error !== undefined) throw this.error
    return this.value
  }
}

/** How a plain value shows that the guest did not show itself. */
function plain(value) {
  if (value === undefined) return ''
  if (typeof value === 'string') return JSON.stringify(value)
  if (typeof value === 'bigint') return `${value}n`
  return Object.is(value, -0) ? '-0' : String(value)
}

/** Splits bytes at lengths. */
function split(bytes, lengths) {
  let at = 0
  return lengths.map((length) => bytes.subarray(at, (at += length)))
}

function readAnswer(answer, limit, failures) {
  // `[0, value, text]`, or `[1, name, message, trace, number]` for an exception.
  const parts = decode(answer, limit)
  if (Array.isArray(parts) && parts[0] === 0 && parts.length === 3) {
    const [, value, text] = parts
    return { value, text: typeof text === 'string' ? text : plain(value), error: undefined }
  }
  if (!Array.isArray(parts) || parts[0] !== 1 || parts.length !== 5) {
    throw new MarshalError("the guest's answer is damaged")
  }
  const [, name, message, trace, number] = parts
  const cause = failures?.get(number)
  const options = cause === undefined ? undefined : { cause: cause.error }
  const shown = typeof trace === 'string' ? trace : undefined
  return { value: undefined, text: '', error: new ProgramError(String(name), String(message), shown, options) }
}

/** The cost of a call; amounts that are not known are undefined. */
function cost({ peakMemory, dirtyPages, ...known }) {
  return Object.freeze({ ...known, peakMemory: peakMemory ?? undefined, dirtyPages: dirtyPages ?? undefined })
}

/** Converts the outcome of the native half. `failures` are errors of tools by their numbers. */
function result({ json, bytes }, limit, failures) {
  const [answer, stdout, stderr] = split(bytes, json.lengths)
  let read = { value: undefined, text: '', error: json.error && ofNative(json.error) }
  if (!json.error) {
    try {
      read = readAnswer(answer, limit, failures)
    } catch (error) {
      // The output stays readable.
      read = { value: undefined, text: '', error }
    }
  }
  return new Result({
    ...read,
    stdout: stdout.toString(),
    stderr: stderr.toString(),
    truncated: json.truncated,
    results: json.results.map(richResult),
    cost: cost(json.cost),
    dirtyPages: json.cost.dirtyPages ?? undefined,
    microseconds: json.cost.wallMs * 1e3,
  })
}

module.exports = { Result, result, split }
