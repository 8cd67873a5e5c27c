'use strict'
const assert = require('node:assert/strict')
const test = require('node:test')
const afresh = require('afresh')
const { js, withSandbox } = require('./common.js')

test(
  'a result has the cost of its call',
  withSandbox({ outputLimit: 10 }, async (sb) => {
    const result = await sb.runCode("console.log('x'.repeat(99)); let s = 0; for (let i = 0; i < 1e5; i++) s += i; s")
    const { cost } = result
    assert.ok(cost.wallMs > 0 && cost.cpuMs > 0)
    assert.ok(cost.peakMemory >= 65536)
    assert.ok(cost.dirtyPages > 0)
    assert.equal(result.dirtyPages, cost.dirtyPages)
    assert.equal(result.microseconds, cost.wallMs * 1e3)
    assert.ok(cost.inputBytes > 50 && cost.outputBytes >= 100)
    assert.deepEqual([cost.droppedBytes, result.truncated], [90, true])
    assert.equal((await (await js()).runCode('1')).cost.dirtyPages, undefined)
    assert.deepEqual(result.results, [])
  })
)

test(
  'a limit of CPU time ends a busy call, and waits do not count',
  withSandbox({ cpuLimitMs: 100, tools: { wait: () => new Promise((resolve) => setTimeout(resolve, 500)) } }, async (sb) => {
    const clean = await sb.checkpoint()
    assert.equal(await sb.eval('wait(); 1'), 1)
    const { error, cost } = await sb.runCode('for (;;) {}')
    assert.ok(error instanceof afresh.TimeoutError)
    assert.match(error.message, /CPU time limit of 100ms/)
    assert.ok(cost.cpuMs >= 100)
    await sb.rollback(clean)
    assert.equal(await sb.eval('2'), 2)
  })
)

test('a limit of CPU time is a number of milliseconds', async () => {
  await assert.rejects((await js()).sandbox({ cpuLimitMs: 0 }), /cpuLimitMs is a number/)
})
