/** A client of `afresh serve`: sandboxes over HTTP. It needs no native half. */

import { AfreshError, type Cancellable, type Data } from './index.js'

/** The server refused a request. */
export class HttpError extends AfreshError {
  readonly status: number
}

/** Code raised an error in a sandbox of a server. */
export class ExecutionError extends AfreshError {
  readonly type: string
  readonly reason: string
  readonly trace: string | undefined
}

export interface ExecutionResult {
  readonly text?: string
  readonly is_main_result?: boolean
  /**
   * The value in other forms: `json`, and those that Linux programs display, such as `html` and
   * `png`.
   */
  readonly [format: string]: unknown
}

/** The result of code in a sandbox of a server. */
export class Execution {
  private constructor()
  readonly results: ExecutionResult[]
  readonly stdout: string
  readonly stderr: string
  readonly error: Error | undefined
  /** The value of the last expression, as the language shows it. */
  readonly text: string | undefined
  /** This execution; throws its error if there is one. */
  check(): this
}

export interface ClientOptions {
  /** The address of the server; `$E2B_API_URL` if not set. */
  url?: string | URL | undefined
  /** A key of the server's `keys`; `$E2B_API_KEY` if not set. */
  apiKey?: string | undefined
}

export interface CreateOptions extends Cancellable {
  /** The life of the sandbox, in milliseconds. The server counts whole seconds. */
  timeoutMs?: number | undefined
  metadata?: Readonly<Record<string, string>> | undefined
  /** Environment variables of a Linux program. */
  env?: Readonly<Record<string, string>> | undefined
  /** Whether it is paused at its end, and not killed. */
  autoPause?: boolean | undefined
}

export interface RemoteRunOptions extends Cancellable {
  language?: string | undefined
  /** A context of code, by its id. */
  context?: string | undefined
  env?: Readonly<Record<string, string>> | undefined
  onOutput?: ((stream: 'stdout' | 'stderr', text: string) => void) | undefined
}

export interface RemoteState {
  readonly checkpointID: string
  readonly parentID: string | null
  readonly name: string | null
  readonly storedPages: number
  readonly ownPages: number
  readonly ownBytes: number
}

export interface RemoteDifference {
  readonly pages: number
  readonly bytes: number
  readonly state: boolean
  readonly ranges: readonly { readonly memory: number; readonly start: number; readonly end: number }[]
}

export interface SandboxInfo {
  readonly sandboxID: string
  readonly templateID: string
  readonly state: 'running' | 'paused'
  readonly startedAt: string
  readonly endAt: string
  readonly metadata?: Record<string, string> | null
}

export interface RemoteFiles {
  read(path: string): Promise<Uint8Array>
  readText(path: string): Promise<string>
  write(path: string, data: Data): Promise<void>
}

/** A sandbox of a server. */
export class RemoteSandbox implements AsyncDisposable {
  private constructor()
  readonly id: string
  readonly template: string
  readonly files: RemoteFiles
  /** Runs code; an error that it raises is in the result. */
  runCode(code: string, options?: RemoteRunOptions): Promise<Execution>
  /** Keeps the present state under a name; gives its id. */
  checkpoint(name: string): Promise<string>
  /** Goes to a state, by its id or name. */
  rollback(to: string): Promise<string>
  /** Forgets a state. */
  drop(checkpoint: string): Promise<void>
  /** Sandboxes with the present state. */
  fork(count?: number, options?: { timeoutMs?: number | undefined }): Promise<RemoteSandbox[]>
  tree(): Promise<{ readonly at: string; readonly states: RemoteState[] }>
  diff(from: string, to: string): Promise<RemoteDifference>
  /** Ends the sandbox so many milliseconds from now. */
  setTimeout(timeoutMs: number): Promise<void>
  /** Saves the sandbox and frees its memory; `Client.connect` resumes it. */
  pause(): Promise<void>
  /** Ends the sandbox. */
  kill(): Promise<void>
  [Symbol.asyncDispose](): Promise<void>
}

/** Sandboxes of a server. */
export class Client {
  constructor(options?: ClientOptions)
  /** Makes a sandbox from a template. */
  create(template: string, options?: CreateOptions): Promise<RemoteSandbox>
  /** A sandbox that exists, which is resumed if it is paused. */
  connect(id: string, options?: { timeoutMs?: number | undefined } & Cancellable): Promise<RemoteSandbox>
  /** All sandboxes, page by page. */
  list(
    options?: {
      state?: 'running' | 'paused' | undefined
      metadata?: Readonly<Record<string, string>> | undefined
    } & Cancellable,
  ): AsyncGenerator<SandboxInfo>
}
