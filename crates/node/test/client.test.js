'use strict'
const assert = require('node:assert/strict')
const { spawn } = require('node:child_process')
const { mkdtempSync, rmSync, writeFileSync } = require('node:fs')
const { createServer } = require('node:net')
const { tmpdir } = require('node:os')
const path = require('node:path')
const test = require('node:test')
const { Client, ExecutionError, HttpError } = require('afresh/client')

const command = process.env.AFRESH_TEST_COMMAND
const skip = !command && 'SKIPPED: $AFRESH_TEST_COMMAND does not name the command `afresh`'

/** A port that nothing listens on. */
const freePort = () =>
  new Promise((resolve) => {
    const server = createServer().listen(0, '127.0.0.1', () => {
      const { port } = server.address()
      server.close(() => resolve(port))
    })
  })

/** Starts a server; gives its address. */
async function serve(t) {
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
  const server = spawn(command, ['serve', '--config', path.join(folder, 'serve.toml')], { stdio: ['ignore', 'ignore', 'pipe'] })
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

test('sandboxes of a server', { skip }, async (t) => {
  const url = await serve(t)
  const wrong = new Client({ url, apiKey: 'wrong' })
  await assert.rejects(wrong.create('script'), (error) => error instanceof HttpError && error.status === 401)
  const client = new Client({ url, apiKey: 'secret-key' })
  const sb = await client.create('script', { timeoutMs: 60_000, metadata: { of: 'test' } })
  const pieces = []
  const done = await sb.runCode("console.log('out'); ({ a: [1] })", { onOutput: (...piece) => pieces.push(piece) })
  assert.deepEqual([done.stdout, done.error, pieces], ['out\n', undefined, [['stdout', 'out\n']]])
  assert.deepEqual(done.results[0].json, { a: [1] })
  const { error } = await sb.runCode("throw new RangeError('far')")
  assert.ok(error instanceof ExecutionError && error.type === 'RangeError')
  await sb.runCode('globalThis.x = 1')
  const clean = await sb.checkpoint('clean')
  await sb.runCode('x = 2')
  const [fork] = await sb.fork(1)
  await sb.rollback('clean')
  assert.deepEqual([(await sb.runCode('x')).text, (await fork.runCode('x')).text], ['1', '2'])
  assert.ok((await sb.tree()).states.some((state) => state.checkpointID === clean))
  await sb.files.write('/tmp/a.bin', new Uint8Array([0, 255]))
  assert.deepEqual(await sb.files.read('/tmp/a.bin'), new Uint8Array([0, 255]))
  await sb.setTimeout(120_000)
  const ids = []
  for await (const info of client.list({ metadata: { of: 'test' } })) ids.push(info.sandboxID)
  assert.ok(ids.includes(sb.id))
  await fork.kill()
  await fork.kill().then(() => assert.fail('killed twice'), (e) => assert.equal(e.status, 404))
  await sb.pause()
  const again = await client.connect(sb.id)
  assert.equal((await again.runCode('x')).text, '1')
  await again.kill()
})

test('a client needs an address and a key', () => {
  assert.throws(() => new Client({ url: 'http://127.0.0.1:1', apiKey: undefined }), /apiKey/)
  assert.throws(() => new Client({ uri: 'x' }), /no option "uri"/)
})
