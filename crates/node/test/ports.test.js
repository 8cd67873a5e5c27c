'use strict'
// Requests to a port, with servers that break off, over a sandbox that this file imitates.
const assert = require('node:assert/strict')
const test = require('node:test')
const { SandboxError, TimeoutError } = require('../lib/errors.js')
const { Port } = require('../lib/ports.js')

/** A sandbox with a server that sends these bytes, once or without end. */
function port(answer, { timeout = 60_000, endless = false } = {}) {
  let sent = 0
  return new Port(
    {
      limits: { timeout, output: 1 << 20 },
      async operate(operation, _, given) {
        await new Promise(setImmediate)
        if (operation === 'dial') return { json: 1 }
        if (operation !== 'exchange') return { json: true }
        if (given.bytes?.length > 0) return { json: { taken: given.bytes.length, ended: false }, bytes: Buffer.alloc(0) }
        if (endless) sent = 0
        const bytes = Buffer.from(answer).subarray(sent)
        sent += bytes.length
        return { json: { taken: 0, ended: bytes.length === 0 }, bytes }
      },
    },
    8000,
  )
}

test('a request returns the response', async () => {
  const answer = await port('HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok').get('/')
  assert.deepEqual([answer.status, answer.text], [200, 'ok'])
  assert.equal((await port('HTTP/1.1 200 OK\r\n\r\nto the end').get('/')).text, 'to the end')
})

const switching = 'HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n'
for (const [what, answer, message, method = 'GET'] of [
  ['a switch of protocols', switching, /left HTTP/],
  ['a tunnel', 'HTTP/1.1 200 OK\r\n\r\n', /left HTTP/, 'CONNECT'],
  ['no byte', '', /does not speak HTTP/],
  ['only early hints', 'HTTP/1.1 103 Early Hints\r\n\r\n', /does not speak HTTP/],
  ['half a response', 'HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nok', /does not speak HTTP/],
]) {
  test(`a request fails after ${what}`, { timeout: 60_000 }, async () => {
    await assert.rejects(port(answer).request(method, '/'), (error) => {
      assert.ok(error instanceof SandboxError)
      assert.match(error.message, message)
      return true
    })
  })
}

test('a request ends at its time limit while bytes arrive', { timeout: 60_000 }, async () => {
  const endless = port('HTTP/1.1 103 Early Hints\r\n\r\n', { timeout: 100, endless: true })
  await assert.rejects(endless.get('/'), TimeoutError)
})
