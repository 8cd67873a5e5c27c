'use strict'
// Ports within a sandbox of a Linux program: requests to a server in it.
//
// The sandbox runs while a request waits for its response.

const http = require('node:http')
const { Duplex } = require('node:stream')
const { drive, WAIT } = require('./commands.js')
const { AfreshError, SandboxError, TimeoutError } = require('./errors.js')
const { bytes: asBytes, options, text, timeout } = require('./options.js')

/** Maximum bytes of one exchange. */
const PIECE = 64 * 1024
/** Milliseconds of a request, if neither it nor the sandbox has a limit. */
const TIMEOUT = 60_000
/** The longest time of a timer of Node, in milliseconds. */
const MAX_TIMER = 2 ** 31 - 1

/** A connection into a sandbox. Its operations follow one another. */
class PortConnection {
  #sandbox
  #port
  #signal
  #number
  #until
  #milliseconds
  /** Whether bytes have passed since the sandbox ran. */
  #moved = true
  #last = Promise.resolve()

  constructor(sandbox, port, milliseconds, signal) {
    this.#sandbox = sandbox
    this.#port = port
    this.#signal = signal
    this.#milliseconds = milliseconds
    this.#until = performance.now() + milliseconds
  }

  /** Milliseconds that are left. */
  get left() {
    return Math.max(0, this.#until - performance.now())
  }

  /** The error of a request that takes longer. */
  late() {
    return new TimeoutError(
      `port ${this.#port} of the sandbox took no connection or gave no answer within ${this.#milliseconds} ms`,
    )
  }

  /** Does work after the work from before. */
  #after(work) {
    const done = this.#last.then(work)
    this.#last = done.catch(() => {})
    return done
  }

  /** Lets the sandbox run for a moment; whether it may do something by itself afterwards. */
  #proceed() {
    const left = this.left
    if (left <= 0) throw this.late()
    const moved = this.#moved
    this.#moved = false
    return drive(this.#sandbox, Math.min(WAIT, left), this.#signal, moved)
  }

  /** Connects, as soon as a program listens. */
  async open() {
    await this.#sandbox.operate('beginWait')
    this.#moved = false
    for (let proceeds = true; ; ) {
      const { json } = await this.#sandbox.operate('dial', { port: this.#port })
      if (json !== null) {
        this.#number = json
        this.#moved = true
        return
      }
      if (!proceeds) {
        throw new SandboxError(
          `nothing listens on port ${this.#port} of the sandbox, and no process in it is about to: start a server, on ` +
            '127.0.0.1 or all addresses',
        )
      }
      proceeds = await this.#proceed()
    }
  }

  async #exchange(data, room) {
    const request = { connection: this.#number, room }
    const { json, bytes } = await this.#sandbox.operate('exchange', request, { bytes: data })
    this.#moved ||= json.taken > 0 || bytes.length > 0
    return { ...json, bytes }
  }

  /** Sends all bytes. */
  async send(data) {
    let proceeds = true
    for (let at = 0; at < data.length; ) {
      const piece = data.subarray(at, at + PIECE)
      const taken = await this.#after(async () => {
        const found = (await this.#exchange(piece, 0)).taken
        if (found > 0) return found
        if (!proceeds) throw new SandboxError(`the program on port ${this.#port} of the sandbox does not read the connection`)
        proceeds = await this.#proceed()
        return 0
      })
      at += taken
    }
  }

  /** The next bytes; `null` at the end. */
  async receive() {
    for (let proceeds = true; ; ) {
      const found = await this.#after(async () => {
        const { bytes, ended } = await this.#exchange(undefined, PIECE)
        if (bytes.length > 0) return bytes
        if (ended) return null
        if (!proceeds) {
          throw new SandboxError(`the program on port ${this.#port} of the sandbox does not answer: it waits itself`)
        }
        proceeds = await this.#proceed()
        return undefined
      })
      if (found !== undefined) return found
    }
  }

  /**
   * Closes it. The sandbox may be closed, failed, or in another state: the connection has ended
   * then.
   */
  async close() {
    if (this.#number === undefined) return
    const request = { connection: this.#number }
    await this.#after(() => this.#sandbox.operate('hangUp', request)).catch(() => {})
  }
}

/** The response of a server in a sandbox. */
class PortResponse {
  constructor(status, headers, body) {
    Object.assign(this, { status, headers, body })
  }

  /** The body as text in UTF-8. */
  get text() {
    return Buffer.from(this.body).toString()
  }

  /** The body as JSON. */
  json() {
    return JSON.parse(this.text)
  }
}

/** A port within a sandbox, made by `Sandbox.port`. */
class Port {
  #sandbox
  #number

  constructor(sandbox, number) {
    if (!Number.isInteger(number) || number < 1 || number > 65_535) throw new TypeError('a port is 1 to 65535')
    this.#sandbox = sandbox
    this.#number = number
  }

  /** Makes one request in a new connection. */
  async request(method, path = '/', given = undefined) {
    const { headers, body, timeoutMs, signal } = options(given, ['headers', 'body', 'timeoutMs', 'signal'])
    const most = timeout(timeoutMs) ?? this.#sandbox.limits.timeout ?? TIMEOUT
    const connection = new PortConnection(this.#sandbox, this.#number, most, signal)
    try {
      await connection.open()
      const wanted = { method: text(method, 'the method'), path: text(path, 'the path') }
      const data = body === undefined ? undefined : asBytes(body, 'the body')
      return await this.#exchange(connection, wanted, { headers, data, signal })
    } finally {
      await connection.close()
    }
  }

  #exchange(connection, wanted, { headers, data, signal }) {
    const stream = duplex(connection)
    const most = this.#sandbox.limits.output
    return new Promise((resolve, reject) => {
      const refuse = (cause) => {
        const message = `the program on port ${this.#number} of the sandbox does not speak HTTP: ${cause.message}`
        if (signal?.aborted) reject(signal.reason)
        else reject(cause instanceof AfreshError ? cause : new SandboxError(message, { cause }))
      }
      const switched = (_, socket) => {
        socket.destroy()
        clearTimeout(timer)
        reject(new SandboxError(`the program on port ${this.#number} of the sandbox left HTTP, and gave no response to read`))
      }
      let responded = false
      const sent = { host: 'localhost', connection: 'close', ...headers }
      const request = http.request({ ...wanted, headers: sent, createConnection: () => stream })
      // A response may also arrive in pieces without end.
      const timer = setTimeout(() => request.destroy(connection.late()), Math.min(connection.left, MAX_TIMER))
      request.on('error', refuse)
      request.on('upgrade', switched)
      request.on('connect', switched)
      request.on('close', () => {
        clearTimeout(timer)
        if (!responded) refuse(new Error('it ended the connection without a response'))
      })
      request.on('response', (response) => {
        responded = true
        const pieces = []
        let length = 0
        response.on('data', (piece) => {
          pieces.push(piece)
          length += piece.length
          if (length > most) {
            const message = `the response of port ${this.#number} has more than ${most} bytes: set a larger \`outputLimit\``
            request.destroy(new SandboxError(message))
            reject(new SandboxError(message))
          }
        })
        response.on('error', refuse)
        response.on('close', () => refuse(new Error('it ended the connection within its response')))
        response.on('end', () => {
          const whole = new Uint8Array(Buffer.concat(pieces))
          resolve(new PortResponse(response.statusCode, { ...response.headers }, whole))
          request.destroy()
        })
      })
      request.end(data)
    })
  }

  /** A GET request. */
  get(path = '/', given = undefined) {
    return this.request('GET', path, given)
  }

  /** A POST request. */
  post(path, body, given = undefined) {
    return this.request('POST', path, { ...given, body })
  }
}

/** A connection as a stream. */
function duplex(connection) {
  return new Duplex({
    read() {
      connection.receive().then(
        (piece) => this.push(piece),
        (error) => this.destroy(error),
      )
    },
    write(piece, _, done) {
      connection.send(piece).then(() => done(), done)
    },
  })
}

module.exports = { Port, PortResponse }
