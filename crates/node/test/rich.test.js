'use strict'
const assert = require('node:assert/strict')
const test = require('node:test')
const afresh = require('afresh')
const { richResult } = require('../lib/rich.js')

const SHOWN = `
class Shown:
    def __init__(self, **formats):
        self.formats = formats
    def __repr__(self):
        return "Shown()"
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {name.replace("__", "/").replace("_xml", "+xml"): value for name, value in self.formats.items()}
`

test('displayed values have all their formats', async (t) => {
  let python
  try {
    python = await afresh.linux('python3')
  } catch (error) {
    if (!(error instanceof afresh.OpenError)) throw error
    return t.skip(`SKIPPED: Linux guests: ${error.message}`)
  }
  const sb = await python.sandbox({ timeoutMs: 60_000 })
  await sb.eval(SHOWN)
  const shown = await sb.runCode(`
display(Shown(image__png=b'\\x89PNG', text__html='<b>1</b>', text__markdown='*2*'))
display(Shown(image__svg_xml='<svg/>', text__latex='$x$', application__json={'a': [1]}))
display({'b': 2}); print('said')
Shown(text__html='<i>main</i>')`)
  assert.equal(shown.error, undefined)
  assert.equal(shown.stdout, 'said\n')
  const [one, two, three, main] = shown.results
  assert.ok(one instanceof afresh.RichResult)
  assert.deepEqual([Buffer.from(one.png), one.html, one.markdown, one.text], [Buffer.from('\x89PNG', 'latin1'), '<b>1</b>', '*2*', 'Shown()'])
  assert.deepEqual([two.svg, two.latex, two.json], ['<svg/>', '$x$', { a: [1] }])
  assert.deepEqual([three.json, three.text], [{ b: 2 }, "{'b': 2}"])
  assert.deepEqual([main.html, main.isMainResult, one.isMainResult], ['<i>main</i>', true, false])
  assert.deepEqual(two.formats(), ['text', 'latex', 'svg', 'json'])
  assert.equal(shown.truncated, false)
  for (const code of ['1', "'text'", "[1, {'a': 2}]", 'x = 3', 'object()']) {
    assert.deepEqual((await sb.runCode(code)).results, [], code)
  }
  const failed = await sb.runCode("display('before')\n1 / 0")
  assert.deepEqual([failed.error.type, failed.results.map(({ text }) => text)], ['ZeroDivisionError', ['before']])
  await sb.close()
})

test('a format that cannot be read is left out', () => {
  const json = '{"chart":{"type":"line"},"data":null,"extra":{"a/b":1},"unknown":2}'
  const shown = richResult({ isMain: true, texts: { text: 't', png: '!', pdf: 'AA==' }, json })
  assert.deepEqual([shown.text, shown.png, [...shown.pdf]], ['t', undefined, [0]])
  assert.deepEqual([shown.chart, shown.data, shown.extra], [{ type: 'line' }, null, { 'a/b': 1 }])
  assert.equal('unknown' in shown, false)
  for (const wrong of ['', '[', '[1]', '"text"', 'null', null]) {
    const empty = richResult({ isMain: false, texts: {}, json: wrong })
    assert.deepEqual([empty.formats(), empty.extra], [[], {}], String(wrong))
  }
})
