'use strict'
// A client of `afresh serve`: sandboxes over HTTP. It needs no native half.

const { AfreshError, SandboxError, TimeoutError } = require('./lib/errors.js')
const { bytes: asBytes, callback, options, text, timeout } = require('./lib/options.js')

/** The server refused a request. */
class HttpError extends AfreshError {
  constructor(status, message) {
    super(message)
    this.status = status
  }
}

/** Code raised an error in a sandbox of a server. */
class ExecutionError extends AfreshError {
  constructor({ name, value, traceback }) {
    super(traceback || `${name}: ${value}`)
    this.type = name
    this.reason = value
    this.trace = traceback
  }
}

/** The result of code in a sandbox of a server. */
class Execution {
  constructor() {
    this.results = []
    this.stdout = ''
    this.stderr = ''
    this.error = undefined
  }

  /** The value of the last expression, as the language shows it. */
  get text() {
    return this.results.find((result) => result.is_main_result)?.text
  }

  /** This execution; throws its error if there is one. */
  check() {
    if (this.error !== undefined) throw this.error
    return this
  }
}

/** Seconds for the server; a part of a second counts as one. */
function seconds(milliseconds) {
  const given = timeout(milliseconds)
  return given === null ? undefined : Math.ceil(given / 1000)
}

async function refused(response) {
  const body = await response.text()
  let said = body
  try {
    said = JSON.parse(body).message ?? body
  } catch {
    // Another server is in between.
  }
  return new HttpError(response.status, said || `the server answered with the status ${response.status}`)
}

/** The lines of a body. */
async function* lines(body) {
  let rest = ''
  const decoder = new TextDecoder()
  for await (const piece of body) {
    rest += decoder.decode(piece, { stream: true })
    const whole = rest.split('\n')
    rest = whole.pop()
    yield* whole
  }
  if (rest) yield rest
}

/** Sandboxes of a server. */
class Client {
  #url
  #key

  constructor(given) {
    const { url, apiKey } = options(given, ['url', 'apiKey'])
    this.#url = text(url instanceof URL ? url.href : (url ?? process.env.E2B_API_URL), 'the url').replace(/\/+$/, '')
    this.#key = text(apiKey ?? process.env.E2B_API_KEY, 'the apiKey')
  }

  /** A request, whose answer must be a success. */
  async request(method, path, { body, headers, signal } = {}) {
    const plain = body === undefined || body instanceof Uint8Array
    const response = await fetch(`${this.#url}${path}`, {
      method,
      signal,
      headers: { 'x-api-key': this.#key, ...(plain ? {} : { 'content-type': 'application/json' }), ...headers },
      body: plain ? body : JSON.stringify(body),
    })
    if (!response.ok) throw await refused(response)
    return response
  }

  /** Makes a sandbox from a template. */
  async create(template, given) {
    const { timeoutMs, metadata, env, autoPause, signal } = options(given, [
      'timeoutMs',
      'metadata',
      'env',
      'autoPause',
      'signal',
    ])
    const body = { templateID: text(template, 'the template'), timeout: seconds(timeoutMs), metadata, envVars: env, autoPause }
    const response = await this.request('POST', '/sandboxes', { body, signal })
    return new RemoteSandbox(this, await response.json())
  }

  /** A sandbox that exists, which is resumed if it is paused. */
  async connect(id, given = undefined) {
    const { timeoutMs, signal } = options(given, ['timeoutMs', 'signal'])
    const body = { timeout: seconds(timeoutMs) }
    const response = await this.request('POST', `/sandboxes/${encodeURIComponent(id)}/connect`, { body, signal })
    return new RemoteSandbox(this, await response.json())
  }

  /** All sandboxes, page by page. */
  async *list(given) {
    const { state, metadata, signal } = options(given, ['state', 'metadata', 'signal'])
    const query = new URLSearchParams()
    if (state !== undefined) query.set('state', state)
    if (metadata !== undefined) query.set('metadata', String(new URLSearchParams(metadata)))
    for (;;) {
      const response = await this.request('GET', `/v2/sandboxes?${query}`, { signal })
      yield* await response.json()
      const next = response.headers.get('x-next-token')
      if (!next) return
      query.set('nextToken', next)
    }
  }
}

/** A sandbox of a server. */
class RemoteSandbox {
  #client
  #token

  /** Made by `Client`. */
  constructor(client, { sandboxID, templateID, envdAccessToken }) {
    this.#client = client
    this.#token = envdAccessToken
    this.id = sandboxID
    this.template = templateID
    this.files = new RemoteFiles((...request) => this.#inside(...request))
  }

  /** A request to the control plane. */
  #control(method, path, how) {
    return this.#client.request(method, `/sandboxes/${encodeURIComponent(this.id)}${path}`, how)
  }

  /** A request into the sandbox. */
  #inside(method, path, how) {
    const headers = { 'e2b-sandbox-id': this.id, 'x-access-token': this.#token, ...how?.headers }
    return this.#client.request(method, path, { ...how, headers })
  }

  /** Runs code; an error that it raises is in the result. */
  async runCode(code, given) {
    const { language, context, env, onOutput, signal } = options(given, [
      'language',
      'context',
      'env',
      'onOutput',
      'signal',
    ])
    callback(onOutput, 'onOutput')
    const body = { code: text(code, 'the code'), language, context_id: context, env_vars: env }
    const response = await this.#inside('POST', '/execute', { body, signal })
    const execution = new Execution()
    let ended = false
    for await (const line of lines(response.body)) {
      if (!line) continue
      const { type, ...said } = JSON.parse(line)
      if (type === 'stdout' || type === 'stderr') {
        execution[type] += said.text
        onOutput?.(type, said.text)
      } else if (type === 'result') {
        execution.results.push(said)
      } else if (type === 'error') {
        execution.error = said.name === 'TimeoutError' ? new TimeoutError(said.value) : new ExecutionError(said)
      } else if (type === 'end_of_execution') {
        ended = true
      }
    }
    if (!ended && execution.error === undefined) {
      throw new SandboxError('the answer broke off: the sandbox or its server has ended')
    }
    return execution
  }

  /** Keeps the present state under a name; gives its id. */
  async checkpoint(name) {
    const response = await this.#control('POST', '/checkpoints', { body: { name: text(name, 'the name') } })
    return (await response.json()).checkpointID
  }

  /** Goes to a state, by its id or name. */
  async rollback(to) {
    const response = await this.#control('POST', '/rollback', { body: { to: text(to, 'the state') } })
    return (await response.json()).checkpointID
  }

  /** Forgets a state. */
  async drop(checkpoint) {
    await this.#control('DELETE', `/checkpoints/${encodeURIComponent(checkpoint)}`)
  }

  /** Sandboxes with the present state. */
  async fork(count = 1, given = undefined) {
    const { timeoutMs } = options(given, ['timeoutMs'])
    const response = await this.#control('POST', '/fork', { body: { count, timeout: seconds(timeoutMs) } })
    return (await response.json()).map(({ sandbox }) => new RemoteSandbox(this.#client, sandbox))
  }

  /** The states of the sandbox and its relatives, oldest first, and the one that it stands on. */
  async tree() {
    return (await this.#control('GET', '/tree')).json()
  }

  /** The differences of two states. */
  async diff(from, to) {
    return (await this.#control('GET', `/diff?${new URLSearchParams({ from, to })}`)).json()
  }

  /** Ends the sandbox so many milliseconds from now. */
  async setTimeout(timeoutMs) {
    await this.#control('POST', '/timeout', { body: { timeout: seconds(timeoutMs) } })
  }

  /** Saves the sandbox and frees its memory; `Client.connect` resumes it. */
  async pause() {
    await this.#control('POST', '/pause')
  }

  /** Ends the sandbox. */
  async kill() {
    await this.#control('DELETE', '')
  }
}

if (Symbol.asyncDispose) {
  Object.defineProperty(RemoteSandbox.prototype, Symbol.asyncDispose, {
    value() {
      return this.kill()
    },
  })
}

/** Files of a sandbox of a server. */
class RemoteFiles {
  #request

  constructor(request) {
    this.#request = request
  }

  #path(path) {
    return `/files?${new URLSearchParams({ path: text(path, 'the path') })}`
  }

  /** All bytes of a file. */
  async read(path) {
    return new Uint8Array(await (await this.#request('GET', this.#path(path))).arrayBuffer())
  }

  /** A file as text in UTF-8. */
  async readText(path) {
    return (await this.#request('GET', this.#path(path))).text()
  }

  /** Writes a whole file. */
  async write(path, data) {
    const body = Buffer.from(asBytes(data, 'the data'))
    const form = new FormData()
    form.set('file', new Blob([body]), 'file')
    const encoded = new Response(form)
    const headers = { 'content-type': encoded.headers.get('content-type') }
    await this.#request('POST', this.#path(path), { body: new Uint8Array(await encoded.arrayBuffer()), headers })
  }
}

module.exports = { Client, RemoteSandbox, Execution, ExecutionError, HttpError }
