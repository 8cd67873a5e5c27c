// Checked by `tsc --strict`, not run: the types accept what the guide shows, and refuse mistakes.
import { BusyError, exec, linux, load, ProgramError, SandboxError, warm, type Result, type Sandbox } from 'afresh'

export async function accepted(): Promise<void> {
  await using js = await warm('js', { setup: 'globalThis.x = 1', signal: AbortSignal.timeout(1000) })
  await using sb = await js.sandbox({
    timeoutMs: 5000,
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
  const unknown: unknown = await sb.eval('1')
  const forks: Sandbox[] = await sb.fork(2)
  await sb.rollback(await sb.checkpoint('clean'))
  await sb.offer([function named(n: number) { return n + value }])
  const bytes: Uint8Array = await sb.files.read('/a')
  const python = await linux('python3', { dirs: ['.', new URL('file:///tmp')] })
  const { exitCode } = await (await python.sandbox()).commands.run(['ls'], { stdin: bytes, onStdout: console.log })
  const done = await exec(['true'], { timeoutMs: 1 })
  const busy: SandboxError = new BusyError(String([unknown, forks, exitCode, done.stdout]))
  if (result.error instanceof ProgramError) console.log(result.error.type, busy.message)
  await load('store@agent')
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
