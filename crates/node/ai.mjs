// Tools for the AI SDK (`ai`) over one sandbox, of this process or of a server.
//
// Promises: calls run one after the other, though a model makes several at a time. Code that is cut
// short is undone. An error is in the text of the result, for the model to read.

import path from 'node:path'
import { jsonSchema, tool } from 'ai'
import errors from './lib/errors.js'

/** Characters of one text. */
const MAX_TEXT = 50_000
/** Checkpoints that a model may keep at a time, and characters of a name. */
const MAX_CHECKPOINTS = 100
const MAX_NAME = 200
/** The start of relative paths, as of commands. */
const HOME = '/home/user'

const absolute = (name) => path.posix.resolve(HOME, name)

/** Text without its middle, if it is long. */
function shortened(text) {
  if (text.length <= MAX_TEXT) return text
  const half = MAX_TEXT / 2
  const left = text.length - MAX_TEXT
  return `${text.slice(0, half)}\n[${left} characters left out]\n${text.slice(-half)}`
}

const joined = (...parts) => parts.filter(Boolean).map((part) => part.replace(/\n+$/, '')).join('\n')

/** An error for a model. */
function described(error, undone) {
  const { trace, reason = error.message } = error
  // The trace of Python has the message, that of JavaScript has not.
  const first = `${error.type ?? error.name}: ${reason}`
  const text = trace?.includes(reason) ? trace.trimEnd() : joined(first, trace)
  return undone ? `${text}; its changes are undone` : text
}

/** Runs code; a sandbox of this process that it leaves unusable returns to the state before. */
async function runCode(sandbox, code, signal) {
  if (sandbox.failed === undefined) {
    const done = await sandbox.runCode(code, { signal })
    return joined(done.stdout, done.stderr, done.error ? described(done.error) : done.text)
  }
  const before = await sandbox.checkpoint()
  let undone = false
  try {
    const done = await sandbox.runCode(code, { signal })
    undone = (await sandbox.failed()) !== undefined
    const value = done.value === undefined ? '' : done.text
    return joined(done.stdout, done.stderr, done.error ? described(done.error, undone) : value)
  } finally {
    if (undone || (await sandbox.failed()) !== undefined) await sandbox.rollback(before)
    await sandbox.drop(before)
  }
}

/** The tools; see `ai.d.mts`. */
export function sandboxTools(sandbox, { commands = false } = {}) {
  if (commands && sandbox.commands === undefined) {
    throw new TypeError('a sandbox of a server has no `commands` in this client: use `runCode`, or an E2B client')
  }
  const names = new Map()
  let last = Promise.resolve()
  const define = (description, properties, work) =>
    tool({
      description,
      inputSchema: jsonSchema({
        type: 'object',
        properties: Object.fromEntries(
          Object.entries(properties).map(([name, about]) => [name, { type: 'string', description: about }]),
        ),
        required: Object.keys(properties),
        additionalProperties: false,
      }),
      execute: (input, { abortSignal }) => {
        const done = last.then(async () => {
          abortSignal?.throwIfAborted()
          try {
            return shortened(await work(input, abortSignal))
          } catch (error) {
            if (error instanceof errors.AfreshError) return `error: ${shortened(error.message)}`
            throw error
          }
        })
        last = done.catch(() => {})
        return done
      },
    })

  const tools = {
    run_code: define(
      'Run code in the sandbox. The value of its last expression is returned, with its output.',
      { code: 'The code.' },
      ({ code }, signal) => runCode(sandbox, code, signal),
    ),
    read_file: define('Read a text file of the sandbox.', { path: 'Its path.' }, ({ path }) =>
      sandbox.files.readText(absolute(path)),
    ),
    write_file: define(
      'Write a text file of the sandbox.',
      { path: 'Its path. Missing directories are made.', content: 'Its whole content.' },
      async ({ path, content }) => {
        await sandbox.files.write(absolute(path), content)
        return `wrote ${Buffer.byteLength(content)} bytes`
      },
    ),
    checkpoint: define(
      'Save the present state of the sandbox: variables, files and processes.',
      { name: 'A name to roll back to. An earlier checkpoint of this name is forgotten.' },
      async ({ name }) => {
        if (name.length > MAX_NAME) return `error: the name has more than ${MAX_NAME} characters: give a shorter one`
        const former = names.get(name)
        if (former === undefined && names.size >= MAX_CHECKPOINTS) {
          return `error: there are ${MAX_CHECKPOINTS} checkpoints, the maximum: use one of their names again`
        }
        names.set(name, await sandbox.checkpoint(name))
        if (former !== undefined) await sandbox.drop(former)
        return `saved ${name}`
      },
    ),
    rollback: define(
      'Return the sandbox to a saved state.',
      { name: 'The name of a checkpoint.' },
      async ({ name }) => {
        const state = names.get(name)
        if (state === undefined) {
          return `error: there is no checkpoint ${name}; there are: ${[...names.keys()].join(', ') || 'none'}`
        }
        await sandbox.rollback(state)
        return `the sandbox is in the state ${name}`
      },
    ),
  }
  if (commands) {
    tools.run_command = define(
      'Run a shell command in the sandbox to its end, and return its output and exit code.',
      { command: 'A line for the shell.' },
      async ({ command }, signal) => {
        const done = await sandbox.commands.run(command, { signal })
        return joined(done.stdout, done.stderr, done.exitCode === 0 ? '' : `exit code ${done.exitCode}`)
      },
    )
  }
  return tools
}
