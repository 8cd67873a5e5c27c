'use strict'
// Lifetimes: dropped sandboxes, worker threads, and the end of a process while guests run.

const assert = require('node:assert/strict')
const { execFile } = require('node:child_process')
const { readFileSync } = require('node:fs')
const { promisify } = require('node:util')
const test = require('node:test')
const { Worker } = require('node:worker_threads')
const { StoppedError } = require('afresh')
const { collect, js } = require('./common.js')

const run = (script) => promisify(execFile)(process.execPath, ['-e', script], { timeout: 60_000 })
const status = (field) => Number(new RegExp(`^${field}:\\s+(\\d+)`, 'm').exec(readFileSync('/proc/self/status', 'utf8'))[1])
const maps = () => readFileSync('/proc/self/maps', 'utf8').split('\n').length

test('1,000 sandboxes that are dropped leave nothing', { skip: !global.gc && 'node --expose-gc' }, async () => {
  const warm = await js()
  const round = async (count) => {
    for (let n = 0; n < count; n += 1) await (await warm.sandbox()).eval('count')
    await collect()
  }
  await round(100)
  const [memory, mapped] = [status('VmRSS'), maps()]
  await round(1000)
  const [grown, more] = [status('VmRSS') - memory, maps() - mapped]
  assert.ok(grown < 128 * 1024, `resident memory grew by ${grown} KiB`)
  assert.ok(more < 500, `${more} more mappings`)
  assert.ok(status('Threads') < 120)
})

test('64 sandboxes at a time', async () => {
  const warm = await js()
  const all = await Promise.all(Array.from({ length: 64 }, () => warm.sandbox()))
  assert.deepEqual(await Promise.all(all.map((sb, n) => sb.eval(`count + ${n}`))), all.map((_, n) => 40 + n))
  await Promise.all(all.map((sb) => sb.close()))
})

test('stop, abort and close need no free thread', async () => {
  const warm = await js()
  const all = await Promise.all(Array.from({ length: 80 }, () => warm.sandbox()))
  const controller = new AbortController()
  const { signal } = controller
  const endless = all.map((sb, n) => sb.runCode('for (;;);', n === 79 ? { signal } : {}))
  const settled = Promise.allSettled(endless)
  await new Promise((resolve) => setTimeout(resolve, 50))
  controller.abort()
  await assert.rejects(endless[79], { name: 'AbortError' })
  all[0].stop()
  assert.ok((await endless[0]).error instanceof StoppedError)
  await Promise.all(all.map((sb) => sb.close()))
  assert.ok((await settled).every((one) => (one.reason ?? one.value.error) instanceof Error))
  assert.equal(await warm.eval('count'), 40)
})

const IN_WORKER = `
  const { parentPort } = require('node:worker_threads')
  require('afresh').warm('js').then(async (warm) => {
    const sb = await warm.sandbox({ tools: { tell: (n) => parentPort.postMessage(n) } })
    await sb.eval('tell(6 * 7)')
    if (ENDLESS) await sb.eval('for (;;);')
  })`

test('a worker thread has sandboxes of its own', async () => {
  const worker = new Worker(IN_WORKER.replace('ENDLESS', 'false'), { eval: true })
  const said = new Promise((resolve) => worker.once('message', resolve))
  const ended = new Promise((resolve) => worker.once('exit', resolve))
  assert.equal(await said, 42)
  assert.equal(await ended, 0)
})

test('a worker thread is terminated while its guest runs', async () => {
  const worker = new Worker(IN_WORKER.replace('ENDLESS', 'true'), { eval: true })
  await new Promise((resolve) => worker.once('message', resolve))
  await worker.terminate()
  assert.equal(await (await js()).eval('count'), 40)
})

test('the process exits while a guest runs, and while a tool is awaited', async () => {
  for (const [code, exits] of [
    ["setTimeout(() => process.exit(7), 50); sb.eval('for (;;);')", 7],
    ["sb.eval('exit()')", 9],
    ["setTimeout(() => { throw new Error('mine') }, 50); sb.eval('for (;;) console.log(1)', { onOutput() {} })", 1],
  ]) {
    const script = `require('afresh').warm('js').then(async (warm) => {
      const sb = await warm.sandbox({ tools: { exit: () => process.exit(9) } }); ${code} })`
    await assert.rejects(run(script), { code: exits, signal: null })
  }
})

test('a pending call keeps the process alive, and an idle sandbox does not', async () => {
  const script = `require('afresh').warm('js').then(async (warm) => {
    const sb = await warm.sandbox({ tools: { wait: () => new Promise((r) => setTimeout(r, 50, 'waited').unref()) } })
    console.log(await sb.eval('wait()')) })`
  assert.equal((await run(script)).stdout, 'waited\n')
})

test('a missing native half is named', async () => {
  const script = "process.env.AFRESH_NATIVE = '/nowhere/afresh.node'; require('afresh')"
  await assert.rejects(run(script), /linux-x64 is not at \/nowhere\/afresh\.node/)
  const other = "Object.defineProperty(process, 'platform', { value: 'plan9' }); require('afresh')"
  await assert.rejects(run(other), /no native half for plan9-x64: it runs on linux-x64 and linux-arm64 with glibc/)
})

test('ES modules import it', async () => {
  const script = "import { warm, exec } from 'afresh'; console.log(typeof warm, typeof exec)"
  const { stdout } = await promisify(execFile)(process.execPath, ['--input-type=module', '-e', script])
  assert.equal(stdout, 'function function\n')
})
