'use strict'
// Tools: functions of the host that programs call by their names.

const { MarshalError } = require('./errors.js')
const { decode, encode } = require('./values.js')

/** Maximum errors kept, each with all objects that are reachable from it. */
const MAX_FAILURES = 16
const NAME = /^[\p{ID_Start}$_][\p{ID_Continue}$]*$/u

/** Tools by their names, from an object or from an array of named functions. */
function named(tools) {
  if (tools === undefined) return new Map()
  if (tools === null || typeof tools !== 'object') throw new TypeError('tools are an object or an array of functions')
  const entries = Array.isArray(tools) ? tools.map((tool) => [tool?.name, tool]) : Object.entries(tools)
  for (const [name, tool] of entries) {
    if (typeof tool !== 'function') throw new TypeError(`the tool ${JSON.stringify(name)} is not a function`)
    if (!NAME.test(name)) {
      throw new TypeError(`${JSON.stringify(name)} cannot be the name of a tool: programs call it by a plain name`)
    }
  }
  return new Map(entries)
}

/** The tool calls of one evaluation. */
class ToolCalls {
  #tools
  #limit
  #failed = 0
  /** The most recent errors, by their numbers. */
  failures = new Map()

  constructor(tools, limit) {
    this.#tools = tools
    this.#limit = limit
  }

  #failure(error) {
    const number = this.#failed
    this.#failed += 1
    this.failures.set(number, { error })
    this.failures.delete(number - MAX_FAILURES)
    const isError = error instanceof Error
    const name = isError ? String(error.name) : 'Error'
    const message = isError ? String(error.message) : String(error)
    return encode([1, name, message, number])
  }

  /** The bytes of the answer to a tool call. An error is an answer as well. */
  async answer(request, signal) {
    try {
      const [name, positional, keywords] = this.#read(request)
      const tool = this.#tools.get(name)
      if (tool === undefined) throw new ReferenceError(`there is no tool ${JSON.stringify(name)}`)
      // Languages with named arguments give them as an object after the others.
      const given = keywords && Object.keys(keywords).length > 0 ? [...positional, keywords] : positional
      return encode([0, await tool.apply({ signal }, given)])
    } catch (error) {
      return this.#failure(error)
    }
  }

  #read(request) {
    // `[name, arguments]`, with named arguments behind them from languages that have them.
    const whole = decode(request, this.#limit)
    if (!Array.isArray(whole) || typeof whole[0] !== 'string' || !Array.isArray(whole[1])) {
      throw new MarshalError('a tool call is damaged')
    }
    return whole
  }
}

module.exports = { named, ToolCalls }
