/**
 * Sandboxes that start warm, fork, and roll back: JavaScript and Python in Wasm, and unmodified
 * Linux programs.
 *
 * Values between JavaScript and a guest:
 *
 * | here | in the guest |
 * |---|---|
 * | `undefined`, `null`, booleans, strings | the same; `None` in Python |
 * | numbers | integers where they are whole and exact, else floats |
 * | `bigint` | integers of any size; a whole number comes back as `number` where that is exact |
 * | `Uint8Array`, `Buffer`, `ArrayBuffer`, `DataView` | bytes; a `Uint8Array` on the way back |
 * | arrays, other typed arrays | arrays; tuples and arrays of numbers come back as arrays |
 * | `Date` | dates; dates without a time come back as midnight UTC |
 * | `Map`, objects | maps; a map comes back as an object if all its keys are strings, else as a `Map` |
 * | `Set` | sets |
 * | text | a `Decimal` or `UUID` of Python comes back as text |
 * | functions, symbols, promises, errors | a `MarshalError`; from a guest an `Opaque` |
 */

/** Bytes, or text like `"64MiB"`. */
export type Size = number | string
/** Data as bytes; text is encoded as UTF-8. */
export type Data = string | Uint8Array | ArrayBuffer
/** A path, a reference or a `file:` URL. */
export type Location = string | URL

/** The base of every error of this package. */
export class AfreshError extends Error {}
/** A guest cannot be opened or warmed up. */
export class OpenError extends AfreshError {}
/** The guest failed: it trapped, or ended itself. */
export class GuestError extends AfreshError {}
/** The operation was stopped by its host. */
export class StoppedError extends AfreshError {}
/** A sandbox cannot be used or moved like this. */
export class SandboxError extends AfreshError {}
/** Another call is under way in the same sandbox. */
export class BusyError extends SandboxError {}
/** A state cannot be saved. */
export class SaveError extends AfreshError {}
/** A value cannot be carried between host and guest. */
export class MarshalError extends AfreshError {}
/** The operation took longer than its time limit. */
export class TimeoutError extends AfreshError {}
/** The program threw something and did not catch it. An error of a tool is the `cause`. */
export class ProgramError extends AfreshError {
  /** The name of the error type in the language of the guest. */
  readonly type: string
  /** Its message. */
  readonly reason: string
  /** The stack trace, as the language shows it. */
  readonly trace: string | undefined
}
/** A command ended with an exit code other than 0, and its result was checked. */
export class CommandError extends AfreshError {
  readonly exitCode: number
  readonly stdout: string
  readonly stderr: string
}

/** A value of a program that only has a name here. */
export class Opaque {
  constructor(kind: string, text: string)
  readonly kind: string
  readonly text: string
  toString(): string
}

/** The cost of a call. An amount that is not known is `undefined`. */
export interface CallCost {
  /** Wall-clock time in milliseconds. */
  readonly wallMs: number
  /**
   * CPU time in milliseconds: of the thread that runs the guest, and of the processes of a Linux
   * program. A wait takes none.
   */
  readonly cpuMs: number
  /**
   * Peak of the guest's memory in bytes: the memories of a Wasm guest, or what the processes of a
   * Linux program have mapped together. `undefined` for a micro-VM.
   */
  readonly peakMemory: number | undefined
  /**
   * Pages of memory (4 KiB) that differ from the last state; `undefined` in Linux programs, and
   * after a run from the warm state.
   */
  readonly dirtyPages: number | undefined
  /** Bytes of the request to the guest. */
  readonly inputBytes: number
  /** Bytes that the guest sent: its answer, output and requests. */
  readonly outputBytes: number
  /** Bytes of output and of displayed results that were dropped. */
  readonly droppedBytes: number
}

/**
 * A result that code displays: a value, a figure or an image. A format that it does not have is
 * `undefined`. All formats come from the sandbox: show HTML in a frame without scripts, and a
 * drawing as an image.
 */
export class RichResult {
  private constructor()
  /** As the guest's language shows it. */
  readonly text: string | undefined
  readonly html: string | undefined
  readonly markdown: string | undefined
  readonly latex: string | undefined
  /** A drawing. */
  readonly svg: string | undefined
  readonly png: Uint8Array | undefined
  readonly jpeg: Uint8Array | undefined
  readonly pdf: Uint8Array | undefined
  /** JavaScript, which is never run. */
  readonly javascript: string | undefined
  /** A value of JSON. */
  readonly json: unknown
  /** The columns of a data frame. */
  readonly data: unknown
  /** The data of a chart, where the guest has the Python package `e2b_charts`. */
  readonly chart: unknown
  /** Further formats by their MIME types. */
  readonly extra: Readonly<Record<string, unknown>>
  /** Whether it is the value of the last expression. */
  readonly isMainResult: boolean
  /** The names of its formats. */
  formats(): string[]
}

/** The result of an evaluation. */
export class Result<T = unknown> {
  private constructor()
  /** The value of the last expression; `undefined` without one. */
  readonly value: T
  /** The value as the guest's language shows it. */
  readonly text: string
  readonly stdout: string
  readonly stderr: string
  /** The error that ended it. */
  readonly error: Error | undefined
  /** Whether more was printed or displayed than is kept. */
  readonly truncated: boolean
  /**
   * What the code displayed in a sandbox of Python as a Linux program: by `display`, as an open
   * figure of matplotlib, and as the value of the last expression if that has a format in addition
   * to text.
   */
  readonly results: readonly RichResult[]
  readonly cost: CallCost
  /** Pages of memory (4 KiB) that differ from the last state; `undefined` if they are not counted.
   */
  readonly dirtyPages: number | undefined
  /** Microseconds that the guest ran. */
  readonly microseconds: number
  /** The value; throws the error if there is one. */
  unwrap(): T
}

/** Ends an operation; the promise rejects with the signal's reason. */
export interface Cancellable {
  signal?: AbortSignal | undefined
}

export interface RunOptions extends Cancellable {
  /** The name of the code in stack traces. */
  name?: string | undefined
  /** Called with output while the code runs. An error that it throws ends the run. */
  onOutput?: ((stream: 'stdout' | 'stderr', text: string) => void) | undefined
}

/**
 * A function that programs call by its name, synchronous or asynchronous. `this.signal` is aborted
 * when the call that wants its result has ended. Named arguments of Python come as an object after
 * the others.
 */
export type Tool = (this: { readonly signal: AbortSignal }, ...args: any[]) => unknown
/** Tools by their names, or functions with names. */
export type Tools = Readonly<Record<string, Tool>> | readonly Tool[]

export interface SandboxOptions {
  /**
   * Maximum milliseconds of a call. One that takes longer fails, and the sandbox has to be rolled
   * back.
   */
  timeoutMs?: number | undefined
  /**
   * Maximum milliseconds of CPU time of a call, counted as `CallCost.cpuMs`: time in which the
   * guest waits does not count. One that uses more fails as with `timeoutMs`.
   */
  cpuLimitMs?: number | undefined
  /** Maximum memory of the guest. */
  memoryLimit?: Size | undefined
  /** Maximum bytes kept of each stream; 16 MiB if not set. */
  outputLimit?: Size | undefined
  /** Maximum memory of the values of a result or of tool arguments; 128 MiB if not set. */
  resultLimit?: Size | undefined
  tools?: Tools | undefined
}

export interface MapOptions extends SandboxOptions {
  /** How many sandboxes run at a time; the number of processors if not set. */
  concurrency?: number | undefined
}

/** A state in the tree of a sandbox. */
export class Checkpoint {
  private constructor()
  readonly id: string
  toString(): string
}

export interface State {
  readonly checkpoint: Checkpoint
  readonly parent: Checkpoint | undefined
  readonly name: string | undefined
  readonly storedPages: number
  readonly ownPages: number
  readonly ownBytes: number
}

export interface Difference {
  /** Pages with differences. */
  readonly pages: number
  readonly bytes: number
  /** Whether other state differs. */
  readonly state: boolean
}

export interface FileStat {
  readonly kind: 'file' | 'directory' | 'link' | 'other'
  readonly size: number
  readonly mode: number
}

/** Files of a sandbox, between its calls. */
export interface Files {
  read(path: string): Promise<Uint8Array>
  readText(path: string): Promise<string>
  write(path: string, data: Data): Promise<void>
  list(path: string): Promise<string[]>
  /** Makes a directory, with those above it that are missing. */
  makeDirectory(path: string): Promise<void>
  /** `undefined` where no file exists. */
  stat(path: string): Promise<FileStat | undefined>
  /** Removes a file, or a directory with everything in it. */
  remove(path: string): Promise<void>
}

/** The result of a command. */
export class CommandResult {
  private constructor()
  /** Its exit code; negative for the signal that ended it. */
  readonly exitCode: number
  readonly stdout: string
  readonly stderr: string
  readonly truncated: boolean
  /** This result; throws a `CommandError` if the command failed. */
  check(): this
}

export interface CommandOptions {
  cwd?: string | undefined
  env?: Readonly<Record<string, string>> | undefined
  onStdout?: ((text: string) => void) | undefined
  onStderr?: ((text: string) => void) | undefined
}

export interface CommandRunOptions extends CommandOptions, Cancellable {
  /** Its input; empty if not given. */
  stdin?: Data | undefined
  /** Maximum milliseconds, if not those of a call. It is killed then. */
  timeoutMs?: number | undefined
}

export interface CommandStartOptions extends CommandOptions {
  /** Whether it has an input to write to. */
  stdin?: boolean | undefined
  tag?: string | undefined
}

export interface CommandInfo {
  readonly pid: number
  readonly command: string[]
  readonly cwd: string | undefined
  readonly env: Record<string, string>
  readonly tag: string | undefined
}

/** A command that runs in a sandbox. It makes progress while an operation of the sandbox runs. */
export class Command {
  private constructor()
  readonly pid: number
  /** Lets the sandbox run until the command has ended. */
  wait(options?: { timeoutMs?: number | undefined } & Cancellable): Promise<CommandResult>
  /** Lets the sandbox run for a slice of time; the exit code, if the command has ended. */
  poll(): Promise<number | undefined>
  /** Sends the command and its descendants a signal; whether it still ran. */
  sendSignal(signal: number | NodeJS.Signals): Promise<boolean>
  kill(): Promise<boolean>
  sendStdin(data: Data): Promise<void>
  closeStdin(): Promise<void>
}

/** Commands of a sandbox of a Linux program. They are part of its state. */
export class Commands {
  private constructor()
  /** Runs a command to its end: a line for the shell, or a program and its arguments. */
  run(command: string | readonly string[], options?: CommandRunOptions): Promise<CommandResult>
  /** Starts a command in the background. */
  start(command: string | readonly string[], options?: CommandStartOptions): Promise<Command>
  list(): Promise<CommandInfo[]>
  /** A command that runs already. */
  connect(pid: number, options?: Pick<CommandOptions, 'onStdout' | 'onStderr'>): Promise<Command>
}

export interface PortOptions extends Cancellable {
  headers?: Readonly<Record<string, string>> | undefined
  body?: Data | undefined
  /** Maximum milliseconds of the request, if not those of a call; a minute if neither is set. */
  timeoutMs?: number | undefined
}

/** The response of a server in a sandbox. */
export interface PortResponse {
  readonly status: number
  readonly headers: Readonly<Record<string, string | string[] | undefined>>
  readonly body: Uint8Array
  /** The body as text in UTF-8. */
  readonly text: string
  json(): unknown
}

/** A port within a sandbox. The sandbox runs while a request waits for its response. */
export interface Port {
  /** Makes one request in a new connection. A body has at most the bytes of `outputLimit`. */
  request(method: string, path?: string, options?: PortOptions): Promise<PortResponse>
  get(path?: string, options?: Omit<PortOptions, 'body'>): Promise<PortResponse>
  post(path: string, body: Data, options?: Omit<PortOptions, 'body'>): Promise<PortResponse>
}

/**
 * A live guest whose calls continue from one another. One operation at a time; others fail with a
 * `BusyError`.
 */
export class Sandbox implements AsyncDisposable, Disposable {
  private constructor()
  readonly files: Files
  readonly commands: Commands
  /** Runs code; what the program throws is in the result. */
  runCode<T = unknown>(code: string, options?: RunOptions): Promise<Result<T>>
  /** The value that code gives; throws what the program throws. */
  eval<T = unknown>(code: string, options?: RunOptions): Promise<T>
  /** Calls a function, given as an expression in the language of the guest. */
  apply<T = unknown>(code: string, args?: readonly unknown[], options?: RunOptions): Promise<T>
  /** As `apply`, but gives the whole result. */
  applyResult<T = unknown>(code: string, args?: readonly unknown[], options?: RunOptions): Promise<Result<T>>
  /** Calls an export that takes and gives bytes: for guests that are no interpreters. */
  call(name: string, input?: Data, options?: Cancellable): Promise<Uint8Array>
  /** Keeps the present state. */
  checkpoint(name?: string): Promise<Checkpoint>
  /** Goes to any state of the tree, also after a call was cut short. */
  rollback(to: Checkpoint | string): Promise<Checkpoint>
  /** Sandboxes that start from the present state, with the same tools and limits. */
  fork(count?: number): Promise<Sandbox[]>
  /** Every state of its tree. */
  tree(): Promise<State[]>
  /** The state that it stands on. */
  at(): Promise<Checkpoint>
  diff(one: Checkpoint | string, two: Checkpoint | string): Promise<Difference>
  /** Forgets a state. */
  drop(which: Checkpoint | string): Promise<void>
  /** Saves what it became since it was last saved there; gives the id of the saved state. */
  save(to: Location): Promise<string>
  /** The changes since a state. */
  delta(since: Checkpoint | string): Promise<Uint8Array>
  /** Goes to the state that a delta makes of the present one. */
  applyDelta(delta: Uint8Array): Promise<Checkpoint>
  /** Offers other tools from the next call on. */
  offer(tools: Tools): Promise<void>
  /** A port within a sandbox of a Linux program, for requests to a server in it. */
  port(number: number): Port
  /** Lets background work of a Linux program run. */
  proceed(milliseconds: number, options?: Cancellable): Promise<void>
  /** Why it refuses calls; `undefined` if it does not. */
  failed(): Promise<string | undefined>
  /** Stops the call that is under way. */
  stop(): void
  /** Closes it, stops a call that is under way, and waits for its end. Forks stay open. */
  close(): Promise<void>
  [Symbol.asyncDispose](): Promise<void>
  [Symbol.dispose](): void
}

/** A guest in its warm state. */
export class Warm implements AsyncDisposable, Disposable {
  private constructor()
  readonly name: string
  readonly kind: 'module' | 'component' | 'machine' | 'program' | 'guest'
  readonly isInterpreter: boolean
  /** Runs code from the warm state, and forgets what it did. */
  runCode<T = unknown>(code: string, options?: RunOptions): Promise<Result<T>>
  eval<T = unknown>(code: string, options?: RunOptions): Promise<T>
  /** Calls an export that takes and gives bytes, from the warm state. */
  call(name: string, input?: Data, options?: Cancellable): Promise<Uint8Array>
  /** A live guest that starts from the warm state. */
  sandbox(options?: SandboxOptions): Promise<Sandbox>
  /** A sandbox in the state that a delta makes of the warm state. */
  apply(delta: Uint8Array, options?: SandboxOptions): Promise<Sandbox>
  /**
   * Calls a function with each input, each time from the warm state. Results are in the order of
   * the inputs.
   */
  map<T = unknown>(code: string, inputs: Iterable<unknown>, options?: MapOptions): Promise<Result<T>[]>
  /** Saves the warm state as a snapshot; gives its id. */
  save(to: Location): Promise<string>
  /** Frees it. Its sandboxes stay open. */
  close(): Promise<void>
  [Symbol.asyncDispose](): Promise<void>
  [Symbol.dispose](): void
}

export interface WarmOptions extends Cancellable {
  /** Code that an interpreter runs once. */
  setup?: string | undefined
  /**
   * Calls that warm up a guest that is no interpreter: names of exports, and the bytes that each is
   * given.
   */
  calls?: readonly (readonly [name: string, input?: Data])[] | undefined
  /** Maximum milliseconds of a call of `Warm` itself. */
  timeoutMs?: number | undefined
  memoryLimit?: Size | undefined
  outputLimit?: Size | undefined
  /** Where compiled code is kept: native code, so the directory must be the user's own. */
  cache?: string | undefined
}

/** A rule for HTTP requests to one server. */
export interface NetRule {
  /** The server: `"api.example.org:443"`. */
  to: string
  /** Methods that are allowed; all if not set. */
  methods?: readonly string[]
  /** Patterns of allowed paths, such as `"/v1/**"`; all if not set. */
  paths?: readonly string[]
  /** Headers that each request gets. */
  headers?: Readonly<Record<string, string>> | undefined
  /** A header with a secret of the host, which the program never has. */
  credential?:
    | {
        header: string
        env?: string | undefined
        file?: string | undefined
        prefix?: string | undefined
        placeholder?: string | undefined
      }
    | undefined
  /** Whether the connection has TLS: true, but for port 80. */
  tls?: boolean | undefined
  /** Absolute path of a file with the authorities that the server is verified with. */
  ca?: string | undefined
  /** Whether allowed requests are logged. */
  log?: boolean | undefined
}

export interface Grants {
  /** Host directories that the program may read. Its changes never reach the host. */
  dirs?: readonly Location[] | undefined
  /** Servers that it may connect to: `"api.example.org:443"`, `"*.example.org:*"`. None by default.
   */
  net?: readonly (string | NetRule)[] | undefined
  /** Maximum memory that its processes may map together; 4 GiB if not set. */
  memoryLimit?: Size | undefined
  /** Maximum bytes of files that it may write; 1 GiB if not set. */
  storageLimit?: Size | undefined
}

export interface LoadOptions extends Grants, Cancellable {
  cache?: string | undefined
}

export interface LinuxOptions extends Grants, Cancellable {
  /** Code that the interpreter runs once. */
  setup?: string | undefined
  env?: Readonly<Record<string, string>> | undefined
  cwd?: Location | undefined
  /** Maximum milliseconds of a call of `Warm` itself. */
  timeoutMs?: number | undefined
  /** Maximum milliseconds of the start and the setup; a minute if not set. */
  setupTimeoutMs?: number | undefined
}

export interface ImageOptions extends LinuxOptions {
  cache?: string | undefined
}

export interface ExecOptions extends Grants, Cancellable {
  stdin?: Data | undefined
  env?: Readonly<Record<string, string>> | undefined
  cwd?: string | undefined
  /** Maximum milliseconds. It is killed then. */
  timeoutMs?: number | undefined
  outputLimit?: Size | undefined
  onStdout?: ((text: string) => void) | undefined
  onStderr?: ((text: string) => void) | undefined
}

/**
 * Opens a guest and warms it up: `"js"`, `"python"` (with `$AFRESH_PYTHON`), the path of a Wasm
 * module or component or of a micro-VM program, or a snapshot.
 */
export function warm(guest: Location, options?: WarmOptions): Promise<Warm>
/** Opens a snapshot that `Warm.save` or `Sandbox.save` made, here or on another machine. */
export function load(snapshot: Location, options?: LoadOptions): Promise<Warm>
/** Warms up a Python interpreter of the host, unmodified, as a Linux program in a sandbox. */
export function linux(program?: Location, options?: LinuxOptions): Promise<Warm>
/** Warms up the Python interpreter of a container image. */
export function image(reference: Location, options?: ImageOptions): Promise<Warm>
/** Runs a program of the host once in a pristine sandbox, from its start to its end. */
export function exec(command: readonly string[], options?: ExecOptions): Promise<CommandResult>
/** Where compiled guests are kept between runs. */
export function cacheDir(): string
