'use strict'
const assert = require('node:assert/strict')
const test = require('node:test')
const { Client, ExecutionError, HttpError } = require('afresh/client')

const { command, serve } = require('./common.js')

const skip = !command && 'SKIPPED: $AFRESH_TEST_COMMAND does not name the command `afresh`'

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
