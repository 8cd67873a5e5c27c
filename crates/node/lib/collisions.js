'use strict'
// Keys of a guest that collide in V8's tables of `Map` and `Set`.
//
// V8 seeds the hashes of most strings. It hashes numbers, BigInts (by their lowest 64 bits) and, in
// older releases of Node, strings of digits by functions without a seed. So a guest can choose keys
// that all are in one chain: building a table then takes a time quadratic in their number, on the
// event loop.
//
// Promises: building a table takes at most as many steps through long chains as counted here. May
// break it: a V8 with other functions without a seed (`ComputeUnseededHash` and `ComputeLongHash`
// have been the same since 2019).

/** Keys of one chain that cost nothing. Keys that are not chosen have far shorter chains. */
const MAX_CHAIN = 32
const INDEX = /^(0|[1-9][0-9]{0,9})$/
const WORD = 2 ** 32

const double = new Float64Array(1)
const bigint = new BigUint64Array(double.buffer)
const words = new Uint32Array(double.buffer)

function hashInteger(key) {
  let hash = (~key + (key << 15)) | 0
  hash ^= hash >>> 12
  hash = (hash + (hash << 2)) | 0
  hash ^= hash >>> 4
  hash = Math.imul(hash, 2057)
  return hash ^ (hash >>> 16)
}

/**
 * Hashes the 64 bits in `words`, whose first word is the low one: all supported platforms are
 * little-endian.
 */
function hashWords() {
  let [low, high] = words
  // hash = ~hash + (hash << 18)
  let result = (~low >>> 0) + ((low << 18) >>> 0)
  high = (~high + ((high << 18) | (low >>> 14)) + (result >= WORD ? 1 : 0)) | 0
  low = result | 0
  // hash ^= hash >> 31
  low ^= (high << 1) | (low >>> 31)
  high ^= high >>> 31
  // hash *= 21
  result = (low >>> 0) * 21
  high = (Math.imul(high, 21) + Math.floor(result / WORD)) | 0
  low = result | 0
  // hash ^= hash >> 11
  low ^= (high << 21) | (low >>> 11)
  high ^= high >>> 11
  // hash += hash << 6
  result = (low >>> 0) * 65
  high = (Math.imul(high, 65) + Math.floor(result / WORD)) | 0
  low = result | 0
  // hash ^= hash >> 22
  return low ^ (high << 10) ^ (low >>> 22)
}

/**
 * The hash of a key; `undefined` for a key that a guest cannot choose. Tables use its low bits.
 */
function hashOf(key) {
  switch (typeof key) {
    case 'number':
      if ((key | 0) === key) return hashInteger(key)
      if (Number.isNaN(key)) return undefined
      double[0] = key
      return hashWords()
    case 'bigint':
      // Keeps the lowest 64 bits.
      bigint[0] = key < 0n ? -key : key
      return hashWords()
    case 'string':
      return key.length <= 10 && INDEX.test(key) ? Number(key) | (key.length << 24) : undefined
    default:
      return undefined
  }
}

/** The number of steps through long chains that building a table with `count` keys takes. */
function countCollisions(count, keyAt) {
  if (count <= MAX_CHAIN) return 0
  // A table has at least half as many chains as keys, and a power of two.
  const chains = new Uint32Array(2 ** Math.ceil(Math.log2(count)) / 2)
  let steps = 0
  for (let at = 0; at < count; at += 1) {
    const hash = hashOf(keyAt(at))
    if (hash === undefined) continue
    const length = (chains[hash & (chains.length - 1)] += 1)
    if (length > MAX_CHAIN) steps += length
  }
  return steps
}

module.exports = { countCollisions, hashOf }
