'use strict'
// Values between JavaScript and an interpreter, as CBOR (RFC 8949). `index.d.ts` has the table.
//
// Guests are not trusted: the memory of the values made of one message keeps to a budget, which is
// charged before they are made, nesting ends at MAX_DEPTH, and colliding keys have a budget as
// well.

const { countCollisions } = require('./collisions.js')
const { MarshalError } = require('./errors.js')

const MAX_DEPTH = 128
/** Steps through long chains of tables that one message may take: some milliseconds. */
const MAX_COLLISIONS = 1 << 22
const TAGS = { TIMESTAMP: 0, DATE: 1, POSITIVE: 2, NEGATIVE: 3, UUID: 37, NAMED: 39, INTEGERS: 79, FLOATS: 86 }
Object.assign(TAGS, { SET: 258, DAY: 1004, COMPLEX: 43_000, TUPLE: 65_584, DECIMAL: 65_585 })
/** Estimated bytes of values in V8, with the slot that refers to each. */
const COST = { plain: 16, text: 32, list: 64, object: 96, entry: 64, word: 32 }

/** A value of a program that only has a name here: a function, a promise, an error, a data frame.
 */
class Opaque {
  constructor(kind, text) {
    this.kind = kind
    this.text = text
  }

  toString() {
    return this.text
  }
}

class Writer {
  #bytes = Buffer.allocUnsafe(256)
  #at = 0

  /**
   * Makes room, and gives its place. It may replace the buffer, so callers look the buffer up
   * afterwards.
   */
  #room(length) {
    const wanted = this.#at + length
    if (wanted > this.#bytes.length) {
      const larger = Buffer.allocUnsafe(Math.max(wanted, this.#bytes.length * 2))
      this.#bytes.copy(larger, 0, 0, this.#at)
      this.#bytes = larger
    }
    const at = this.#at
    this.#at = wanted
    return at
  }

  head(major, value) {
    const first = major << 5
    if (value < 24) {
      const at = this.#room(1)
      this.#bytes[at] = first | value
    } else if (value < 0x100) {
      const at = this.#room(2)
      this.#bytes[at] = first | 24
      this.#bytes[at + 1] = value
    } else if (value < 0x10000) {
      const at = this.#room(3)
      this.#bytes[at] = first | 25
      this.#bytes.writeUInt16BE(value, at + 1)
    } else if (value < 0x100000000) {
      const at = this.#room(5)
      this.#bytes[at] = first | 26
      this.#bytes.writeUInt32BE(value, at + 1)
    } else {
      const at = this.#room(9)
      this.#bytes[at] = first | 27
      this.#bytes.writeBigUInt64BE(BigInt(value), at + 1)
    }
  }

  float(value) {
    const at = this.#room(9)
    this.#bytes[at] = 0xfb
    this.#bytes.writeDoubleBE(value, at + 1)
  }

  text(value) {
    const length = Buffer.byteLength(value)
    this.head(3, length)
    const at = this.#room(length)
    this.#bytes.write(value, at, length)
  }

  raw(value) {
    this.head(2, value.length)
    const at = this.#room(value.length)
    this.#bytes.set(value, at)
  }

  finish() {
    return this.#bytes.subarray(0, this.#at)
  }
}

function writeInteger(out, value) {
  if (value >= 0) out.head(0, value)
  else out.head(1, -1 - value)
}

function writeBigInt(out, value) {
  const negative = value < 0n
  const magnitude = negative ? -1n - value : value
  if (magnitude < 1n << 63n) {
    out.head(negative ? 1 : 0, exact(magnitude))
    return
  }
  const digits = magnitude.toString(16)
  out.head(6, negative ? TAGS.NEGATIVE : TAGS.POSITIVE)
  out.raw(Buffer.from(digits.padStart(digits.length + (digits.length % 2), '0'), 'hex'))
}

function writeList(out, list, depth) {
  out.head(4, list.length)
  // Also the holes of a sparse array.
  for (let at = 0; at < list.length; at += 1) write(out, list[at], depth + 1)
}

function writeObject(out, value, depth) {
  if (value instanceof Error || value instanceof Promise) {
    throw new MarshalError(`${value instanceof Error ? 'an error' : 'a promise'} cannot be given to a guest`)
  }
  if (Array.isArray(value)) {
    writeList(out, value, depth)
  } else if (value instanceof Uint8Array) {
    out.raw(value)
  } else if (value instanceof ArrayBuffer) {
    out.raw(new Uint8Array(value))
  } else if (value instanceof DataView) {
    out.raw(new Uint8Array(value.buffer, value.byteOffset, value.byteLength))
  } else if (ArrayBuffer.isView(value)) {
    writeList(out, value, depth)
  } else if (value instanceof Date) {
    if (Number.isNaN(value.getTime())) throw new MarshalError('an invalid Date cannot be given to a guest')
    out.head(6, TAGS.DATE)
    out.float(value.getTime() / 1000)
  } else if (value instanceof Map) {
    out.head(5, value.size)
    for (const [key, entry] of value) {
      write(out, key, depth + 1)
      write(out, entry, depth + 1)
    }
  } else if (value instanceof Set) {
    out.head(6, TAGS.SET)
    writeList(out, [...value], depth)
  } else {
    const entries = Object.entries(value)
    out.head(5, entries.length)
    for (const [key, entry] of entries) {
      out.text(key)
      write(out, entry, depth + 1)
    }
  }
}

function write(out, value, depth) {
  if (depth > MAX_DEPTH) {
    throw new MarshalError(`the value is nested deeper than ${MAX_DEPTH} levels, or refers to itself`)
  }
  switch (typeof value) {
    case 'undefined':
      return out.head(7, 23)
    case 'boolean':
      return out.head(7, value ? 21 : 20)
    case 'string':
      return out.text(value)
    case 'bigint':
      return writeBigInt(out, value)
    case 'number':
      if (Number.isSafeInteger(value) && !Object.is(value, -0)) writeInteger(out, value)
      else out.float(value)
      return
    case 'object':
      if (value === null) out.head(7, 22)
      else writeObject(out, value, depth)
      return
    default:
      throw new MarshalError(`a ${typeof value} cannot be given to a guest: offer functions as tools`)
  }
}

/** A value as the bytes that guests read. */
function encode(value) {
  const out = new Writer()
  write(out, value, 0)
  return out.finish()
}

class Reader {
  #bytes
  #at = 0
  #left
  #limit
  #collisions = MAX_COLLISIONS

  constructor(bytes, limit) {
    this.#bytes = bytes
    this.#left = this.#limit = limit
  }

  #charge(cost) {
    this.#left -= cost
    if (this.#left < 0) {
      throw new MarshalError(`the value takes more memory than \`resultLimit\` allows, ${this.#limit} bytes`)
    }
  }

  /** Charges the keys of a table before it is built. */
  #chargeKeys(count, keyAt) {
    this.#collisions -= countCollisions(count, keyAt)
    if (this.#collisions < 0) {
      throw new MarshalError("too many keys of the guest's value have one hash in JavaScript: give a list of pairs")
    }
  }

  #take(length) {
    const at = this.#at
    if (length > this.#bytes.length - at) throw new MarshalError("the guest's value is cut off")
    this.#at = at + length
    return at
  }

  /** The argument of a head: a number where it is exact, else a BigInt. */
  #argument(info) {
    const bytes = this.#bytes
    if (info < 24) return info
    if (info === 24) return bytes[this.#take(1)]
    if (info === 25) return bytes.readUInt16BE(this.#take(2))
    if (info === 26) return bytes.readUInt32BE(this.#take(4))
    if (info !== 27) throw new MarshalError("a length is missing in the guest's value")
    const large = bytes.readBigUInt64BE(this.#take(8))
    return large <= Number.MAX_SAFE_INTEGER ? Number(large) : large
  }

  #text(length) {
    const at = this.#take(length)
    this.#charge(COST.text + length * 2)
    return this.#bytes.toString('utf8', at, at + length)
  }

  #raw(length) {
    const at = this.#take(length)
    this.#charge(COST.object + length)
    return new Uint8Array(this.#bytes.subarray(at, at + length))
  }

  #list(length, depth) {
    this.#charge(COST.list)
    const list = []
    for (let at = 0; at < length; at += 1) list.push(this.read(depth + 1))
    return list
  }

  #map(length, depth) {
    this.#charge(COST.object)
    const entries = []
    let isObject = true
    for (let at = 0; at < length; at += 1) {
      this.#charge(COST.entry)
      const key = this.read(depth + 1)
      isObject &&= typeof key === 'string'
      entries.push([key, this.read(depth + 1)])
    }
    // Defines properties, so that `__proto__` is one as well.
    if (isObject) return Object.fromEntries(entries)
    this.#chargeKeys(length, (at) => entries[at][0])
    return new Map(entries)
  }

  /** Many numbers as they are in memory, after the tag. */
  #words(depth, convert) {
    const bytes = this.read(depth + 1)
    if (!(bytes instanceof Uint8Array) || bytes.length % 8 !== 0) {
      throw new MarshalError('numbers that the guest sent are cut off')
    }
    this.#charge(COST.list + (bytes.length / 8) * COST.word)
    const view = new DataView(bytes.buffer)
    return Array.from({ length: bytes.length / 8 }, (_, at) => convert(view, at * 8))
  }

  #tagged(tag, depth) {
    if (tag === TAGS.INTEGERS) return this.#words(depth, (view, at) => exact(view.getBigInt64(at, true)))
    if (tag === TAGS.FLOATS) return this.#words(depth, (view, at) => view.getFloat64(at, true))
    const value = this.read(depth + 1)
    this.#charge(COST.object)
    const is = (right) => {
      if (!right) throw new MarshalError("the guest's value is damaged")
      return value
    }
    switch (tag) {
      case TAGS.TIMESTAMP:
      case TAGS.DAY:
        return new Date(is(typeof value === 'string'))
      case TAGS.DATE:
        return new Date(Math.round(is(typeof value === 'number') * 1000))
      case TAGS.POSITIVE:
      case TAGS.NEGATIVE: {
        const bytes = is(value instanceof Uint8Array)
        this.#charge(bytes.length * 4)
        const magnitude = BigInt(`0x0${Buffer.from(bytes).toString('hex')}`)
        return tag === TAGS.POSITIVE ? magnitude : -1n - magnitude
      }
      case TAGS.SET:
        this.#charge(is(Array.isArray(value)).length * COST.entry)
        this.#chargeKeys(value.length, (at) => value[at])
        return new Set(value)
      case TAGS.TUPLE:
        return is(Array.isArray(value))
      case TAGS.DECIMAL:
        return is(typeof value === 'string')
      case TAGS.UUID: {
        const digits = Buffer.from(is(value instanceof Uint8Array && value.length === 16)).toString('hex')
        return digits.replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-')
      }
      case TAGS.NAMED:
        is(Array.isArray(value) && value.length === 2)
        return new Opaque(String(value[0]), String(value[1]))
      case TAGS.COMPLEX:
        is(Array.isArray(value) && value.length === 2)
        return new Opaque('complex', `${value[0]}${value[1] < 0 ? '' : '+'}${value[1]}j`)
      default:
        throw new MarshalError(`the guest's value has parts of an unknown kind (tag ${tag})`)
    }
  }

  #simple(info) {
    switch (info) {
      case 20:
      case 21:
        return info === 21
      case 22:
        return null
      case 23:
        return undefined
      case 26:
        return this.#bytes.readFloatBE(this.#take(4))
      case 27:
        return this.#bytes.readDoubleBE(this.#take(8))
      default:
        throw new MarshalError("the guest's bytes are not a value")
    }
  }

  /** Reads the next value. */
  read(depth = 0) {
    if (depth > MAX_DEPTH) throw new MarshalError(`the guest's value is nested deeper than ${MAX_DEPTH} levels`)
    this.#charge(COST.plain)
    const head = this.#bytes[this.#take(1)]
    const [major, info] = [head >> 5, head & 31]
    if (major === 7) return this.#simple(info)
    const argument = this.#argument(info)
    switch (major) {
      case 0:
        return argument
      case 1:
        return exact(-1n - BigInt(argument))
      case 2:
        return this.#raw(argument)
      case 3:
        return this.#text(argument)
      case 4:
        return this.#list(argument, depth)
      case 5:
        return this.#map(argument, depth)
      default:
        return this.#tagged(argument, depth)
    }
  }
}

/** A number where it is exact, else a BigInt. */
function exact(value) {
  const small = value >= Number.MIN_SAFE_INTEGER && value <= Number.MAX_SAFE_INTEGER
  return small ? Number(value) : value
}

/** The value that such bytes hold; at most `limit` bytes of memory are made of it. */
function decode(bytes, limit) {
  try {
    return new Reader(bytes, limit).read()
  } catch (cause) {
    if (cause instanceof MarshalError) throw cause
    throw new MarshalError(`a value of the guest has no equal in JavaScript: ${cause.message}`, { cause })
  }
}

module.exports = { encode, decode, Opaque }
