'use strict'
const assert = require('node:assert/strict')
const test = require('node:test')
const { MarshalError, Opaque } = require('afresh')
const { hashOf } = require('../lib/collisions.js')
const { decode, encode } = require('../lib/values.js')
const { js, withSandbox } = require('./common.js')

const LIMIT = 1 << 20
const again = (value) => decode(encode(value), LIMIT)
const hex = (text) => decode(Buffer.from(text, 'hex'), LIMIT)

const SAME = [
  undefined, null, true, false, '', 'é\u{1f600}', 0, -0, 1, -1, 23, 24, 255, 256, 65_535, 65_536, 2 ** 32, -(2 ** 32),
  Number.MAX_SAFE_INTEGER, Number.MIN_SAFE_INTEGER, 1.5, NaN, Infinity, -Infinity, 2 ** 60 + 0.5,
  2n ** 53n, -(2n ** 53n), 2n ** 63n - 1n, 2n ** 63n, 2n ** 64n, -(2n ** 63n), -(2n ** 64n), 3n ** 200n, -(3n ** 200n),
  [], [1, [2, 'three']], {}, { a: { b: null } }, new Date(0), new Date(1_700_000_000_123), new Map([[1, 'one'], [null, 2]]),
  new Set([1, 'a']), new Uint8Array([0, 255]),
]

test('values come back as they were', () => {
  for (const value of SAME) assert.deepStrictEqual(again(value), value)
})

test('large values come back as they were', () => {
  const numbers = Array.from({ length: 5000 }, (_, n) => n * n)
  for (const value of [numbers, numbers.map(String), numbers.map((n) => n / 3), 'é'.repeat(5000), numbers.map((n) => [n])]) {
    assert.deepStrictEqual(again(value), value)
  }
})

test('values that have another form in a guest', () => {
  assert.deepStrictEqual(again(5n), 5)
  assert.deepStrictEqual(again(Buffer.from('a')), new Uint8Array([97]))
  assert.deepStrictEqual(again(new Uint8Array([1, 2]).buffer), new Uint8Array([1, 2]))
  assert.deepStrictEqual(again(new Float64Array([1, 2.5])), [1, 2.5])
  assert.deepStrictEqual(again(new Map([['a', 1]])), { a: 1 })
  assert.deepStrictEqual(again([, 1]), [undefined, 1])
  assert.deepStrictEqual(again(new (class Point { x = 1 })()), { x: 1 })
})

test('a guest cannot reach a prototype', () => {
  // {"__proto__": {"x": 1}}
  const value = hex('a1695f5f70726f746f5f5fa1617801')
  assert.equal(value.x, undefined)
  assert.ok(Object.hasOwn(value, '__proto__'))
  assert.equal(Object.getPrototypeOf(value), Object.prototype)
})

test('values that guests cannot get', () => {
  const loop = []
  loop.push(loop)
  for (const value of [() => {}, Symbol('s'), Promise.resolve(), new Error('e'), loop, new Date(NaN)]) {
    assert.throws(() => encode(value), MarshalError)
  }
})

test('tags of other languages', () => {
  assert.deepStrictEqual(hex('da0001003082 0102'.replace(' ', '')), [1, 2])
  assert.deepStrictEqual(hex('d84f50ffffffffffffffff00000000000000 40'.replace(' ', '')), [-1, 2n ** 62n])
  assert.deepStrictEqual(hex('d85648000000000000f83f'), [1.5])
  assert.equal(hex('da00010031632d312e'), '-1.')
  assert.equal(hex('d8255000112233445566778899aabbccddeeff'), '00112233-4455-6677-8899-aabbccddeeff')
  assert.ok(Number.isNaN(hex('c1fb7ff8000000000000').getTime()))
  assert.deepStrictEqual(hex('d903ec6a323032342d30322d3239'), new Date('2024-02-29'))
  const opaque = hex('d8278261666167')
  assert.ok(opaque instanceof Opaque && opaque.kind === 'f' && String(opaque) === 'g')
})

test('damaged values are errors', () => {
  const damaged = ['', '8201', '9f01ff', 'ff', 'd84f4178', '9bffffffffffffffff', 'bbffffffffffffffff', '7bffffffffffffffff',
    '5b0000ffffffffffff', 'd8270a', 'c161', 'd9ffff00', 'f8ff', 'c2f6', 'd82541ff', 'da0001003101', '81'.repeat(200), 'd84f'.repeat(100_000)]
  for (const bytes of damaged) assert.throws(() => hex(bytes), MarshalError, bytes.slice(0, 40))
})

test('random bytes are values or MarshalErrors', () => {
  let seed = 7
  const next = () => (seed = (seed * 1_103_515_245 + 12_345) & 0x7fffffff) >> 16
  for (let round = 0; round < 5000; round += 1) {
    const bytes = Buffer.from(Array.from({ length: next() % 24 }, () => next() & 255))
    try {
      decode(bytes, LIMIT)
    } catch (error) {
      assert.ok(error instanceof MarshalError, `${bytes.toString('hex')}: ${error.stack}`)
    }
  }
})

test('values keep to their budget', () => {
  const list = Buffer.concat([Buffer.from('9a00100000', 'hex'), Buffer.alloc(1 << 20, 0xf6)])
  assert.throws(() => decode(list, LIMIT), /resultLimit/)
  assert.equal(decode(list, 64 << 20).length, 1 << 20)
})

test('a guest sees the values and gives them back', withSandbox({}, async (sb) => {
  for (const value of SAME) assert.deepStrictEqual(await sb.apply('(value) => value', [value]), value)
  assert.equal(await sb.apply('(a, b) => a.concat(b).length', [[1, 2], [3]]), 3)
  assert.equal((await sb.eval('() => 1')).kind, 'function')
  assert.equal(await sb.apply('(d) => d.getTime()', [new Date(5)]), 5)
  assert.ok((await js()).isInterpreter)
}))

test('hashes of keys are those of V8', () => {
  const hashes = [
    [1, 316017654], [-7, 493895126], [1.5, 410605258], [2 ** 40, 639130342], [2n ** 70n + 5n, 714525335],
    [-(2n ** 63n), 360010069], ['65536', 83951616],
  ]
  for (const [key, hash] of hashes) assert.equal(hashOf(key) & 0x3fffffff, hash, String(key))
  for (const key of [NaN, 'a', '01', '4294967296000', null, [], new Date()]) assert.equal(hashOf(key), undefined)
})

test('keys that collide in tables are refused', () => {
  const many = Array.from({ length: 4000 }, (_, n) => n)
  const large = (value) => decode(encode(value), LIMIT * 8)
  const table = (of) => new Map(many.map((n) => [of(n), n]))
  for (const of of [(n) => n, (n) => n / 3, (n) => BigInt(n + 1) << 60n, (n) => 2 ** 40 + n * 4096, (n) => n * -4096]) {
    assert.deepStrictEqual(large(table(of)), table(of))
    assert.deepStrictEqual(large(new Set(table(of).keys())), new Set(table(of).keys()))
  }
  const digits = (n) => String(n * 2 ** 16)
  for (const of of [(n) => BigInt(n) << 64n, (n) => -(BigInt(n + 1) << 64n), digits]) {
    assert.throws(() => large(new Set(table(of).keys())), /one hash/)
  }
  assert.throws(() => large(new Map([[0, 0], ...table(digits)])), /one hash/)
  // Each of three tables alone is within the budget.
  const some = new Map([...table((n) => BigInt(n) << 64n)].slice(0, 2500))
  assert.deepStrictEqual(large(some).size, 2500)
  assert.throws(() => large([some, some, some]), /one hash/)
})
