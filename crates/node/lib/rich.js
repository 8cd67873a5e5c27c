'use strict'
// Results that code displays, in all their formats. They come from the guest, which may send any
// bytes: a format that cannot be read is left out.

const BINARY = ['png', 'jpeg', 'pdf']
const OTHERS = ['json', 'data', 'chart']
const NAMES = ['text', 'html', 'markdown', 'latex', 'svg', 'javascript', ...BINARY, ...OTHERS]
const BASE64 = /^[A-Za-z0-9+/\s]*={0,2}\s*$/

class RichResult {
  constructor(formats) {
    for (const name of NAMES) this[name] = formats[name]
    this.extra = formats.extra ?? {}
    this.isMainResult = formats.isMainResult
  }

  /** The names of its formats. */
  formats() {
    return [...NAMES.filter((name) => this[name] !== undefined), ...Object.keys(this.extra)]
  }
}

function isObject(value) {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

/** The formats that are JSON. */
function others(json) {
  if (typeof json !== 'string') return {}
  try {
    const whole = JSON.parse(json)
    return isObject(whole) ? whole : {}
  } catch {
    return {}
  }
}

/** Converts a result of the native half. */
function richResult({ isMain, texts, json }) {
  const formats = { isMainResult: isMain }
  for (const [name, text] of Object.entries(texts)) {
    if (!BINARY.includes(name)) formats[name] = text
    else if (BASE64.test(text)) formats[name] = new Uint8Array(Buffer.from(text, 'base64'))
  }
  const whole = others(json)
  for (const name of OTHERS) if (Object.hasOwn(whole, name)) formats[name] = whole[name]
  if (isObject(whole.extra)) formats.extra = whole.extra
  return new RichResult(formats)
}

module.exports = { RichResult, richResult }
