'use strict'
const assert = require('node:assert/strict')
const { execFileSync } = require('node:child_process')
const test = require('node:test')
const afresh = require('afresh')

function missing() {
  try {
    execFileSync('python3', ['-c', ''])
    return false
  } catch {
    return 'SKIPPED: there is no python3 on this host'
  }
}

let warm
/** The host's Python, warm; tests are skipped where the host forbids Linux guests. */
async function python(t) {
  try {
    warm ??= await afresh.linux('python3', { setup: 'x = 20' })
    return warm
  } catch (error) {
    if (!(error instanceof afresh.OpenError)) throw error
    t.skip(`SKIPPED: Linux guests: ${error.message}`)
    return undefined
  }
}

test('the interpreter of the host is a guest', { skip: missing() }, async (t) => {
  const guest = await python(t)
  if (!guest) return
  assert.equal(guest.kind, 'program')
  const sb = await guest.sandbox({ timeoutMs: 60_000, tools: { join: (a, { sep }) => a.join(sep) } })
  const clean = await sb.checkpoint()
  assert.equal(await sb.eval('x += 1; x * 2'), 42)
  assert.equal(await sb.eval('x * 2'), 42)
  assert.deepEqual(await sb.eval("[{'a': (1, 2)}, {1: 2}, 2 ** 70]"), [{ a: [1, 2] }, new Map([[1, 2]]), 2n ** 70n])
  assert.equal(await sb.eval("join(['a', 'b'], sep='-')"), 'a-b')
  assert.equal((await sb.runCode("open('/none')")).error.type, 'FileNotFoundError')
  await sb.rollback(clean)
  assert.equal(await sb.eval('x'), 20)
  await sb.close()
})

test('commands run beside the code', { skip: missing() }, async (t) => {
  const guest = await python(t)
  if (!guest) return
  const sb = await guest.sandbox({ timeoutMs: 60_000 })
  const said = []
  const done = await sb.commands.run('cat; echo $HOME; echo bad >&2; exit 3', {
    stdin: 'typed\n',
    onStdout: (text) => said.push(text),
  })
  assert.deepEqual([done.exitCode, done.stdout, done.stderr], [3, 'typed\n/home/user\n', 'bad\n'])
  assert.equal(said.join(''), done.stdout)
  assert.throws(() => done.check(), afresh.CommandError)
  const cat = await sb.commands.start(['cat'], { stdin: true, tag: 'mine' })
  assert.deepEqual((await sb.commands.list()).map(({ pid, tag }) => [pid, tag]), [[cat.pid, 'mine']])
  await assert.rejects(cat.wait(), /sendStdin/)
  await cat.sendStdin('hello')
  await cat.closeStdin()
  assert.equal((await cat.wait()).stdout, 'hello')
  await assert.rejects(sb.commands.run('sleep 60', { timeoutMs: 100 }), afresh.TimeoutError)
  await assert.rejects(sb.commands.run('sleep 60', { signal: AbortSignal.timeout(100) }), { name: 'TimeoutError' })
  const sleeper = await sb.commands.start('sleep 60')
  assert.equal(await sleeper.kill(), true)
  assert.equal((await sleeper.wait()).exitCode, -9)
  await sb.close()
})

test('requests to a server in a sandbox, also in a fork', { skip: missing() }, async (t) => {
  const guest = await python(t)
  if (!guest) return
  const sb = await guest.sandbox({ timeoutMs: 120_000 })
  await assert.rejects(sb.port(8000).get('/'), /nothing listens on port 8000/)
  await sb.files.makeDirectory('/srv/www')
  await sb.files.write('/srv/www/index.html', 'hello')
  await sb.files.write('/srv/www/large', new Uint8Array(300_000).fill(7))
  await sb.commands.start(['python3', '-m', 'http.server', '8000', '--directory', '/srv/www'])
  const [fork] = await sb.fork()
  for (const each of [sb, fork]) {
    const answer = await each.port(8000).get('/index.html')
    assert.deepEqual([answer.status, answer.text], [200, 'hello'])
    assert.equal((await each.port(8000).get('/none')).status, 404)
    assert.equal((await each.port(8000).get('/large')).body.length, 300_000)
    assert.equal((await each.port(8000).post('/index.html', 'x')).status, 501)
  }
  const serve = (port, then) =>
    sb.commands.start(['python3', '-c', `import socket, time; s = socket.create_server(('127.0.0.1', ${port})); c, _ = s.accept(); ${then}`])
  await serve(9000, 'time.sleep(60)')
  await assert.rejects(sb.port(9000).get('/', { timeoutMs: 300 }), afresh.TimeoutError)
  await serve(9001, 'time.sleep(60)')
  await assert.rejects(sb.port(9001).get('/', { signal: AbortSignal.timeout(300) }), { name: 'TimeoutError' })
  await serve(9002, "c.sendall(b'garbage\\n' * 9); time.sleep(60)")
  await assert.rejects(sb.port(9002).get('/'), /does not speak HTTP/)
  await serve(9003, 'time.sleep(60)')
  const controller = new AbortController()
  setTimeout(() => controller.abort(new Error('mine')), 300)
  await assert.rejects(sb.port(9003).get('/', { signal: controller.signal }), /^Error: mine$/)
  assert.equal((await sb.port(8000).get('/index.html')).text, 'hello')
  await Promise.all([sb.close(), fork.close()])
})

test('a rule without the methods that it names is an error', async () => {
  const net = [{ to: 'api.test:443', methods: undefined }]
  await assert.rejects(afresh.exec(['true'], { net }), /`methods` of a rule is an array/)
})

test('a Wasm sandbox has no commands', async () => {
  const sb = await (await afresh.warm('js')).sandbox()
  await assert.rejects(sb.commands.run('ls'), /no processes/)
  await sb.close()
})

test('exec runs one program in a pristine sandbox', async (t) => {
  let done
  try {
    done = await afresh.exec(['sh', '-c', 'tr a-z A-Z; echo bad >&2; exit 3'], { stdin: 'hello' })
  } catch (error) {
    if (!(error instanceof afresh.OpenError)) throw error
    t.skip(`SKIPPED: Linux guests: ${error.message}`)
    return
  }
  assert.deepEqual([done.exitCode, done.stdout, done.stderr], [3, 'HELLO', 'bad\n'])
  await assert.rejects(afresh.exec(['sleep', '60'], { timeoutMs: 100 }), afresh.TimeoutError)
  await assert.rejects(afresh.exec(['sleep', '60'], { signal: AbortSignal.timeout(100) }), { name: 'TimeoutError' })
  await assert.rejects(afresh.exec(['no-such-program']), /not found/)
  await assert.rejects(afresh.linux('sh'), /evaluates no code/)
})
