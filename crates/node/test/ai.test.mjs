// Tools for the AI SDK, with the published package and its mock of a model.
import assert from 'node:assert/strict'
import test from 'node:test'
import afresh from 'afresh'
import client from 'afresh/client'
import common from './common.js'

const ai = await import('ai').catch(() => undefined)
const skip = !ai && 'SKIPPED: the package `ai` is not installed; `cargo xtask node` installs it'
const { serve, command } = common
const { MockLanguageModelV3 } = ai ? await import('ai/test') : {}
const { sandboxTools } = ai ? await import('afresh/ai') : {}

const usage = {
  inputTokens: { total: 1, noCache: 1, cacheRead: undefined, cacheWrite: undefined },
  outputTokens: { total: 1, text: 1, reasoning: undefined },
}

/** A model that makes these calls of tools, step by step, and then ends. */
function model(steps) {
  let step = 0
  let call = 0
  return new MockLanguageModelV3({
    doGenerate: async () => {
      const calls = steps[step++]
      const content = calls?.map(([toolName, input]) => ({
        type: 'tool-call',
        toolCallId: String(call++),
        toolName,
        input: JSON.stringify(input),
      })) ?? [{ type: 'text', text: 'done' }]
      const unified = calls ? 'tool-calls' : 'stop'
      return { content, finishReason: { unified, raw: unified }, usage, warnings: [] }
    },
  })
}

/** The texts that the tools gave, step by step. */
async function answers(tools, steps) {
  const done = await ai.generateText({ model: model(steps), tools, prompt: 'go', stopWhen: ai.stepCountIs(steps.length + 1) })
  assert.equal(done.text, 'done')
  return done.steps.slice(0, -1).map((step) => step.toolResults.map((result) => result.output))
}

const STEPS = [
  [['run_code', { code: 'var x = 1; console.log("out"); x + 1' }]],
  [['checkpoint', { name: 'one' }]],
  // Calls at the same time run in order.
  [['run_code', { code: 'x = 5' }], ['run_code', { code: 'x + 1' }]],
  [['rollback', { name: 'one' }]],
  [['run_code', { code: 'x' }]],
  [['run_code', { code: 'nothing.at.all' }]],
  [['write_file', { path: 'notes/a.txt', content: 'ä' }]],
  [['read_file', { path: '/home/user/notes/a.txt' }]],
  [['read_file', { path: 'missing' }]],
  [['rollback', { name: 'two' }]],
]

function check(given) {
  const [first, saved, pair, back, again, failed, wrote, read, missing, unknown] = given
  assert.deepEqual([first, saved, pair], [['out\n2'], ['saved one'], ['5', '6']])
  assert.deepEqual([back, again], [['the sandbox is in the state one'], ['1']])
  assert.match(failed[0], /ReferenceError: .*nothing/)
  assert.deepEqual([wrote, read], [['wrote 2 bytes'], ['ä']])
  assert.match(missing[0], /^error: /)
  assert.match(unknown[0], /^error: there is no checkpoint two; there are: one/)
}

test('a model uses a sandbox of this process', { skip }, async (t) => {
  const sandbox = await (await common.js()).sandbox({ timeoutMs: 500 })
  t.after(() => sandbox.close())
  check(await answers(sandboxTools(sandbox), STEPS))
  const [[late], [after]] = await answers(sandboxTools(sandbox), [
    [['run_code', { code: 'x = 9; for (;;) {}' }]],
    [['run_code', { code: 'x' }]],
  ])
  assert.match(late, /undone/)
  assert.equal(after, '1')
})

test('a model uses a sandbox of a server', { skip: skip || (!command && 'SKIPPED: $AFRESH_TEST_COMMAND is not set') }, async (t) => {
  const connected = new client.Client({ url: await serve(t), apiKey: 'secret-key' })
  const sandbox = await connected.create('script')
  check(await answers(sandboxTools(sandbox), STEPS))
  assert.throws(() => sandboxTools(sandbox, { commands: true }), /no `commands`/)
})

test('a model runs commands in a sandbox of a Linux program', { skip }, async (t) => {
  let sandbox
  try {
    sandbox = await (await afresh.linux('python3')).sandbox()
  } catch (error) {
    return t.skip(`SKIPPED: ${error.message}`)
  }
  t.after(() => sandbox.close())
  const [[done], [long]] = await answers(sandboxTools(sandbox, { commands: true }), [
    [['run_command', { command: 'echo hi; exit 3' }]],
    [['run_code', { code: "'x' * 60000" }]],
  ])
  assert.equal(done, 'hi\nexit code 3')
  assert.match(long, /characters left out/)
})
