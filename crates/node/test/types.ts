// Checked by `tsc --strict`, not run: the types accept what the guide shows, and refuse mistakes.
import { BusyError, exec, linux, load, ProgramError, SandboxError, warm, type CallCost, type Result, type RichResult, type Sandbox } from 'afresh'
import { Client, ExecutionError, type RemoteSandbox } from 'afresh/client'

export async function accepted(): Promise<void> {
  await using js = await warm('js', { setup: 'globalThis.x = 1', signal: AbortSignal.timeout(1000) })
  await using sb = await js.sandbox({
    timeoutMs: 5000,
    cpuLimitMs: 1000,
    memoryLimit: '64MiB',
    tools: {
      search: async (query: string): Promise<string[]> => [query],
      stop() {
        this.signal.throwIfAborted()
      },
    },
  })
  const result: Result<number> = await sb.runCode<number>('1', { onOutput: (stream, text) => console.log(stream, text) })
  const value: number = result.unwrap()
  const { cpuMs, peakMemory }: CallCost = result.cost
  const images: (Uint8Array | undefined)[] = result.results.map((shown: RichResult) => shown.png)
  const unknown: unknown = await sb.eval('1')
  const forks: Sandbox[] = await sb.fork(2)
  await sb.rollback(await sb.checkpoint('clean'))
  await sb.offer([function named(n: number) { return n + value }])
  const bytes: Uint8Array = await sb.files.read('/a')
  const python = await linux('python3', { dirs: ['.', new URL('file:///tmp')] })
  const { exitCode } = await (await python.sandbox()).commands.run(['ls'], { stdin: bytes, onStdout: console.log })
  const done = await exec(['true'], { timeoutMs: 1 })
  const busy: SandboxError = new BusyError(String([unknown, forks, cpuMs, peakMemory ?? 0, images, exitCode, done.stdout]))
  if (result.error instanceof ProgramError) console.log(result.error.type, busy.message)
  await load('store@agent')
}

export async function remote(): Promise<void> {
  const client = new Client({ url: new URL('http://127.0.0.1:8080'), apiKey: 'key' })
  await using sb: RemoteSandbox = await client.create('script', { timeoutMs: 1000 })
  const done = (await sb.runCode('1', { onOutput: (stream) => console.log(stream) })).check()
  if (done.error instanceof ExecutionError) console.log(done.error.trace, done.text)
  for await (const { sandboxID } of client.list({ state: 'running' })) console.log(sandboxID)
  const [fork] = await sb.fork(1)
  await fork?.kill()
}

export async function refused(): Promise<void> {
  // @ts-expect-error the option is `timeoutMs`
  await warm('js', { timeout: 1 })
  const js = await warm('js')
  // @ts-expect-error tools are functions
  await js.sandbox({ tools: { search: 1 } })
  // @ts-expect-error a command is an array
  await exec('ls')
}
