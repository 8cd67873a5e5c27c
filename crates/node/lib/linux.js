'use strict'
// Linux programs: interpreters of the host and of OCI images as guests, and single runs of any
// program.

const { execFile } = require('node:child_process')
const { accessSync, constants, existsSync, realpathSync, statSync } = require('node:fs')
const path = require('node:path')
const { promisify } = require('node:util')
const { CommandResult } = require('./commands.js')
const { OpenError } = require('./errors.js')
const { operate } = require('./native.js')
const given = require('./options.js')
const { split } = require('./result.js')
const { explain, grants, Warm } = require('./warm.js')

/** Milliseconds that an interpreter has to report its own directories. */
const REPORT_TIMEOUT = 30_000
/** Milliseconds of a warm-up. */
const START = 60_000
const INTERPRETER = /^python(\d+(\.\d+)*t?)?$/
/** Host directories that every program may read anyway. */
const SYSTEM = ['/usr', '/lib', '/lib64', '/bin', '/sbin']
const PATH = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'
const REPORT = 'import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix]))'
const ENVIRONMENT = { PATH, HOME: '/home/user', LANG: 'C.UTF-8' }
const OPTIONS = ['setup', 'dirs', 'net', 'env', 'cwd', 'timeoutMs', 'setupTimeoutMs', 'memoryLimit', 'storageLimit']

function isExecutable(file) {
  try {
    accessSync(file, constants.X_OK)
    return statSync(file).isFile()
  } catch {
    return false
  }
}

/** The path of a program of the host. */
function findProgram(name) {
  const folders = (process.env.PATH ?? '').split(':').filter(Boolean)
  const candidates = name.includes('/') ? [name] : folders.map((folder) => path.join(folder, name))
  const found = candidates.find(isExecutable)
  if (found === undefined) {
    throw new OpenError(`the program ${JSON.stringify(name)} was not found: it must be in PATH, or be the path of an executable`)
  }
  return path.resolve(found)
}

/**
 * The file of a Python interpreter, and the directories that it needs. The interpreter reports them
 * itself.
 */
async function interpreter(name) {
  const file = findProgram(name)
  if (!INTERPRETER.test(path.basename(file))) {
    throw new OpenError(
      `the program ${JSON.stringify(name)} evaluates no code that is known: \`linux\` takes a Python interpreter, such ` +
        "as 'python3'. `exec` runs any program once, and `sandbox.commands.run` within a sandbox",
    )
  }
  try {
    const { stdout } = await promisify(execFile)(file, ['-I', '-c', REPORT], { timeout: REPORT_TIMEOUT })
    const [executable, ...prefixes] = JSON.parse(stdout)
    const granted = prefixes.filter((prefix) => !SYSTEM.some((system) => prefix.startsWith(system)))
    return [executable, [...new Set(granted)].sort()]
  } catch (cause) {
    throw new OpenError(`the interpreter ${file} does not run on this host: ${cause.message}`, { cause })
  }
}

function environment(executable, granted) {
  const variables = { PATH: `${path.dirname(executable)}:${PATH}` }
  // Some distributions of Python find their own library only through it.
  const libraries = (process.env.LD_LIBRARY_PATH ?? '').split(':')
  const own = libraries.filter((library) => granted.some((prefix) => library.startsWith(`${prefix}/`)))
  if (own.length > 0) variables.LD_LIBRARY_PATH = own.join(':')
  return variables
}

/** The present directory, if a program that was granted these may read it. */
function here(granted) {
  const present = realpathSync(process.cwd())
  return granted.some((folder) => present === folder || present.startsWith(path.join(folder, '/'))) ? present : undefined
}

/** A setup that goes to a directory and imports from there. It defines no name. */
function enter(directory) {
  const quoted = JSON.stringify(directory)
  return `__import__('os').chdir(${quoted}); __import__('sys').path.insert(0, ${quoted})`
}

async function opened(reference, granted, { setup, cwd, cache, signal, ...chosen }) {
  const first = cwd === undefined ? [] : [enter(given.reference(cwd, 'cwd'))]
  const openWith = async (setups) => {
    const limits = given.limits(chosen)
    const request = { op: 'openProgram', reference, setups, cache: cache ?? given.cacheDir(), limits, linux: granted }
    return new Warm((await operate(request, { signal })).json, reference)
  }
  if (setup === undefined) return openWith(first)
  try {
    return await openWith([...first, given.text(setup, 'the setup')])
  } catch (error) {
    if (!(error instanceof OpenError)) throw error
    // The guest ends where a setup raises. Run as other code, it reports the exception.
    await explain(() => openWith(first), setup)
    throw error
  }
}

/** Warms up a Python interpreter of the host, unmodified, as a Linux program in a sandbox. */
async function linux(program = 'python3', opts = undefined) {
  const chosen = given.options(opts, [...OPTIONS, 'signal'])
  const [executable, own] = await interpreter(given.reference(program, 'the program'))
  const env = { ...environment(executable, own), ...chosen.env }
  const start = given.timeout(chosen.setupTimeoutMs ?? START, 'setupTimeoutMs')
  const granted = grants({ ...chosen, cwd: undefined, env, start })
  const cwd = chosen.cwd ?? here(granted.dirs)
  granted.dirs.push(...own)
  return opened(executable, granted, { ...chosen, memoryLimit: undefined, cwd })
}

/** Warms up the interpreter of a container image, as `linux` does with one of the host. */
async function image(reference, opts) {
  const chosen = given.options(opts, [...OPTIONS, 'cache', 'signal'])
  const name = given.reference(reference, 'the image')
  const folder = name.slice(0, Math.max(name.lastIndexOf('@'), 0))
  if (!name.startsWith('oci://') && !existsSync(name) && !(folder && existsSync(folder))) {
    throw new OpenError(`there is no image at ${name}: give oci://REGISTRY/NAME:TAG, a directory in the OCI layout, or a tar`)
  }
  const start = given.timeout(chosen.setupTimeoutMs ?? START, 'setupTimeoutMs')
  const granted = grants({ ...chosen, cwd: undefined, start })
  return opened(name, granted, { ...chosen, memoryLimit: undefined, cwd: chosen.cwd ?? here(granted.dirs) })
}

/** Runs a program of the host once in a pristine sandbox, from its start to its end. */
async function exec(command, opts) {
  const names = ['stdin', 'dirs', 'net', 'env', 'cwd', 'timeoutMs', 'memoryLimit', 'storageLimit', 'outputLimit']
  const chosen = given.options(opts, [...names, 'onStdout', 'onStderr', 'signal'])
  if (!Array.isArray(command) || command.length === 0) {
    throw new TypeError("a command is an array of its program and its arguments: ['sh', '-c', '…'] runs a shell")
  }
  const [program, ...args] = command.map((word) => given.text(word, 'a word of the command'))
  const sinks = [given.callback(chosen.onStdout, 'onStdout'), given.callback(chosen.onStderr, 'onStderr')]
  const decoders = sinks.map(() => new TextDecoder())
  const granted = grants({ ...chosen, env: { ...ENVIRONMENT, ...chosen.env } })
  granted.cwd ??= here(granted.dirs) ?? null
  const request = {
    op: 'exec',
    path: findProgram(program),
    arguments: args,
    linux: granted,
    timeout: given.timeout(chosen.timeoutMs),
    output: given.size(chosen.outputLimit, 'outputLimit', given.OUTPUT),
    streams: sinks.some(Boolean),
  }
  const onOutput = (stream, piece) => {
    const said = decoders[stream - 1].decode(piece, { stream: true })
    if (said) sinks[stream - 1]?.(said)
  }
  const input = given.bytes(chosen.stdin ?? '', 'stdin')
  const { json, bytes } = await operate(request, { bytes: input, signal: chosen.signal, onOutput })
  const [stdout, stderr] = split(bytes, json.lengths).map(String)
  return new CommandResult(json.exitCode, stdout, stderr, json.truncated)
}

module.exports = { linux, image, exec }
