'use strict'
const assert = require('node:assert/strict')
const test = require('node:test')
const afresh = require('afresh')
const { js, withSandbox } = require('./common.js')

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

test('tools are synchronous or asynchronous', async () => {
  const prices = new Map([['apple', 0.5]])
  const tools = { price: (item) => prices.get(item), later: async (n) => (await sleep(2), n + 1n) }
  const sb = await (await js()).sandbox({ tools })
  assert.equal(await sb.eval("price('apple') * 6"), 3)
  assert.equal(await sb.eval('later(2n ** 70n)'), 2n ** 70n + 1n)
  const [fork] = await sb.fork()
  assert.equal(await fork.eval("price('apple')"), 0.5)
  await fork.offer([function twice(n) { return 2 * n }])
  assert.equal(await fork.eval('twice(4)'), 8)
  await Promise.all([sb.close(), fork.close()])
})

test('a tool that throws is an exception in the guest, and the cause outside', async () => {
  const mine = new RangeError('too far')
  const tools = { fail: () => { throw mine }, reject: async () => { throw 'text' }, bad: () => () => {} }
  const sb = await (await js()).sandbox({ tools })
  assert.equal(await sb.eval("try { fail() } catch (e) { `${e.name}: ${e.message}` }"), 'RangeError: too far')
  assert.equal((await sb.runCode('fail()')).error.cause, mine)
  assert.equal(await sb.eval("try { reject() } catch (e) { e.message }"), 'text')
  const { error } = await sb.runCode('bad()')
  assert.ok(error.cause instanceof afresh.MarshalError)
  // Only the last errors are kept.
  await sb.runCode('for (let n = 0; n < 50; n++) try { fail() } catch {} fail()')
  assert.equal(await sb.eval('1'), 1)
  await sb.close()
})

test('a tool that never settles ends with the time limit', async () => {
  let signal
  const tools = { never() { signal = this.signal; return new Promise(() => {}) } }
  const sb = await (await js()).sandbox({ tools, timeoutMs: 200 })
  const start = await sb.checkpoint()
  assert.ok((await sb.runCode('never()')).error instanceof afresh.TimeoutError)
  assert.equal(signal.aborted, true)
  await sb.rollback(start)
  assert.equal(await sb.failed(), undefined)
  await sb.close()
})

test('an abort ends the wait for a tool', async () => {
  const controller = new AbortController()
  const tools = { never: () => (controller.abort(), new Promise(() => {})) }
  const sb = await (await js()).sandbox({ tools })
  await assert.rejects(sb.eval('never()', { signal: controller.signal }), { name: 'AbortError' })
  await sb.close()
})

test('a tool closes its own sandbox', async () => {
  let sb
  let closed
  const tools = { close: () => (closed = sb.close()) }
  sb = await (await js()).sandbox({ tools })
  const { error } = await sb.runCode('close(); 1')
  assert.ok(error instanceof afresh.StoppedError, String(error))
  await closed
  await assert.rejects(sb.eval('1'), afresh.SandboxError)
})

test('a tool uses the sandbox that waits for it, and others', async () => {
  let sb
  const tools = { again: () => sb.eval('1'), other: async (n) => (n === 0 ? 0 : 1 + (await nested(n - 1))) }
  const warm = await js()
  const nested = async (n) => {
    const inner = await warm.sandbox({ tools })
    try {
      return await inner.apply('(n) => other(n)', [n])
    } finally {
      await inner.close()
    }
  }
  sb = await warm.sandbox({ tools })
  assert.ok((await sb.runCode('again()')).error.cause instanceof afresh.BusyError)
  // More at a time than libuv has threads.
  assert.equal(await nested(12), 12)
  await sb.close()
})

test('a late answer is dropped', async () => {
  let answer
  const tools = { slow: () => new Promise((resolve) => (answer = resolve)), quick: () => 'quick' }
  const sb = await (await js()).sandbox({ tools })
  const start = await sb.checkpoint()
  const controller = new AbortController()
  const { signal } = controller
  const slow = assert.rejects(sb.runCode('slow()', { signal }), { name: 'AbortError' })
  while (!answer) await sleep(1)
  controller.abort()
  await slow
  await sb.rollback(start)
  answer('late')
  assert.equal(await sb.eval('quick()'), 'quick')
  await sb.close()
})

test('without tools there are none', withSandbox({}, async (sb) => {
  assert.match((await sb.runCode('price()')).error.message, /price/)
}))
