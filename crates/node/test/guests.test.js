'use strict'
// Guests other than the warm one of the other tests: the language `python`, modules by their path,
// and warm-ups.

const assert = require('node:assert/strict')
const { copyFileSync, mkdtempSync, rmSync, writeFileSync } = require('node:fs')
const { tmpdir } = require('node:os')
const path = require('node:path')
const test = require('node:test')
const afresh = require('afresh')
const { decode, encode } = require('../lib/values.js')

const turns = process.env.AFRESH_TURNS
const skip = !turns && "SKIPPED: the guest with CPython's interface is not built; `cargo xtask node` builds it"

test('the language python, with a small guest that has the interface of CPython', { skip }, async (t) => {
  const folder = mkdtempSync(path.join(tmpdir(), 'afresh-node-python-'))
  t.after(() => {
    delete process.env.AFRESH_PYTHON
    rmSync(folder, { recursive: true })
  })
  await assert.rejects(afresh.warm('python'), /set \$AFRESH_PYTHON/)
  process.env.AFRESH_PYTHON = folder
  await assert.rejects(afresh.warm('python'), /python\.wasm does not exist/)
  copyFileSync(turns, path.join(folder, 'python.wasm'))
  await assert.rejects(afresh.warm('python'), /python-stdlib\.zip/)
  writeFileSync(path.join(folder, 'python-stdlib.zip'), 'library '.repeat(10_000))
  const warm = await afresh.warm('python', { setup: 'add 40\nprint nobody sees this' })
  const r = await warm.runCode('print one\ncomplain two\nadd 2')
  assert.deepEqual([r.value, r.text, r.stdout, r.stderr, r.dirtyPages], [42, 'shown', 'one\n', 'two\n', undefined])
  await assert.rejects(afresh.warm('python', { setup: 'fail broken' }), { name: 'ProgramError', reason: 'broken' })
  const sb = await warm.sandbox({ tools: { twice: async (n) => 2 * n } })
  assert.equal(await sb.eval('tool twice 21'), 42)
  const start = await sb.checkpoint()
  assert.ok((await sb.runCode('trap')).error instanceof afresh.GuestError)
  await sb.rollback(start)
  await sb.eval('write /tmp/own one')
  await sb.save(`${folder}/store@agent`)
  const loaded = await afresh.load(`${folder}/store@agent`)
  assert.equal(Buffer.from(await loaded.eval('read /tmp/own')).toString(), 'one')
  await sb.close()
})

test('a module is opened by its path and called with bytes', async () => {
  const file = path.join(__dirname, '../guests/js.wasm')
  const warm = await afresh.warm(file, { calls: [['warm']], setup: 'globalThis.x = 40' })
  const request = encode([0, [], 'x += 2', '<bytes>', []])
  const sb = await warm.sandbox()
  for (const guest of [warm, warm, sb]) assert.equal(decode(Buffer.from(await guest.call('evaluate', request)), 1 << 20)[1], 42)
  await assert.rejects(sb.call('none'), afresh.GuestError)
  await sb.close()
  await warm.close()
  await assert.rejects(warm.eval('1'), afresh.SandboxError)
})

test('a signal ends a warm-up', async () => {
  const signal = AbortSignal.timeout(300)
  await assert.rejects(afresh.warm('js', { setup: 'for (;;);', signal }), { name: 'TimeoutError' })
})
