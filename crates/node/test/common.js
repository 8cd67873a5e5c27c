'use strict'
// Shared by the tests: one warm guest for each test file, and a server.

const { spawn } = require('node:child_process')
const { mkdtempSync, rmSync, writeFileSync } = require('node:fs')
const { createServer } = require('node:net')
const { tmpdir } = require('node:os')
const path = require('node:path')
const afresh = require('afresh')

/** The command `afresh`, which tests of servers need. */
exports.command = process.env.AFRESH_TEST_COMMAND

let js
/** A warm JavaScript guest, which all tests of a file share. */
exports.js = () => (js ??= afresh.warm('js', { setup: 'const greet = (name) => `hello, ${name}`; globalThis.count = 40' }))

/** Runs a test with a sandbox of it, and closes that. */
exports.withSandbox = (options, run) => async (t) => {
  const sandbox = await (await exports.js()).sandbox(options)
  try {
    await run(sandbox, t)
  } finally {
    await sandbox.close()
  }
}

/** Collects garbage, and lets finalizers run. */
exports.collect = async () => {
  for (let round = 0; round < 5; round += 1) {
    global.gc()
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}

/** A port that nothing listens on. */
const freePort = () =>
  new Promise((resolve) => {
    const server = createServer().listen(0, '127.0.0.1', () => {
      const { port } = server.address()
      server.close(() => resolve(port))
    })
  })

/** Starts a server; gives its address. */
exports.serve = async (t) => {
  const folder = mkdtempSync(path.join(tmpdir(), 'afresh-node-serve-'))
  const port = await freePort()
  const guest = path.join(__dirname, '../guests/js.wasm')
  writeFileSync(path.join(folder, 'keys'), 'me secret-key\n', { mode: 0o600 })
  writeFileSync(path.join(folder, 'serve.toml'), `addr = "127.0.0.1:${port}"
[sandboxes]
keys = "keys"
store = "sandboxes"
[[sandboxes.template]]
name = "script"
language = "javascript"
guest = ${JSON.stringify(guest)}
memory-mib = 256
`)
  const server = spawn(exports.command, ['serve', '--config', path.join(folder, 'serve.toml')], { stdio: ['ignore', 'ignore', 'pipe'] })
  let said = ''
  server.stderr.on('data', (piece) => (said += piece))
  const ended = new Promise((resolve) => server.once('exit', resolve))
  t.after(async () => {
    server.kill()
    await ended
    rmSync(folder, { recursive: true })
  })
  const url = `http://127.0.0.1:${port}`
  for (let tries = 0; tries < 600 && server.exitCode === null; tries += 1) {
    const up = await fetch(`${url}/readyz`).then((response) => response.ok, () => false)
    if (up) return url
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
  throw new Error(`the server did not start: ${said}`)
}
